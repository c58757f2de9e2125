"""Weights of experts in int8."""

# E experts, M model dim, H hidden dim

from typing import NamedTuple

from torch import Tensor


class Int8Weights(NamedTuple):
    """Weights of all experts of a rank: `weight[e, o, i] = scale[e, o] * q[e, o, i]`.

    q1 and q2 are int8, or int32 in the memory layout of the C++ kernels. The sums are those of a
    row of `weight`: they multiply the offset of the rows' numbers.
    """

    q1: Tensor  # [E, H, M]
    scale1: Tensor  # [E, H] fp32
    sum1: Tensor  # [E, H] fp32
    b1: Tensor | None  # [E, H] fp32
    q2: Tensor  # [E, M, H]
    scale2: Tensor  # [E, M] fp32
    sum2: Tensor  # [E, M] fp32
    b2: Tensor | None  # [E, M] fp32


class Int8Inputs(NamedTuple):
    """The arguments of the op `moe_core::int8_ffn`, in its order."""

    rows: Tensor  # [N, M]
    q1: Tensor
    scale1: Tensor
    sum1: Tensor
    b1: Tensor | None
    q2: Tensor
    scale2: Tensor
    sum2: Tensor
    b2: Tensor | None
    offsets: Tensor  # [E] int32
    activation: str
    kernels: str
