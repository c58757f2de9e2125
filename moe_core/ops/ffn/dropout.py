"""Dropout of the hidden layer in the kernels.

Each element of the hidden layer has a noise value, an int16. If the noise is at least `threshold`,
the element is kept and multiplied by `scale`. Otherwise it becomes 0. C++ reads noise that was
drawn before. The Triton kernels compute the noise from a seed, the row and the column, in
the forward and the backward pass, so no noise is stored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_VALUES = 65536  # of an int16


class Dropout(NamedTuple):
    """The threshold and the scale for one dropout probability."""

    threshold: int
    scale: float  # 1 / share of elements that are kept

    @classmethod
    def of(cls, share: float) -> "Dropout":
        """The rule that drops `share` of the elements, rounded to 1/65536 and below 1."""
        dropped = min(round(share * _VALUES), _VALUES - 1)
        return cls(dropped - _VALUES // 2, _VALUES / (_VALUES - dropped))


def draw_seed(device: torch.device) -> Tensor:
    """A seed of the kernels' noise, int64 [1], from the generator of the device."""
    return torch.empty(1, dtype=torch.int64, device=device).random_(0, 2**32)


@torch.library.custom_op(
    "moe_core::dropout_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dropout_seed(like: Tensor) -> Tensor:
    """int64 [1] from the generator of the device of `like`."""
    return draw_seed(like.device)


@torch.library.custom_op(
    "moe_core::dropout_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dropout_noise(rows: Tensor, w1: Tensor) -> Tensor:
    """The noise, int16, one value for each element of the hidden layer."""
    size = rows.shape[0] * w1.shape[1]  # in every dtype the same, so that the masks are the same
    # Each int64 from the generator gives four int16, because the generator is slow on a CPU.
    draws = torch.empty(-(-size // 4), dtype=torch.int64, device=rows.device)
    return draws.random_(-(2**63), None).view(torch.int16)[:size]


@dropout_seed.register_fake
def _(like):
    return like.new_empty(1, dtype=torch.int64)


@dropout_noise.register_fake
def _(rows, w1):
    return rows.new_empty(rows.shape[0] * w1.shape[1], dtype=torch.int16)
