// What surrounds a product, for CPUs where the product itself is oneDNN's: RMSNorm of rows, and
// silu(gate) * up of rows that hold both. Computed in float32, each row by itself and in one order:
// what a row gives does not depend on its batch mates, bit by bit.

#include <cmath>
#include <cstdint>

#include "vectors.hpp"

namespace {

struct Args {
  const void* x;
  const float* norm_weight;  // [width]; the gate has none
  void* y;                   // [rows][width]
  int64_t x_stride;          // between rows, in elements
  int64_t rows, width;
  float epsilon;
  int32_t dtype, num_threads;
};

template <class T>
void norm(const Args& a, const T* x, T* y) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, a.width) / a.width + a.epsilon);
  for (int64_t i = 0; i < a.width; i += kLanes) {
    const int64_t n = a.width - i;
    store(y + i, load(x + i, n) * scale * load(a.norm_weight + i, n), n);
  }
}

template <class T>
void gate(const Args& a, const T* x, T* y) {
  const T* up = x + a.width;
  for (int64_t i = 0; i < a.width; i += kLanes) {
    const int64_t n = a.width - i;
    store(y + i, silu(load(x + i, n)) * load(up + i, n), n);
  }
}

template <class T>
void each_row(const Args& a, void (*compute)(const Args&, const T*, T*)) {
  // Less is done before other threads have woken up.
  const int num_threads = a.rows * a.width > 16384 ? a.num_threads : 1;
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t row = 0; row < a.rows; ++row)
    compute(a, static_cast<const T*>(a.x) + row * a.x_stride, static_cast<T*>(a.y) + row * a.width);
}

}  // namespace

extern "C" void norm_rows(const Args* args) {
  if (args->dtype == kFloat32) each_row<float>(*args, norm);
  if (args->dtype == kBFloat16) each_row<BFloat16>(*args, norm);
  if (args->dtype == kFloat16) each_row<Float16>(*args, norm);
}

extern "C" void gate_rows(const Args* args) {
  if (args->dtype == kFloat32) each_row<float>(*args, gate);
  if (args->dtype == kBFloat16) each_row<BFloat16>(*args, gate);
  if (args->dtype == kFloat16) each_row<Float16>(*args, gate);
}
