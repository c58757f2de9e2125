"""What the forms of routing get, as named tuples."""

# T tokens, E experts, K top-k, M model dim

from typing import NamedTuple

from torch import Tensor


class RouteSettings(NamedTuple):
    top_k: int
    normalize: bool  # the gate values of a token sum to 1
    loss: str  # name of the auxiliary loss
    noise_std: float  # factor of the noise
    loss_noise_std: float  # the standard deviation of the noise, for the loss
    kernels: str = "auto"  # see `backend.chosen`
    activation: str = "softmax"  # of the gate values


class SavedRoute(NamedTuple):
    """The arguments and results of `moe_core::route` that its backward pass reads."""

    x: Tensor
    weight: Tensor | None
    noise: Tensor | None
    ids: Tensor
    gates: Tensor
    probs: Tensor
    scores: Tensor
    logits: Tensor


class RouteGradients(NamedTuple):
    """The gradients of results of `moe_core::route`; None: zeros."""

    gates: Tensor | None
    probs: Tensor | None
    sums: Tensor | None
    inputs: Tensor | None  # the cast tokens
