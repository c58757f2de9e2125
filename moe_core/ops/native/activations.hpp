// Activations of the experts, and their slopes.

#pragma once

#include "vectors.hpp"

namespace {

// 1. Activations and their slopes

struct Activated {
  V value, slope;
};

// The standard normal distribution below z and sqrt(2 pi) times its density. Relative error of the smaller tail 5e-7:
// erfc(a / sqrt 2) exp(a^2 / 2) / 2 as a polynomial in 1 / (1 + 0.3 a), fitted to 2e-7.
struct Normal {
  V below, density;

  INLINE explicit Normal(V z) {
    const V one = broadcast(1.0f), a = absolute(z);
    density = exp_of_negative(a * a * broadcast(-0.5f));
    const V t = reciprocal(multiply_add(a, broadcast(0.3f), one));
    const V shape = polynomial(t, 0.0351786502f, -0.155142009f, 0.202815726f, -0.0504435711f, 0.126858339f, 0.100425489f,
                               0.120672747f, 0.119634531f);
    const V tail = shape * t * density;  // beyond a
    below = above(z, 0.0f, one - tail, tail);
  }
};

struct Gelu {
  static INLINE Activated of(V z) {
    const Normal normal(z);
    return {z * normal.below, multiply_add(z * normal.density, broadcast(0.398942280f), normal.below)};
  }
};

// For results that are kept in bf16: an error below a quarter of bf16's spacing, that at 2^-10 for smaller values and at
// 2^-8 for smaller slopes. The logarithm of (1 - below) / below is z times a polynomial in z^2, fitted to 5.
struct GeluInBf16 {
  static INLINE Activated of(V z) {
    const V one = broadcast(1.0f), t = smaller(z * z, broadcast(25.0f));
    const V power = z * polynomial(t, -2.04784e-6f, 5.90042457e-5f, 5.8633759e-4f, -0.105871477f, -2.3012649f);
    const V below = rough_reciprocal(one + rough_exp2(power)), value = z * below;
    const V slope = polynomial(t, 1.27750909e-5f, -2.86290386e-4f, -2.03209124e-3f, 0.220153547f, 1.59511528f);
    return {value, multiply_add(value * (one - below), slope, below)};  // slope: of the logarithm
  }
};

struct Relu {
  static INLINE Activated of(V z) {
    Activated a = {z, broadcast(1.0f)};
    EACH_PIECE a.value.p[i] = z.p[i] <= 0.0f ? Lanes{} : z.p[i];  // what is no number stays
    EACH_PIECE a.slope.p[i] = z.p[i] <= 0.0f ? Lanes{} : a.slope.p[i];
    return a;
  }
};

struct Silu {
  static INLINE Activated of(V z) {
    const V one = broadcast(1.0f), small = exp_of_negative(broadcast(0.0f) - absolute(z));
    const V gate = above(z, 0.0f, one, small) / (one + small);
    const V value = z * gate;
    return {value, multiply_add(value, one - gate, gate)};
  }
};

// 2. Of gated experts

// The hidden layer of gated experts from both products, and its slopes along them.
struct GatedValue {
  V value, by_z, by_u;
};
template <class Act>
struct Gated {
  static INLINE GatedValue of(V z, V u) {
    const Activated a = Act::of(z);
    return {a.value * u, a.slope * u, a.value};
  }
};
// z' sigmoid(1.702 z') (u' + 1) with z' = min(z, 7) and u' = u limited to -7 to 7
struct ClampedSwiglu {
  static INLINE Activated of(V z) { return Silu::of(z); }  // only of gated experts
};
template <>
struct Gated<ClampedSwiglu> {
  static INLINE GatedValue of(V z, V u) {
    const V one = broadcast(1.0f), zero = broadcast(0.0f), limit = broadcast(7.0f), alpha = broadcast(1.702f);
    const V low_z = above(z, 7.0f, limit, z), high_u = above(u, 7.0f, limit, u);
    const V factor = above(zero - high_u, 7.0f, zero - limit, high_u) + one;
    const Activated swish = Silu::of(low_z * alpha);
    const V value = swish.value / alpha;
    const V by_u = above(u, 7.0f, zero, above(zero - u, 7.0f, zero, value));
    return {value * factor, above(z, 7.0f, zero, swish.slope * factor), by_u};
  }
};

// run(activation) with the activation of this number in ../backend.py, for a hidden layer of type P.
template <class P, class Run>
void activated(long number, Run run) {
  if (number == 0) run(std::conditional_t<std::is_same<P, bf16>::value, GeluInBf16, Gelu>());
  if (number == 1) run(Relu());
  if (number == 2) run(Silu());
  if (number == 3) run(ClampedSwiglu());
}

}  // namespace
