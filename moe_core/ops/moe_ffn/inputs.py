"""The inputs of the Triton form, as a named tuple."""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.ops.ffn.inputs import ExpertWeights


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

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.w1, self.b1, self.w2, self.b2, self.w3, self.b3)

    @property
    def cast_weights(self) -> ExpertWeights:
        """The weights and biases; w1, w2 and w3 are contiguous and in the tokens' dtype."""
        weights = self.weights
        if self.w1_cast is not None and self.w2_cast is not None:
            weights = weights._replace(w1=self.w1_cast, w2=self.w2_cast, w3=self.w3_cast)
        return weights.map(Tensor.contiguous)

    @property
    def num_kept(self) -> int:
        """The number of products that the backward pass needs: 2 for gated experts, else 1."""
        return 1 if self.w3 is None else 2

    def needs_gradients(self) -> bool:
        """Whether tokens, gates, weights or biases require a gradient."""
        tensors = (self.tokens, self.gates, *self.weights)
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the parameters and of their gradients."""
        return self.w1.dtype


def cast_matrices(
    casts: ExpertWeights | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The fields w1_cast, w2_cast and w3_cast."""
    if casts is None:
        return None, None, None
    return casts.w1, casts.w2, casts.w3
