"""Dropout of the hidden layer, the same in every form.

An int16 of noise is drawn for each number of the hidden layer. A number is kept where its noise is
at least `threshold`, and multiplied by `scale`.
"""

from typing import NamedTuple

_VALUES = 65536  # of an int16


class Dropout(NamedTuple):
    """The rule for one share of dropped numbers."""

    threshold: int
    scale: float  # 1 / share of numbers that are kept

    @classmethod
    def of(cls, share: float) -> "Dropout":
        """`share` to the nearest 1/65536, below 1."""
        dropped = min(round(share * _VALUES), _VALUES - 1)
        return cls(dropped - _VALUES // 2, _VALUES / (_VALUES - dropped))
