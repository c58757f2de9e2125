"""Dropout of the hidden layer. All forms use the same rule.

Each element of the hidden layer has a noise value, an int16. If the noise is at least `threshold`,
the element is kept and multiplied by `scale`. Otherwise it becomes 0. Forms on a CPU read noise
that was drawn before. The Triton kernels compute the noise from a seed, the row and the column
(`seeded_noise`), in the forward and the backward pass, so no noise is stored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_VALUES = 65536  # of an int16
_MASK = 2**32 - 1


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
    """A seed for `seeded_noise`, int64 [1], from the generator of the device."""
    return torch.empty(1, dtype=torch.int64, device=device).random_(0, 2**32)


def seeded_noise(seed: Tensor, num_rows: int, hidden_dim: int) -> Tensor:
    """The noise, int16 [num_rows, hidden_dim], of a seed: the specification for the kernels.

    A hash of (seed, row) is the state of a row. The noise is the upper half of a hash of the state
    and the column. This takes a tenth of the instructions of Philox (triton.language.rand). Philox
    would take longer than the experts' products (docs/explanation/performance.md).
    """
    row = torch.arange(num_rows, device=seed.device).unsqueeze(1)
    column = torch.arange(hidden_dim, device=seed.device)
    state = _hash(_hash(row) ^ seed)
    noise = _hash((state + column * 0x9E3779B9) & _MASK) >> 16
    return (noise - _VALUES // 2).to(torch.int16)


def _hash(x: Tensor) -> Tensor:
    """A hash of 32-bit integers, stored in int64: "lowbias32" of C. Wellons' hash-prospector."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
