// What attention.cpp and step.cpp share.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>

void add_step(torch::Library& m);

namespace {

using at::BFloat16;
using at::Tensor;
using Vec = at::vec::Vectorized<float>;
using std::int64_t;

constexpr int64_t W = Vec::size();
constexpr float INFINITE = std::numeric_limits<float>::infinity();

int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <typename T>
struct Free {
  void operator()(T* at) const { std::free(at); }
};
template <typename T>
using Buffer = std::unique_ptr<T[], Free<T>>;

template <typename T>
Buffer<T> buffer(int64_t count) {
  auto* at = static_cast<T*>(std::aligned_alloc(64, up(std::max<int64_t>(count, 1) * sizeof(T), 64)));
  TORCH_CHECK(at != nullptr, "can't allocate memory: ", count * sizeof(T), " bytes");
  return Buffer<T>(at);
}

// e^x. For bfloat16, with AVX-512, a cubic, 7.5e-5 off at most: a hundredth of a rounding to bfloat16.
template <typename T>
Vec exponential(Vec x) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, BFloat16>) {  // 2^y = 2^floor(y) times the cubic of the rest
    Vec y = x * Vec(1.44269504f), rest = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF);
    Vec cubic = at::vec::fmadd(rest, Vec(0.0780245227f), Vec(0.226067155f));
    cubic = at::vec::fmadd(rest, at::vec::fmadd(rest, cubic, Vec(0.69583354f)), Vec(0.999925219f));
    return _mm512_scalef_ps(cubic, y);
  }
#endif
  return x.exp();
}

}  // namespace
