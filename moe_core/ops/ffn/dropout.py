"""Dropout of the hidden layer, the same rule in every form.

A number of the hidden layer is kept where its noise, an int16, is at least `threshold`, and then
multiplied by `scale`. Forms on a CPU read noise that is drawn before. The Triton kernels compute it
in both directions from a seed, the row and the column (`seeded_noise`), so that nothing is stored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_VALUES = 65536  # of an int16
_MASK = 2**32 - 1


class Dropout(NamedTuple):
    """The rule for one share of dropped numbers."""

    threshold: int
    scale: float  # 1 / share of numbers that are kept

    @classmethod
    def of(cls, share: float) -> "Dropout":
        """`share` to the nearest 1/65536, below 1."""
        dropped = min(round(share * _VALUES), _VALUES - 1)
        return cls(dropped - _VALUES // 2, _VALUES / (_VALUES - dropped))


def draw_seed(device: torch.device) -> Tensor:
    """A seed [1] of `seeded_noise` from the device's generator, in int64."""
    return torch.empty(1, dtype=torch.int64, device=device).random_(0, 2**32)


def seeded_noise(seed: Tensor, num_rows: int, hidden_dim: int) -> Tensor:
    """The noise int16 [num_rows, hidden_dim] of a seed: the specification of the kernels'.

    A hash of (seed, row) is the state of a row. The noise is the upper half of a hash of the state
    and the column. It takes a tenth of the instructions of Philox (triton.language.rand), which for
    these products would take longer than they do (docs/explanation/performance.md).
    """
    row = torch.arange(num_rows, device=seed.device).unsqueeze(1)
    column = torch.arange(hidden_dim, device=seed.device)
    state = _hash(_hash(row) ^ seed)
    noise = _hash((state + column * 0x9E3779B9) & _MASK) >> 16
    return (noise - _VALUES // 2).to(torch.int16)


def _hash(x: Tensor) -> Tensor:
    """32 bits in int64 -> 32 bits: "lowbias32" of C. Wellons' hash-prospector."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
