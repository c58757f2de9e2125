// How ffn.cpp divides its work: the weights in memory, the cells that threads take and the memory that they work in.
//
// T tokens, K top-k, E experts, M model dim, H hidden dim, n choices of a cell

#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <vector>

#include "ffn.hpp"
#include "product.hpp"

namespace {

template <class P>
using Rows = Packed<P, kB>;  // 16 tokens side by side
template <class P>
using Weights = Packed<P, kA>;

inline long in_sixteens(long n) { return (n + 15) / 16 * 16; }

inline long kept_rows(const Problem& p) { return p.ends[p.num_experts - 1]; }
// Rows of a cell that are worked on at once. In fp32 they and their results fit the L2 cache, if 320 do: for further rows the
// weights are packed again.
inline long most_rows(const Problem& p) {
  const long fit = std::max((160L << 10) / p.model_dim / 16 * 16, 320L);
  return std::clamp(in_sixteens(kept_rows(p)), 16L, p.packed || p.in_bf16 ? 640L : std::min(fit, 640L));
}

// Hidden units whose weights are packed at once, at most: 512 KiB in fp32, to stay in the L2 cache.
inline long most_units(const Problem& p) {
  return std::min(std::max(32L, (128L << 10) / p.model_dim / 32 * 32), p.hidden_dim);
}
// Shares of an expert's hidden units. Several where few experts have rows, so that threads have work: more of few rows,
// which ranges of tokens would divide into parts too small for packing the weights.
inline long shares_of(const Problem& p) {
  const long busy = std::clamp(kept_rows(p), 1L, p.num_experts), wanted = kept_rows(p) < 512 * busy ? 16 : 8;
  return std::clamp((wanted - 1 + busy) / busy, 1L, p.hidden_dim / most_units(p));
}
inline long first_unit(const Problem& p, long share, long shares) {
  return share == shares ? p.hidden_dim : share * p.hidden_dim / shares / 32 * 32;
}
// Hidden units of a step, of which a share has several of nearly equal size.
inline long units_of(const Problem& p) {
  const long shares = shares_of(p), share = p.hidden_dim - first_unit(p, shares - 1, shares);
  const long steps = (share + most_units(p) - 1) / most_units(p);
  return (share + 32 * steps - 1) / (32 * steps) * 32;
}

// 1. Weights

// A weight [E, H, M], or transposed [E, M, H].
struct Weight {
  const void* data;
  const long* strides;
  bool in_bf16;

  bool transposed() const { return strides[2] != 1; }
  template <class Run>
  auto at(long e, long unit, Run run) const {
    const long place = e * strides[0] + unit * strides[1];
    return in_bf16 ? run(static_cast<const bf16*>(data) + place) : run(static_cast<const float*>(data) + place);
  }
  // Memory of `units` hidden units, for the caches; none of a transposed weight, which is in many places.
  Ahead ahead(long e, long unit, long units) const {
    if (!data || transposed()) return Ahead();
    return at(e, unit, [&](const auto* w) { return Ahead(w, units * strides[1]); });
  }
  // For a product over the model dim, [units, M].
  template <class P>
  Weights<P> over_model(int32_t* to, long e, long unit, long units, long M) const {
    const Weights<P> packed(to, units, M);
    return at(e, unit, [&](const auto* w) {
      return transposed() ? packed.template pack<kAcrossK>(w, strides[2]) : packed.template pack<kAlongK>(w, strides[1]);
    });
  }
  // For a product over the hidden units, [M, units].
  template <class P, Side side>
  Packed<P, side> over_units(int32_t* to, long e, long unit, long units, long M) const {
    const Packed<P, side> packed(to, M, units);
    return at(e, unit, [&](const auto* w) {
      return transposed() ? packed.template pack<kAlongK>(w, strides[2]) : packed.template pack<kAcrossK>(w, strides[1]);
    });
  }
};

struct Network {
  Weight w1, w2, w3;

  explicit Network(const Problem& p)
      : w1{p.w1, p.w1_strides, p.weights_bf16 != 0}, w2{p.w2, p.w2_strides, p.weights_bf16 != 0},
        w3{p.w3, p.w3_strides, p.weights_bf16 != 0} {}
};

// An expert's whole weight by pack_weight: w1 and w3 [H, M], of which a step takes panels, or w2 [M, H], of which it
// takes blocks.
template <class P>
Packed<P, kB> packed_expert(const void* all, long e, long H, long M, bool is_w2) {
  int32_t* start = static_cast<int32_t*>(const_cast<void*>(all)) + e * H * M / Shape<P>::numbers;
  return is_w2 ? Packed<P, kB>(start, M, H) : Packed<P, kB>(start, H, M);
}
template <class P>
Packed<P, kB> panels_of(const Packed<P, kB>& w1, long unit, long units) {
  return Packed<P, kB>(w1.data + unit / 16 * w1.blocks * 256, units, w1.depth);
}

// 2. Cells. They depend on sizes and on the number of kept choices, so results are the same for any number of threads.

// The choices of an expert by a range of tokens, and a share of the hidden units. Its results are added to the tokens
// after those of the cells before it, and its gradients of weights to those of the ranges before it.
struct Cell {
  long expert, range, start, end;  // of its choices in Cells::choices
  long turn, unit, last_unit;      // turn: of the range's cells
  long place;                      // of its first row in the hidden layer, a multiple of 16
  bool first, has_bias;            // first: no range before has choices of the expert

  bool clears() const { return turn == 0; }
};

struct Cells {
  long shares;            // of an expert's hidden units
  long length;            // tokens of a range
  long ranges;
  std::vector<Cell> all;  // range by range
  std::vector<int32_t> choices;
  bool valid = true;

  static long length_of(const Problem& p) {
    // A range's tokens and results fit the L2 cache, unless an expert then has so few rows in it that packing its weights
    // counts. hidden_rows in ../ffn/inputs.py relies on at least 256 rows.
    const double rows = std::clamp(p.hidden_dim * p.model_dim / 1024L, 256L, 1024L);
    const double tokens = std::max(static_cast<double>((128L << 10) / p.model_dim), rows * p.num_experts / p.top_k);
    const double kept = static_cast<double>(kept_rows(p)) / p.top_k;  // in tokens
    const long ranges = std::max<long>(kept / tokens + 0.5, 15 / (p.num_experts * shares_of(p)) + 1);
    return std::max((p.num_tokens + ranges - 1) / ranges, 64L);
  }

  explicit Cells(const Problem& p)
      : shares(shares_of(p)), length(length_of(p)), ranges((p.num_tokens - 1) / length + 1), choices(kept_rows(p)) {
    const long E = p.num_experts;
    std::vector<int32_t> range_of(choices.size());
    std::vector<long> counts(ranges * E), next(ranges * E);
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
    std::vector<bool> has_rows(E);
    long start = 0, place = 0;
    for (long range = 0; range < ranges; range++) {
      for (long e = 0; e < E; e++) {
        const long count = counts[range * E + e];
        for (long i = 0; i < shares; i++) {
          const long unit = first_unit(p, i, shares), last = first_unit(p, i + 1, shares);
          all.push_back({e, range, start, start + count, e * shares + i, unit, last, place, !has_rows[e], i == 0});
        }
        if (count > 0) has_rows[e] = true;
        next[range * E + e] = start;
        start += count, place += in_sixteens(count);
      }
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

// 3. Memory

// Takes pieces of memory; from no memory, it counts them.
struct Arena {
  char* base;
  long used = 0;

  template <class T>
  T* take(long count) {
    T* start = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (count * static_cast<long>(sizeof(T)) + 63) / 64 * 64;
    return start;
  }
};

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

// Of the rows that are worked on: their tokens and gates, and the states of their dropout.
struct RowsSpace {
  int32_t *tokens, *states;
  float* gates;

  RowsSpace(Arena& arena, long n)
      : tokens(arena.take<int32_t>(n)), states(arena.take<int32_t>(n)), gates(arena.take<float>(n)) {}
};

// Rows of tokens, or of the gradients of their results; after the last one are 32 rows of zeros.
template <class P>
struct Gathered {
  const P **rows, *zeros;
  int32_t* over_rows;  // in bf16: the operand of a product over the rows

  Gathered(Arena& arena, long n, long M, bool over_rows)
      : rows(arena.take<const P*>(n + 32)), zeros(arena.take<P>(M)),
        over_rows(arena.take<int32_t>(over_rows ? Rows<P>::words(M, n) : 0)) {
    if (arena.base) std::fill_n(const_cast<P*>(zeros), M, P());
  }
  // The rows of tokens among the rows [T, M].
  void point_to(const P* all, const int32_t* tokens, long n, long M) const {
    for (long i = 0; i < n; i++) rows[i] = all + tokens[i] * M;
    std::fill_n(rows + n, 32, zeros);
  }
};

// The memory of a thread. Its blocks of n rows are those of Rows: [n / 16, ..., 16].
template <class P>
struct Space : RowsSpace {
  int32_t *x, *w, *packed;
  P *h, *dz, *du;
  float *z, *so_far, *sums, *columns, *grad_gates;
  long sums_stride;  // an odd number of cache lines
  Gathered<P> x_rows, grads;

  Space(Arena& arena, const Problem& p, bool backward)
      : RowsSpace(arena, most_rows(p)), sums_stride(most_rows(p) | 16),
        x_rows(arena, most_rows(p), p.model_dim, backward && std::is_same<P, bf16>::value),
        grads(arena, most_rows(p), p.model_dim, backward && std::is_same<P, bf16>::value) {
    const long M = p.model_dim, units = units_of(p), n = most_rows(p);
    const bool in_bf16 = std::is_same<P, bf16>::value;
    const long h_size = Rows<P>::words(n, units) * Shape<P>::numbers;
    x = arena.take<int32_t>(Rows<P>::words(n, M));
    w = arena.take<int32_t>(std::max({Weights<P>::words(units, M), Weights<P>::words(M, units), Rows<P>::words(M, units)}));
    packed = arena.take<int32_t>(in_bf16 ? std::max(Weights<P>::words(n, units), Weights<P>::words(units, n)) : 0);
    h = arena.take<P>(h_size);
    dz = arena.take<P>(backward ? h_size : 0);
    du = arena.take<P>(backward && p.w3 ? h_size : 0);
    z = arena.take<float>(p.w3 ? n * in_sixteens(units) : 0);
    so_far = arena.take<float>(n * units);
    sums = arena.take<float>(M * sums_stride);
    columns = arena.take<float>(backward && !in_bf16 ? n * 16 * kTileColumns : 0);
    grad_gates = arena.take<float>(n);
  }
};

// The same with packed weights, where everything lies row by row.
template <class P>
struct PackedSpace : RowsSpace {
  int32_t *x, *packed_h;
  P* h;
  float *z, *so_far, *sums;
  Gathered<P> x_rows;

  PackedSpace(Arena& arena, const Problem& p, bool)
      : RowsSpace(arena, most_rows(p)), x_rows(arena, most_rows(p), p.model_dim, false) {
    const long M = p.model_dim, units = units_of(p), n = most_rows(p);
    x = arena.take<int32_t>(Packed<P, kA>::words(n, M));
    packed_h = arena.take<int32_t>(Packed<P, kA>::words(n, units));
    h = arena.take<P>(n * units);
    z = arena.take<float>(p.w3 ? n * units : 0);
    so_far = arena.take<float>(n * units);
    sums = arena.take<float>(n * M);
  }
};

// run(cell, space) for every cell, in their order, on all threads.
template <class P, class Space, class Run>
void for_each_cell(const Problem& p, const Cells& cells, char* memory, bool backward, Run run) {
  std::atomic<size_t> next(0);
#pragma omp parallel num_threads(p.threads)
  {
    Arena counted{nullptr};
    Space(counted, p, backward);
    Arena own{memory + counted.used * omp_get_thread_num()};
    const Space space(own, p, backward);
    const Mode<P> mode;
    for (size_t c; (c = next++) < cells.all.size();) run(cells.all[c], space);
  }
}

}  // namespace
