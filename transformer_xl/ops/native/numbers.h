// Registers of AVX-512 for the step: loads, rounding, products and sums of float32 and bfloat16.

#pragma once

#include "common.h"

#include <immintrin.h>

namespace {

constexpr int64_t AHEAD = 8192;  // bytes between a read and its prefetch

#define INLINE __attribute__((always_inline))

template <typename T>
constexpr int64_t CHUNK = 64 / sizeof(T);  // numbers in a register

INLINE inline __m512 chunk(const float* at) { return _mm512_loadu_ps(at); }
INLINE inline __m512 chunk(const float* at, int64_t n) { return _mm512_maskz_loadu_ps((1u << n) - 1, at); }
INLINE inline __m512i chunk(const BFloat16* at) { return _mm512_loadu_si512(at); }
INLINE inline __m512i chunk(const BFloat16* at, int64_t n) { return _mm512_maskz_loadu_epi16((1u << n) - 1, at); }

INLINE inline __m512 add_products(__m512 sum, __m512 x, __m512 y) { return _mm512_fmadd_ps(x, y, sum); }
INLINE inline __m512 add_products(__m512 sum, __m512i x, __m512i y) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
#else
  const __m512i odd = _mm512_set1_epi32(0xffff0000);
  auto first = [](__m512i z) { return _mm512_castsi512_ps(_mm512_slli_epi32(z, 16)); };
  sum = _mm512_fmadd_ps(first(x), first(y), sum);
  auto second = [=](__m512i z) { return _mm512_castsi512_ps(_mm512_and_si512(z, odd)); };
  return _mm512_fmadd_ps(second(x), second(y), sum);
#endif
}

INLINE inline __m512 wide(const float* at, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, at); }
INLINE inline __m512 wide(const BFloat16* at, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at)), 16));
}

// Up to four numbers.
INLINE inline __m128 four(const float* at, int64_t n) { return _mm_maskz_loadu_ps((1u << n) - 1, at); }
INLINE inline __m128 four(const BFloat16* at, int64_t n) {
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_maskz_loadu_epi16((1u << n) - 1, at)), 16));
}
INLINE inline void put(float* at, __m128 x, int64_t n) { _mm_mask_storeu_ps(at, (1u << n) - 1, x); }
INLINE inline void put(BFloat16* at, __m128 x, int64_t n) {
#ifdef __AVX512BF16__
  _mm_mask_storeu_epi16(at, (1u << n) - 1, reinterpret_cast<__m128i>(_mm_cvtneps_pbh(x)));
#else
  for (int64_t i = 0; i < n; ++i) at[i] = x[i];
#endif
}

// As PyTorch rounds the result of a product.
template <typename T>
INLINE inline __m128 rounded(__m128 x) {
  T numbers[8];
  put(numbers, x, 4);
  return four(numbers, 4);
}

// The sums of the lanes of four registers, and then of four such results: [a, b, c, d] of each 128 bits. All lanes are
// added in the same order.
INLINE inline __m512 add_quarters(const __m512 (&x)[4]) {
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  __m512d low = _mm512_castps_pd(ab), high = _mm512_castps_pd(cd);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
}
INLINE inline __m512 add_halves(__m512 x, __m512 y) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}
INLINE inline __m512 add_lanes(const __m512 (&x)[4]) { return add_halves(add_halves(x[0], x[1]), add_halves(x[2], x[3])); }

// sums[r][i] += the products of row r of x with w[i]. Rows of x are padded with zeros to whole chunks. The four w follow
// each other in memory. Of `parts` calls with the same w, at most 4, each prefetches its share of what comes after them.
template <int R, typename T>
INLINE inline void add_dots(__m512 (&sums)[R][4], const T* x, int64_t ld, const T* const (&w)[4], int64_t n,
                            int64_t part = 0, int64_t parts = 1) {
  int64_t first = 4 * part / parts, last = part < parts ? 4 * (part + 1) / parts : first;
  auto add = [&](auto load, int64_t c) INLINE {
    decltype(chunk(x)) y[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) y[i] = load(w[i] + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      auto z = chunk(x + r * ld + c);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][i] = add_products(sums[r][i], z, y[i]);
    }
  };
  int64_t c = 0;
  for (; c + CHUNK<T> <= n; c += CHUNK<T>) {
    auto* ahead = reinterpret_cast<const char*>(w[0] + 4 * c) + AHEAD;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      if (first <= i && i < last) _mm_prefetch(ahead + 64 * i, _MM_HINT_T0);
    add([](const T* at) INLINE { return chunk(at); }, c);
  }
  if (c < n) add([&](const T* at) INLINE { return chunk(at, n - c); }, c);
}

}  // namespace
