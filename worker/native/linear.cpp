// y = f(norm(x) W^T + bias), for weights in float32, bfloat16 or float16, computed in float32.
//
// norm is RMSNorm or nothing; f is nothing, `+ residual`, or silu(gate) * up for a W that holds
// both. W is packed in blocks of kColumns rows, [blocks][in][kColumns], each kColumns in the order
// of `load_pair`. Rows of x are taken in tiles that are normalized, widened and transposed to
// [in][rows], so the inner loop loads two vectors of weights and one float per row, for two
// multiply-adds per row.
//
// Each sum is one chain of multiply-adds over `in`, in order, however many rows there are: what
// a row gives does not depend on its batch mates, bit by bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

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
  int32_t dtype, gated, num_threads;
};

template <class T>
class Linear {
 public:
  explicit Linear(const Args& args)
      : a_(args),
        tiles_((args.rows + kRows - 1) / kRows),
        blocks_((args.out + width() - 1) / width()) {}

  void run() {
    if (a_.rows == 0) return;
    static thread_local std::vector<float> x_scratch;
    if (int64_t(x_scratch.size()) < a_.rows * a_.in) x_scratch.resize(a_.rows * a_.in);
    x_ = x_scratch.data();
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
  const Args& a_;
  const int64_t tiles_, blocks_;
  float* x_ = nullptr;  // tiles of [in][rows of the tile]

  int64_t width() const { return a_.gated ? kLanes : kColumns; }  // columns of y per block
  int64_t row_of(int64_t tile) const { return a_.rows * tile / tiles_; }

  void prepare(int64_t tile) {
    const int64_t first = row_of(tile), rows = row_of(tile + 1) - first;
    for (int64_t r = 0; r < rows; ++r) {
      const T* x = static_cast<const T*>(a_.x) + (first + r) * a_.x_stride;
      float* to = x_ + first * a_.in + r;
      if (!a_.norm_weight) {
        for (int64_t i = 0; i < a_.in; ++i) to[i * rows] = to_float(x[i]);
        continue;
      }
      const float scale = 1.0f / std::sqrt(sum_of_squares(x, a_.in) / a_.in + a_.epsilon);
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
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) finish(sum[r][b], block + b, first + r);
  }

  void finish(Floats* sum, int64_t block, int64_t row) const {
    if (a_.bias)
      for (int v = 0; v < 2; ++v) sum[v] += load(a_.bias + block * kColumns + v * kLanes);
    if (a_.gated) sum[0] = silu(sum[0]) * sum[1];
    float out[kColumns];
    for (int v = 0; v < 2; ++v) store(out + v * kLanes, sum[v]);
    const int64_t column = block * width();
    const int64_t count = std::min(width(), a_.out - column);
    T* y = static_cast<T*>(a_.y) + row * a_.y_stride + column;
    if (a_.residual) {
      const T* residual = static_cast<const T*>(a_.residual) + row * a_.residual_stride + column;
      for (int64_t c = 0; c < count; ++c) out[c] += to_float(residual[c]);
    }
    for (int64_t c = 0; c < count; ++c) store(y + c, out[c]);
  }
};

}  // namespace

extern "C" int32_t packed_columns() { return kColumns; }

extern "C" void linear(const Args* args) {
  if (args->dtype == kFloat32) Linear<float>(*args).run();
  if (args->dtype == kBFloat16) Linear<BFloat16>(*args).run();
  if (args->dtype == kFloat16) Linear<Float16>(*args).run();
}
