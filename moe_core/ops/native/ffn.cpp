// The experts' networks from tokens to the weighted sums of their results. ../ffn/cpp.py calls this and says what is
// computed. It is compiled once for each set of instructions. P: the type of tokens and products, fp32 or, where an
// instruction multiplies it, bf16.
//
// Tokens are gathered while they are packed, 16 of them side by side in a vector. Every product is a weight times these
// vectors, so its results lie as the next product reads them. At the end they are turned, and added to the tokens' rows; in
// bf16 the last product gives rows. The gradient of a weight in fp32 packs nothing. With weights that are packed already,
// the tokens are the first operand: few of them then leave no part of a vector empty.
//
// T tokens, K top-k, E experts, M model dim, H hidden dim, n choices of a cell

#include <sys/syscall.h>
#include <unistd.h>

#include "activations.hpp"
#include "ffn_work.hpp"

namespace {

// 1. Products

// A row of numbers, for the caches: tokens lie anywhere.
template <class T>
INLINE void fetch(T* row, long M) {
  for (long m = 0; m < M; m += 64 / sizeof(T)) __builtin_prefetch(row + m, 1);
}

// The rows [n, M] as an operand of a product over M.
template <Side side, class P>
Packed<P, side> pack_rows(int32_t* to, const P* const* rows, long n, long M) {
  const Packed<P, side> packed(to, n, M);
  for (long p = 0; p < packed.panels; p++) {
    const long start = packed.start(p);
    for (long i = start + 16; i < std::min(start + 32, n); i++) fetch(rows[i], M);
    for (long k = 0; k < M; k += Shape<P>::depth) {
      Words v[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) v[i] = along(rows[start + i] + k, M - k, P());
      if (side == kB || !Shape<P>::tiles) transpose(v);
      int32_t* block = to + (p * packed.stride + k / Shape<P>::depth) * 256;
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) store_words(block + 16 * i, v[i]);
    }
  }
  return packed;
}
// The rows [n, M] as B of a product over n.
inline void pack_over_rows(const Gathered<float>&, long, long) {}
inline void pack_over_rows(const Gathered<bf16>& gathered, long n, long M) {
  const Rows<bf16> packed(gathered.over_rows, M, n);
  const auto pack = [&](long k, long m, long count) {
    int32_t* to = gathered.over_rows + (m / 16 * packed.stride + k) * 256;
    const bf16* const* rows = gathered.rows + 32 * k;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++, rows += 2)
      store_words(to + 16 * i, across(rows[0] + m, rows[1] - rows[0], 2, count, bf16()));
  };
  for (long k = 0; k < packed.blocks; k++)
    for (long m = 0; m < M; m += 16) M - m < 16 ? pack(k, m, M - m) : pack(k, m, 16);
}

// `units` hidden units of a weight times rows: use(unit, row, v) takes 16 rows.
template <class P, class Soon, class Use>
void over_model(const Space<P>& space, const Weight& w, long e, long unit, long units, const Rows<P>& rows, Ahead ahead,
                Soon soon, Use use) {
  const auto packed = w.over_model<P>(space.w, e, unit, units, rows.depth);
  long_product(packed, rows, ahead, space.so_far, soon, [=](long i, long j, long, V v) { use(i, j, v); });
}

// The sums over hidden units of a weight times h, in fp32 [M, n], in bf16 [n, M]; or what is there and these.
inline void over_units(const Space<float>& space, const Weight& w, long e, long unit, const Units<float>& h, long M,
                       Ahead ahead, bool add) {
  const auto packed = w.over_units<float, kA>(space.w, e, unit, h.count, M);
  const Rows<float> rows(reinterpret_cast<int32_t*>(h.data), h.rows, h.count);
  product_into(packed, rows, ahead, space.sums, space.sums_stride, add, false);
}
inline void over_units(const Space<bf16>& space, const Weight& w, long e, long unit, const Units<bf16>& h, long M,
                       Ahead ahead, bool add) {
  const auto packed = w.over_units<bf16, kB>(space.w, e, unit, h.count, M);
  const auto rows = Weights<bf16>(space.packed, h.rows, h.count).pack<kAcrossK>(h.data, h.stride);
  product_into(rows, packed, ahead, space.sums, M, add, false);
}

// The part of a weight that is read after the hidden units before `unit` of expert e: of the next expert after the last.
inline Ahead next_weight(const Problem& p, const Weight& w, long e, long unit, long units) {
  if (unit >= p.hidden_dim) e++, unit = 0;
  if (e == p.num_experts) e = 0;
  return w.ahead(e, unit, std::min(units, p.hidden_dim - unit));
}

// A hash of 32-bit integers: "lowbias32" of C. Wellons' hash-prospector.
template <class Integers>
INLINE Integers hash_32(Integers x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
// v after dropout, of 16 states of rows from `states` on, or one, and hidden units from `unit` on, or one. The noise is that
// of the Triton kernels. Not inline, since the loops that may call it need all registers.
template <bool of_rows>
__attribute__((noinline, cold)) V drop_out(const Problem& p, V v, const int32_t* states, long unit) {
  int32_t numbers[16];
  for (int i = 0; i < 16; i++)
    numbers[i] = static_cast<uint32_t>(states[of_rows ? i : 0]) + static_cast<uint32_t>(unit + (of_rows ? 0 : i)) * 0x9e3779b9u;
  const Ints sums = load(numbers);
  EACH_PIECE {
    const IntLanes noise = (IntLanes)(hash_32((WordLanes)sums.p[i]) >> 16) - 32768;
    v.p[i] *= noise >= static_cast<int32_t>(p.least) ? p.scale - Lanes{} : Lanes{};
  }
  return v;
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
inline void weight_gradient(const Space<float>& space, const Units<float>& d, const Gathered<float>& b, long n, long M,
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
inline void weight_gradient(const Space<bf16>& space, const Units<bf16>& d, const Gathered<bf16>& b, long n, long M,
                            float* to, bool add) {
  const auto a = Weights<bf16>(space.packed, d.count, n).pack<kAlongK>(d.data, d.stride);
  product_into(a, Rows<bf16>(b.over_rows, M, n), Ahead(), to, M, add, true);
}

// `count` numbers of a token's row += scale times (sum + bias)
INLINE void add_to_token(float* row, V sum, const float* bias, float scale, long count) {
  if (bias) sum = sum + load(bias, count);
  store(row, multiply_add(sum, broadcast(scale), load(row, count)), count);
}
// The rows of tokens in `all` += scales times (space.sums and the bias); scales and bias may be null.
template <class Space>
void add_to_tokens(const Space& space, float* all, const float* scales, const float* bias, long n, long M) {
  for (long i = 0; i < n; i++) {
    if (i + 8 < n) fetch(all + space.tokens[i + 8] * M, M);
    float* row = all + space.tokens[i] * M;
    const float *sums = space.sums + i * M, scale = scales ? scales[i] : 1.0f;
    long m = 0;
    for (; m + 16 <= M; m += 16) add_to_token(row + m, load(sums + m), bias ? bias + m : nullptr, scale, 16);
    if (m < M) add_to_token(row + m, load(sums + m, M - m), bias ? bias + m : nullptr, scale, M - m);
  }
}
inline void add_to_tokens(const Space<float>& space, float* all, const float* scales, const float* bias, long n, long M) {
  for (long start = 0; start < n; start += 16) {
    for (long i = start + 16; i < std::min(start + 32, n); i++) fetch(all + space.tokens[i] * M, M);
    for (long m = 0; m < M; m += 16) {
      const long count = std::min(M - m, 16L);
      Words v[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++)
        v[i] = along(space.sums + (m + i) * space.sums_stride + start, i < count ? 16 : 0, float());
      transpose(v);
      for (long i = start; i < std::min(start + 16, n); i++) {
        V sum;
        std::memcpy(&sum, &v[i - start], sizeof sum);
        add_to_token(all + space.tokens[i] * M + m, sum, bias ? bias + m : nullptr, scales ? scales[i] : 1.0f, count);
      }
    }
  }
}

// 2. Both passes

// Rows of a cell that are worked on at once: [from, from + n) of its choices.
struct Part {
  long n, place;
  const int32_t* choices;
};

// run(part) for the parts of a cell, of nearly equal sizes; their gates and states are in the space.
template <class Run>
void for_each_part(const Problem& p, const Cells& cells, const Cell& cell, const RowsSpace& space, Run run) {
  const long rows = cell.end - cell.start, parts = (rows + most_rows(p) - 1) / most_rows(p);
  const long step = parts ? in_sixteens((rows + parts - 1) / parts) : 1;
  for (long from = cell.start; from < cell.end; from += step) {
    const Part part = {std::min(step, cell.end - from), cell.place + from - cell.start, &cells.choices[from]};
    const uint32_t K = p.top_k;  // a division of 64 bits takes longer
    for (long i = 0; i < part.n; i++) space.tokens[i] = static_cast<uint32_t>(part.choices[i]) / K;
    for (long i = 0; i < in_sixteens(part.n); i++)
      space.gates[i] = i >= part.n ? 0.0f : p.gates ? p.gates[part.choices[i]] : 1.0f;
    for (long i = 0; p.scale != 0 && i < part.n; i++)
      space.states[i] = hash_32(hash_32<uint32_t>(part.choices[i]) ^ static_cast<uint32_t>(p.seed));
    run(part);
  }
}

// The tokens of a range start at 0; the range's first cell does this.
inline void clear(float* to, const Problem& p, const Cells& cells, const Cell& cell) {
  if (!to || !cell.clears()) return;
  const long first = cell.range * cells.length, end = std::min(first + cells.length, p.num_tokens);
  std::fill(to + first * p.model_dim, to + end * p.model_dim, 0.0f);
}

template <class Act, class P>
void forward(const Problem& p, const Cells& cells, char* memory, float* out, P* hidden) {
  const long M = p.model_dim, H = p.hidden_dim, step = units_of(p);
  const Network net(p);
  const bool drops = p.scale != 0;
  P* hidden_u = hidden ? hidden + p.hidden_rows * H : nullptr;
  Turns of_range(cells.ranges);
  for_each_cell<P, Space<P>>(p, cells, memory, false, [&](const Cell& cell, const Space<P>& space) {
    const long e = cell.expert;
    clear(out, p, cells, cell);
    for_each_part(p, cells, cell, space, [&](const Part& part) {
      space.x_rows.point_to(static_cast<const P*>(p.tokens), space.tokens, part.n, M);
      const auto x = pack_rows<kB>(space.x, space.x_rows.rows, part.n, M);
      for (long unit = cell.unit; unit < cell.last_unit; unit += step) {
        const long units = std::min(step, cell.last_unit - unit), bias = e * H + unit;
        const Units<P> h(space.h, part.n, units);
        const Units<float> z(space.z, part.n, units);
        const long kept = part.place * H + unit * 16;
        const float *b1 = p.b1 ? p.b1 + bias : nullptr, *b3 = p.b3 ? p.b3 + bias : nullptr;
        const int32_t* states = drops ? space.states : nullptr;
        const bool gated = p.w3;
        const auto store_h = [=, &p](long i, long row, V v) {
          store(h.at(i, row), states ? drop_out<true>(p, v, states + row, unit + i) : v);
        };
        const Ahead w2 = net.w2.ahead(e, unit, units);
        const auto nothing = [](long, long) {};
        const Ahead second = p.w3 ? net.w3.ahead(e, unit, units) : w2;
        over_model(space, net.w1, e, unit, units, x, second, nothing, [=](long i, long row, V v) {
          if (b1) v = v + broadcast(b1[i]);
          if (hidden) store(hidden + kept + row * H + i * 16, v);
          if (gated)
            store(z.at(i, row), v);
          else
            store_h(i, row, Act::of(v).value);
        });
        if (p.w3) over_model(space, net.w3, e, unit, units, x, w2, nothing, [=](long i, long row, V v) {
          if (b3) v = v + broadcast(b3[i]);
          if (hidden) store(hidden_u + kept + row * H + i * 16, v);
          store_h(i, row, Gated<Act>::of(load(z.at(i, row)), v).value);
        });
        over_units(space, net.w2, e, unit, h, M, next_weight(p, net.w1, e, unit + units, step), unit > cell.unit);
      }
      of_range.wait(cell.range, cell.turn);
      add_to_tokens(space, out, space.gates, p.b2 && cell.has_bias ? p.b2 + e * M : nullptr, part.n, M);
    });
    of_range.wait(cell.range, cell.turn);  // a cell without choices has not waited
    of_range.end(cell.range);
  });
}

template <class Act, class P>
void forward_packed(const Problem& p, const Cells& cells, char* memory, float* out) {
  const long M = p.model_dim, H = p.hidden_dim, step = units_of(p);
  Turns of_range(cells.ranges);
  for_each_cell<P, PackedSpace<P>>(p, cells, memory, false, [&](const Cell& cell, const PackedSpace<P>& space) {
    const long e = cell.expert;
    clear(out, p, cells, cell);
    for_each_part(p, cells, cell, space, [&](const Part& part) {
      space.x_rows.point_to(static_cast<const P*>(p.tokens), space.tokens, part.n, M);
      const auto x = pack_rows<kA>(space.x, space.x_rows.rows, part.n, M);
      for (long unit = cell.unit; unit < cell.last_unit; unit += step) {
        const long units = std::min(step, cell.last_unit - unit);
        // x w^T + bias of these units, in use(row, unit, count, v)
        const auto over_model = [&](const void* all, const float* bias, auto use) {
          const auto w = panels_of(packed_expert<P>(all, e, H, M, false), unit, units);
          const auto nothing = [](long, long) {};
          long_product(x, w, Ahead(), space.so_far, nothing, [&](long i, long j, long count, V v) {
            if (bias) v = v + load(bias + e * H + unit + j, count);
            use(i, j, count, v);
          });
        };
        const auto store_h = [&](long i, long j, long count, V v) {
          if (p.scale != 0) v = drop_out<false>(p, v, space.states + i, unit + j);
          store(space.h + i * units + j, v, count);
        };
        over_model(p.w1, p.b1, [&](long i, long j, long count, V v) {
          if (p.w3)
            store(space.z + i * units + j, v, count);
          else
            store_h(i, j, count, Act::of(v).value);
        });
        if (p.w3) over_model(p.w3, p.b3, [&](long i, long j, long count, V v) {
          store_h(i, j, count, Gated<Act>::of(load(space.z + i * units + j, count), v).value);
        });
        const auto h = Packed<P, kA>(space.packed_h, part.n, units).template pack<kAlongK>(space.h, units);
        const auto w2 = packed_expert<P>(p.w2, e, H, M, true).along_k(unit, units);
        product_into(h, w2, Ahead(), space.sums, M, unit > cell.unit, false);
      }
      of_range.wait(cell.range, cell.turn);
      add_to_tokens(space, out, space.gates, p.b2 && cell.has_bias ? p.b2 + e * M : nullptr, part.n, M);
    });
    of_range.wait(cell.range, cell.turn);
    of_range.end(cell.range);
  });
}

struct Gradients {
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
void backward(const Problem& p, const Cells& cells, char* memory, const P* grad, const P* hidden,
              const Gradients& to) {
  const long M = p.model_dim, H = p.hidden_dim, step = units_of(p);
  const Network net(p);
  const bool drops = p.scale != 0;
  const P* hidden_u = hidden + p.hidden_rows * H;
  Turns of_range(cells.ranges), of_weights(p.num_experts * cells.shares);
  for_each_cell<P, Space<P>>(p, cells, memory, true, [&](const Cell& cell, const Space<P>& space) {
    const long e = cell.expert;
    clear(to.tokens, p, cells, cell);
    of_weights.wait(cell.turn, cell.range);
    bool add = !cell.first;
    for_each_part(p, cells, cell, space, [&](const Part& part) {
      const long n = part.n;
      space.grads.point_to(grad, space.tokens, n, M);
      space.x_rows.point_to(static_cast<const P*>(p.tokens), space.tokens, n, M);
      const auto dy = pack_rows<kB>(space.x, space.grads.rows, n, M);
      if (to.w2) pack_over_rows(space.grads, n, M);
      if (to.w1 || to.w3) pack_over_rows(space.x_rows, n, M);
      float* by_gate = space.grad_gates;
      std::fill_n(by_gate, in_sixteens(n), 0.0f);
      for (long i = 0; i < n && p.b2 && cell.has_bias; i++) {
        V sum = broadcast(0.0f);
        for (long m = 0; m < M; m += 16)
          sum = multiply_add(load(space.grads.rows[i] + m, M - m), load(p.b2 + e * M + m, M - m), sum);
        by_gate[i] = sum_of(sum);
      }
      if (to.b2 && cell.has_bias) {
        for (long m = 0; m < M; m += 16) {
          const long count = std::min(M - m, 16L);
          V sum = add ? load(to.b2 + e * M + m, count) : broadcast(0.0f);
          for (long i = 0; i < n; i++) sum = multiply_add(load(space.grads.rows[i] + m, count), broadcast(space.gates[i]), sum);
          store(to.b2 + e * M + m, sum, count);
        }
      }
      for (long unit = cell.unit; unit < cell.last_unit; unit += step) {
        const long units = std::min(step, cell.last_unit - unit), weight = (e * H + unit) * M, bias = e * H + unit;
        const Units<P> h(space.h, n, units), dz(space.dz, n, units), du(space.du, n, units);
        const P *kept = hidden + part.place * H + unit * 16, *kept_u = hidden_u + part.place * H + unit * 16;
        const float* gates = space.gates;
        const int32_t* states = drops ? space.states : nullptr;
        const bool gated = p.w3;
        const auto soon = [=](long i, long row) __attribute__((always_inline)) {  // of the next tile's rows
          for (long next = row + 32; next < row + 64; next += 16) {
            __builtin_prefetch(kept + next * H + i * 16);
            if (gated) __builtin_prefetch(kept_u + next * H + i * 16);
          }
        };
        const Ahead w1 = to.tokens ? net.w1.ahead(e, unit, units) : Ahead();
        over_model(space, net.w2, e, unit, units, dy, w1, soon, [=, &p](long i, long row, V v) {
          if (states) v = drop_out<true>(p, v, states + row, unit + i);
          const V gate = load(gates + row), dh = v * gate, z = load(kept + row * H + i * 16);
          V value;
          if (gated) {
            const GatedValue g = Gated<Act>::of(z, load(kept_u + row * H + i * 16));
            value = g.value;
            store(dz.at(i, row), dh * g.by_z);
            store(du.at(i, row), dh * g.by_u);
          } else {
            const Activated a = Act::of(z);
            value = a.value;
            store(dz.at(i, row), dh * a.slope);
          }
          store(by_gate + row, multiply_add(v, value, load(by_gate + row)));
          if (states) value = drop_out<true>(p, value, states + row, unit + i);
          store(h.at(i, row), value * gate);
        });
        if (to.w2) weight_gradient(space, h, space.grads, n, M, to.w2 + weight, add);
        const auto through = [&](const Units<P>& d, const Weight& w, float* to_w, float* to_b, Ahead ahead, bool add_rows) {
          if (to_w) weight_gradient(space, d, space.x_rows, n, M, to_w + weight, add);
          if (to_b) bias_gradient(d, n, to_b + bias, add);
          if (to.tokens) over_units(space, w, e, unit, d, M, ahead, add_rows);
        };
        const Ahead next = next_weight(p, net.w2, e, unit + units, step);
        through(dz, net.w1, to.w1, to.b1, p.w3 ? net.w3.ahead(e, unit, units) : next, unit > cell.unit);
        if (p.w3) through(du, net.w3, to.w3, to.b3, next, true);
      }
      add = true;
      of_range.wait(cell.range, cell.turn);
      if (to.gates)
        for (long i = 0; i < n; i++) to.gates[part.choices[i]] += by_gate[i];
      if (!to.tokens) return;
      add_to_tokens(space, to.tokens, nullptr, nullptr, n, M);
    });
    finish_streams();
    of_weights.end(cell.turn);
    of_range.wait(cell.range, cell.turn);  // a cell without choices has not waited
    of_range.end(cell.range);
  });
}

// 3. What Python calls

// run(number) with a number of the type of tokens and products.
template <class Run>
auto typed(const Problem& p, Run run) {
  if constexpr (kPairs)
    if (p.in_bf16) return run(bf16());
  return run(float());
}

}  // namespace

extern "C" {

// Linux gives a process AMX's registers when it asks. 0: it did, or they are not used.
int request_tiles() {
#if defined(__AMX_BF16__)
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
#else
  return 0;
#endif
}

// Bytes of a number that rows in bf16 are multiplied in.
long bf16_product_bytes() { return sizeof(ProductType<bf16>); }

void pack_weight(const float* w, void* to, long E, long H, long M, long is_w2, long to_bf16, long threads) {
  const auto pack = [&](auto number) {
#pragma omp parallel for num_threads(threads)
    for (long e = 0; e < E; e++) {
      const auto packed = packed_expert<decltype(number)>(to, e, H, M, is_w2 != 0);
      if (is_w2)
        packed.template pack<kAcrossK>(w + e * H * M, M);
      else
        packed.template pack<kAlongK>(w + e * H * M, M);
    }
  };
  if (to_bf16)
    pack(ProductType<bf16>());
  else
    pack(float());
}

long experts_space(const Problem* p, long backward) {
  Arena arena{nullptr};
  typed(*p, [&](auto number) {
    if (p->packed)
      PackedSpace<decltype(number)>(arena, *p, backward);
    else
      Space<decltype(number)>(arena, *p, backward);
  });
  return arena.used * p->threads;
}

long experts_forward(const Problem* p, char* memory, float* out, void* hidden) {
  const Cells cells(*p);
  if (!cells.valid) return 1;
  typed(*p, [&](auto number) {
    using P = decltype(number);
    activated<P>(p->activation, [&](auto act) {
      using Act = decltype(act);
      if (p->packed)
        forward_packed<Act, P>(*p, cells, memory, out);
      else
        forward<Act, P>(*p, cells, memory, out, static_cast<P*>(hidden));
    });
  });
  return 0;
}

long experts_backward(const Problem* p, char* memory, const void* grad, const void* hidden, float* grad_tokens,
                      float* grad_gates, float* grad_w1, float* grad_b1, float* grad_w2, float* grad_b2, float* grad_w3,
                      float* grad_b3) {
  const Cells cells(*p);
  if (!cells.valid) return 1;
  const Gradients to = {grad_tokens, grad_gates, grad_w1, grad_b1, grad_w2, grad_b2, grad_w3, grad_b3};
  typed(*p, [&](auto number) {
    using P = decltype(number);
    const auto *dy = static_cast<const P*>(grad), *kept = static_cast<const P*>(hidden);
    activated<P>(p->activation, [&](auto act) { backward<decltype(act)>(*p, cells, memory, dy, kept, to); });
  });
  return 0;
}
}
