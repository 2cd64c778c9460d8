// Vectors of floats in GCC's and clang's own notation, so that one source serves AVX2, AVX-512
// and NEON; and loads and stores of every stored type as float.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// What a tensor holds; the numbers are those of `worker/attention/cpu.py`.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8 = 3 };

struct BFloat16 { uint16_t bits; };
struct Float16 { _Float16 value; };
struct Float8 { uint8_t bits; };  // e4m3: 1 sign, 4 exponent (bias 7), 3 mantissa, no infinity

struct Float8Table {
  float value[256];
  Float8Table() {
    for (int bits = 0; bits < 256; ++bits) {
      const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
      float x = exponent ? (1.0f + mantissa / 8.0f) : mantissa / 4.0f;
      for (int e = exponent ? exponent : 0; e < 7; ++e) x *= 0.5f;
      for (int e = 7; e < exponent; ++e) x *= 2.0f;
      if ((bits & 127) == 127) x = __builtin_nanf("");
      value[bits] = bits & 128 ? -x : x;
    }
  }
};
inline const Float8Table kFloat8Table;

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
  const uint32_t word = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline float to_float(Float16 x) { return float(x.value); }
inline float to_float(Float8 x) { return kFloat8Table.value[x.bits]; }

// Rounded to nearest even; NaN stays NaN.
inline BFloat16 to_bfloat16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  word += 0x7fff + ((word >> 16) & 1);
  return {x == x ? uint16_t(word >> 16) : uint16_t(0x7fc0)};
}

// Subtracting zero is nothing; adding it is not (-0), and would be done.
inline Floats splat(float x) { return x - Floats{}; }

inline Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
#if defined(__AVX512F__)
inline Floats load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
inline Floats load(const Float16* p) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#elif defined(__AVX2__) && defined(__F16C__)
// Left to itself, gcc 12 widens bfloat16 in two halves and float16 one by one.
inline Floats load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
}
inline Floats load(const Float16* p) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
#else
inline Floats load(const BFloat16* p) {
  Halves bits;
  std::memcpy(&bits, p, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}
inline Floats load(const Float16* p) {
  typedef _Float16 Float16s __attribute__((vector_size(kLanes * 2)));
  Float16s x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, Floats);
}
#endif
inline Floats load(const Float8* p) {
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = kFloat8Table.value[p[i].bits];
  return x;
}
// Two vectors that are stored side by side; in bfloat16 their elements stand in turn, a0 b0 a1 b1:
// widening bfloat16 is then a shift and a mask, and no shuffle.
inline void load_pair(const BFloat16* p, Floats& a, Floats& b) {
  Words words;
  std::memcpy(&words, p, sizeof words);
  a = (Floats)(words << 16);
  b = (Floats)(words & 0xffff0000u);
}
template <class T>
inline void load_pair(const T* p, Floats& a, Floats& b) {
  a = load(p);
  b = load(p + kLanes);
}

inline void store(float* p, float x) { *p = x; }
inline void store(BFloat16* p, float x) { *p = to_bfloat16(x); }
inline void store(Float16* p, float x) { p->value = _Float16(x); }

// Rounded as one number is; a CPU's own instruction makes zeros of what is below 1e-38.
inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
inline void store(BFloat16* p, Floats x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  const Words words = (Words)x;
  const Words rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
  const Words bits = x == x ? rounded : Words{} + 0x7fc0;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)bits));
#else
  const Halves halves = __builtin_convertvector(bits, Halves);
  std::memcpy(p, &halves, sizeof halves);
#endif
#endif
}
inline void store(Float16* p, Floats x) {
#if defined(__AVX512F__)
  const __m256i bits = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &bits, sizeof bits);
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i bits = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &bits, sizeof bits);
#else
  for (int i = 0; i < kLanes; ++i) store(p + i, x[i]);
#endif
}

// The first n of a vector, and zeros.
template <class T>
inline Floats load(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  Floats x = {};
  for (int64_t i = 0; i < n; ++i) x[i] = to_float(p[i]);
  return x;
}
template <class T>
inline void store(T* p, Floats x, int64_t n) {
  if (n >= kLanes) return store(p, x);
  for (int64_t i = 0; i < n; ++i) store(p + i, float(x[i]));
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline float sum_of(Floats x) {
  typedef float Four __attribute__((vector_size(16)));
  Four part[kLanes / 4];
  std::memcpy(part, &x, sizeof part);
  for (int i = 1; i < kLanes / 4; ++i) part[0] += part[i];
  return (part[0][0] + part[0][1]) + (part[0][2] + part[0][3]);
}

template <class T>
inline float sum_of_squares(const T* x, int64_t n) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int k = 0; k < 4; ++k) {
      const Floats part = load(x + i + k * kLanes);
      sums[k] += part * part;
    }
  float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) sum += to_float(x[i]) * to_float(x[i]);
  return sum;
}

// The sums of four vectors, in one pass of shuffles instead of four.
inline void sums_of_4(Floats a, Floats b, Floats c, Floats d, float* to) {
#if defined(__AVX512F__)
#define PAIR(x, y, i) __builtin_shufflevector(x, y, i, 16 + i, 2 + i, 18 + i, 4 + i, 20 + i, \
    6 + i, 22 + i, 8 + i, 24 + i, 10 + i, 26 + i, 12 + i, 28 + i, 14 + i, 30 + i)
#define QUAD(x, y, i) __builtin_shufflevector(x, y, i, 1 + i, 16 + i, 17 + i, 4 + i, 5 + i, \
    20 + i, 21 + i, 8 + i, 9 + i, 24 + i, 25 + i, 12 + i, 13 + i, 28 + i, 29 + i)
#else
#define PAIR(x, y, i) __builtin_shufflevector(x, y, i, 8 + i, 2 + i, 10 + i, 4 + i, 12 + i, \
    6 + i, 14 + i)
#define QUAD(x, y, i) __builtin_shufflevector(x, y, i, 1 + i, 8 + i, 9 + i, 4 + i, 5 + i, \
    12 + i, 13 + i)
#endif
  const Floats ab = PAIR(a, b, 0) + PAIR(a, b, 1);      // a b a b ...: sums of 2 lanes
  const Floats cd = PAIR(c, d, 0) + PAIR(c, d, 1);
  const Floats abcd = QUAD(ab, cd, 0) + QUAD(ab, cd, 2);  // a b c d a b c d: sums of 4 lanes
#undef PAIR
#undef QUAD
  typedef float Four __attribute__((vector_size(16)));
  Four part[kLanes / 4];
  std::memcpy(part, &abcd, sizeof part);
  for (int i = 1; i < kLanes / 4; ++i) part[0] += part[i];
  std::memcpy(to, part, 16);
}

inline float max_of(Floats x) {
  typedef float Four __attribute__((vector_size(16)));
  Four part[kLanes / 4];
  std::memcpy(part, &x, sizeof part);
  for (int i = 1; i < kLanes / 4; ++i) part[0] = part[0] > part[i] ? part[0] : part[i];
  const float left = part[0][0] > part[0][1] ? part[0][0] : part[0][1];
  const float right = part[0][2] > part[0][3] ? part[0][2] : part[0][3];
  return left > right ? left : right;
}

// 2^x, relative error about 1e-7, for x up to 127; 0 below -126.
inline Floats exp2_of(Floats x) {
  const Floats low = splat(-126.0f);
  const Floats bounded = max(x, low);
#if defined(__AVX512F__)
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)bounded, 0);
#else
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = (bounded + magic) - magic;
#endif
  const Floats f = bounded - n;
  Floats p = splat(1.3218672482e-3f);
  p = p * f + 9.6716979384e-3f;
  p = p * f + 5.5508929525e-2f;
  p = p * f + 2.4022238003e-1f;
  p = p * f + 6.9314685594e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 is_low = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_LT_OQ);
  return (Floats)_mm512_maskz_scalef_ps(~is_low, (__m512)p, (__m512)n);
#else
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Floats result = p * (Floats)power;
  return x < low ? Floats{} : result;
#endif
}

// e^x, relative error about 1e-7, for x up to 88; 0 below -87.
inline Floats exp_of(Floats x) {
  const Floats low = splat(-87.0f);
  const Floats bounded = max(x, low);
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = (bounded * 1.44269504f + magic) - magic;
  const Floats f = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Floats result = p * (Floats)power;
  return x < low ? Floats{} : result;
}

inline Floats silu(Floats x) {
  const Floats low = splat(-87.0f);  // e^87 is near the largest float; the result is 1e-36
  return x < low ? Floats{} : x / (1.0f + exp_of(-max(x, low)));
}

inline Floats tanh_of(Floats x) {
  const Floats bounded = max(-max(-x, splat(-40.0f)), splat(-40.0f));
  return 1.0f - 2.0f / (exp_of(2.0f * bounded) + 1.0f);
}
