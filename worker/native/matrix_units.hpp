// Products of bfloat16 on the matrix units of some CPUs (AMX), summed in float32.
//
// A tile has kTile rows of kTileDepth bfloat16, or of kTile floats. What stands on the right of a
// product comes in pairs: row p of its tile holds rows 2p and 2p + 1 of the matrix, in turn.

#pragma once

#include "vectors.hpp"

constexpr int kTile = 16;
constexpr int kTileDepth = 32;
constexpr int kTileElements = kTile * kTileDepth;

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

// Whether this process may use them: Linux wants to be asked, once.
inline bool has_tiles() {
  constexpr long kAskForState = 0x1023, kTileData = 18;
  static const bool is_granted = syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  return is_granted;
}

// The tile registers of this thread, all of the full size, for as long as it lives.
class Tiles {
 public:
  Tiles() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) shape.row_bytes[i] = 64, shape.rows[i] = kTile;
    asm volatile("" ::"r"(&shape) : "memory");  // gcc believes that 8 of its 64 bytes are read
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;

  // c[R tiles of rows][2 * kTile] (+)= a b. Each of R tiles of rows of `a` is `deep` tiles, one
  // after the other, and `b` a left and a right tile for each of them; rows of c are `c_stride`
  // apart. Each tile that is loaded serves two products if R is 2; loading would take the longest
  // otherwise.
  template <int R, bool kFetch = false>
  void multiply(const BFloat16* a, const BFloat16* b, int64_t deep, float* c, int64_t c_stride,
                bool add = false) const {
    constexpr int kRowBytes = kTileDepth * sizeof(BFloat16);
    constexpr int kAhead = 4 * kTileElements;  // far enough for memory to answer
    const int64_t sum_bytes = c_stride * sizeof(float);
    const BFloat16* lower = a + deep * kTileElements;
    asm volatile("" ::: "memory");  // the compiler is not told that tiles are loaded from memory
    if (add) {
      _tile_loadd(0, c, sum_bytes);
      _tile_loadd(1, c + kTile, sum_bytes);
      if (R == 2) {
        _tile_loadd(2, c + kTile * c_stride, sum_bytes);
        _tile_loadd(3, c + kTile * c_stride + kTile, sum_bytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < deep; ++k) {
      if (kFetch)
        for (int line = 0; line < 2 * kTileElements; line += kTileDepth)
          __builtin_prefetch(b + kAhead + line);
      _tile_loadd(4, a, kRowBytes);
      _tile_loadd(6, b, kRowBytes);
      _tile_loadd(7, b + kTileElements, kRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (R == 2) {
        _tile_loadd(5, lower, kRowBytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      a += kTileElements;
      lower += kTileElements;
      b += 2 * kTileElements;
    }
    _tile_stored(0, c, sum_bytes);
    _tile_stored(1, c + kTile, sum_bytes);
    if (R == 2) {
      _tile_stored(2, c + kTile * c_stride, sum_bytes);
      _tile_stored(3, c + kTile * c_stride + kTile, sum_bytes);
    }
  }
};

#else

inline bool has_tiles() { return false; }

struct Tiles {
  template <int R, bool kFetch = false>
  void multiply(const BFloat16*, const BFloat16*, int64_t, float*, int64_t, bool = false) const {}
};

#endif
