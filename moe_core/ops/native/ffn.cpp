// The experts' networks on a CPU. ../ffn/cpp.py calls this and says what is computed. It is compiled once for each set of
// instructions.
//
// E experts, N rows, n rows of one expert, M model dim, H hidden dim

#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "ffn.hpp"
#include "product.hpp"

namespace {

// Rows of an expert that are worked on at once: each further step packs its weights again, where they are not.
inline long row_step(bool packed_weights) { return packed_weights ? 512 : 4096; }

// Hidden units whose weights are packed at once: 512 KiB in fp32, to stay in the L2 cache.
inline long hidden_step(long model_dim) { return std::max(32L, (128L << 10) / model_dim / 32 * 32); }

// 1. The work, divided

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

template <class T, class W>
struct Network {
  const T* rows;
  const W *w1, *w2;
  const float *b1, *b2;  // or null
  const int32_t* ends;
  long num_experts, model_dim, hidden_dim;
  Dropout dropout;
  long threads;
  bool packed;  // w1 and w2, by pack_weights

  long step() const { return std::min(hidden_step(model_dim), hidden_dim); }
  long hidden_begin(const Item& item) const { return item.part * hidden_dim / item.parts / 32 * 32; }
  long hidden_end(const Item& item) const {
    return item.part + 1 == item.parts ? hidden_dim : (item.part + 1) * hidden_dim / item.parts / 32 * 32;
  }
};

// An expert's whole weights [H, M], packed; a step takes a part of each, in panels or in blocks.
template <class P>
struct PackedExpert {
  Packed<P, kB> w1, w2;

  template <class W>
  PackedExpert(const W* all_w1, const W* all_w2, long e, long H, long M)
      : w1(at(all_w1, e * H * M), H, M), w2(at(all_w2, e * H * M), M, H) {}
  template <class W>
  static int32_t* at(const W* all, long place) {
    return reinterpret_cast<int32_t*>(const_cast<W*>(all + place));
  }
  Packed<P, kB> part_of_w1(long unit, long units) const {
    return Packed<P, kB>(w1.data + unit / 16 * w1.blocks * 256, units, w1.depth);
  }
  Packed<P, kB> part_of_w2(long unit, long units) const {
    return Packed<P, kB>(w2.data + unit / Shape<P>::depth * 256, w2.extent, units, w2.blocks);
  }
};

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

// Room for fp32 numbers: `place`, if it is for such.
inline float* or_new(Arena&, float* place, long) { return place; }
inline float* or_new(Arena& arena, bf16*, long count) { return arena.take<float>(count); }

template <class P>
struct ForwardSpace {
  int32_t *x, *w1, *w2, *packed_h;
  P* h;
  float* so_far;

  ForwardSpace(Arena& arena, long n, long step, long M)
      : x(arena.take<int32_t>(Packed<P, kA>::words(n, M))), w1(arena.take<int32_t>(Packed<P, kB>::words(step, M))),
        w2(arena.take<int32_t>(Packed<P, kB>::words(M, step))),
        packed_h(arena.take<int32_t>(Packed<P, kA>::words(n, step))), h(arena.take<P>(n * step)),
        so_far(or_new(arena, h, n * step)) {}
  template <class Net>
  static long row_step(const Net& net, long) {
    return ::row_step(net.packed);
  }
};

template <class P, class W>
struct BackwardSpace {
  int32_t *dy, *wide_dy, *x, *w, *packed_h;
  P *h, *dz;
  float* so_far;

  BackwardSpace(Arena& arena, long n, long step, long M)
      : dy(arena.take<int32_t>(Packed<P, kA>::words(n, M))), wide_dy(arena.take<int32_t>(Packed<P, kB>::words(M, n))),
        x(arena.take<int32_t>(Packed<P, kB>::words(M, n))),
        w(arena.take<int32_t>(std::max(Packed<P, kB>::words(step, M), Packed<P, kB>::words(M, step)))),
        packed_h(arena.take<int32_t>(std::max(Packed<P, kA>::words(step, n), Packed<P, kA>::words(n, step)))),
        h(arena.take<P>(n * step)), dz(arena.take<P>(n * step)), so_far(or_new(arena, dz, n * step)) {}
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
  Space(own, std::min(items.most_rows, Space::row_step(net, items.most_rows)), net.step(), net.model_dim);
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
    Space(counted, n, net.step(), net.model_dim);
    Arena own{memory + shared.used + counted.used * omp_get_thread_num()};
    const Space space(own, n, net.step(), net.model_dim);
    const Mode<ProductType<T>> mode;
#pragma omp for schedule(dynamic, 1) nowait
    for (size_t i = 0; i < items.all.size(); i++) run(items, items.all[i], space, sums);
    finish_streams();
  }
}

template <class Act, class T, class W>
void forward(const Network<T, W>& net, char* memory, T* out, T* hidden) {
  using P = ProductType<T>;
  using Space = ForwardSpace<P>;
  const long M = net.model_dim, H = net.hidden_dim, step = net.step();
  for_each_item<Space>(net, memory, [&](Items& items, const Item& item, const Space& space, float* sums) {
    const long begin = net.hidden_begin(item), end = net.hidden_end(item), row_step = Space::row_step(net, 0);
    for (long start = item.start; start < item.end; start += row_step) {
      const long n = std::min(row_step, item.end - start);
      float* sum = sums + (item.sums + start - item.start) * M;
      const auto x = Packed<P, kA>(space.x, n, M).template pack<kAlongK>(net.rows + start * M, M);
      for (long unit = begin; unit < end; unit += step) {
        const long units = std::min(step, end - unit), weight = (item.e * H + unit) * M, next = weight + units * M;
        const float* bias = net.b1 ? net.b1 + item.e * H + unit : nullptr;
        const PackedExpert<P> expert(net.w1, net.w2, item.e, H, M);
        const auto w1 = net.packed ? expert.part_of_w1(unit, units)
                                   : Packed<P, kB>(space.w1, units, M).template pack<kAlongK>(net.w1 + weight, M);
        const Ahead w2_ahead = net.packed ? Ahead() : Ahead(net.w2 + weight, units * M);
        const auto nothing = [](long, long) {};
        long_product(x, w1, w2_ahead, space.so_far, nothing, [&](long i, long j, long count, V v) {
          if (bias) v = v + load(bias + j, count);
          const long place = (start + i) * H + unit + j;
          if (hidden) store(hidden + place, v, count);
          store(space.h + i * units + j, net.dropout(Act::of(v).value, place, count), count);
        });
        const auto h = Packed<P, kA>(space.packed_h, n, units).template pack<kAlongK>(space.h, units);
        const auto w2 = net.packed ? expert.part_of_w2(unit, units)
                                   : Packed<P, kB>(space.w2, M, units).template pack<kAcrossK>(net.w2 + weight, M);
        const Ahead ahead = unit + units < end && !net.packed ? Ahead(net.w1 + next, units * M) : Ahead();
        product_into(h, w2, ahead, sum, M, unit > begin, false);
      }
    }
    items.finish(item, sums, net.b2 ? net.b2 + item.e * M : nullptr, out, M);
  });
}

template <class T, class W>
struct Gradients {  // each may be null: not needed
  T* rows;
  W *w1, *w2;
  float *b1, *b2;
};

template <class Act, class T, class W>
void backward(const Network<T, W>& net, char* memory, const T* grad, const T* hidden, const Gradients<T, W>& to) {
  using P = ProductType<T>;
  using Space = BackwardSpace<P, W>;
  const long M = net.model_dim, H = net.hidden_dim, step = net.step();
  for_each_item<Space>(net, memory, [&](Items& items, const Item& item, const Space& space, float* sums) {
    const long begin = net.hidden_begin(item), end = net.hidden_end(item);
    const long row_step = Space::row_step(net, item.end - item.start);
    for (long start = item.start; start < item.end; start += row_step) {
      const long n = std::min(row_step, item.end - start);
      const bool add = start > item.start;
      float* sum = sums + (item.sums + start - item.start) * M;
      const auto dy = Packed<P, kA>(space.dy, n, M).template pack<kAlongK>(grad + start * M, M);
      const Packed<P, kB> wide_dy(space.wide_dy, M, n), x(space.x, M, n);
      if (to.w2) wide_dy.template pack<kAcrossK>(grad + start * M, M);
      if (to.w1) x.template pack<kAcrossK>(net.rows + start * M, M);
      if (to.b2 && item.part == 0) sum_rows(grad + start * M, n, M, to.b2 + item.e * M, add);
      for (long unit = begin; unit < end; unit += step) {
        const long units = std::min(step, end - unit), weight = (item.e * H + unit) * M, next = weight + units * M;
        const auto w2 = Packed<P, kB>(space.w, units, M).template pack<kAlongK>(net.w2 + weight, M);
        const auto soon = [&](long i, long j) {
          __builtin_prefetch(hidden + (start + i) * H + unit + j);
          __builtin_prefetch(hidden + (start + i) * H + unit + j + 16);
        };
        const Ahead w1_ahead = to.rows ? Ahead(net.w1 + weight, units * M) : Ahead();
        long_product(dy, w2, w1_ahead, space.so_far, soon, [&](long i, long j, long count, V v) {
          const long place = (start + i) * H + unit + j;
          const Activated a = Act::of(load(hidden + place, count));
          store(space.h + i * units + j, net.dropout(a.value, place, count), count);
          store(space.dz + i * units + j, net.dropout(v, place, count) * a.slope, count);
        });
        if (to.w2) {
          const auto h = Packed<P, kA>(space.packed_h, units, n).template pack<kAcrossK>(space.h, units);
          product_into(h, wide_dy, Ahead(), to.w2 + weight, M, add, true);
        }
        if (to.w1) {
          const auto dz = Packed<P, kA>(space.packed_h, units, n).template pack<kAcrossK>(space.dz, units);
          product_into(dz, x, Ahead(), to.w1 + weight, M, add, true);
        }
        if (to.b1) sum_rows(space.dz, n, units, to.b1 + item.e * H + unit, add);
        if (to.rows) {
          const auto dz = Packed<P, kA>(space.packed_h, n, units).template pack<kAlongK>(space.dz, units);
          const auto w1 = Packed<P, kB>(space.w, M, units).template pack<kAcrossK>(net.w1 + weight, M);
          const Ahead ahead = unit + units < end ? Ahead(net.w2 + next, units * M) : Ahead();
          product_into(dz, w1, ahead, sum, M, unit > begin, false);
        }
      }
    }
    if (to.rows) items.finish(item, sums, nullptr, to.rows, M);
  });
}

// 2. What Python calls

// run(network) in the types of the problem; there are no fp32 rows with bf16 weights.
template <class Run>
auto typed(const Problem& p, Run run) {
  const auto network = [&](auto row, auto weight) {
    using T = decltype(row);
    using W = decltype(weight);
    return Network<T, W>{static_cast<const T*>(p.rows), static_cast<const W*>(p.w1), static_cast<const W*>(p.w2),
                         p.b1, p.b2, p.ends, p.num_experts, p.model_dim, p.hidden_dim,
                         Dropout{p.noise, p.least, p.scale}, p.threads, p.packed != 0};
  };
  if (!p.rows_bf16) return run(network(float(), float()));
  return p.weights_bf16 ? run(network(bf16(), bf16())) : run(network(bf16(), float()));
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

// Bytes of memory that a call works in.
long forward_space(const Problem* p) {
  return typed(*p, [](const auto& net) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(net.rows)>>;
    return space_of<ForwardSpace<ProductType<T>>>(net);
  });
}

long backward_space(const Problem* p) {
  return typed(*p, [](const auto& net) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(net.rows)>>;
    using W = std::remove_const_t<std::remove_pointer_t<decltype(net.w1)>>;
    return space_of<BackwardSpace<ProductType<T>, W>>(net);
  });
}

// fp32 weights [E, H, M], H and M multiples of 32, to as many numbers in fp32 or bf16, in the order of products.
void pack_weights(const float* w1, const float* w2, void* to_w1, void* to_w2, long E, long H, long M, long to_bf16,
                  long threads) {
  const auto pack = [&](auto* to_w1, auto* to_w2) {
    using P = std::remove_pointer_t<decltype(to_w1)>;
#pragma omp parallel for num_threads(threads)
    for (long e = 0; e < E; e++) {
      const PackedExpert<P> packed(to_w1, to_w2, e, H, M);
      packed.w1.template pack<kAlongK>(w1 + e * H * M, M);
      packed.w2.template pack<kAcrossK>(w2 + e * H * M, M);
    }
  };
  if (to_bf16)
    pack(static_cast<ProductType<bf16>*>(to_w1), static_cast<ProductType<bf16>*>(to_w2));
  else
    pack(static_cast<float*>(to_w1), static_cast<float*>(to_w2));
}

void experts_forward(const Problem* p, char* memory, void* out, void* hidden) {
  typed(*p, [&](const auto& net) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(net.rows)>>;
    activated(p->activation, [&](auto act) {
      forward<decltype(act)>(net, memory, static_cast<T*>(out), static_cast<T*>(hidden));
    });
  });
}

void experts_backward(const Problem* p, char* memory, const void* grad, const void* hidden, void* grad_rows,
                      void* grad_w1, void* grad_w2, float* grad_b1, float* grad_b2) {
  typed(*p, [&](const auto& net) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(net.rows)>>;
    using W = std::remove_const_t<std::remove_pointer_t<decltype(net.w1)>>;
    const Gradients<T, W> to = {static_cast<T*>(grad_rows), static_cast<W*>(grad_w1), static_cast<W*>(grad_w2), grad_b1,
                                grad_b2};
    activated(p->activation, [&](auto act) {
      backward<decltype(act)>(net, memory, static_cast<const T*>(grad), static_cast<const T*>(hidden), to);
    });
  });
}
}
