"""What the Triton form is computed from, as one value."""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

from typing import NamedTuple

import torch
from torch import Tensor


class MoEFFNInputs(NamedTuple):
    """The arguments of the op `moe_core::moe_ffn`, in its order."""

    tokens: Tensor  # [T, M]
    gates: Tensor | None  # [T, K]; None: all 1, and the plan only reorders
    w1: Tensor  # [E, H, M]
    b1: Tensor | None  # [E, H]
    w2: Tensor  # [E, H, M]
    b2: Tensor | None  # [E, M]
    w1_cast: Tensor | None  # w1 in the tokens' dtype; None: it has that dtype
    w2_cast: Tensor | None
    choices: Tensor  # a DispatchPlan's
    offsets: Tensor
    slots: Tensor
    kept: Tensor | None
    seed: Tensor | None  # int64 [1], of dropout; None: no dropout
    activation: str
    dropout: float

    def needs_gradients(self) -> bool:
        """Whether tokens, gates, weights or biases require a gradient."""
        tensors = (self.tokens, self.gates, self.w1, self.b1, self.w2, self.b2)
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the parameters, and so of their gradients."""
        return self.w1.dtype

    @property
    def cast_w1(self) -> Tensor:
        """w1 in the tokens' dtype."""
        if self.w1_cast is None:
            return self.w1
        return self.w1_cast

    @property
    def cast_w2(self) -> Tensor:
        """w2 in the tokens' dtype."""
        if self.w2_cast is None:
            return self.w2
        return self.w2_cast
