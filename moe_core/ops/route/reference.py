"""Routing in plain torch: the specification, differentiable by autograd."""

# T tokens, E experts, K top-k

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.registry import LOSSES


class RoutingScores(NamedTuple):
    """The inputs of a loss: the router's scores for the tokens of this rank."""

    logits: Tensor  # [T, E] without noise
    noisy: Tensor  # [T, E] with noise: experts are chosen by these
    probs: Tensor  # [T, E] softmax of `noisy`
    expert_ids: Tensor  # [T, K] int64
    noise_std: float


def add_noise(logits: Tensor, noise: Tensor | None, noise_std: float) -> Tensor:
    """`logits + noise_std * noise` in the dtype of the logits; the logits themselves if `noise` is
    None."""
    if noise is None:
        return logits
    return logits + noise_std * noise.to(logits.dtype)


def route(noisy: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, E] -> gates [T, K], expert ids [T, K] int64 and probabilities [T, E]."""
    probs = noisy.softmax(-1)
    ids = largest(noisy.detach(), top_k)
    gates = probs.gather(1, ids)
    if normalize:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates, ids, probs


def route_and_sums(
    noisy: Tensor, clean: Tensor, top_k: int, normalize: bool, loss: str, noise_std: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates [T, K], probabilities [T, E] and the sums [2, E] of the loss, as the fused op.

    Args:
        clean: [T, E], the logits without noise.
    """
    gates, ids, probs = route(noisy, top_k, normalize)
    scores = RoutingScores(clean, noisy, probs, ids, noise_std)
    return gates, probs, LOSSES[loss]().sums(scores)


def largest(logits: Tensor, top_k: int) -> Tensor:
    """Indices [T, K] of the largest logits [T, E], in descending order. NaN counts as infinity.

    If logits are equal, the lower index comes first. `Tensor.max` guarantees this, `torch.topk`
    does not. Logits are compared, not probabilities, because different logits may have equal
    probabilities after rounding.
    """
    # -inf marks the experts that are already chosen, so no logit may be -inf.
    lowest = torch.finfo(logits.dtype).min
    remaining = logits.nan_to_num(nan=math.inf, posinf=math.inf, neginf=lowest)
    ids: list[Tensor] = []
    for k in range(top_k):
        if k > 0:
            remaining = remaining.scatter(1, ids[-1], -math.inf)
        ids.append(remaining.max(1, keepdim=True).indices)
    return torch.cat(ids, 1)
