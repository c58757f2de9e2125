// The experts' networks from tokens to the weighted sums of their results. ../ffn/fused.py calls this and says what is
// computed. P: the type of tokens and products, fp32 or, where an instruction multiplies it, bf16; weights are in fp32.
//
// Tokens are gathered while they are packed, 16 of them side by side in a vector. Every product is a weight times these
// vectors, so its results lie as the next product reads them. Only at the end are they turned, and added to the tokens'
// rows. The gradient of a weight copies some columns of the tokens at a time, and packs nothing.
//
// T tokens, K top-k, E experts, M model dim, H hidden dim, n choices of a cell

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <vector>

#include "activations.hpp"
#include "ffn_work.hpp"
#include "moe_ffn.hpp"

namespace {

template <class P>
using Rows = Packed<P, kB>;  // 16 tokens side by side
template <class P>
using Weights = Packed<P, kA>;

constexpr long kMostRows = 640;  // of a cell that are worked on at once

inline long in_sixteens(long n) { return (n + 15) / 16 * 16; }

// 1. The division of the work. It depends on sizes and on the number of kept choices, so results are the same for any
// number of threads.

// The choices of an expert by a range of tokens. Its results are added to the tokens after those of the experts before it,
// and its gradients of weights to those of the ranges before it.
struct Cell {
  long expert, range, start, end;  // of its choices in Cells::choices
  long place;                      // of its first row in the hidden layer, a multiple of 16
  bool first;                      // no range before has choices of the expert
};

struct Cells {
  long length;            // tokens of a range
  std::vector<Cell> all;  // range by range
  std::vector<int32_t> choices;
  bool valid = true;

  static long length_of(const MoEProblem& p) {
    // A range's tokens and results fit the L2 cache, unless an expert then has so few rows in it that packing its weights
    // counts. hidden_rows in ../ffn/inputs.py relies on at least 256 rows.
    const double rows = std::clamp(p.hidden_dim * p.model_dim / 1024L, 256L, 1024L);
    const double tokens = std::max(static_cast<double>((128L << 10) / p.model_dim), rows * p.num_experts / p.top_k);
    const double kept = static_cast<double>(p.ends[p.num_experts - 1]) / p.top_k;  // in tokens
    const long ranges = std::max<long>(kept / tokens + 0.5, 15 / p.num_experts + 1);
    return std::max((p.num_tokens + ranges - 1) / ranges, 64L);
  }
  static long count(const MoEProblem& p) { return ((p.num_tokens - 1) / length_of(p) + 1) * p.num_experts; }

  explicit Cells(const MoEProblem& p) : length(length_of(p)), all(count(p)), choices(p.ends[p.num_experts - 1]) {
    const long E = p.num_experts, cells = count(p);
    std::vector<int32_t> range_of(choices.size());
    std::vector<long> counts(cells), next(cells);
    const uint64_t most = p.num_tokens * p.top_k;
    const uint32_t of_range = length * p.top_k;
    const auto each_row = [&](auto run) {
#pragma omp parallel for num_threads(p.threads) if (choices.size() > 1 << 14)
      for (long e = 0; e < E; e++)
        for (long n = e ? p.ends[e - 1] : 0; n < p.ends[e]; n++) run(e, n, p.choices[n]);
    };
    std::atomic<bool> in_range(true);
    each_row([&](long e, long n, int64_t choice) {
      if (static_cast<uint64_t>(choice) >= most) in_range = false;
      range_of[n] = in_range ? static_cast<uint32_t>(choice) / of_range : 0;
      counts[range_of[n] * E + e]++;
    });
    valid = in_range;
    long start = 0, place = 0;
    for (long c = 0; c < cells; c++) {
      const bool first = c < E || (all[c - E].first && counts[c - E] == 0);
      all[c] = {c % E, c / E, start, start + counts[c], place, first};
      next[c] = start;
      start += counts[c], place += in_sixteens(counts[c]);
    }
    each_row([&](long e, long n, int64_t choice) { choices[next[range_of[n] * E + e]++] = static_cast<int32_t>(choice); });
  }
};

// Places in memory to which cells add one after the other: a cell waits for its turn, and ends it.
class Turns {
  std::unique_ptr<std::atomic<long>[]> next;

 public:
  explicit Turns(long count) : next(new std::atomic<long>[count]()) {}
  void wait(long i, long turn) const {
    while (next[i].load(std::memory_order_acquire) != turn) sched_yield();
  }
  void end(long i) { next[i].fetch_add(1, std::memory_order_release); }
};

// Hidden units that are worked on at once.
inline long units_of(const MoEProblem& p) {
  const long steps = (p.hidden_dim + hidden_step(p.model_dim) - 1) / hidden_step(p.model_dim);
  return std::max(in_sixteens((p.hidden_dim + steps - 1) / steps), 16L);
}

// Numbers of a part's rows for each hidden unit: in fp32 as Rows, in bf16 one unit after the other.
template <class P>
struct Units {
  static constexpr bool as_rows = std::is_same<P, float>::value;
  P* data;
  long rows, count, stride;  // stride: from one block of 16 rows, or in bf16 from one unit, to the next

  Units(P* data, long rows, long count)
      : data(data), rows(rows), count(count), stride(in_sixteens(as_rows ? count : rows) * (as_rows ? 16 : 1)) {}
  P* at(long unit, long row) const { return data + (as_rows ? row / 16 * stride + unit * 16 : unit * stride + row); }
};

// Rows of tokens, or of the gradients of their results.
template <class P>
struct Gathered {
  const P** rows;
  int32_t* over_rows;  // in bf16: the operand of a product over the rows
};

// The memory of a thread. Its blocks of n rows are those of Rows: [n / 16, ..., 16].
template <class P>
struct MoESpace {
  int32_t *x, *w, *packed;
  P *h, *dz, *du;
  float *z, *so_far, *sums, *columns, *gates, *grad_gates;
  Gathered<P> tokens, grads;
  float** to;  // where the results are added

  MoESpace(Arena& arena, const MoEProblem& p, bool backward) {
    const long M = p.model_dim, units = units_of(p), n = kMostRows;
    const bool in_bf16 = std::is_same<P, bf16>::value;
    const long h_size = Rows<P>::words(n, units) * Shape<P>::numbers, over_rows = Rows<P>::words(M, n);
    x = arena.take<int32_t>(Rows<P>::words(n, M));
    w = arena.take<int32_t>(std::max(Weights<P>::words(units, M), Weights<P>::words(M, units)));
    packed = arena.take<int32_t>(in_bf16 ? std::max(Rows<P>::words(n, units), Weights<P>::words(units, n)) : 0);
    h = arena.take<P>(h_size);
    dz = arena.take<P>(backward ? h_size : 0);
    du = arena.take<P>(backward && p.w3 ? h_size : 0);
    z = arena.take<float>(p.w3 ? n * in_sixteens(units) : 0);
    so_far = arena.take<float>(n * units);
    sums = arena.take<float>(M * sums_stride());
    columns = arena.take<float>(backward && !in_bf16 ? n * 16 * kTileColumns : 0);
    gates = arena.take<float>(n), grad_gates = arena.take<float>(n);
    for (Gathered<P>* gathered : {&tokens, &grads}) {
      gathered->rows = arena.take<const P*>(n);
      gathered->over_rows = arena.take<int32_t>(backward && in_bf16 ? over_rows : 0);
    }
    to = arena.take<float*>(n);
  }
  static constexpr long sums_stride() { return kMostRows + 16; }  // no power of two
};

// run(cell, space) for every cell, in their order, on all threads.
template <class P, class Run>
void for_each_cell(const MoEProblem& p, const Cells& cells, char* memory, bool backward, Run run) {
  std::atomic<size_t> next(0);
#pragma omp parallel num_threads(p.threads)
  {
    Arena counted{nullptr};
    MoESpace<P>(counted, p, backward);
    Arena own{memory + counted.used * omp_get_thread_num()};
    const MoESpace<P> space(own, p, backward);
    const Mode<P> mode;
    for (size_t c; (c = next++) < cells.all.size();) run(cells.all[c], space);
  }
}

// 2. Products

// The 16 rows from `row`, for the caches: tokens lie anywhere.
template <class T>
INLINE void fetch_rows(T* const* rows, long row, long n, long M) {
  constexpr long line = 64 / sizeof(T);
  for (long i = row; i < std::min(row + 16, n); i++)
    for (long m = 0; m < M; m += line) __builtin_prefetch(rows[i] + m, 1);
}

// The rows [n, M], side by side.
template <class P>
Rows<P> pack_rows(int32_t* to, const P* const* rows, long n, long M) {
  const Rows<P> packed(to, n, M);
  for (long p = 0; p < packed.panels; p++) {
    const long count = std::min(n - 16 * p, 16L);
    fetch_rows(rows, 16 * (p + 1), n, M);
    for (long k = 0; k < M; k += Shape<P>::depth) {
      Words v[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) v[i] = i < count ? along(rows[16 * p + i] + k, M - k, P()) : Words{};
      transpose(v);
      int32_t* block = to + (p * packed.stride + k / Shape<P>::depth) * 256;
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) store_words(block + 16 * i, v[i]);
    }
  }
  return packed;
}
// Number m of 16 rows.
inline V number(const Rows<float>& rows, long m, long row) {
  return load(reinterpret_cast<const float*>(rows.data) + row / 16 * rows.stride * 256 + m * 16);
}
inline V number(const Rows<bf16>& rows, long m, long row) {
  Words words;
  std::memcpy(&words, rows.data + row / 16 * rows.stride * 256 + m / 2 * 16, sizeof words);
  V v;
  EACH_PIECE v.p[i] = (Lanes)(m % 2 ? words.p[i] & 0xffff0000u : words.p[i] << 16);
  return v;
}

// The rows [n, M] as B of a product over n.
inline void pack_over_rows(const Gathered<float>&, long, long) {}
inline void pack_over_rows(const Gathered<bf16>& gathered, long n, long M) {
  const Rows<bf16> packed(gathered.over_rows, M, n);
  const auto pack = [&](int32_t* to, const bf16* const* rows, long m, long left, long count) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++, rows += 2, left -= 2) {
      const bf16* row = left > 0 ? rows[0] + m : nullptr;
      const long stride = left > 1 ? rows[1] - rows[0] : 0;
      store_words(to + 16 * i, across(row, stride, left, count, bf16()));
    }
  };
  for (long k = 0; k < packed.blocks; k++) {
    for (long p = 0; p < packed.panels; p++) {
      int32_t* to = gathered.over_rows + (p * packed.stride + k) * 256;
      if (n - 32 * k >= 32 && M - 16 * p >= 16)
        pack(to, gathered.rows + 32 * k, 16 * p, 32, 16);
      else
        pack(to, gathered.rows + 32 * k, 16 * p, n - 32 * k, std::min(M - 16 * p, 16L));
    }
  }
}

// Hidden units as rows of the next product.
inline Rows<float> as_rows(const MoESpace<float>&, const Units<float>& h) {
  return {reinterpret_cast<int32_t*>(h.data), h.rows, h.count};
}
inline Rows<bf16> as_rows(const MoESpace<bf16>& space, const Units<bf16>& h) {
  return Rows<bf16>(space.packed, h.rows, h.count).pack<kAcrossK>(h.data, h.stride);
}

// `units` hidden units of a weight [H, M] times rows: use(unit, row, v) takes 16 rows.
template <class P, class Soon, class Use>
void over_model(const MoESpace<P>& space, const float* w, long units, const Rows<P>& rows, Ahead ahead, Soon soon, Use use) {
  const auto packed = Weights<P>(space.w, units, rows.depth).template pack<kAlongK>(w, rows.depth);
  long_product(packed, rows, ahead, space.so_far, soon, [&](long i, long j, long, V v) { use(i, j, v); });
}

// The sums over hidden units of a weight [units, M] times h, [M, n]; or what is there and these.
template <class P>
void over_units(const MoESpace<P>& space, const float* w, const Units<P>& h, long M, Ahead ahead, bool add) {
  const auto packed = Weights<P>(space.w, M, h.count).template pack<kAcrossK>(w, M);
  product_into(packed, as_rows(space, h), ahead, space.sums, space.sums_stride(), add, false);
}

// The part of a weight that is read after the hidden units before `unit` of expert e: of the next expert after the last.
inline Ahead next_weight(const MoEProblem& p, const float* w, long e, long unit, long units) {
  if (unit >= p.hidden_dim) e++, unit = 0;
  if (e == p.num_experts) e = 0;
  return Ahead(w + (e * p.hidden_dim + unit) * p.model_dim, std::min(units, p.hidden_dim - unit) * p.model_dim);
}

// A tile of a weight's gradient: to [units, columns] = the sum over n rows of d [units] times b, and what is there. d is as
// Rows, `block` numbers from 16 rows to the next; b [n, 16 kTileColumns].
template <int units>
void gradient_tile(const float* d, long block, const float* b, long n, float* to, long stride, long columns, bool add) {
  V sums[units][kTileColumns];
#pragma GCC unroll 14
  for (int i = 0; i < units; i++)
#pragma GCC unroll 2
    for (int j = 0; j < kTileColumns; j++) sums[i][j] = {};
  for (long start = 0; start < n; start += 16, d += block) {
    const long rows = std::min(n - start, 16L);
    for (long k = 0; k < rows; k++, b += 16 * kTileColumns) {
#pragma GCC unroll 14
      for (int i = 0; i < units; i++)
#pragma GCC unroll 2
        for (int j = 0; j < kTileColumns; j++)
          add_products(sums[i][j], d[16 * i + k], b + 16 * j);
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < units; i++, to += stride)
#pragma GCC unroll 2
    for (int j = 0; j < kTileColumns; j++) {
      const long count = columns - 16 * j;
      if (!add && count >= 16 && reinterpret_cast<uintptr_t>(to) % 64 == 0)
        stream(to + 16 * j, sums[i][j]);
      else
        store(to + 16 * j, add ? sums[i][j] + load(to + 16 * j, count) : sums[i][j], count);
    }
}

using GradientTile = void (*)(const float*, long, const float*, long, float*, long, long, bool);
template <class Units>
struct GradientTiles;
template <int... units>
struct GradientTiles<std::integer_sequence<int, units...>> {
  static constexpr GradientTile of_units[] = {nullptr, gradient_tile<units + 1>...};
};

// The gradient of `units` hidden units of a weight: to [units, M] (+)= d [n, units] ^T times b [n, M].
inline void weight_gradient(const MoESpace<float>& space, const Units<float>& d, const Gathered<float>& b, long n, long M,
                            float* to, bool add) {
  constexpr long wide = 16 * kTileColumns;
  const auto tile = GradientTiles<std::make_integer_sequence<int, kTileRows>>::of_units;
  const long units = d.count, tiles = (units + kTileRows - 1) / kTileRows;
  for (long m = 0; m < M; m += wide) {
    for (long i = 0; i < n; i++)
      for (long j = 0; j < wide; j += 16)
        if (m + j < M) store(space.columns + i * wide + j, load(b.rows[i] + m + j, std::min(M - m - j, 16L)));
    for (long t = 0; t < tiles; t++) {
      const long unit = t * units / tiles, end = (t + 1) * units / tiles;
      tile[end - unit](d.at(unit, 0), d.stride, space.columns, n, to + unit * M + m, M, M - m, add);
    }
  }
}
inline void weight_gradient(const MoESpace<bf16>& space, const Units<bf16>& d, const Gathered<bf16>& b, long n, long M,
                            float* to, bool add) {
  const auto a = Weights<bf16>(space.packed, d.count, n).pack<kAlongK>(d.data, d.stride);
  product_into(a, Rows<bf16>(b.over_rows, M, n), Ahead(), to, M, add, true);
}

// The rows space.to [n, M] += scales times (space.sums [M, n] turned, and the bias); both may be null.
template <class P>
void add_to_tokens(const MoESpace<P>& space, const float* scales, const float* bias, long n, long M) {
  for (long row = 0; row < n; row += 16) {
    fetch_rows(space.to, row + 16, n, M);
    for (long m = 0; m < M; m += 16) {
      const auto add = [&](long count, long rows) {
        Words v[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
          v[i] = along(space.sums + (m + i) * space.sums_stride() + row, i < count ? 16 : 0, float());
        transpose(v);
        for (long i = 0; i < rows; i++) {
          V sum;
          std::memcpy(&sum, &v[i], sizeof sum);
          if (bias) sum = sum + load(bias + m, count);
          float* place = space.to[row + i] + m;
          store(place, multiply_add(sum, broadcast(scales ? scales[row + i] : 1.0f), load(place, count)), count);
        }
      };
      if (M - m >= 16 && n - row >= 16)
        add(16, 16);
      else
        add(std::min(M - m, 16L), std::min(n - row, 16L));
    }
  }
}

// 3. Both passes

// Rows of a cell that are worked on at once: [from, from + n) of its choices.
struct Part {
  long n, place;
  const int32_t* choices;
};

// run(part) for the parts of a cell, of nearly equal sizes; their gates are in the space.
template <class P, class Run>
void for_each_part(const MoEProblem& p, const Cells& cells, const Cell& cell, const MoESpace<P>& space, Run run) {
  const long rows = cell.end - cell.start, parts = (rows + kMostRows - 1) / kMostRows;
  const long step = parts ? in_sixteens((rows + parts - 1) / parts) : 1;
  for (long from = cell.start; from < cell.end; from += step) {
    const Part part = {std::min(step, cell.end - from), cell.place + from - cell.start, &cells.choices[from]};
    for (long i = 0; i < in_sixteens(part.n); i++)
      space.gates[i] = i >= part.n ? 0.0f : p.gates ? p.gates[part.choices[i]] : 1.0f;
    run(part);
  }
}

// The tokens of a range start at 0; the range's first cell does this.
inline void clear(float* to, const MoEProblem& p, const Cells& cells, const Cell& cell) {
  if (!to || cell.expert > 0) return;
  const long first = cell.range * cells.length, end = std::min(first + cells.length, p.num_tokens);
  std::fill(to + first * p.model_dim, to + end * p.model_dim, 0.0f);
}

// rows[i] = the token's row of each choice.
template <class T>
void point_to(T** rows, T* tokens, const Part& part, const MoEProblem& p) {
  const uint32_t K = p.top_k;  // a division of 64 bits takes longer
  for (long i = 0; i < part.n; i++) rows[i] = tokens + static_cast<uint32_t>(part.choices[i]) / K * p.model_dim;
}

template <class Act, class P>
void forward(const MoEProblem& p, const Cells& cells, char* memory, float* out, P* hidden) {
  const long M = p.model_dim, H = p.hidden_dim, step = units_of(p);
  P* hidden_u = hidden ? hidden + p.hidden_rows * H : nullptr;
  Turns of_range(cells.all.size() / p.num_experts);
  for_each_cell<P>(p, cells, memory, false, [&](const Cell& cell, const MoESpace<P>& space) {
    const long e = cell.expert;
    clear(out, p, cells, cell);
    for_each_part(p, cells, cell, space, [&](const Part& part) {
      point_to(space.tokens.rows, static_cast<const P*>(p.tokens), part, p);
      const auto x = pack_rows<P>(space.x, space.tokens.rows, part.n, M);
      for (long unit = 0; unit < H; unit += step) {
        const long units = std::min(step, H - unit), weight = (e * H + unit) * M, bias = e * H + unit;
        const Units<P> h(space.h, part.n, units);
        const Units<float> z(space.z, part.n, units);
        const auto kept = [&](P* all, long i, long row) { return all + (part.place + row) * H + (unit + i) * 16; };
        const Ahead w2(p.w2 + weight, units * M);
        const Ahead w3 = p.w3 ? Ahead(p.w3 + weight, units * M) : Ahead();
        const auto nothing = [](long, long) {};
        over_model(space, p.w1 + weight, units, x, p.w3 ? w3 : w2, nothing, [&](long i, long row, V v) {
          if (p.b1) v = v + broadcast(p.b1[bias + i]);
          if (hidden) store(kept(hidden, i, row), v);
          if (p.w3)
            store(z.at(i, row), v);
          else
            store(h.at(i, row), Act::of(v).value);
        });
        if (p.w3) over_model(space, p.w3 + weight, units, x, w2, nothing, [&](long i, long row, V v) {
          if (p.b3) v = v + broadcast(p.b3[bias + i]);
          if (hidden) store(kept(hidden_u, i, row), v);
          store(h.at(i, row), Gated<Act>::of(load(z.at(i, row)), v).value);
        });
        over_units(space, p.w2 + weight, h, M, next_weight(p, p.w1, e, unit + step, step), unit > 0);
      }
      point_to(space.to, out, part, p);
      of_range.wait(cell.range, e);
      add_to_tokens(space, space.gates, p.b2 ? p.b2 + e * M : nullptr, part.n, M);
    });
    of_range.wait(cell.range, e);  // a cell without choices has not waited
    of_range.end(cell.range);
  });
}

struct MoEGradients {
  float *tokens, *gates, *w1, *b1, *w2, *b2, *w3, *b3;
};

// to [units] (+)= the sums of d over n rows
template <class P>
void bias_gradient(const Units<P>& d, long n, float* to, bool add) {
  for (long unit = 0; unit < d.count; unit++) {
    V sum = broadcast(0.0f);
    for (long row = 0; row < n; row += 16) sum = sum + load(d.at(unit, row));
    to[unit] = sum_of(sum) + (add ? to[unit] : 0.0f);
  }
}

template <class Act, class P>
void backward(const MoEProblem& p, const Cells& cells, char* memory, const P* grad, const P* hidden,
              const MoEGradients& to) {
  const long M = p.model_dim, H = p.hidden_dim, step = units_of(p);
  const P* hidden_u = hidden + p.hidden_rows * H;
  Turns of_range(cells.all.size() / p.num_experts), of_expert(p.num_experts);
  for_each_cell<P>(p, cells, memory, true, [&](const Cell& cell, const MoESpace<P>& space) {
    const long e = cell.expert;
    clear(to.tokens, p, cells, cell);
    of_expert.wait(e, cell.range);
    bool add = !cell.first;
    for_each_part(p, cells, cell, space, [&](const Part& part) {
      const long n = part.n;
      point_to(space.grads.rows, grad, part, p);
      point_to(space.tokens.rows, static_cast<const P*>(p.tokens), part, p);
      const auto dy = pack_rows<P>(space.x, space.grads.rows, n, M);
      if (to.w2) pack_over_rows(space.grads, n, M);
      if (to.w1 || to.w3) pack_over_rows(space.tokens, n, M);
      float* by_gate = space.grad_gates;
      for (long row = 0; row < n; row += 16) {  // of the bias
        V sum = broadcast(0.0f);
        if (p.b2)
          for (long m = 0; m < M; m++) sum = multiply_add(number(dy, m, row), broadcast(p.b2[e * M + m]), sum);
        store(by_gate + row, sum);
      }
      if (to.b2) {
        for (long m = 0; m < M; m += 16) {
          const long count = std::min(M - m, 16L);
          V sum = add ? load(to.b2 + e * M + m, count) : broadcast(0.0f);
          for (long i = 0; i < n; i++) sum = multiply_add(load(space.grads.rows[i] + m, count), broadcast(space.gates[i]), sum);
          store(to.b2 + e * M + m, sum, count);
        }
      }
      for (long unit = 0; unit < H; unit += step) {
        const long units = std::min(step, H - unit), weight = (e * H + unit) * M, bias = e * H + unit;
        const Units<P> h(space.h, n, units), dz(space.dz, n, units), du(space.du, n, units);
        const auto kept = [&](const P* all, long i, long row) { return all + (part.place + row) * H + (unit + i) * 16; };
        const auto soon = [&](long i, long row) __attribute__((always_inline)) {  // of the next tile's rows
          for (long next = row + 32; next < row + 64; next += 16) {
            __builtin_prefetch(kept(hidden, i, next));
            if (p.w3) __builtin_prefetch(kept(hidden_u, i, next));
          }
        };
        const Ahead w1(p.w1 + weight, to.tokens ? units * M : 0);
        over_model(space, p.w2 + weight, units, dy, w1, soon, [&](long i, long row, V v) {
          const V gate = load(space.gates + row), dh = v * gate, z = load(kept(hidden, i, row));
          V value;
          if (p.w3) {
            const GatedValue g = Gated<Act>::of(z, load(kept(hidden_u, i, row)));
            value = g.value;
            store(dz.at(i, row), dh * g.by_z);
            store(du.at(i, row), dh * g.by_u);
          } else {
            const Activated a = Act::of(z);
            value = a.value;
            store(dz.at(i, row), dh * a.slope);
          }
          store(by_gate + row, multiply_add(v, value, load(by_gate + row)));
          store(h.at(i, row), value * gate);
        });
        if (to.w2) weight_gradient(space, h, space.grads, n, M, to.w2 + weight, add);
        const auto through = [&](const Units<P>& d, const float* w, float* to_w, float* to_b, Ahead ahead, bool add_rows) {
          if (to_w) weight_gradient(space, d, space.tokens, n, M, to_w + weight, add);
          if (to_b) bias_gradient(d, n, to_b + bias, add);
          if (to.tokens) over_units(space, w + weight, d, M, ahead, add_rows);
        };
        const Ahead next = next_weight(p, p.w2, e, unit + step, step);
        const Ahead w3 = p.w3 ? Ahead(p.w3 + weight, units * M) : Ahead();
        through(dz, p.w1, to.w1, to.b1, p.w3 ? w3 : next, unit > 0);
        if (p.w3) through(du, p.w3, to.w3, to.b3, next, true);
      }
      if (to.gates)
        for (long i = 0; i < n; i++) to.gates[part.choices[i]] = by_gate[i];
      add = true;
      if (!to.tokens) return;
      point_to(space.to, to.tokens, part, p);
      of_range.wait(cell.range, e);
      add_to_tokens(space, nullptr, nullptr, n, M);
    });
    finish_streams();
    of_expert.end(e);
    of_range.wait(cell.range, e);  // a cell without choices has not waited
    of_range.end(cell.range);
  });
}

// 4. What Python calls

// run(number) with a number of the type of tokens and products.
template <class Run>
auto typed(const MoEProblem& p, Run run) {
  if constexpr (kPairs)
    if (p.in_bf16) return run(bf16());
  return run(float());
}

}  // namespace

extern "C" {

long moe_space(const MoEProblem* p, long backward) {
  Arena arena{nullptr};
  typed(*p, [&](auto number) { MoESpace<decltype(number)>(arena, *p, backward); });
  return arena.used * p->threads;
}

long moe_forward(const MoEProblem* p, char* memory, float* out, void* hidden) {
  const Cells cells(*p);
  if (!cells.valid) return 1;
  typed(*p, [&](auto number) {
    auto* kept = static_cast<decltype(number)*>(hidden);
    activated(p->activation, [&](auto act) { forward<decltype(act)>(*p, cells, memory, out, kept); });
  });
  return 0;
}

long moe_backward(const MoEProblem* p, char* memory, const void* grad, const void* hidden, float* grad_tokens,
                  float* grad_gates, float* grad_w1, float* grad_b1, float* grad_w2, float* grad_b2, float* grad_w3,
                  float* grad_b3) {
  const Cells cells(*p);
  if (!cells.valid) return 1;
  const MoEGradients to = {grad_tokens, grad_gates, grad_w1, grad_b1, grad_w2, grad_b2, grad_w3, grad_b3};
  typed(*p, [&](auto number) {
    using P = decltype(number);
    const auto *dy = static_cast<const P*>(grad), *kept = static_cast<const P*>(hidden);
    activated(p->activation, [&](auto act) { backward<decltype(act)>(*p, cells, memory, dy, kept, to); });
  });
  return 0;
}
}
