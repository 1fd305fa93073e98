// Registers for the step: loads, rounding, products and sums of float32 and bfloat16.

#pragma once

#include "common.h"

#include <immintrin.h>

namespace {

constexpr int64_t AHEAD = 8192;  // bytes between a read and its prefetch

#define INLINE __attribute__((always_inline))

template <typename T>
using Chunk = at::vec::Vectorized<T>;  // a register of numbers

INLINE inline Vec add_products(Vec sum, Vec x, Vec y) { return at::vec::fmadd(x, y, sum); }
INLINE inline Vec add_products(Vec sum, Chunk<BFloat16> x, Chunk<BFloat16> y) {
#ifdef __AVX512BF16__
  __m512i a = x, b = y;
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  using Bits = at::vec::Vectorized<int32_t>;
  auto odd = [](Bits z) INLINE { return at::vec::cast<float>(z & Bits(0xffff0000)); };
  auto even = [](Bits z) INLINE { return at::vec::cast<float>(z << Bits(16)); };
  Bits a(x), b(y);
  return at::vec::fmadd(odd(a), odd(b), at::vec::fmadd(even(a), even(b), sum));
#endif
}

// W numbers, and up to W.
INLINE inline Vec wide(const float* at) { return Vec::loadu(at); }
INLINE inline Vec wide(const float* at, int64_t n) { return Vec::loadu(at, n); }
INLINE inline Vec wide(const BFloat16* at) {
  Vec x;
  at::vec::load_fp32_from_bf16(at, x);
  return x;
}
INLINE inline Vec wide(const BFloat16* at, int64_t n) {
  return std::get<0>(at::vec::convert_bfloat16_float(Chunk<BFloat16>::loadu(at, n)));
}

// Up to four.
using Four = float __attribute__((vector_size(16)));

template <typename T>
INLINE inline Four four(const T* at, int64_t n) {
  Four x = {};
  for (int64_t i = 0; i < n; ++i) x[i] = at[i];
  return x;
}
template <typename T>
INLINE inline void put(T* at, Four x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) at[i] = x[i];
}

// As PyTorch rounds the result of a product.
template <typename T>
INLINE inline Four rounded(Four x) {
  T numbers[4];
  put(numbers, x, 4);
  return four(numbers, 4);
}

INLINE inline Four relu(Four x) { return x < Four{} ? Four{} : x; }

// The sums of the lanes of four registers.
INLINE inline Four add_lanes(const Vec (&x)[4]) {
#ifdef __AVX512F__
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  __m512d low = _mm512_castps_pd(ab), high = _mm512_castps_pd(cd);
  __m512 quarters = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)) + _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  __m256 sums = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
#else
  __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
#endif
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// sums[r][i] += the products of row r of x with w[i]. Rows of x are padded with zeros to whole chunks. The four w follow
// each other in memory. Of `parts` calls with the same w, at most 4, each prefetches its share of what comes after them.
template <int R, typename T>
INLINE inline void add_dots(Vec (&sums)[R][4], const T* x, int64_t ld, const T* const (&w)[4], int64_t n,
                            int64_t part = 0, int64_t parts = 1) {
  int64_t first = 4 * part / parts, last = part < parts ? 4 * (part + 1) / parts : first;
  auto add = [&](auto load, int64_t c) INLINE {
    Chunk<T> y[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) y[i] = load(w[i] + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      auto z = Chunk<T>::loadu(x + r * ld + c);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][i] = add_products(sums[r][i], z, y[i]);
    }
  };
  int64_t c = 0;
  for (; c + Chunk<T>::size() <= n; c += Chunk<T>::size()) {
    auto* ahead = reinterpret_cast<const char*>(w[0] + 4 * c) + AHEAD;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      if (first <= i && i < last) __builtin_prefetch(ahead + sizeof(Vec) * i);
    add([](const T* at) INLINE { return Chunk<T>::loadu(at); }, c);
  }
  if (c < n) add([&](const T* at) INLINE { return Chunk<T>::loadu(at, n - c); }, c);
}

}  // namespace
