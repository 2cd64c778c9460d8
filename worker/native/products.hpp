// Products of small float matrices that lie in the cache.

#pragma once

#include "vectors.hpp"

// C[R, n] (+)= A[R, depth] B[depth, n] in tiles of R x 2 vectors; n is whole vectors, twice.
template <int R>
void multiply_rows(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int depth,
                   int n, bool add) {
  for (int column = 0; column < n; column += 2 * kLanes) {
    Floats sum[R][2];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 2; ++i)
        sum[r][i] = add ? load(c + r * ldc + column + i * kLanes) : Floats{};
    for (int d = 0; d < depth; ++d) {
      const Floats b0 = load(b + d * ldb + column), b1 = load(b + d * ldb + column + kLanes);
      for (int r = 0; r < R; ++r) {
        const Floats x = splat(a[r * lda + d]);
        sum[r][0] += x * b0;
        sum[r][1] += x * b1;
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 2; ++i) store(c + r * ldc + column + i * kLanes, sum[r][i]);
  }
}

inline void multiply(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int rows,
              int depth, int n, bool add) {
  int r = 0;
  for (; r + 6 <= rows; r += 6)
    multiply_rows<6>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, n, add);
  for (; r + 3 <= rows; r += 3)
    multiply_rows<3>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, n, add);
  for (; r < rows; ++r)
    multiply_rows<1>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, n, add);
}
