// Relative attention on a CPU, forward and backward, in blocks that stay in the cache. See ops/native/__init__.py.
//
// Query i scores key j with row T - 1 - i + j of r (row R - 1 is distance -ahead). A block of m queries and n keys needs
// a strip of n + m - 1 such rows (n + m are multiplied). Row a of the block reads the strip's product from column
// m - 1 - a, so the shift of the paper's Appendix B costs an unaligned load.
//
// Right operands of bfloat16 products are packed: two rows interleaved, [rows / 2][columns][2]. A matrix packed this
// way and transposed as numbers of 32 bits is the packed form of its transpose. For float a "pair" is one row.

#include "common.h"

#include <ATen/native/CPUBlas.h>

#include <tuple>

namespace {

constexpr int64_t WIDE = 2 * W;  // numbers are read and written this many at a time
constexpr int64_t UNITS = 32;  // backward divides rows and heads into about this many parts
constexpr float SLACK = 16;  // probabilities may reach e^SLACK before they are divided by their sum

template <typename T>
constexpr int64_t PAIR = 4 / sizeof(T);

// ---- Numbers ----------------------------------------------------------------------------------------------------

struct Two {
  Vec a, b;
};
Two load(const float* at) { return {Vec::loadu(at), Vec::loadu(at + W)}; }
void store(float* at, Two x) {
  x.a.store(at);
  x.b.store(at + W);
}
void store(BFloat16* at, Two x) {
#ifdef __AVX512BF16__  // one instruction; ATen's conversion takes fourteen
  _mm512_storeu_si512(at, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x.b, x.a)));
#else
  at::vec::convert_from_float<BFloat16>(x.a, x.b).store(at);
#endif
}

float total(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}
float largest(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, x);
}

// ---- Matrices ---------------------------------------------------------------------------------------------------

// C [M, N] = A [M, K] B [K, N] (+ C), B packed.
template <typename T>
void product(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb, float* C, int64_t ldc,
             bool add) {
  at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, A, B, C, PAIR<T> == 2);
}

template <typename T>
struct Rows {
  const T* at;
  int64_t ld;
};

// Rows `first`, ... of a matrix of K columns, Kp wide: where they are, or copied to `room`. Rows outside [low, high) and
// columns from K on are 0 and not read.
template <typename T>
Rows<T> padded_rows(const T* from, int64_t stride, int64_t first, int64_t low, int64_t high, int64_t rows, int64_t K,
                    int64_t Kp, T* room) {
  if (K == Kp && first >= low && first + rows <= high && stride % PAIR<T> == 0) return {from + first * stride, stride};
  for (int64_t n = 0; n < rows; ++n) {
    T* to = room + n * Kp;
    bool inside = first + n >= low && first + n < high;
    if (inside) std::copy_n(from + (first + n) * stride, K, to);
    std::fill(to + (inside ? K : 0), to + Kp, T(0));
  }
  return {room, Kp};
}

// Rows [rows, width] to pairs of rows [rows / 2, width, 2].
void pack_rows(Rows<float> from, int64_t rows, int64_t width, float* to) {
  for (int64_t n = 0; n < rows; ++n) std::copy_n(from.at + n * from.ld, width, to + n * width);
}
void pack_rows(Rows<BFloat16> from, int64_t rows, int64_t width, BFloat16* to) {
  auto* out = reinterpret_cast<uint32_t*>(to);
  for (int64_t n = 0; n < rows; n += 2, out += width) {
    auto* even = reinterpret_cast<const uint16_t*>(from.at + n * from.ld);
    auto* odd = even + from.ld;
    for (int64_t c = 0; c < width; ++c) out[c] = even[c] | static_cast<uint32_t>(odd[c]) << 16;
  }
}

// [rows, columns] to pairs of columns, [columns / 2, rows, 2] with `ld` pairs a row. Rows are a multiple of W, columns
// of WIDE.
template <typename T>
void pack_columns(Rows<T> from, int64_t rows, int64_t columns, T* to, int64_t ld) {
  auto* in = reinterpret_cast<const float*>(from.at);
  auto* out = reinterpret_cast<float*>(to);
  for (int64_t n = 0; n < rows; n += W)
    for (int64_t c = 0; c < columns / PAIR<T>; c += W)
      at::vec::transpose_mxn<float, W, W>(in + n * from.ld / PAIR<T> + c, from.ld / PAIR<T>, out + c * ld + n, ld);
}

// ---- A call -----------------------------------------------------------------------------------------------------

template <typename T>
struct Heads {  // a tensor [B, H, L, K] or [H, L, K]
  T* data;
  int64_t row, head, position;
  explicit Heads(const Tensor& x)
      : data(x.data_ptr<std::remove_const_t<T>>()),
        row(x.dim() == 4 ? x.stride(0) : 0),
        head(x.stride(-3)),
        position(x.stride(-2)) {}
  T* at(int64_t b, int64_t h) const { return data + b * row + h * head; }
};

struct Call {
  Tensor q, k, v, r, content_bias, position_bias;
  std::optional<Tensor> first, until;  // [B, T]
  int64_t window, ahead;
  double scale, dropout_p;
  int64_t seed;
  int64_t m, most_n;  // queries of a block, and its largest number of keys

  int64_t B = q.size(0), H = q.size(1), T = q.size(2), K = q.size(3), S = k.size(2), R = r.size(1);
  int64_t Kp = up(K, WIDE);
  uint32_t threshold = static_cast<uint32_t>(dropout_p * 2147483648.0);
  float keep_scale = static_cast<float>(1 / (1 - dropout_p));

  // The packed table: columns `before` + n hold row n of r. The strip of a block begins at a multiple of W, and rows of
  // an odd number of cache lines do not compete for the same places of the cache.
  int64_t before = up(T + m, W) - T;
  int64_t ld = up(before + R + m + most_n, 32) + 16;

  // The column where the strip of queries `first`, ... and keys `key`, ... begins.
  int64_t strip(int64_t first, int64_t key) const { return before + T - first - m + key; }

  // The keys [low, high) that query i of row b sees.
  std::pair<int64_t, int64_t> seen(int64_t b, int64_t i) const {
    if (i >= T) return {0, 0};
    int64_t own = S - T + i;
    int64_t from = first ? first->const_data_ptr<int64_t>()[b * T + i] : 0;
    int64_t to = until ? until->const_data_ptr<int64_t>()[b * T + i] : S;
    if (own < from || own >= to) return {0, 0};
    return {std::max({from, own - window + 1, int64_t(0)}), std::min({to, own + ahead + 1, S})};
  }

  // `low` and `high` of queries `first`, ..., and the keys from the first to the last that some of them see.
  std::pair<int64_t, int64_t> seen(int64_t b, int64_t first, int64_t queries, int64_t* low, int64_t* high) const {
    int64_t begin = S, end = 0;
    for (int64_t n = 0; n < queries; ++n) {
      std::tie(low[n], high[n]) = seen(b, first + n);
      if (low[n] < high[n]) begin = std::min(begin, low[n]), end = std::max(end, high[n]);
    }
    return {begin, end};
  }
};

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Dropout's factors of keys [key, key + n) of one query: 0 or `factor`. Two multiplications mix the key's index into the
// query's 64 random bits.
void keep_factors(const Call& call, int64_t b, int64_t h, int64_t i, int64_t key, int64_t n, float factor, float* to) {
  uint64_t bits = mixed(mixed(call.seed) ^ mixed((b * call.H + h) * call.T + i));
  uint32_t one = bits, other = bits >> 32;
  for (int64_t c = 0; c < n; ++c) {
    uint32_t x = static_cast<uint32_t>(key + c) * 0x9E3779B9u + one;
    x = ((x ^ (x >> 16)) * 0x7FEB352Du) ^ other;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    x ^= x >> 16;
    to[c] = (x >> 1) >= call.threshold ? factor : 0.0f;
  }
}

// Queries `first`, ... plus a bias, scaled, [rows, Kp]; rows from T on are 0.
template <typename T>
void load_queries(const Call& call, const T* q, int64_t stride, const Tensor& biases, int64_t h, int64_t first,
                  int64_t rows, T* to) {
  auto row = buffer<float>(2 * call.Kp);
  std::fill_n(row.get(), 2 * call.Kp, 0.0f);
  float* bias = row.get() + call.Kp;
  at::vec::convert(biases.const_data_ptr<T>() + h * call.K, bias, call.K);
  Vec scale(call.scale);
  for (int64_t n = 0; n < rows; ++n, to += call.Kp) {
    if (first + n >= call.T) {
      std::fill_n(to, call.Kp, T(0));
      continue;
    }
    at::vec::convert(q + (first + n) * stride, row.get(), call.K);
    for (int64_t c = 0; c < call.Kp; c += WIDE) {
      Two x = load(row.get() + c), y = load(bias + c);
      store(to + c, {(x.a + y.a) * scale, (x.b + y.b) * scale});
    }
  }
}

// Each thread takes the next of `units` until none is left. `make` makes a thread's worker with its buffers.
template <typename T, typename Make>
void share_out(int64_t units, Make make) {
  std::atomic<int64_t> next{0};
  int64_t threads = std::min<int64_t>(at::get_num_threads(), units);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      auto work = make();
      for (int64_t unit; (unit = next++) < units;) work(unit);
      at::native::cpublas::brgemm_release(PAIR<T> == 2);
    }
  });
}

// ---- Forward ----------------------------------------------------------------------------------------------------

constexpr int64_t CHUNK = 128;  // queries that share packed keys in forward

// The table of each head, [H, Kp / 2, ld, 2].
template <typename T>
Buffer<T> packed_table(const Call& call) {
  int64_t Kp = call.Kp, blocks = call.ld / W;
  Heads<const T> r(call.r);
  auto packed = buffer<T>(call.H * Kp * call.ld);
  at::parallel_for(0, call.H * blocks, 16, [&](int64_t begin, int64_t end) {
    auto room = buffer<T>(W * Kp);
    for (int64_t n = begin; n < end; ++n) {
      int64_t h = n / blocks, column = n % blocks * W;
      auto rows = padded_rows(r.at(0, h), r.position, column - call.before, 0, call.R, W, call.K, Kp, room.get());
      pack_columns(rows, W, Kp, packed.get() + h * Kp * call.ld + column * PAIR<T>, call.ld);
    }
  });
  return packed;
}

template <typename T>
struct Forward {
  const Call& call;
  int64_t chunk;  // queries that share packed keys, a multiple of m
  const T* table;
  const Tensor& out_;
  float* lse;  // [B, H, T]
  Heads<const T> q{call.q}, k{call.k}, v{call.v};
  Heads<T> out{out_};
  int64_t Kp = call.Kp, m = call.m;
  Buffer<T> content_q = buffer<T>(chunk * Kp), position_q = buffer<T>(chunk * Kp);
  Buffer<T> room = buffer<T>(call.most_n * Kp), k_packed = buffer<T>(call.most_n * Kp), v_packed = buffer<T>(call.most_n * Kp);
  Buffer<T> probability = buffer<T>(m * call.most_n);
  Buffer<float> score = buffer<float>(m * call.most_n), strip = buffer<float>(m * (m + call.most_n));
  Buffer<float> sums = buffer<float>(chunk * Kp), keep = buffer<float>(call.most_n);
  Buffer<float> most = buffer<float>(chunk), weight = buffer<float>(chunk * W);
  Buffer<int64_t> low = buffer<int64_t>(chunk), high = buffer<int64_t>(chunk);

  void operator()(int64_t unit) {
    int64_t chunks = (call.T + chunk - 1) / chunk;
    int64_t h = unit / chunks % call.H, b = unit / chunks / call.H;
    int64_t first = (chunks - 1 - unit % chunks) * chunk;  // the longest rows start first
    int64_t queries = std::min(chunk, up(call.T - first, m));
    load_queries(call, q.at(b, h), q.position, call.content_bias, h, first, queries, content_q.get());
    load_queries(call, q.at(b, h), q.position, call.position_bias, h, first, queries, position_q.get());
    std::fill_n(sums.get(), queries * Kp, 0.0f);
    std::fill_n(most.get(), queries, -INFINITE);
    std::fill_n(weight.get(), queries * W, 0.0f);
    auto [begin, end] = call.seen(b, first, queries, low.get(), high.get());
    for (int64_t key = begin / W * W; key < end; key += call.most_n) panel(b, h, first, queries, key, end);
    finish(b, h, first, std::min(queries, call.T - first));
  }

  void panel(int64_t b, int64_t h, int64_t first, int64_t queries, int64_t key, int64_t end) {
    int64_t n = std::min(call.most_n, up(end - key, WIDE));
    pack_columns(padded_rows(k.at(b, h), k.position, key, 0, end, n, call.K, Kp, room.get()), n, Kp, k_packed.get(), n);
    pack_rows(padded_rows(v.at(b, h), v.position, key, 0, end, n, call.K, Kp, room.get()), n, Kp, v_packed.get());
    for (int64_t block = 0; block < queries; block += m) {
      bool any = false;
      for (int64_t a = block; a < block + m; ++a) any |= low[a] < key + n && high[a] > key && low[a] < high[a];
      if (!any) continue;
      product(m, n, Kp, content_q.get() + block * Kp, Kp, k_packed.get(), n, score.get(), n, false);
      product(m, n + m, Kp, position_q.get() + block * Kp, Kp,
              table + h * Kp * call.ld + call.strip(first + block, key) * PAIR<T>, call.ld, strip.get(), n + m, false);
      for (int64_t a = 0; a < m; ++a) softmax(b, h, first, block + a, a, key, n);
      product(m, Kp, n, probability.get(), n, v_packed.get(), Kp, sums.get() + block * Kp, Kp, true);
    }
  }

  // Row `a` of a block: scores to probabilities, relative to a score that no other exceeds by more than SLACK.
  void softmax(int64_t b, int64_t h, int64_t first, int64_t row, int64_t a, int64_t key, int64_t n) {
    int64_t from = std::clamp<int64_t>(low[row] - key, 0, n), to = std::clamp<int64_t>(high[row] - key, 0, n);
    T* probabilities = probability.get() + a * n;
    if (from >= to) {
      std::fill_n(probabilities, n, T(0));
      return;
    }
    float* scores = score.get() + a * n;
    const float* shifted = strip.get() + a * (n + m) + m - 1 - a;
    int64_t left = from / WIDE * WIDE, right = up(to, WIDE);
    std::fill(scores + left, scores + from, -INFINITE);
    std::fill(scores + to, scores + right, -INFINITE);
    std::fill(probabilities, probabilities + left, T(0));
    if (call.threshold) keep_factors(call, b, h, first + row, key, n, 1.0f, keep.get());
    if (most[row] == -INFINITE) most[row] = scores[from] + shifted[from];
    float* weights = weight.get() + row * W;
    Vec sum, other_sum;
    for (bool fits = false; !fits;) {
      Vec offset(most[row]), top(-INFINITE), other_top(-INFINITE);
      sum = Vec::loadu(weights), other_sum = Vec(0.0f);
      for (int64_t c = left; c < right; c += WIDE) {
        Two x = load(scores + c), y = load(shifted + c);
        x = {x.a + y.a, x.b + y.b};
        top = at::vec::clamp_min(top, x.a);
        other_top = at::vec::clamp_min(other_top, x.b);
        x = {exponential<T>(x.a - offset), exponential<T>(x.b - offset)};
        sum = sum + x.a;
        other_sum = other_sum + x.b;
        if (call.threshold) {
          Two kept = load(keep.get() + c);
          x = {x.a * kept.a, x.b * kept.b};
        }
        store(probabilities + c, x);
      }
      float now = largest(at::vec::clamp_min(top, other_top));
      fits = !(now > most[row] + SLACK);
      if (!fits) raise(row, now);
    }
    std::fill(probabilities + right, probabilities + n, T(0));
    (sum + other_sum).store(weights);
  }

  // Take a row's probabilities relative to a larger score from now on.
  void raise(int64_t row, float now) {
    Vec shrink(std::exp(most[row] - now));
    most[row] = now;
    for (float* at = weight.get() + row * W; at < weight.get() + (row + 1) * W; at += W) (Vec::loadu(at) * shrink).store(at);
    for (float* at = sums.get() + row * Kp; at < sums.get() + (row + 1) * Kp; at += W) (Vec::loadu(at) * shrink).store(at);
  }

  void finish(int64_t b, int64_t h, int64_t first, int64_t queries) {
    for (int64_t n = 0; n < queries; ++n) {
      bool blind = low[n] >= high[n];
      float sum = total(Vec::loadu(weight.get() + n * W)), factor = blind ? 0 : call.keep_scale / sum;
      float* row = sums.get() + n * Kp;
      for (int64_t c = 0; c < Kp; c += W) (Vec::loadu(row + c) * Vec(factor)).store(row + c);
      at::vec::convert(row, out.at(b, h) + (first + n) * out.position, call.K);
      lse[(b * call.H + h) * call.T + first + n] = blind ? 0 : most[n] + std::log(sum);
    }
  }
};

Tensor ready(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

template <typename T>
void run_forward(const Call& call, const Tensor& out, float* lse) {
  int64_t chunk = std::clamp(up(call.T, call.m), call.m, CHUNK);
  auto units = [&] { return call.B * call.H * ((call.T + chunk - 1) / chunk); };
  while (chunk > call.m && units() < at::get_num_threads()) chunk = up(chunk / 2, call.m);
  auto table = packed_table<T>(call);
  share_out<T>(units(), [&] { return Forward<T>{call, chunk, table.get(), out, lse}; });
}

using Given = std::optional<Tensor>;

Call call_of(Tensor q, Tensor k, Tensor v, Tensor r, Tensor content_bias, Tensor position_bias, Given first, Given until,
             Given seed, int64_t window, int64_t ahead, double scale, double dropout_p, int64_t m, int64_t n) {
  for (Given* each : {&first, &until})
    if (*each) *each = (*each)->contiguous();
  return {ready(q), ready(k), ready(v), ready(r), content_bias.contiguous(), position_bias.contiguous(),
          first,    until,    window,   ahead,    scale,                     dropout_p,
          seed ? seed->item<int64_t>() : 0,       m,        n};
}

Tensor new_heads(const Tensor& x) {  // [B, H, L, K] as [B, L, H, K] in memory
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
}

template <typename... Arguments>
std::tuple<Tensor, Tensor> forward(Arguments... arguments) {
  Call call = call_of(arguments..., 32, 256);
  Tensor out = new_heads(call.q), lse = at::empty({call.B, call.H, call.T}, out.options().dtype(at::kFloat));
  auto run = call.q.scalar_type() == at::kFloat ? run_forward<float> : run_forward<BFloat16>;
  run(call, out, lse.data_ptr<float>());
  return {out, lse};
}

// ---- Backward ---------------------------------------------------------------------------------------------------

// One head and a group of rows. Gradients of keys, values and the table are summed transposed, [panels][Kp][most_n]
// (the table [Kp][ld]), in the order of the queries, so a run repeats bit by bit.
template <typename T>
struct Backward {
  const Call& call;
  int64_t groups;
  const Tensor &d_out_, &out_, &d_q_, &d_k_, &d_v_;
  const float* lse;                 // [B, H, T]
  float *d_table, *d_biases;        // [groups, H, Kp, ld], [groups, H, 2, Kp]
  Heads<const T> q{call.q}, k{call.k}, v{call.v}, r{call.r}, d_out{d_out_}, out{out_};
  Heads<T> d_q{d_q_}, d_k{d_k_}, d_v{d_v_};
  int64_t Kp = call.Kp, m = call.m, most_n = call.most_n, Sp = up(call.S, most_n);
  Buffer<T> table_rows = buffer<T>(call.ld * Kp), table_columns = buffer<T>(call.ld * Kp);
  Buffer<T> room = buffer<T>(std::max(m, most_n) * Kp);
  Buffer<T> k_columns = buffer<T>(Sp * Kp), k_rows = buffer<T>(Sp * Kp), v_columns = buffer<T>(Sp * Kp);
  Buffer<float> sum_k = buffer<float>(Sp * Kp), sum_v = buffer<float>(Sp * Kp), moved = buffer<float>(most_n * Kp);
  Buffer<T> content_q = buffer<T>(m * Kp), position_q = buffer<T>(m * Kp), d_rows = buffer<T>(m * Kp);
  Buffer<T> content_qT = buffer<T>(m * Kp), position_qT = buffer<T>(m * Kp), d_rowsT = buffer<T>(m * Kp);
  Buffer<float> sum_content = buffer<float>(m * Kp), sum_position = buffer<float>(m * Kp), delta = buffer<float>(m);
  Buffer<float> score = buffer<float>(m * most_n), strip = buffer<float>(m * (m + most_n));
  Buffer<float> d_probability = buffer<float>(m * most_n), keep = buffer<float>(most_n);
  Buffer<T> probability = buffer<T>(m * most_n), d_score = buffer<T>(m * most_n), d_strip = buffer<T>(m * (m + most_n));
  Buffer<T> packed = buffer<T>(m * (m + most_n));
  Buffer<int64_t> low = buffer<int64_t>(up(call.T, m)), high = buffer<int64_t>(up(call.T, m));  // of a row or a block

  void operator()(int64_t unit) {
    int64_t h = unit % call.H, group = unit / call.H;
    float* d_columns = d_table + unit * Kp * call.ld;
    float* d_bias = d_biases + unit * 2 * Kp;
    std::fill_n(d_columns, Kp * call.ld, 0.0f);
    std::fill_n(d_bias, 2 * Kp, 0.0f);
    for (int64_t n = 0; n < call.ld; n += W) {
      auto rows = padded_rows(r.at(0, h), r.position, n - call.before, 0, call.R, W, call.K, Kp, room.get());
      pack_rows(rows, W, Kp, table_rows.get() + n * Kp);
      pack_columns(rows, W, Kp, table_columns.get() + n * PAIR<T>, call.ld);
    }
    for (int64_t b = group * call.B / groups; b < (group + 1) * call.B / groups; ++b) row(b, h, d_columns, d_bias);
  }

  void row(int64_t b, int64_t h, float* d_columns, float* d_bias) {
    auto [begin, end] = call.seen(b, 0, call.T, low.get(), high.get());
    std::fill_n(sum_k.get(), Sp * Kp, 0.0f);
    std::fill_n(sum_v.get(), Sp * Kp, 0.0f);
    for (int64_t key = begin / most_n * most_n; key < end; key += most_n) {
      auto rows = padded_rows(k.at(b, h), k.position, key, begin, end, most_n, call.K, Kp, room.get());
      pack_columns(rows, most_n, Kp, k_columns.get() + key * Kp, most_n);
      pack_rows(rows, most_n, Kp, k_rows.get() + key * Kp);
      rows = padded_rows(v.at(b, h), v.position, key, begin, end, most_n, call.K, Kp, room.get());
      pack_columns(rows, most_n, Kp, v_columns.get() + key * Kp, most_n);
    }
    for (int64_t first = 0; first < call.T; first += m) {
      begin_block(b, h, first);
      auto [begin, end] = call.seen(b, first, m, low.get(), high.get());
      for (int64_t key = begin / most_n * most_n; key < end; key += most_n)
        block(b, h, first, key, std::min(most_n, up(end - key, WIDE)), d_columns);
      finish(b, h, first, d_bias);
    }
    for (int64_t key = 0; key < call.S; key += most_n) {
      put(sum_k.get() + key * Kp, key, d_k.at(b, h), d_k.position);
      put(sum_v.get() + key * Kp, key, d_v.at(b, h), d_v.position);
    }
  }

  void transpose_rows(const T* from, T* to) {  // [m, Kp] to [Kp, m]
    pack_rows(Rows<T>{from, Kp}, m, Kp, room.get());
    pack_columns(Rows<T>{room.get(), Kp * PAIR<T>}, m / PAIR<T>, Kp * PAIR<T>, to, m / PAIR<T>);
  }

  void begin_block(int64_t b, int64_t h, int64_t first) {
    load_queries(call, q.at(b, h), q.position, call.content_bias, h, first, m, content_q.get());
    load_queries(call, q.at(b, h), q.position, call.position_bias, h, first, m, position_q.get());
    std::fill_n(sum_content.get(), m * Kp, 0.0f);
    std::fill_n(sum_position.get(), m * Kp, 0.0f);
    for (int64_t n = 0; n < m; ++n) {
      int64_t inside = first + n < call.T ? call.K : 0;
      const T* from = d_out.at(b, h) + (first + n) * d_out.position;
      std::copy_n(from, inside, d_rows.get() + n * Kp);
      std::fill(d_rows.get() + n * Kp + inside, d_rows.get() + (n + 1) * Kp, T(0));
      float *d_row = moved.get(), *row = d_row + Kp;
      std::fill_n(d_row, Kp, 0.0f);
      at::vec::convert(from, d_row, inside);
      at::vec::convert(out.at(b, h) + (first + n) * out.position, row, inside);
      delta[n] = at::vec::map2_reduce_all<float>([](Vec x, Vec y) { return x * y; }, [](Vec x, Vec y) { return x + y; },
                                                 d_row, row, inside);
    }
    transpose_rows(content_q.get(), content_qT.get());
    transpose_rows(position_q.get(), position_qT.get());
    transpose_rows(d_rows.get(), d_rowsT.get());
  }

  void block(int64_t b, int64_t h, int64_t first, int64_t key, int64_t n, float* d_columns) {
    int64_t at = call.strip(first, key), offset = key * Kp, width = n + m;
    product(m, n, Kp, content_q.get(), Kp, k_columns.get() + offset, most_n, score.get(), n, false);
    product(m, n, Kp, d_rows.get(), Kp, v_columns.get() + offset, most_n, d_probability.get(), n, false);
    product(m, width, Kp, position_q.get(), Kp, table_columns.get() + at * PAIR<T>, call.ld, strip.get(), width,
            false);
    for (int64_t a = 0; a < m; ++a) differentiate(b, h, first + a, a, key, n);
    product(m, Kp, n, d_score.get(), n, k_rows.get() + offset, Kp, sum_content.get(), Kp, true);
    product(m, Kp, width, d_strip.get(), width, table_rows.get() + at * Kp, Kp, sum_position.get(), Kp, true);
    pack_rows(Rows<T>{probability.get(), n}, m, n, packed.get());
    product(Kp, n, m, d_rowsT.get(), m, packed.get(), n, sum_v.get() + offset, most_n, true);
    pack_rows(Rows<T>{d_score.get(), n}, m, n, packed.get());
    product(Kp, n, m, content_qT.get(), m, packed.get(), n, sum_k.get() + offset, most_n, true);
    pack_rows(Rows<T>{d_strip.get(), width}, m, width, packed.get());
    product(Kp, width, m, position_qT.get(), m, packed.get(), width, d_columns + at, call.ld, true);
  }

  // Row `a` of a block: the probabilities that were used, and the gradients of its scores, also shifted back.
  void differentiate(int64_t b, int64_t h, int64_t query, int64_t a, int64_t key, int64_t n) {
    int64_t from = std::clamp<int64_t>(low[a] - key, 0, n), to = std::clamp<int64_t>(high[a] - key, 0, n);
    T *used = probability.get() + a * n, *d_scores = d_score.get() + a * n, *d_shifted = d_strip.get() + a * (n + m);
    int64_t shift = m - 1 - a, left = from / WIDE * WIDE, right = std::max(left, up(to, WIDE));
    auto clear_around = [&](T* row, int64_t low, int64_t high, int64_t end) {
      std::fill(row, row + low, T(0));
      std::fill(row + high, row + end, T(0));
    };
    clear_around(used, left, right, n);
    clear_around(d_scores, left, right, n);
    clear_around(d_shifted, shift + left, shift + right, n + m);
    if (from >= to) return;
    float* scores = score.get() + a * n;
    std::fill(scores + left, scores + from, -INFINITE);
    std::fill(scores + to, scores + right, -INFINITE);
    const float *shifted = strip.get() + a * (n + m) + shift, *d_probabilities = d_probability.get() + a * n;
    d_shifted += shift;
    Vec normaliser(lse[(b * call.H + h) * call.T + query]), mean(delta[a]);
    if (call.threshold) keep_factors(call, b, h, query, key, n, call.keep_scale, keep.get());
    for (int64_t c = left; c < right; c += WIDE) {
      Two x = load(scores + c), y = load(shifted + c), d = load(d_probabilities + c);
      Two share{exponential<T>(x.a + y.a - normaliser), exponential<T>(x.b + y.b - normaliser)};
      Two kept = share;
      if (call.threshold) {
        Two factor = load(keep.get() + c);
        kept = {share.a * factor.a, share.b * factor.b};
        d = {d.a * factor.a, d.b * factor.b};
      }
      d = {share.a * (d.a - mean), share.b * (d.b - mean)};
      store(used + c, kept);
      store(d_scores + c, d);
      store(d_shifted + c, d);
    }
  }

  void finish(int64_t b, int64_t h, int64_t first, float* d_bias) {
    Vec scale(call.scale);
    for (int64_t n = 0; n < std::min(m, call.T - first); ++n) {
      for (int64_t c = 0; c < Kp; c += W) {
        Vec content = Vec::loadu(sum_content.get() + n * Kp + c) * scale;
        Vec position = Vec::loadu(sum_position.get() + n * Kp + c) * scale;
        (content + position).store(moved.get() + c);
        (Vec::loadu(d_bias + c) + content).store(d_bias + c);
        (Vec::loadu(d_bias + Kp + c) + position).store(d_bias + Kp + c);
      }
      at::vec::convert(moved.get(), d_q.at(b, h) + (first + n) * d_q.position, call.K);
    }
  }

  void put(const float* sum, int64_t key, T* to, int64_t stride) {
    pack_columns(Rows<float>{sum, most_n}, Kp, most_n, moved.get(), Kp);
    for (int64_t n = 0; n < std::min(most_n, call.S - key); ++n)
      at::vec::convert(moved.get() + n * Kp, to + (key + n) * stride, call.K);
  }
};

template <typename T>
void run_backward(const Call& call, int64_t groups, const Tensor& d_out, const Tensor& out, const Tensor& lse,
                  const Tensor& d_q, const Tensor& d_k, const Tensor& d_v, const Tensor& d_table, const Tensor& d_biases) {
  share_out<T>(groups * call.H, [&] {
    return Backward<T>{call, groups, d_out, out, d_q, d_k, d_v, lse.const_data_ptr<float>(),
                       d_table.data_ptr<float>(), d_biases.data_ptr<float>()};
  });
}

// The gradients of q, k, v, r [H, K, R] and the biases [H, 2, K].
template <typename... Arguments>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(Tensor d_out, Tensor out, Tensor lse,
                                                                    Arguments... arguments) {
  int64_t T = out.size(2), S = std::get<1>(std::tie(arguments...)).size(2), panels = (S + 255) / 256;
  int64_t m = up(T, 32) * 6 < up(T, 64) * 5 ? 32 : 64;  // smaller blocks where a sixth or more of the rows would be padding
  Call call = call_of(arguments..., m, up((S + panels - 1) / panels, WIDE));
  d_out = ready(d_out);
  int64_t groups = std::max<int64_t>(1, std::min(UNITS / call.H, call.B));
  Tensor d_q = new_heads(call.q), d_k = new_heads(call.k), d_v = new_heads(call.v);
  auto wide = out.options().dtype(at::kFloat);
  Tensor d_table = at::empty({groups, call.H, call.Kp, call.ld}, wide);
  Tensor d_biases = at::empty({groups, call.H, 2, call.Kp}, wide);
  auto run = out.scalar_type() == at::kFloat ? run_backward<float> : run_backward<BFloat16>;
  run(call, groups, d_out, out, lse, d_q, d_k, d_v, d_table, d_biases);
  d_table = groups == 1 ? d_table[0] : d_table.sum(0);
  auto d_r = d_table.narrow(1, 0, call.K).narrow(2, call.before, call.R);
  auto biases = d_biases.sum(0).narrow(2, 0, call.K);
  return {d_q, d_k, d_v, d_r.contiguous().to(out.scalar_type()), biases.contiguous().to(out.scalar_type())};
}

}  // namespace

// The arguments of `call_of` but the last two.
#define ARGUMENTS Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Given, Given, Given, int64_t, int64_t, double, double

#define LIBRARY(name, m) TORCH_LIBRARY(name, m)  // which would not see what a name stands for

LIBRARY(LIBRARY_NAME, m) {
  m.def("forward", torch::dispatch(c10::DispatchKey::CPU, &forward<ARGUMENTS>));
  m.def("backward", torch::dispatch(c10::DispatchKey::CPU, &backward<ARGUMENTS>));
  add_step(m);
}
