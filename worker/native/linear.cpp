// y = f(norm(x) W^T + bias), for weights in float32, bfloat16 or float16, summed in float32.
//
// norm is RMSNorm or nothing; f is nothing, `+ residual`, or silu(gate) * up for a W that holds
// both. W is packed in blocks of kColumns rows, whose two halves are gates and what they gate.
// `VectorLinear` computes on every CPU, `TileLinear` in bfloat16 on matrix units.
//
// Each sum is one chain of additions over `in`, in order, however many rows there are: what
// a row gives does not depend on its batch mates, bit by bit.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "matrix_units.hpp"
#include "memory.hpp"
#include "vectors.hpp"

namespace {

constexpr int kColumns = 2 * kLanes;
// As many sums as fit into the registers beside two vectors of weights and one of x.
#if defined(__AVX512F__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif

struct Args {
  const void *x, *packed, *residual;  // residual null: none
  const float *bias, *norm_weight;    // null: none; the bias is in packed order
  void* y;
  int64_t x_stride, residual_stride, y_stride;  // between rows, in elements
  int64_t rows, in, out;                        // out: columns of y
  float epsilon;
  int32_t dtype, gated, tiled, num_threads;
};

int64_t ratio_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// What both forms share: where rows of x begin and what becomes of a sum.
template <class T>
class Linear {
 protected:
  explicit Linear(const Args& args) : a_(args), blocks_(ratio_up(args.out, width())) {}

  const Args& a_;
  const int64_t blocks_;

  int64_t width() const { return a_.gated ? kLanes : kColumns; }  // columns of y per block

  const T* row(int64_t r) const { return static_cast<const T*>(a_.x) + r * a_.x_stride; }

  float norm_scale(const T* x) const {
    return 1.0f / std::sqrt(sum_of_squares(x, a_.in) / a_.in + a_.epsilon);
  }

  // `sums`: [rows][kColumns], of one block, for the rows from `first`.
  void finish(const float* sums, int64_t rows, int64_t block, int64_t first) const {
    const int64_t column = block * width();
    const int64_t count = std::min(width(), a_.out - column);
    T* y = static_cast<T*>(a_.y) + first * a_.y_stride + column;
    const T* residual = static_cast<const T*>(a_.residual);
    if (residual) residual += first * a_.residual_stride + column;
    const float* bias = a_.bias ? a_.bias + block * kColumns : nullptr;
    const bool gated = a_.gated;
    const int64_t y_stride = a_.y_stride, residual_stride = a_.residual_stride;
    for (int64_t r = 0; r < rows; ++r) {
      Floats left = load(sums), right = load(sums + kLanes);
      if (bias) left += load(bias), right += load(bias + kLanes);
      if (gated) left = silu(left) * right;
      write(left, residual, y, count);
      if (!gated && count > kLanes)
        write(right, residual ? residual + kLanes : nullptr, y + kLanes, count - kLanes);
      sums += kColumns;
      y += y_stride;
      if (residual) residual += residual_stride;
    }
  }

 private:
  static void write(Floats sum, const T* residual, T* y, int64_t count) {
    if (residual) sum += load(residual, count);
    store(y, sum, count);
  }
};

// W as [blocks][in][kColumns], each kColumns in the order of `load_pair`. Rows of x are taken in
// tiles that are normalized, widened and transposed to [in][rows], so the inner loop loads two
// vectors of weights and one float per row, for two multiply-adds per row.
template <class T>
class VectorLinear : Linear<T> {
 public:
  explicit VectorLinear(const Args& args)
      : Linear<T>(args), tiles_(ratio_up(args.rows, kRows)) {}

  void run() {
    static thread_local Memory<float> scratch;
    x_ = scratch.of(a_.rows * a_.in);
    // A few rows leave sums idle: two blocks at once keep the multipliers busy.
    const int64_t together = a_.rows <= 2 ? 2 : 1;
    // One tile is prepared before another thread would have met this one at a barrier.
    if (tiles_ == 1) prepare(0);
#pragma omp parallel num_threads(a_.num_threads)
    {
      if (tiles_ > 1) {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles_; ++tile) prepare(tile);
      }
#pragma omp for schedule(static)
      for (int64_t block = 0; block < blocks_; block += together)
        if (block + 1 < blocks_ && together == 2)
          multiply_tile<2>(block, 0);
        else
          for (int64_t tile = 0; tile < tiles_; ++tile) multiply_tile<1>(block, tile);
    }
  }

 private:
  using Linear<T>::a_;
  using Linear<T>::blocks_;
  const int64_t tiles_;
  float* x_ = nullptr;  // tiles of [in][rows of the tile]

  int64_t row_of(int64_t tile) const { return a_.rows * tile / tiles_; }

  void prepare(int64_t tile) {
    const int64_t first = row_of(tile), rows = row_of(tile + 1) - first;
    for (int64_t r = 0; r < rows; ++r) {
      const T* x = this->row(first + r);
      float* to = x_ + first * a_.in + r;
      if (!a_.norm_weight) {
        for (int64_t i = 0; i < a_.in; ++i) to[i * rows] = to_float(x[i]);
        continue;
      }
      const float scale = this->norm_scale(x);
      for (int64_t i = 0; i < a_.in; ++i)
        to[i * rows] = to_float(x[i]) * scale * a_.norm_weight[i];
    }
  }

  // B neighbouring blocks with the rows of one tile.
  template <int B>
  void multiply_tile(int64_t block, int64_t tile) {
    const int64_t first = row_of(tile);
    multiply_rows<kRows, B>(block, first, row_of(tile + 1) - first);
  }

  template <int R, int B>
  void multiply_rows(int64_t block, int64_t first, int64_t rows) {
    if constexpr (R > 1)
      if (rows < R) return multiply_rows<R - 1, B>(block, first, rows);
    // More rows than two never come with two blocks, and their sums would not fit.
    if constexpr (B == 1 || R <= 2) multiply<R, B>(block, first);
  }

  // Widening the weights anew for each tile costs less than keeping them widened in the cache.
  template <int R, int B>
  void multiply(int64_t block, int64_t first) {
    const T* w = static_cast<const T*>(a_.packed) + block * a_.in * kColumns;
    const float* x = x_ + first * a_.in;
    Floats sum[R][B][2] = {};
    for (int64_t i = 0; i < a_.in; ++i)
      for (int b = 0; b < B; ++b) {
        const T* column = w + (b * a_.in + i) * kColumns;
        Floats w0, w1;
        load_pair(column, w0, w1);
        for (int r = 0; r < R; ++r) {
          const Floats xr = splat(x[i * R + r]);
          sum[r][b][0] += w0 * xr;
          sum[r][b][1] += w1 * xr;
        }
      }
    float sums[B][R][kColumns];
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b)
        for (int v = 0; v < 2; ++v) store(&sums[b][r][v * kLanes], sum[r][b][v]);
    for (int b = 0; b < B; ++b) this->finish(sums[b][0], R, block + b, first);
  }
};

// W as [blocks][tiles deep][2 halves][kTileElements]; zeros fill up what is not whole. A pair of
// tiles of rows, copied and normalized, meets a group of blocks that stays in the cache of a core
// from pair to pair.
class TileLinear : Linear<BFloat16> {
 public:
  explicit TileLinear(const Args& args)
      : Linear<BFloat16>(args), tiles_deep_(ratio_up(args.in, kTileDepth)) {}

  void run() {
    const int64_t pairs = ratio_up(a_.rows, 2 * kTile);
    int64_t groups = ratio_up(blocks_ * 2 * tile_row(), kGroupElements);
    // Threads share out what is more, W or the rows of x: each of them reads all of the other.
    if (a_.out > a_.rows) groups = ratio_up(groups, a_.num_threads) * a_.num_threads;
    groups = std::min(groups, blocks_);
#pragma omp parallel num_threads(a_.num_threads)
    {
      static thread_local Memory<BFloat16> scratch;
      BFloat16* x = scratch.of(2 * tile_row());
      int64_t prepared = -1;
      const Tiles units;
#pragma omp for schedule(static)
      for (int64_t item = 0; item < groups * pairs; ++item) {
        const int64_t group = item / pairs, pair = item % pairs, first = pair * 2 * kTile;
        if (pair != prepared) prepare(first, x);
        prepared = pair;
        const int64_t end = blocks_ * (group + 1) / groups;
        for (int64_t block = blocks_ * group / groups; block < end; ++block)
          if (first + kTile < a_.rows)
            multiply<2>(units, x, block, first);
          else
            multiply<1>(units, x, block, first);
      }
    }
  }

 private:
  static constexpr int64_t kGroupElements = 5 << 17;  // 1.25 MB, of a cache of 2

  const int64_t tiles_deep_;

  int64_t tile_row() const { return tiles_deep_ * kTileElements; }  // elements

  // Two tiles of rows, or the one that is left.
  void prepare(int64_t first, BFloat16* to) const {
    const int64_t rows = std::min<int64_t>(2 * kTile, a_.rows - first);
    if (rows % kTile || a_.in % kTileDepth) std::fill_n(to, 2 * tile_row(), BFloat16());
    for (int64_t r = 0; r < rows; ++r) {
      const BFloat16* x = row(first + r);
      const float scale = a_.norm_weight ? norm_scale(x) : 1.0f;
      BFloat16* place = to + r / kTile * tile_row() + r % kTile * kTileDepth;
      for (int64_t i = 0; i < a_.in; i += kLanes) {
        Floats part = load(x + i, a_.in - i);
        if (a_.norm_weight) part = part * scale * load(a_.norm_weight + i, a_.in - i);
        store(place + i / kTileDepth * kTileElements + i % kTileDepth, part, a_.in - i);
      }
    }
  }

  // R tiles of rows with one block.
  template <int R>
  void multiply(const Tiles& units, const BFloat16* x, int64_t block, int64_t first) const {
    alignas(64) float sums[R * kTile * kColumns];
    const BFloat16* w = static_cast<const BFloat16*>(a_.packed) + block * 2 * tile_row();
    units.multiply<R, true>(x, w, tiles_deep_, sums, kColumns);
    finish(sums, std::min<int64_t>(R * kTile, a_.rows - first), block, first);
  }
};

}  // namespace

extern "C" int32_t packed_columns() { return kColumns; }

extern "C" int32_t linear_has_tiles() { return has_tiles(); }

extern "C" void linear(const Args* args) {
  if (args->rows == 0) return;
  if (args->tiled) return TileLinear(*args).run();
  if (args->dtype == kFloat32) VectorLinear<float>(*args).run();
  if (args->dtype == kBFloat16) VectorLinear<BFloat16>(*args).run();
  if (args->dtype == kFloat16) VectorLinear<Float16>(*args).run();
}
