"""Activations and dropout as Triton functions of tiles, for `triton_kernels`."""

# H hidden dim

import triton
import triton.language as tl

# Indices in backend.KERNEL_ACTIVATIONS.
_GELU, _RELU, _SILU, _CLAMPED_SWIGLU = (tl.constexpr(i) for i in range(4))


@triton.jit
def _normal(z):
    """The standard normal distribution function and its density.

    erf is approximated to 1.5e-7 by formula 7.1.26 of Abramowitz and Stegun.
    """
    x = tl.abs(z) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * x)
    density = tl.exp(-x * x)
    tail = 0.5 * density * t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )  # fmt: skip
    return tl.where(z < 0, tail, 1.0 - tail), density * 0.3989422804014327


@triton.jit
def activation(z, ACTIVATION: tl.constexpr):
    """The activation of z and its derivative."""
    if ACTIVATION == _GELU:
        share, density = _normal(z)
        value, slope = z * share, share + z * density
    elif ACTIVATION == _RELU:
        value, slope = tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)
    else:
        share = tl.sigmoid(z)
        value, slope = z * share, share * (1.0 + z * (1.0 - share))
    return value, slope


@triton.jit
def gated_activation(z, u, ACTIVATION: tl.constexpr):
    """The hidden layer of gated experts from both products, and its derivatives by z and u."""
    if ACTIVATION == _CLAMPED_SWIGLU:
        low_z = tl.minimum(z, 7.0)
        factor = tl.minimum(tl.maximum(u, -7.0), 7.0) + 1.0
        share = tl.sigmoid(1.702 * low_z)
        swish = low_z * share
        by_z = tl.where(z > 7.0, 0.0, share * (1.0 + 1.702 * low_z * (1.0 - share)) * factor)
        by_u = tl.where(tl.abs(u) > 7.0, 0.0, swish)
        value = swish * factor
    else:
        by_u, slope = activation(z, ACTIVATION)
        value, by_z = by_u * u, slope * u
    return value, by_z, by_u


@triton.jit
def _hash(x):
    """The hash of moe_core.ops.ffn.dropout, for uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_factors(seed, n, columns, LEAST: tl.constexpr, SCALE: tl.constexpr):
    """The factors of dropout for rows n and `columns` of H: SCALE if noise >= LEAST, else 0."""
    state = _hash(_hash(n.to(tl.uint32)) ^ tl.load(seed).to(tl.uint32))
    steps = columns.to(tl.uint32) * 0x9E3779B9
    noise = _hash(state[:, None] + steps[None, :]) >> 16
    return tl.where(noise.to(tl.int32) - 32768 >= LEAST, SCALE, 0.0)
