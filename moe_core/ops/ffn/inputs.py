"""What the experts' networks are computed from, as one value."""

# E experts, N rows, M model dim, H hidden dim

from typing import NamedTuple

from torch import Tensor


class ExpertWeights(NamedTuple):
    """Weights and biases of all experts of a rank."""

    w1: Tensor  # [E, H, M]
    b1: Tensor | None  # [E, H]
    w2: Tensor  # [E, H, M]
    b2: Tensor | None  # [E, M]


class FFNInputs(NamedTuple):
    """The arguments of the op `moe_core::expert_ffn`, in its order."""

    rows: Tensor  # [N, M]
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    offsets: Tensor  # [E] int32
    # int16, one for each number of the hidden layer; for a form with SEEDED_DROPOUT int64 [1], its
    # seed; None: no dropout
    noise: Tensor | None
    activation: str
    dropout: float
    kernels: str

    def needs_gradients(self) -> bool:
        """Whether rows, weights or biases require a gradient."""
        tensors = (self.rows, self.w1, self.b1, self.w2, self.b2)
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)
