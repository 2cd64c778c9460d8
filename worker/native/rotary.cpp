// In place, for each head of q and k: RMSNorm over the head if asked for, then the rotary
// embedding, which turns the plane of (x[i], x[i + D/2]) by the angle of its token and i.
// Computed in float32.

#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.hpp"

namespace {

struct Args {
  void* x;                         // [tokens][heads][head_dim], tokens x_stride elements apart
  const float *cosines, *sines;    // [tokens][head_dim / 2]
  const float* norm_weight;        // [heads][head_dim]; null: no norm
  int64_t x_stride, tokens;
  float epsilon;
  int32_t heads, head_dim, dtype, num_threads;
};

template <class T>
void rotate_token(const Args& a, int64_t token, float* head) {
  const int half = a.head_dim / 2;
  const float* cosines = a.cosines + token * half;
  const float* sines = a.sines + token * half;
  T* x = static_cast<T*>(a.x) + token * a.x_stride;
  for (int n = 0; n < a.heads; ++n, x += a.head_dim) {
    for (int d = 0; d < a.head_dim; ++d) head[d] = to_float(x[d]);
    if (a.norm_weight) {
      float sum = 0;
      for (int d = 0; d < a.head_dim; ++d) sum += head[d] * head[d];
      const float scale = 1.0f / std::sqrt(sum / a.head_dim + a.epsilon);
      for (int d = 0; d < a.head_dim; ++d)
        head[d] = head[d] * scale * a.norm_weight[n * a.head_dim + d];
    }
    for (int d = 0; d < half; ++d) {
      store(x + d, head[d] * cosines[d] - head[d + half] * sines[d]);
      store(x + d + half, head[d + half] * cosines[d] + head[d] * sines[d]);
    }
  }
}

template <class T>
void rotate_all(const Args& a) {
  // A handful of tokens is done before other threads have woken up.
  const int num_threads = a.tokens > 16 ? a.num_threads : 1;
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<float> head(a.head_dim);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < a.tokens; ++token) rotate_token<T>(a, token, head.data());
  }
}

}  // namespace

extern "C" void rotate(const Args* args) {
  if (args->dtype == kFloat32) rotate_all<float>(*args);
  if (args->dtype == kBFloat16) rotate_all<BFloat16>(*args);
  if (args->dtype == kFloat16) rotate_all<Float16>(*args);
}
