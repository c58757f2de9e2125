"""Dropout of the hidden layer in the kernels.

Each element of the hidden layer has a noise value, an int16. If the noise is at least `threshold`,
the element is kept and multiplied by `scale`. Otherwise it becomes 0. The kernels compute the noise
from a seed, the row and the column, in the forward and the backward pass, so no noise is stored.
Triton's row is the row of the plan, C++'s is the choice (token and k).
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
    """A random seed, int64 [1], from the default generator of `like.device`."""
    return draw_seed(like.device)


@dropout_seed.register_fake
def _(like):
    return like.new_empty(1, dtype=torch.int64)
