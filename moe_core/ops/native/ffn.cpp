// The experts' networks on a CPU. ../ffn/cpp.py calls this and says what is computed. It is compiled once for each set of
// instructions.
//
// E experts, N rows, n rows of one expert, M model dim, H hidden dim

#include <sys/syscall.h>
#include <unistd.h>

#include "activations.hpp"
#include "ffn.hpp"
#include "ffn_work.hpp"

namespace {

// 1. The networks, forward and backward

template <class Act, class T, class W>
void forward(const Network<T, W>& net, char* memory, T* out, T* hidden) {
  using P = ProductType<T>;
  using Space = ForwardSpace<P>;
  const long M = net.model_dim, H = net.hidden_dim, step = net.step();
  T* hidden_u = hidden ? hidden + net.ends[net.num_experts - 1] * H : nullptr;  // both are kept: [2, N, H]
  for_each_item<Space>(net, memory, [&](Items& items, const Item& item, const Space& space, float* sums) {
    const long begin = net.hidden_begin(item), end = net.hidden_end(item), row_step = Space::row_step(net, 0);
    const auto nothing = [](long, long) {};
    for (long start = item.start; start < item.end; start += row_step) {
      const long n = std::min(row_step, item.end - start);
      float* sum = sums + (item.sums + start - item.start) * M;
      const auto x = Packed<P, kA>(space.x, n, M).template pack<kAlongK>(net.rows + start * M, M);
      for (long unit = begin; unit < end; unit += step) {
        const long units = std::min(step, end - unit), e = item.e;
        // x w^T + bias of these units, in use(index in space.h, place in the hidden layer, count, v).
        const auto product_with = [&](const Weight<const W>& weight, const float* bias, Ahead ahead, float* so_far, auto use) {
          const auto w = net.packed ? panels_of(packed_expert<P>(weight.data, e, H, M, false), unit, units)
                                    : weight.template over_model<P>(space.w, space.room, e, unit, units, M);
          long_product(x, w, net.packed ? Ahead() : ahead, so_far, nothing, [&](long i, long j, long count, V v) {
            if (bias) v = v + load(bias + j, count);
            use(i * units + j, (start + i) * H + unit + j, count, v);
          });
        };
        const Ahead w2_ahead = net.w2.ahead(e, unit, units);
        const float *b1 = net.bias_of(net.b1, e, unit), *b3 = net.bias_of(net.b3, e, unit);
        if (net.gated()) {
          const Ahead w3_ahead = net.w3.ahead(e, unit, units);
          product_with(net.w1, b1, w3_ahead, or_else(space.z, space.so_far), [&](long at, long place, long count, V v) {
            if (hidden) store(hidden + place, v, count);
            store(space.z + at, v, count);
          });
          product_with(net.w3, b3, w2_ahead, or_else(space.h, space.so_far), [&](long at, long place, long count, V v) {
            if (hidden) store(hidden_u + place, v, count);
            const V value = Gated<Act>::of(load(space.z + at, count), v).value;
            store(space.h + at, net.dropout(value, place, count), count);
          });
        } else {
          product_with(net.w1, b1, w2_ahead, or_else(space.h, space.so_far), [&](long at, long place, long count, V v) {
            if (hidden) store(hidden + place, v, count);
            store(space.h + at, net.dropout(Act::of(v).value, place, count), count);
          });
        }
        const auto h = Packed<P, kA>(space.packed_h, n, units).template pack<kAlongK>(space.h, units);
        const auto w2 = net.packed ? blocks_of(packed_expert<P>(net.w2.data, e, H, M, true), unit, units)
                                   : net.w2.template over_units<P>(space.w, space.room, e, unit, units, M);
        const long next = unit + units;
        const bool reads_next = next < end && !net.packed;
        const Ahead ahead = reads_next ? net.w1.ahead(e, next, std::min(step, end - next)) : Ahead();
        product_into(h, w2, ahead, sum, M, unit > begin, false);
      }
    }
    items.finish(item, sums, net.b2 ? net.b2 + item.e * M : nullptr, out, M);
  });
}

template <class T, class W>
struct Gradients {  // each may be null: not needed
  T* rows;
  Weight<W> w1, w2, w3;
  float *b1, *b2, *b3;
};

// Rows [n, M] as the operand of a weight's gradient, which is the product's B, or A of a transposed weight.
template <class P, class T, class W>
void pack_wide(int32_t* to, const T* rows, long n, long M, const Weight<W>& gradient) {
  if (gradient.transposed())
    Packed<P, kA>(to, M, n).template pack<kAcrossK>(rows, M);
  else
    Packed<P, kB>(to, M, n).template pack<kAcrossK>(rows, M);
}

template <class Act, class T, class W>
void backward(const Network<T, W>& net, char* memory, const T* grad, const T* hidden, const Gradients<T, W>& to) {
  using P = ProductType<T>;
  using Space = BackwardSpace<P, W>;
  const long M = net.model_dim, H = net.hidden_dim, step = net.step();
  const T* hidden_u = hidden + net.ends[net.num_experts - 1] * H;
  for_each_item<Space>(net, memory, [&](Items& items, const Item& item, const Space& space, float* sums) {
    const long begin = net.hidden_begin(item), end = net.hidden_end(item), e = item.e;
    const long row_step = Space::row_step(net, item.end - item.start);
    for (long start = item.start; start < item.end; start += row_step) {
      const long n = std::min(row_step, item.end - start);
      const bool add = start > item.start;
      float* sum = sums + (item.sums + start - item.start) * M;
      const auto dy = Packed<P, kA>(space.dy, n, M).template pack<kAlongK>(grad + start * M, M);
      if (to.w2.data) pack_wide<P>(space.wide_dy, grad + start * M, n, M, to.w2);
      if (to.w1.data || to.w3.data) pack_wide<P>(space.x, net.rows + start * M, n, M, to.w1);
      if (to.b2 && item.part == 0) sum_rows(grad + start * M, n, M, to.b2 + e * M, add);
      for (long unit = begin; unit < end; unit += step) {
        const long units = std::min(step, end - unit);
        // The gradient of a weight: d [n, units] and the rows that pack_wide packed, multiplied over n.
        const auto by_weight = [&](const P* d, int32_t* wide, const Weight<W>& gradient) {
          if (gradient.transposed()) {
            const auto b = Packed<P, kB>(space.packed_h, units, n).template pack<kAcrossK>(d, units);
            product_into(Packed<P, kA>(wide, M, n), b, Ahead(), gradient.at(e, unit), gradient.model, add, true);
          } else {
            const auto a = Packed<P, kA>(space.packed_h, units, n).template pack<kAcrossK>(d, units);
            product_into(a, Packed<P, kB>(wide, M, n), Ahead(), gradient.at(e, unit), gradient.unit, add, true);
          }
        };
        const auto w2 = net.w2.template over_model<P>(space.w, space.room, e, unit, units, M);
        const auto soon = [&](long i, long j) {
          __builtin_prefetch(hidden + (start + i) * H + unit + j);
          __builtin_prefetch(hidden + (start + i) * H + unit + j + 16);
          if (!net.gated()) return;
          __builtin_prefetch(hidden_u + (start + i) * H + unit + j);
          __builtin_prefetch(hidden_u + (start + i) * H + unit + j + 16);
        };
        const Ahead w1_ahead = to.rows ? net.w1.ahead(e, unit, units) : Ahead();
        long_product(dy, w2, w1_ahead, or_else(space.dz, space.so_far), soon, [&](long i, long j, long count, V v) {
          const long place = (start + i) * H + unit + j, at = i * units + j;
          const V z = load(hidden + place, count), dh = net.dropout(v, place, count);
          if (net.gated()) {
            const GatedValue g = Gated<Act>::of(z, load(hidden_u + place, count));
            store(space.h + at, net.dropout(g.value, place, count), count);
            store(space.dz + at, dh * g.by_z, count);
            store(space.du + at, dh * g.by_u, count);
          } else {
            const Activated a = Act::of(z);
            store(space.h + at, net.dropout(a.value, place, count), count);
            store(space.dz + at, dh * a.slope, count);
          }
        });
        if (to.w2.data) by_weight(space.h, space.wide_dy, to.w2);
        // The gradients through one product of x: of its weight and bias, and of the rows.
        const auto through = [&](const P* d, const Weight<const W>& w, const Weight<W>& to_w, float* to_b, Ahead ahead,
                                 bool add_rows) {
          if (to_w.data) by_weight(d, space.x, to_w);
          if (to_b) sum_rows(d, n, units, to_b + e * H + unit, add);
          if (to.rows) {
            const auto packed = Packed<P, kA>(space.packed_h, n, units).template pack<kAlongK>(d, units);
            const auto packed_w = w.template over_units<P>(space.w, space.room, e, unit, units, M);
            product_into(packed, packed_w, ahead, sum, M, add_rows, false);
          }
        };
        const long next = unit + units;
        const Ahead w2_ahead = next < end ? net.w2.ahead(e, next, std::min(step, end - next)) : Ahead();
        const Ahead w3_ahead = net.w3.ahead(e, unit, units);
        through(space.dz, net.w1, to.w1, to.b1, net.gated() ? w3_ahead : w2_ahead, unit > begin);
        if (net.gated()) through(space.du, net.w3, to.w3, to.b3, w2_ahead, true);
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
    const auto of = [](const void* data, const long* strides) {
      return Weight<const W>{static_cast<const W*>(data), strides[0], strides[1], strides[2]};
    };
    return Network<T, W>{static_cast<const T*>(p.rows), of(p.w1, p.w1_strides), of(p.w2, p.w2_strides),
                         of(p.w3, p.w3_strides), p.b1, p.b2, p.b3, p.ends, p.num_experts, p.model_dim, p.hidden_dim,
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
    using W = std::remove_const_t<std::remove_pointer_t<decltype(net.w1.data)>>;
    return space_of<BackwardSpace<ProductType<T>, W>>(net);
  });
}

// fp32 weights [E, H, M], H and M multiples of 32, to as many numbers in fp32 or bf16, in the order of products.
void pack_weight(const float* w, void* to, long E, long H, long M, long is_w2, long to_bf16, long threads) {
  const auto pack = [&](auto* to) {
    using P = std::remove_pointer_t<decltype(to)>;
#pragma omp parallel for num_threads(threads)
    for (long e = 0; e < E; e++) {
      const auto packed = packed_expert<P>(to, e, H, M, is_w2 != 0);
      if (is_w2)
        packed.template pack<kAcrossK>(w + e * H * M, M);
      else
        packed.template pack<kAlongK>(w + e * H * M, M);
    }
  };
  if (to_bf16)
    pack(static_cast<ProductType<bf16>*>(to));
  else
    pack(static_cast<float*>(to));
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
                      void* grad_w1, float* grad_b1, void* grad_w2, float* grad_b2, void* grad_w3, float* grad_b3) {
  typed(*p, [&](const auto& net) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(net.rows)>>;
    using W = std::remove_const_t<std::remove_pointer_t<decltype(net.w1.data)>>;
    const auto of = [](void* data, const long* strides) {
      return Weight<W>{static_cast<W*>(data), strides[0], strides[1], strides[2]};
    };
    const Gradients<T, W> to = {static_cast<T*>(grad_rows), of(grad_w1, p->grad_w1_strides),
                                of(grad_w2, p->grad_w2_strides), of(grad_w3, p->grad_w1_strides),
                                grad_b1, grad_b2, grad_b3};
    activated(p->activation, [&](auto act) {
      backward<decltype(act)>(net, memory, static_cast<const T*>(grad), static_cast<const T*>(hidden), to);
    });
  });
}
}
