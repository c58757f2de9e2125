"""The inputs of the experts' networks, as named tuples."""

# E experts, N rows, M model dim, H hidden dim

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.registry import check_activation


class ExpertWeights(NamedTuple):
    """Weights and biases of all experts of a rank. Gated experts have w3."""

    w1: Tensor  # [E, H, M]
    b1: Tensor | None  # [E, H]
    w2: Tensor  # [E, H, M]
    b2: Tensor | None  # [E, M]
    w3: Tensor | None = None  # [E, H, M]
    b3: Tensor | None = None  # [E, H]

    def tensors(self) -> list[Tensor]:
        """The tensors that are not None, in the order of the fields."""
        return [tensor for tensor in self if tensor is not None]

    def with_tensors(self, tensors: list[Tensor]) -> "ExpertWeights":
        """The inverse of `tensors`: replace the fields that are not None by `tensors`, in order."""
        rest = iter(tensors)
        return self.map(lambda _: next(rest))

    def map(self, function: Callable[[Tensor], Tensor]) -> "ExpertWeights":
        """Apply `function` to each field that is not None."""
        return ExpertWeights._make([None if x is None else function(x) for x in self])

    def matrices(self) -> "ExpertWeights":
        """The weights without the biases, which become None."""
        return self._replace(b1=None, b2=None, b3=None)

    @property
    def num_kept(self) -> int:
        """The number of products that the backward pass needs: 2 for gated experts, else 1."""
        return 1 if self.w3 is None else 2

    def check(self, activation: str, model_dim: int, num_experts: int) -> None:
        """Raise ValueError if shapes or dtypes do not match, or do not fit the activation.

        Args:
            model_dim: number of columns of the rows.
            num_experts: length of the offsets.
        """
        for name in ("w2", "w3"):
            other = getattr(self, name)
            if other is None:
                continue
            if (other.shape, other.dtype) != (self.w1.shape, self.w1.dtype):
                raise ValueError(
                    f"w1 is {list(self.w1.shape)} in {self.w1.dtype}, {name} {list(other.shape)} in"
                    f" {other.dtype}"
                )
        if self.b3 is not None and self.w3 is None:
            raise ValueError("b3 needs w3, which is None")
        if self.w1.numel() == 0:
            raise ValueError(f"w1 is {list(self.w1.shape)}, and no size of it may be 0")
        experts, hidden, width = self.w1.shape
        if width != model_dim:
            raise ValueError(f"the rows have {model_dim} columns, w1 is {list(self.w1.shape)}")
        if experts != num_experts:
            raise ValueError(f"offsets has {num_experts} experts, w1 {list(self.w1.shape)}")
        for name, length in (("b1", hidden), ("b2", width), ("b3", hidden)):
            bias = getattr(self, name)
            if bias is not None and bias.shape != (experts, length):
                raise ValueError(f"{name} is {list(bias.shape)}, not {[experts, length]}")
        check_activation(activation, gated=self.w3 is not None)


def check_offsets(ends: list[int], num_rows: int) -> None:
    """Raise ValueError unless the ends of the experts' rows ascend from 0 to at most `num_rows`."""
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] > num_rows:
        raise ValueError(f"offsets ({ends}) must ascend from 0 to at most the {num_rows} rows")


def hidden_rows(num_rows: int, num_experts: int) -> int:
    """The rows of a hidden layer that `ffn.cpp` keeps.

    Each expert's rows of a range of tokens (native/ffn_work.hpp: Cells) begin at a multiple of 16.
    There are at most max(num_rows / 256 + E / 2, 15 + E) of these pieces.
    """
    return num_rows + num_rows // 16 + 16 * num_experts + 256


def by_name(of_weights: Sequence[bool]) -> dict[str, bool]:
    """Map the name of each field of ExpertWeights to its value in `of_weights`."""
    return dict(zip(ExpertWeights._fields, of_weights, strict=True))


class MoEFFNInputs(NamedTuple):
    """The arguments of the op `moe_core::moe_ffn`, in the op's order."""

    tokens: Tensor  # [T, M]
    gates: Tensor | None  # [T, K]; None: all 1 (the plan is then a permutation)
    w1: Tensor  # [E, H, M]
    b1: Tensor | None  # [E, H]
    w2: Tensor  # [E, H, M]
    b2: Tensor | None  # [E, M]
    w3: Tensor | None  # [E, H, M]
    b3: Tensor | None  # [E, H]
    w1_cast: Tensor | None  # w1 in the tokens' dtype; None: w1 has this dtype
    w2_cast: Tensor | None
    w3_cast: Tensor | None
    choices: Tensor  # this and the next fields are as in DispatchPlan
    offsets: Tensor
    slots: Tensor
    kept: Tensor | None
    seed: Tensor | None  # int64 [1], of dropout; None: no dropout
    activation: str
    dropout: float
    keep_hidden: bool  # whether the op returns what its backward pass needs
    kernels: str
    language: str  # of the form that computes the op: "triton" or "cpp"

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.w1, self.b1, self.w2, self.b2, self.w3, self.b3)

    @property
    def out_dtype(self) -> torch.dtype:
        if self.gates is None:
            return self.tokens.dtype
        return torch.promote_types(self.tokens.dtype, self.gates.dtype)

    @property
    def cast_weights(self) -> ExpertWeights:
        """The weights and biases; w1, w2 and w3 are contiguous and in the tokens' dtype."""
        weights = self.weights
        if self.w1_cast is not None and self.w2_cast is not None:
            weights = weights._replace(w1=self.w1_cast, w2=self.w2_cast, w3=self.w3_cast)
        return weights.map(Tensor.contiguous)
