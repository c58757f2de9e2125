// The experts' networks from tokens to the weighted sums of their results, in fp32. ../ffn/fused.py calls this and says
// what is computed.
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

using Rows = Packed<float, kB>;     // 16 tokens side by side
using Weights = Packed<float, kA>;

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

// The memory of a thread. Its blocks of n rows are those of Rows: [n / 16, ..., 16].
struct MoESpace {
  int32_t *x, *w, *h, *dz, *du;
  float *z, *so_far, *sums, *columns, *gates, *grad_gates;
  const float **rows, **grads;  // of the tokens, and of the gradient of their results
  float** to;                   // where the results are added

  MoESpace(Arena& arena, const MoEProblem& p, bool backward) {
    const long M = p.model_dim, units = units_of(p), n = kMostRows, h_words = Rows::words(n, units);
    x = arena.take<int32_t>(Rows::words(n, M));
    w = arena.take<int32_t>(std::max(Weights::words(units, M), Weights::words(M, units)));
    h = arena.take<int32_t>(h_words);
    dz = arena.take<int32_t>(backward ? h_words : 0);
    du = arena.take<int32_t>(backward && p.w3 ? h_words : 0);
    z = arena.take<float>(p.w3 ? h_words : 0);
    so_far = arena.take<float>(n * units);
    sums = arena.take<float>(M * sums_stride());
    columns = arena.take<float>(backward ? n * 16 * kTileColumns : 0);
    gates = arena.take<float>(n), grad_gates = arena.take<float>(n);
    rows = arena.take<const float*>(n), grads = arena.take<const float*>(n), to = arena.take<float*>(n);
  }
  static constexpr long sums_stride() { return kMostRows + 16; }  // no power of two
};

// run(cell, space) for every cell, in their order, on all threads.
template <class Run>
void for_each_cell(const MoEProblem& p, const Cells& cells, char* memory, bool backward, Run run) {
  std::atomic<size_t> next(0);
#pragma omp parallel num_threads(p.threads)
  {
    Arena counted{nullptr};
    MoESpace(counted, p, backward);
    Arena own{memory + counted.used * omp_get_thread_num()};
    const MoESpace space(own, p, backward);
    const Mode<float> mode;
    for (size_t c; (c = next++) < cells.all.size();) run(cells.all[c], space);
  }
}

// 2. Products

// The rows [n, M], side by side.
inline Rows pack_rows(int32_t* to, const float* const* rows, long n, long M) {
  const Rows packed(to, n, M);
  for (long p = 0; p < packed.panels; p++) {
    const long count = std::min(n - 16 * p, 16L);
    for (long k = 0; k < M; k += 16) {
      Words v[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) v[i] = i < count ? along(rows[16 * p + i] + k, M - k, float()) : Words{};
      transpose(v);
      int32_t* block = to + (p * packed.stride + k / 16) * 256;
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) store_words(block + 16 * i, v[i]);
    }
  }
  return packed;
}

// `units` hidden units of a weight [H, M] times rows: use(unit, row, v) takes 16 rows.
template <class Use>
void over_model(const MoESpace& space, const float* w, long units, const Rows& rows, Ahead ahead, Use use) {
  const auto nothing = [](long, long) {};
  const auto packed = Weights(space.w, units, rows.depth).pack<kAlongK>(w, rows.depth);
  long_product(packed, rows, ahead, space.so_far, nothing, [&](long i, long j, long, V v) { use(i, j, v); });
}

// The sums over hidden units of a weight [units, M] times h, [M, n]; or what is there and these.
inline void over_units(const MoESpace& space, const float* w, const Rows& h, long M, Ahead ahead, bool add) {
  const auto packed = Weights(space.w, M, h.depth).pack<kAcrossK>(w, M);
  product_into(packed, h, ahead, space.sums, space.sums_stride(), add, false);
}

// The part of a weight that is read after the hidden units before `unit` of expert e: of the next expert after the last.
inline Ahead next_weight(const MoEProblem& p, const float* w, long e, long unit, long units) {
  if (unit >= p.hidden_dim) e++, unit = 0;
  if (e == p.num_experts) e = 0;
  return Ahead(w + (e * p.hidden_dim + unit) * p.model_dim, std::min(units, p.hidden_dim - unit) * p.model_dim);
}

// Where the block of 16 rows that begins at `row` has a unit.
inline float* at(const Rows& h, long unit, long row) {
  return reinterpret_cast<float*>(h.data) + row / 16 * h.stride * 256 + unit * 16;
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
inline void weight_gradient(const MoESpace& space, const Rows& d, const float* const* b, long n, long M, float* to,
                            bool add) {
  constexpr long wide = 16 * kTileColumns;
  const auto tile = GradientTiles<std::make_integer_sequence<int, kTileRows>>::of_units;
  const long units = d.depth, tiles = (units + kTileRows - 1) / kTileRows;
  for (long m = 0; m < M; m += wide) {
    for (long i = 0; i < n; i++)
      for (long j = 0; j < wide; j += 16)
        if (m + j < M) store(space.columns + i * wide + j, load(b[i] + m + j, std::min(M - m - j, 16L)));
    for (long t = 0; t < tiles; t++) {
      const long unit = t * units / tiles, end = (t + 1) * units / tiles;
      tile[end - unit](at(d, unit, 0), d.stride * 256, space.columns, n, to + unit * M + m, M, M - m, add);
    }
  }
}

// The rows space.to [n, M] += scales times (space.sums [M, n] turned, and the bias); both may be null.
inline void add_to_tokens(const MoESpace& space, const float* scales, const float* bias, long n, long M) {
  for (long row = 0; row < n; row += 16) {
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
template <class Run>
void for_each_part(const MoEProblem& p, const Cells& cells, const Cell& cell, const MoESpace& space, Run run) {
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

template <class Act>
void forward(const MoEProblem& p, const Cells& cells, char* memory, float* out, float* hidden) {
  const long M = p.model_dim, H = p.hidden_dim, step = units_of(p);
  float* hidden_u = hidden ? hidden + p.hidden_rows * H : nullptr;
  Turns of_range(cells.all.size() / p.num_experts);
  for_each_cell(p, cells, memory, false, [&](const Cell& cell, const MoESpace& space) {
    const long e = cell.expert;
    clear(out, p, cells, cell);
    for_each_part(p, cells, cell, space, [&](const Part& part) {
      point_to(space.rows, p.tokens, part, p);
      const auto x = pack_rows(space.x, space.rows, part.n, M);
      for (long unit = 0; unit < H; unit += step) {
        const long units = std::min(step, H - unit), weight = (e * H + unit) * M, bias = e * H + unit;
        const Rows h(space.h, part.n, units), z(reinterpret_cast<int32_t*>(space.z), part.n, units);
        const auto kept = [&](float* all, long i, long row) { return all + (part.place + row) * H + (unit + i) * 16; };
        const Ahead w2(p.w2 + weight, units * M);
        const Ahead w3 = p.w3 ? Ahead(p.w3 + weight, units * M) : Ahead();
        over_model(space, p.w1 + weight, units, x, p.w3 ? w3 : w2, [&](long i, long row, V v) {
          if (p.b1) v = v + broadcast(p.b1[bias + i]);
          if (hidden) store(kept(hidden, i, row), v);
          store(at(p.w3 ? z : h, i, row), p.w3 ? v : Act::of(v).value);
        });
        if (p.w3) over_model(space, p.w3 + weight, units, x, w2, [&](long i, long row, V v) {
          if (p.b3) v = v + broadcast(p.b3[bias + i]);
          if (hidden) store(kept(hidden_u, i, row), v);
          store(at(h, i, row), Gated<Act>::of(load(at(z, i, row)), v).value);
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
inline void bias_gradient(const Rows& d, long n, float* to, bool add) {
  for (long unit = 0; unit < d.depth; unit++) {
    V sum = broadcast(0.0f);
    for (long row = 0; row < n; row += 16) sum = sum + load(at(d, unit, row));
    to[unit] = sum_of(sum) + (add ? to[unit] : 0.0f);
  }
}

template <class Act>
void backward(const MoEProblem& p, const Cells& cells, char* memory, const float* grad, const float* hidden,
              const MoEGradients& to) {
  const long M = p.model_dim, H = p.hidden_dim, step = units_of(p);
  const float* hidden_u = hidden + p.hidden_rows * H;
  Turns of_range(cells.all.size() / p.num_experts), of_expert(p.num_experts);
  for_each_cell(p, cells, memory, true, [&](const Cell& cell, const MoESpace& space) {
    const long e = cell.expert;
    clear(to.tokens, p, cells, cell);
    of_expert.wait(e, cell.range);
    bool add = !cell.first;
    for_each_part(p, cells, cell, space, [&](const Part& part) {
      const long n = part.n;
      point_to(space.grads, grad, part, p);
      point_to(space.rows, p.tokens, part, p);
      const auto dy = pack_rows(space.x, space.grads, n, M);
      float* by_gate = space.grad_gates;
      for (long row = 0; row < n; row += 16) {  // of the bias
        V sum = broadcast(0.0f);
        if (p.b2)
          for (long m = 0; m < M; m++) sum = multiply_add(load(at(dy, m, row)), broadcast(p.b2[e * M + m]), sum);
        store(by_gate + row, sum);
      }
      if (to.b2) {
        for (long m = 0; m < M; m += 16) {
          const long count = std::min(M - m, 16L);
          V sum = add ? load(to.b2 + e * M + m, count) : broadcast(0.0f);
          for (long i = 0; i < n; i++) sum = multiply_add(load(space.grads[i] + m, count), broadcast(space.gates[i]), sum);
          store(to.b2 + e * M + m, sum, count);
        }
      }
      for (long unit = 0; unit < H; unit += step) {
        const long units = std::min(step, H - unit), weight = (e * H + unit) * M, bias = e * H + unit;
        const Rows h(space.h, n, units), dz(space.dz, n, units), du(space.du, n, units);
        const auto kept = [&](const float* all, long i, long row) {
          return load(all + (part.place + row) * H + (unit + i) * 16);
        };
        const Ahead w1(p.w1 + weight, to.tokens ? units * M : 0);
        over_model(space, p.w2 + weight, units, dy, w1, [&](long i, long row, V v) {
          const V gate = load(space.gates + row), dh = v * gate, z = kept(hidden, i, row);
          V value;
          if (p.w3) {
            const GatedValue g = Gated<Act>::of(z, kept(hidden_u, i, row));
            value = g.value;
            store(at(dz, i, row), dh * g.by_z);
            store(at(du, i, row), dh * g.by_u);
          } else {
            const Activated a = Act::of(z);
            value = a.value;
            store(at(dz, i, row), dh * a.slope);
          }
          store(by_gate + row, multiply_add(v, value, load(by_gate + row)));
          store(at(h, i, row), value * gate);
        });
        if (to.w2) weight_gradient(space, h, space.grads, n, M, to.w2 + weight, add);
        const auto through = [&](const Rows& d, const float* w, float* to_w, float* to_b, Ahead ahead, bool add_rows) {
          if (to_w) weight_gradient(space, d, space.rows, n, M, to_w + weight, add);
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

}  // namespace

// 4. What Python calls

extern "C" {

long moe_space(const MoEProblem* p, long backward) {
  Arena arena{nullptr};
  MoESpace(arena, *p, backward);
  return arena.used * p->threads;
}

long moe_forward(const MoEProblem* p, char* memory, float* out, float* hidden) {
  const Cells cells(*p);
  if (!cells.valid) return 1;
  activated(p->activation, [&](auto act) { forward<decltype(act)>(*p, cells, memory, out, hidden); });
  return 0;
}

long moe_backward(const MoEProblem* p, char* memory, const float* grad, const float* hidden, float* grad_tokens,
                  float* grad_gates, float* grad_w1, float* grad_b1, float* grad_w2, float* grad_b2, float* grad_w3,
                  float* grad_b3) {
  const Cells cells(*p);
  if (!cells.valid) return 1;
  const MoEGradients to = {grad_tokens, grad_gates, grad_w1, grad_b1, grad_w2, grad_b2, grad_w3, grad_b3};
  activated(p->activation, [&](auto act) { backward<decltype(act)>(*p, cells, memory, grad, hidden, to); });
  return 0;
}
}
