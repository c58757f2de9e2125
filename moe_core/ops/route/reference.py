"""Routing in plain torch: the specification, differentiable by autograd."""

# T tokens, E experts, K top-k

import math

import torch
from torch import Tensor

from moe_core.losses import RoutingScores, expert_sums


def route(noisy: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, E] -> gates [T, K], expert ids [T, K] int64 and probabilities [T, E]."""
    probs = noisy.softmax(-1)
    ids = largest(noisy.detach(), top_k)
    gates = probs.gather(1, ids)
    if normalize:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates, ids, probs


def route_and_sums(
    noisy: Tensor, clean: Tensor | None, top_k: int, normalize: bool, loss: str, noise_std: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates [T, K], probabilities [T, E] and the sums [2, E] of the loss, as the fused ops.

    Args:
        clean: [T, E], the logits without noise; None: `noisy`.
    """
    gates, ids, probs = route(noisy, top_k, normalize)
    if clean is None:
        clean = noisy
    scores = RoutingScores(clean, noisy, probs, ids, noise_std)
    return gates, probs, expert_sums(loss, scores)


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
