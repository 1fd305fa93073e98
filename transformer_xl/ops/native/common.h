// What attention.cpp and step.cpp share.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>

void bind_step(py::module_& m);

namespace {

using at::BFloat16;
using at::Tensor;
using Vec = at::vec::Vectorized<float>;
using std::int64_t;

constexpr int64_t W = Vec::size();
constexpr float INFINITE = std::numeric_limits<float>::infinity();
static_assert(W == 16, "this file needs AVX-512");

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

template <typename T>
Vec exponential(Vec x) {
  if constexpr (std::is_same_v<T, float>) {
    return x.exp();
  } else {
    return x.fexp_u20();
  }
}

}  // namespace
