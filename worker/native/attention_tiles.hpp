// Many query tokens on matrix units: what they multiply, laid out as they take it.

#pragma once

#include <algorithm>

#include "attention.hpp"
#include "matrix_units.hpp"

constexpr int kPair = 2 * kTile;  // rows, keys or columns of two tiles

#if defined(__AVX512F__)

// 16 words of 16 rows change places.
inline void transpose(Words* rows) {
  for (int step = 1; step < 16; step *= 2) {
    Words upper, lower;  // where entries come from: 16 and more are those of the second row
    for (int i = 0; i < 16; ++i) {
      upper[i] = i & step ? 16 + i - step : i;
      lower[i] = i & step ? 16 + i : i + step;
    }
    for (int i = 0; i < 16; ++i)
      if (!(i & step)) {
        const __m512i a = (__m512i)rows[i], b = (__m512i)rows[i + step];
        rows[i] = (Words)_mm512_permutex2var_epi32(a, (__m512i)upper, b);
        rows[i + step] = (Words)_mm512_permutex2var_epi32(a, (__m512i)lower, b);
      }
  }
}

class TileLayout {
 public:
  void size_for(int head_dim, int rows) {
    head_dim_ = head_dim;
    deep_ = (head_dim + kTileDepth - 1) / kTileDepth;
    const int64_t width = deep_ * kTileDepth;
    queries_ = query_memory_.of(rows * width, BFloat16());
    keys_ = key_memory_.of(kChunk * width);
    values_ = value_memory_.of(kChunk * width);
    weights_ = weight_memory_.of(kPair * kChunk);
  }

  void set_query(int r, const BFloat16* q) {
    BFloat16* to = queries_ + r / kTile * deep_ * kTileElements + r % kTile * kTileDepth;
    for (int d = 0; d < head_dim_; d += kTileDepth, to += kTileElements)
      std::memcpy(to, q + d, std::min(kTileDepth, head_dim_ - d) * sizeof(BFloat16));
  }

  // `count` keys and values, which begin at `offsets`; zeros up to a whole pair of tiles.
  void set_keys(const BFloat16* keys, const BFloat16* values, const int64_t* offsets, int count) {
    count_ = count;
    const int end = (count + kPair - 1) / kPair * kPair;
    for (int c = 0; c < deep_; ++c) {
      // [pairs of keys' tiles][deep][half][pairs of dimensions][key][2]
      for (int key = 0; key < end; key += kTile) {
        Words rows[kTile];
        for (int i = 0; i < kTile; ++i) rows[i] = row(keys, offsets, key + i, c);
        transpose(rows);
        const int64_t tile = (int64_t(key / kPair) * deep_ + c) * 2 + key % kPair / kTile;
        std::memcpy(keys_ + tile * kTileElements, rows, sizeof rows);
      }
      // [deep][tiles of keys][half of 32 dimensions][pairs of keys][dimension][2]
      for (int key = 0; key < end; key += 2) {
        const __m512i a = (__m512i)row(values, offsets, key, c);
        const __m512i b = (__m512i)row(values, offsets, key + 1, c);
        BFloat16* to = values_ + (int64_t(c) * (kChunk / kTileDepth) + key / kTileDepth) * 2 *
                                     kTileElements + key % kTileDepth * kTile;
        pair(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b), to);
        pair(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1), to + kTileElements);
      }
    }
  }

  // scores[kPair][kChunk] of the rows from `first` with the first `count` keys.
  void score(const Tiles& units, int first, int count, float* scores) const {
    const BFloat16* q = queries_ + int64_t(first / kTile) * deep_ * kTileElements;
    for (int key = 0; key < count; key += kPair)
      units.multiply<2>(q, keys_ + int64_t(key / kPair) * deep_ * 2 * kTileElements, deep_,
                        scores + key, kChunk);
  }

  // Takes the weights of row r among kPair, for the first `count` keys, vector by vector.
  auto weights_of(int r, int count) const {
    const int tiles = (count + kTileDepth - 1) / kTileDepth;
    BFloat16* row = weights_ + r / kTile * tiles * kTileElements + r % kTile * kTileDepth;
    if (count % kTileDepth) store(row + (tiles - 1) * kTileElements + kLanes, Floats{});
    return [row](int key, Floats weights) {
      store(row + key / kTileDepth * kTileElements + key % kTileDepth, weights);
    };
  }

  // out[kPair][head_dim, whole tiles] += weights * values, of the first `count` keys.
  void add(const Tiles& units, int count, float* out) const {
    const int tiles = (count + kTileDepth - 1) / kTileDepth;
    for (int c = 0; c < deep_; ++c)
      units.multiply<2>(weights_, values_ + int64_t(c) * (kChunk / kTileDepth) * 2 * kTileElements,
                        tiles, out + c * kTileDepth, deep_ * kTileDepth, true);
  }

 private:
  // 32 dimensions of a key, from the c-th 32; zeros where there are none.
  Words row(const BFloat16* from, const int64_t* offsets, int key, int c) const {
    Words words = {};
    if (key < count_) {
      const int begin = c * kTileDepth, n = std::min(kTileDepth, head_dim_ - begin);
      const BFloat16* place = from + offsets[key] + begin;
      if (n == kTileDepth)
        std::memcpy(&words, place, sizeof words);
      else
        std::memcpy(&words, place, n * sizeof(BFloat16));
    }
    return words;
  }

  // a0 b0 a1 b1 ...
  static void pair(__m256i a, __m256i b, BFloat16* to) {
    const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
    _mm512_store_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(a), upper));
  }

  int head_dim_ = 0, count_ = 0;
  int64_t deep_ = 0;  // tiles of a head's dimension
  Memory<BFloat16> query_memory_, key_memory_, value_memory_, weight_memory_;
  BFloat16 *queries_, *keys_, *values_, *weights_;
};

#else

struct TileLayout {
  void size_for(int, int) {}
  void set_query(int, const BFloat16*) {}
  void set_keys(const BFloat16*, const BFloat16*, const int64_t*, int) {}
  void score(const Tiles&, int, int, float*) const {}
  auto weights_of(int, int) const {
    return [](int, Floats) {};
  }
  void add(const Tiles&, int, float*) const {}
};

#endif
