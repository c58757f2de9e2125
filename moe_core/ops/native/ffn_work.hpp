// How ffn.cpp divides its work: the weights in memory, the items of the threads and the memory that they work in.
//
// E experts, N rows, n rows of one expert, M model dim, H hidden dim

#pragma once

#include <omp.h>

#include <atomic>
#include <memory>
#include <vector>

#include "product.hpp"

namespace {

// Rows of an expert that are worked on at once: each further step packs its weights again, where they are not.
inline long row_step(bool packed_weights) { return packed_weights ? 512 : 4096; }

// Hidden units whose weights are packed at once: 512 KiB in fp32, to stay in the L2 cache.
inline long hidden_step(long model_dim) { return std::max(32L, (128L << 10) / model_dim / 32 * 32); }

struct Dropout {
  const int16_t* noise;  // as the hidden layer [N, H], or null
  long least;            // noise that keeps a number
  float scale;

  V operator()(V v, long place, long count) const {
    if (!noise) return v;
    const Words drawn = load_halves(reinterpret_cast<const bf16*>(noise + place), count);
    EACH_PIECE {
      const IntLanes number = (IntLanes)(drawn.p[i] << 16) >> 16;  // with its sign
      v.p[i] = number >= static_cast<int32_t>(least) ? v.p[i] * scale : Lanes{};
    }
    return v;
  }
};

// `part` of `parts` of expert e's hidden units, for its rows [start, end). Its share of [n, M] begins at row `sums` of
// the partial sums.
struct Item {
  long e, start, end, part, parts, sums;
};

// to[i] = from[2 i] for as many of `count` as whole vectors take; the number of these. It reads no number behind the last.
template <unsigned... j>
INLINE WordLanes evens(WordLanes a, WordLanes b, std::integer_sequence<unsigned, j...>) {
  return SHUFFLE(a, b, (2 * j)...);
}
inline long copy_evens(float* to, const float* from, long count) {
  long i = 0;
  for (; i + kLanes < count; i += kLanes) {
    WordLanes a, b;
    std::memcpy(&a, from + 2 * i, sizeof a);
    std::memcpy(&b, from + 2 * i + kLanes, sizeof b);
    a = evens(a, b, std::make_integer_sequence<unsigned, kLanes>());
    std::memcpy(to + i, &a, sizeof a);
  }
  return i;
}
inline long copy_evens(bf16* to, const bf16* from, long count) {
  long i = 0;
  for (; i + kLanes < count; i += kLanes) {
    WordLanes pairs;
    std::memcpy(&pairs, from + 2 * i, sizeof pairs);
    const HalfLanes low = __builtin_convertvector(pairs, HalfLanes);
    std::memcpy(to + i, &low, sizeof low);
  }
  return i;
}

// A weight [E, H, M], or transposed [E, M, H], or with gaps between all numbers: then a step's part is copied to `room`
// [M, units] first. W is const, but for gradients.
template <class W>
struct Weight {
  W* data;
  long expert, unit, model;  // numbers from one expert, hidden unit or model dim to the next

  bool transposed() const { return model != 1; }
  bool has_gaps() const { return data && transposed() && unit != 1; }
  W* at(long e, long h) const { return data + e * expert + h * unit; }
  // Memory of `units` hidden units, for the caches; none of a transposed weight, which is in many places.
  Ahead ahead(long e, long h, long units) const {
    return transposed() ? Ahead() : Ahead(at(e, h), units * unit);
  }
  // As B of a product over the model dim, [units, M].
  template <class P>
  Packed<P, kB> over_model(int32_t* to, void* room, long e, long h, long units, long M) const {
    const Packed<P, kB> packed(to, units, M);
    if (!transposed()) return packed.template pack<kAlongK>(at(e, h), unit);
    if (!has_gaps()) return packed.template pack<kAcrossK>(at(e, h), model);
    return packed.template pack<kAcrossK>(without_gaps(room, e, h, units, M), units);
  }
  // As B of a product over the hidden units, [M, units].
  template <class P>
  Packed<P, kB> over_units(int32_t* to, void* room, long e, long h, long units, long M) const {
    const Packed<P, kB> packed(to, M, units);
    if (!transposed()) return packed.template pack<kAcrossK>(at(e, h), unit);
    if (!has_gaps()) return packed.template pack<kAlongK>(at(e, h), model);
    return packed.template pack<kAlongK>(without_gaps(room, e, h, units, M), units);
  }
  const W* without_gaps(void* room, long e, long h, long units, long M) const {
    auto* to = static_cast<std::remove_const_t<W>*>(room);
    for (long m = 0; m < M; m++) {
      const W* from = at(e, h) + m * model;
      long u = unit == 2 ? copy_evens(to + m * units, from, units) : 0;
      for (; u < units; u++) to[m * units + u] = from[u * unit];
    }
    return to;
  }
};

template <class T, class W>
struct Network {
  const T* rows;
  Weight<const W> w1, w2, w3;  // w3 without data: the experts are not gated
  const float *b1, *b2, *b3;  // or null
  const int32_t* ends;
  long num_experts, model_dim, hidden_dim;
  Dropout dropout;
  long threads;
  bool packed;  // the weights, by pack_weight

  bool gated() const { return w3.data; }
  bool has_gaps() const { return w1.has_gaps() || w2.has_gaps() || w3.has_gaps(); }
  const float* bias_of(const float* bias, long e, long unit) const {
    return bias ? bias + e * hidden_dim + unit : nullptr;
  }
  long step() const { return std::min(hidden_step(model_dim), hidden_dim); }
  long hidden_begin(const Item& item) const { return item.part * hidden_dim / item.parts / 32 * 32; }
  long hidden_end(const Item& item) const {
    return item.part + 1 == item.parts ? hidden_dim : (item.part + 1) * hidden_dim / item.parts / 32 * 32;
  }
};

// An expert's whole weight, packed: w1 and w3 [H, M], of which a step takes panels, or w2 [M, H], of which it takes
// blocks.
template <class P, class W>
Packed<P, kB> packed_expert(const W* all, long e, long H, long M, bool is_w2) {
  int32_t* start = reinterpret_cast<int32_t*>(const_cast<W*>(all + e * H * M));
  return is_w2 ? Packed<P, kB>(start, M, H) : Packed<P, kB>(start, H, M);
}
template <class P>
Packed<P, kB> panels_of(const Packed<P, kB>& w1, long unit, long units) {
  return Packed<P, kB>(w1.data + unit / 16 * w1.blocks * 256, units, w1.depth);
}
template <class P>
Packed<P, kB> blocks_of(const Packed<P, kB>& w2, long unit, long units) {
  return Packed<P, kB>(w2.data + unit / Shape<P>::depth * 256, w2.extent, units, w2.blocks);
}

// One item for each expert, or several, so that all threads have work to the end; the largest first.
struct Items {
  std::vector<Item> all;
  std::unique_ptr<std::atomic<long>[]> unfinished;  // parts of each expert
  long partial_rows = 0, most_rows = 0;

  template <class T, class W>
  explicit Items(const Network<T, W>& net) : unfinished(new std::atomic<long>[net.num_experts]) {
    const long total = net.ends[net.num_experts - 1], most_parts = net.hidden_dim / net.step();  // none without units
    for (long e = 0; e < net.num_experts; e++) {
      const long start = e ? net.ends[e - 1] : 0, end = net.ends[e], n = end - start;
      const long parts = n ? std::clamp((n * 4 * net.threads + total / 2) / total, 1L, most_parts) : 0;
      unfinished[e] = parts;
      most_rows = std::max(most_rows, n);
      for (long part = 0; part < parts; part++, partial_rows += n)
        all.push_back({e, start, end, part, parts, partial_rows});
    }
    std::stable_sort(all.begin(), all.end(), [](const Item& a, const Item& b) {
      return (a.end - a.start) * b.parts > (b.end - b.start) * a.parts;
    });
  }

  // When all parts of an expert are there: their sum in the order of the parts, and the bias.
  template <class T>
  void finish(const Item& item, const float* sums, const float* bias, T* out, long model_dim) {
    if (--unfinished[item.e]) return;
    const long n = item.end - item.start;
    sums += (item.sums - item.part * n) * model_dim;
    for (long i = 0; i < n; i++) {
      for (long j = 0; j < model_dim; j += 16) {
        const long count = std::min(model_dim - j, 16L);
        V sum = bias ? load(bias + j, count) : broadcast(0.0f);
        for (long part = 0; part < item.parts; part++)
          sum = sum + load(sums + (part * n + i) * model_dim + j, count);
        store(out + (item.start + i) * model_dim + j, sum, count);
      }
    }
  }
};

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

// Room for the partial sums of a product whose results go to `place`: there, if it is for fp32.
inline float* or_else(float* place, float*) { return place; }
inline float* or_else(bf16*, float* room) { return room; }

template <class P>
struct ForwardSpace {
  int32_t *x, *w, *packed_h;
  P *h, *z;  // z: x w1^T + b1 of gated experts
  float* so_far;
  char* room;  // of Weight

  ForwardSpace(Arena& arena, long n, long step, long M, bool gated, bool has_gaps)
      : x(arena.take<int32_t>(Packed<P, kA>::words(n, M))),
        w(arena.take<int32_t>(std::max(Packed<P, kB>::words(step, M), Packed<P, kB>::words(M, step)))),
        packed_h(arena.take<int32_t>(Packed<P, kA>::words(n, step))), h(arena.take<P>(n * step)),
        z(arena.take<P>(gated ? n * step : 0)),
        so_far(arena.take<float>(std::is_same<P, float>::value ? 0 : n * step)),
        room(arena.take<char>(has_gaps ? 4 * step * M : 0)) {}
  template <class Net>
  static long row_step(const Net& net, long) {
    return ::row_step(net.packed);
  }
};

template <class P, class W>
struct BackwardSpace {
  int32_t *dy, *wide_dy, *x, *w, *packed_h;
  P *h, *dz, *du;  // du: the gradient of x w3^T + b3 of gated experts
  float* so_far;
  char* room;  // of Weight

  BackwardSpace(Arena& arena, long n, long step, long M, bool gated, bool has_gaps)
      : dy(arena.take<int32_t>(Packed<P, kA>::words(n, M))),
        wide_dy(arena.take<int32_t>(std::max(Packed<P, kA>::words(M, n), Packed<P, kB>::words(M, n)))),
        x(arena.take<int32_t>(std::max(Packed<P, kA>::words(M, n), Packed<P, kB>::words(M, n)))),
        w(arena.take<int32_t>(std::max(Packed<P, kB>::words(step, M), Packed<P, kB>::words(M, step)))),
        packed_h(arena.take<int32_t>(std::max({Packed<P, kA>::words(step, n), Packed<P, kB>::words(step, n),
                                               Packed<P, kA>::words(n, step)}))),
        h(arena.take<P>(n * step)), dz(arena.take<P>(n * step)), du(arena.take<P>(gated ? n * step : 0)),
        so_far(arena.take<float>(std::is_same<P, float>::value ? 0 : n * step)),
        room(arena.take<char>(has_gaps ? 4 * step * M : 0)) {}
  // gradients in bf16 are rounded once, not after every step
  template <class Net>
  static long row_step(const Net&, long n) {
    return std::is_same<W, bf16>::value ? std::max(n, 1L) : ::row_step(false);
  }
};

// The memory of a call: partial sums, then each thread's own space.
template <class Space, class T, class W>
long space_of(const Network<T, W>& net) {
  const Items items(net);
  Arena sums{nullptr}, own{nullptr};
  sums.take<float>(items.partial_rows * net.model_dim);
  Space(own, std::min(items.most_rows, Space::row_step(net, items.most_rows)), net.step(), net.model_dim, net.gated(),
        net.has_gaps());
  return sums.used + own.used * net.threads;
}

// run(items, item, space, sums) for every item, on all threads.
template <class Space, class T, class W, class Run>
void for_each_item(const Network<T, W>& net, char* memory, Run run) {
  Items items(net);
  Arena shared{memory};
  float* sums = shared.take<float>(items.partial_rows * net.model_dim);
#pragma omp parallel num_threads(net.threads)
  {
    const long n = std::min(items.most_rows, Space::row_step(net, items.most_rows));
    Arena counted{nullptr};
    Space(counted, n, net.step(), net.model_dim, net.gated(), net.has_gaps());
    Arena own{memory + shared.used + counted.used * omp_get_thread_num()};
    const Space space(own, n, net.step(), net.model_dim, net.gated(), net.has_gaps());
    const Mode<ProductType<T>> mode;
#pragma omp for schedule(dynamic, 1) nowait
    for (size_t i = 0; i < items.all.size(); i++) run(items, items.all[i], space, sums);
    finish_streams();
  }
}

}  // namespace
