"""Weights of experts in int8."""

# E experts, M model dim, H hidden dim, I input features, O output features

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Int8Linear(NamedTuple):
    """A weight of all experts: `weight[e, o, i] = scales[e, o] * quantized[e, o, i]`."""

    quantized: Tensor  # int8 [E, O, I]; or int32 [E, words] in the memory layout of the C++ kernels
    scales: Tensor  # [E, O] fp32
    sums: Tensor  # [E, O] fp32: sum of weight[e, o] over i; it is multiplied by the rows' offset
    bias: Tensor | None  # [E, O] fp32


class Int8Weights(NamedTuple):
    """Weights of all experts of a rank. Gated experts have linear3."""

    linear1: Int8Linear  # O = H, I = M
    linear2: Int8Linear  # O = M, I = H
    linear3: Int8Linear | None  # as linear1

    @property
    def b2(self) -> Tensor | None:
        return self.linear2.bias

    def with_b2(self, b2: Tensor) -> "Int8Weights":
        """The weights with another bias of the second product."""
        return self._replace(linear2=self.linear2._replace(bias=b2))

    def tensors(self) -> list[Tensor | None]:
        """All tensors, in the order of the op's arguments."""
        tensors: list[Tensor | None] = [*self.linear1, *self.linear2]
        tensors += self.linear3 or [None] * len(Int8Linear._fields)
        return tensors

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor | None]) -> "Int8Weights":
        """The inverse of `tensors`."""
        size = len(Int8Linear._fields)
        starts = range(0, len(tensors), size)
        linear1, linear2, linear3 = [
            Int8Linear._make(tensors[start : start + size])  # type: ignore[arg-type]
            for start in starts
        ]
        if linear3.quantized is None:
            return cls(linear1, linear2, None)
        return cls(linear1, linear2, linear3)
