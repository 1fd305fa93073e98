// One token of each row through all layers on a CPU. Weights and past are read once, and their bandwidth is the bound.
//
// All threads share one parallel region. In each phase they take parts of the output features, rows, or pieces of the
// ring, and spin until all are done. Each sum is computed by one thread in a fixed order, so the bits of a row depend
// neither on the other rows nor on the number of threads. The ring and the order of its slots are described in
// model/step.py.

#include "numbers.h"

#include <omp.h>
#include <sched.h>

#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int64_t PIECE = 256;  // most slots in a unit of attention
constexpr float NORM_EPSILON = 1e-5f;  // of normalised queries and keys
constexpr int64_t PARTS = 8;  // of a thread's share of a phase
constexpr int SPINS = 4096;

// ---- Threads ----------------------------------------------------------------------------------------------------

struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

// A thread first takes the parts of its own share, because they follow each other in memory. Then it takes the parts that
// other threads have left, so nobody waits long for a thread that comes late.
struct Team {
  int thread, threads;
  Counter* counters;  // of the next phase: the parts taken of each share, and the parts done

  template <typename Work>
  void run(int64_t units, Work work) {
    int64_t parts = std::min<int64_t>(units, PARTS * threads);
    std::atomic<int64_t>& done = counters[threads].value;
    for (int other = 0; other < threads; ++other) {
      int64_t share = (thread + other) % threads, first = parts * share / threads, end = parts * (share + 1) / threads;
      for (int64_t part; (part = first + counters[share].value.fetch_add(1, std::memory_order_relaxed)) < end;) {
        for (int64_t n = units * part / parts; n < units * (part + 1) / parts; ++n) work(n);
        done.fetch_add(1, std::memory_order_release);
      }
    }
    for (int spins = 0; done.load(std::memory_order_acquire) < parts; ++spins)
      spins < SPINS ? _mm_pause() : static_cast<void>(sched_yield());
    counters += threads + 1;
  }
};

// ---- A call -----------------------------------------------------------------------------------------------------

// The tensors of a layer, in the order of model/kernels.py. Only models with QK-norm have a gain.
enum Name {
  NORM, NORM_BIAS, QKV, OUTPUT, NEXT_NORM, NEXT_NORM_BIAS, INNER, INNER_BIAS, OUTER, OUTER_BIAS,
  TABLE, CONTENT_BIAS, POSITION_BIAS, GAIN
};
using Layer = std::vector<Tensor>;

struct Model {
  std::vector<Layer> layers;
  std::vector<Tensor> final_norm;  // weight and bias, or nothing
  std::vector<Tensor> softmax;     // weight and bias, or nothing
  bool pre_norm, relu_output;
  double epsilon;
};

template <typename T>
struct Call {
  const Model& model;
  const std::vector<Tensor>& rings;  // [B, 2, H, window, K]
  const int64_t *slots, *counts;  // of each row of the ring
  const int64_t* chosen;  // the row of the ring of each row of the call, or null
  int64_t rows;
  float* out;  // [rows, D]; first the input
  float* logits;  // [rows, V], or null

  int64_t H = rings[0].size(2), window = rings[0].size(3), K = rings[0].size(4);
  int64_t D = model.layers[0][QKV].size(1), F = model.layers[0][INNER].size(0), HK = H * K;
  int64_t pieces = (window + PIECE - 1) / PIECE, piece = up((window + pieces - 1) / pieces, W);
  int64_t ld_x = up(D, Chunk<T>::size()), ld_heads = up(HK, Chunk<T>::size()), ld_inner = up(F, Chunk<T>::size());
  int64_t Kp = up(K, 64), ld_part = Kp + W;
  Buffer<T> x = zeros<T>(rows * ld_x), attended = zeros<T>(rows * ld_heads), inner = zeros<T>(rows * ld_inner);
  Buffer<float> heads = buffer<float>(rows * 3 * HK);
  Buffer<float> parts = buffer<float>(rows * H * pieces * ld_part);  // the largest score, the sum, and at W the values
  std::vector<Counter> counters = std::vector<Counter>((8 * model.layers.size() + 4) * (at::get_num_threads() + 1));

  template <typename Number>
  static Buffer<Number> zeros(int64_t count) {
    auto made = buffer<Number>(count);
    std::fill_n(made.get(), count, Number(0));
    return made;
  }

  static const T* weight(const Layer& layer, Name name) { return layer[name].template const_data_ptr<T>(); }

  void operator()() {
#pragma omp parallel num_threads(at::get_num_threads())
    Thread{*this, {omp_get_thread_num(), omp_get_num_threads(), counters.data()}}();
  }

  struct Thread {
    Call& call;
    Team team;
    int64_t D = call.D, H = call.H, K = call.K, HK = call.HK, rows = call.rows;
    Buffer<float> row = zeros<float>(std::max(D, call.Kp)), score = buffer<float>(call.piece + 3 * W);
    Buffer<T> content = zeros<T>(call.Kp), position = zeros<T>(call.Kp);

    void operator()() {
      bool pre_norm = call.model.pre_norm;
      // One thread takes all pieces of a head where there are enough heads, because they follow each other in memory.
      int64_t together = H * rows < PARTS * team.threads ? 1 : call.pieces, apart = call.pieces / together;
      if (!pre_norm) team.run(rows, [&](int64_t b) { at::vec::convert(call.out + b * D, call.x.get() + b * call.ld_x, D); });
      for (size_t l = 0; l < call.model.layers.size(); ++l) {
        const Layer& layer = call.model.layers[l];
        if (pre_norm) norm(layer[NORM], layer[NORM_BIAS]);
        product(call.x.get(), call.ld_x, D, weight(layer, QKV), 3 * HK, [&](int64_t b, int64_t o, Four y, int64_t n) {
          put(call.heads.get() + b * 3 * HK + o, rounded<T>(y), n);
        });
        T* ring = call.rings[l].template data_ptr<T>();
        team.run(H * apart * rows, [&](int64_t unit) {
          int64_t h = unit / rows / apart, first = unit / rows % apart;
          for (int64_t p = first; p < first + together; ++p) attend(layer, ring, h, p, unit % rows);
        });
        team.run(rows * H, [&](int64_t unit) { merge(unit / H, unit % H); });
        product(call.attended.get(), call.ld_heads, HK, weight(layer, OUTPUT), D,
                [&](int64_t b, int64_t o, Four y, int64_t n) { join(b, o, y, n); });
        pre_norm ? norm(layer[NEXT_NORM], layer[NEXT_NORM_BIAS]) : norm(layer[NORM], layer[NORM_BIAS]);
        const T *inner_bias = weight(layer, INNER_BIAS), *outer_bias = weight(layer, OUTER_BIAS);
        product(call.x.get(), call.ld_x, D, weight(layer, INNER), call.F, [&](int64_t b, int64_t o, Four y, int64_t n) {
          put(call.inner.get() + b * call.ld_inner + o, relu(y + four(inner_bias + o, n)), n);
        });
        product(call.inner.get(), call.ld_inner, call.F, weight(layer, OUTER), D,
                [&](int64_t b, int64_t o, Four y, int64_t n) { join(b, o, y + four(outer_bias + o, n), n); });
        if (!pre_norm) norm(layer[NEXT_NORM], layer[NEXT_NORM_BIAS]);
      }
      const std::vector<Tensor> &final_norm = call.model.final_norm, &softmax = call.model.softmax;
      if (!final_norm.empty())
        team.run(rows, [&](int64_t b) {
          normalise(call.out + b * D, D, call.model.epsilon, call.out + b * D);
          affine(call.out + b * D, final_norm[0], final_norm[1]);
        });
      if (call.logits == nullptr) return;
      team.run(rows, [&](int64_t b) { at::vec::convert(call.out + b * D, call.x.get() + b * call.ld_x, D); });
      const float* bias = softmax[1].const_data_ptr<float>();
      int64_t V = softmax[0].size(0);
      product(call.x.get(), call.ld_x, D, softmax[0].const_data_ptr<T>(), V, [&](int64_t b, int64_t o, Four y, int64_t n) {
        put(call.logits + b * V + o, y + four(bias + o, n), n);
      });
    }

    // Each row of x times each row of w; `done` gets up to four neighbouring results.
    template <typename Done>
    void product(const T* x, int64_t ld, int64_t in, const T* w, int64_t out, Done done) {
      team.run((out + 3) / 4, [&](int64_t unit) {
        int64_t o = 4 * unit, n = std::min<int64_t>(4, out - o);
        const T* const at[4] = {w + o * in, w + std::min(o + 1, out - 1) * in, w + std::min(o + 2, out - 1) * in,
                                w + std::min(o + 3, out - 1) * in};
        int64_t parts = std::min<int64_t>(4, (rows + 3) / 4);
        auto tile = [&](auto count, int64_t b) INLINE {
          constexpr int R = decltype(count)::value;
          Vec sums[R][4];
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) std::fill_n(sums[r], 4, Vec(0.0f));
          add_dots<R>(sums, x + b * ld, ld, at, in, b / 4, parts);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) done(b + r, o, add_lanes(sums[r]), n);
        };
        int64_t b = 0;
        for (; b + 4 <= rows; b += 4) tile(std::integral_constant<int, 4>{}, b);
        if (rows - b == 1) tile(std::integral_constant<int, 1>{}, b);
        if (rows - b == 2) tile(std::integral_constant<int, 2>{}, b);
        if (rows - b == 3) tile(std::integral_constant<int, 3>{}, b);
      });
    }

    void join(int64_t b, int64_t o, Four y, int64_t n) {
      y = rounded<T>(y);
      float* at = call.out + b * D + o;
      put(at, four(at, n) + (call.model.relu_output ? relu(y) : y), n);
    }

    // The input of the next product. After a sublayer (not before it, pre_norm) the norm also changes its sum.
    void norm(const Tensor& weight, const Tensor& bias) {
      team.run(rows, [&](int64_t b) {
        float* to = call.model.pre_norm ? row.get() : call.out + b * D;
        normalise(call.out + b * D, D, call.model.epsilon, to);
        affine(to, weight, bias);
        at::vec::convert(to, call.x.get() + b * call.ld_x, D);
      });
    }

    static void normalise(const float* from, int64_t n, float epsilon, float* to) {
      auto add = [](Vec x, Vec y) { return x + y; };
      float mean = at::vec::reduce_all<float>(add, from, n) / n;
      auto square = [mean](Vec x) { return (x - Vec(mean)) * (x - Vec(mean)); };
      float variance = at::vec::map_reduce_all<float>(square, add, from, n) / n;
      Vec scale(1 / std::sqrt(variance + epsilon));
      at::vec::map<float>([mean, scale](Vec x) { return (x - Vec(mean)) * scale; }, to, from, n);
    }

    void affine(float* x, const Tensor& weight, const Tensor& bias) {
      at::vec::map3<float>([](Vec x, Vec w, Vec b) { return x * w + b; }, x, x, weight.const_data_ptr<float>(),
                           bias.const_data_ptr<float>(), D);
    }

    // One head's attention of row b to the p-th piece of its ring.
    void attend(const Layer& layer, T* ring, int64_t h, int64_t p, int64_t b) {
      int64_t window = call.window, at = call.chosen ? call.chosen[b] : b, slot = call.slots[at], count = call.counts[at];
      int64_t begin = p * call.piece, end = std::min(window, begin + call.piece);
      T *k = ring + (2 * at * H + h) * window * K, *v = k + HK * window;
      const float* q = call.heads.get() + b * 3 * HK + h * K;
      if (begin <= slot && slot < end) {
        head(q + HK, layer, k + slot * K, false);
        at::vec::convert(q + 2 * HK, v + slot * K, K);
      }
      head(q, layer, content.get(), true);
      std::copy_n(content.get(), K, position.get());
      add_bias(content.get(), weight(layer, CONTENT_BIAS) + h * K);
      add_bias(position.get(), weight(layer, POSITION_BIAS) + h * K);

      // The new position is at the slot; older ones come before it, then from the end of the ring backwards. Row
      // W - 1 - d of the table has distance d: slot - j up to the slot, slot - j + W after it.
      const T* table = weight(layer, TABLE) + h * window * K;
      const std::pair<int64_t, int64_t> ranges[2] = {{std::max(begin, slot - count), std::min(end, slot + 1)},
                                                     {std::max(begin, slot + window - count), end}};
      const int64_t shifts[2] = {window - 1 - slot, -slot - 1};
      int64_t n = 0;
      for (int i = 0; i < 2; ++i) {
        auto [low, high] = ranges[i];
        if (low >= high) continue;
        scores(k + low * K, table + (low + shifts[i]) * K, high - low, score.get() + n);
        n += high - low;
      }
      float* part = call.parts.get() + ((b * H + h) * call.pieces + p) * call.ld_part;
      for (int64_t at = 0; at < AHEAD; at += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(v + ranges[0].first * K) + at);
      softmax(n, part);
      n = 0;
      std::fill_n(part + W, call.Kp, 0.0f);
      for (auto [low, high] : ranges) {
        if (low >= high) continue;
        add_values(v + low * K, high - low, score.get() + n, part + W);
        n += high - low;
      }
    }

    // A query or key as the model uses it, with QK-norm normalised.
    void head(const float* from, const Layer& layer, T* to, bool query) {
      if (layer.size() > GAIN) {
        normalise(from, K, NORM_EPSILON, row.get());
        at::vec::convert(row.get(), to, K);
        if (!query) return;
        float gain = *weight(layer, GAIN);
        for (int64_t c = 0; c < K; ++c) to[c] = static_cast<float>(to[c]) * gain;
      } else {
        at::vec::convert(from, to, K);
      }
    }

    void add_bias(T* x, const T* bias) {
      for (int64_t c = 0; c < K; ++c) x[c] = static_cast<float>(x[c]) + static_cast<float>(bias[c]);
    }

    void scores(const T* k, const T* r, int64_t n, float* to) {
      for (int64_t first = 0; first < n; first += 4) {
        const T *keys[4], *distances[4];
        for (int i = 0; i < 4; ++i) {
          int64_t j = std::min(first + i, n - 1);
          keys[i] = k + j * K;
          distances[i] = r + j * K;
        }
        Vec sums[1][4] = {{Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)}};
        add_dots<1>(sums, content.get(), 0, keys, K);
        add_dots<1>(sums, position.get(), 0, distances, K);
        put(to + first, add_lanes(sums[0]), 4);
      }
    }

    // Scores to exponentials relative to the largest, which comes first in `part`, before their sum.
    void softmax(int64_t n, float* part) {
      part[0] = -INFINITE;
      part[1] = 0;
      if (n == 0) return;
      std::fill_n(score.get() + n, W, -INFINITE);
      Vec most(-INFINITE), sum(0.0f), scale(1 / std::sqrt(static_cast<float>(K)));
      for (int64_t c = 0; c < n; c += W) most = at::vec::maximum(most, Vec::loadu(score.get() + c));
      float largest = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, most);
      for (int64_t c = 0; c < n; c += W) {
        Vec share = exponential<T>((Vec::loadu(score.get() + c) - Vec(largest)) * scale);
        share.store(score.get() + c);
        sum = sum + share;
      }
      part[0] = largest;
      part[1] = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, sum);
    }

    void add_values(const T* v, int64_t n, const float* shares, float* to) {
      for (int64_t c = 0; c < K; c += 4 * W) {
        Vec sums[4];
        for (int i = 0; i < 4; ++i) sums[i] = Vec::loadu(to + c + i * W);
        auto add = [&](auto load) INLINE {
          for (int64_t j = 0; j < n; ++j) {
            const T* at = v + j * K + c;
            __builtin_prefetch(reinterpret_cast<const char*>(at) + AHEAD);
            __builtin_prefetch(reinterpret_cast<const char*>(at) + AHEAD + 64);
#pragma GCC unroll 4
            for (int64_t i = 0; i < 4; ++i) sums[i] = at::vec::fmadd(Vec(shares[j]), load(at + i * W, K - c - i * W), sums[i]);
          }
        };
        if (K - c >= 4 * W)
          add([](const T* at, int64_t) INLINE { return wide(at); });
        else
          add([](const T* at, int64_t n) INLINE { return wide(at, std::clamp<int64_t>(n, 0, W)); });
        for (int i = 0; i < 4; ++i) sums[i].store(to + c + i * W);
      }
    }

    void merge(int64_t b, int64_t h) {
      const float* first = call.parts.get() + (b * H + h) * call.pieces * call.ld_part;
      float scale = 1 / std::sqrt(static_cast<float>(K)), most = -INFINITE, sum = 0;
      for (int64_t p = 0; p < call.pieces; ++p) most = std::max(most, first[p * call.ld_part]);
      std::fill_n(row.get(), K, 0.0f);
      for (int64_t p = 0; p < call.pieces; ++p) {
        const float* part = first + p * call.ld_part;
        float share = std::exp((part[0] - most) * scale);
        sum += share * part[1];
        at::vec::map2<float>([share](Vec x, Vec y) { return x + Vec(share) * y; }, row.get(), row.get(), part + W, K);
      }
      at::vec::map<float>([sum](Vec x) { return x / Vec(sum); }, row.get(), row.get(), K);
      at::vec::convert(row.get(), call.attended.get() + b * call.ld_heads + h * K, K);
    }
  };
};

struct Step : torch::CustomClassHolder {
  const Model model;

  template <typename... Options>
  Step(Options... options) : model{std::move(options)...} {}

  // Reads one vector of each row and writes its key and value into the rings. Returns the outputs, or where there is a
  // softmax the logarithms of its probabilities.
  Tensor read(const Tensor& x, const std::vector<Tensor>& rings, const Tensor& slots, const Tensor& counts,
              const std::optional<Tensor>& rows) {
    Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat)).copy_(x), logits;
    if (!model.softmax.empty()) logits = at::empty({x.size(0), model.softmax[0].size(0)}, out.options());
    auto read = [&](auto number) {
      using T = decltype(number);
      Call<T>{model, rings, slots.const_data_ptr<int64_t>(), counts.const_data_ptr<int64_t>(),
              rows ? rows->const_data_ptr<int64_t>() : nullptr, out.size(0), out.data_ptr<float>(),
              logits.defined() ? logits.data_ptr<float>() : nullptr}();
    };
    rings[0].scalar_type() == at::kFloat ? read(float{}) : read(BFloat16{});
    return logits.defined() ? at::log_softmax(logits, -1) : out;
  }
};

}  // namespace

void add_step(torch::Library& m) {
  m.class_<Step>("Step")
      .def(torch::init<std::vector<Layer>, std::vector<Tensor>, std::vector<Tensor>, bool, bool, double>())
      .def("read", &Step::read);
}
