"""Statistics of a layer's routing, for logs."""

# T tokens, E experts, K top-k

from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.capacity import needed_capacity_factor
from moe_core.ops import DispatchPlan


class RoutingStats(NamedTuple):
    """Statistics of this rank's tokens in a forward pass: detached tensors on the device."""

    # [E] choices per expert, before any drop and without the additional choices of `round_to`
    counts: Tensor
    # scalar: share of these choices that were dropped, by the capacity or by `round_to`
    dropped_share: Tensor
    entropy: Tensor  # scalar: mean entropy of the router's probabilities, in nats
    needed_factor: Tensor  # scalar: smallest capacity factor with which no choice is dropped


def counts_and_kept(
    plan: DispatchPlan, top_k: int, routing_kind: str
) -> tuple[Tensor, Tensor | None]:
    """The number of choices of each expert [E], and a mask of the kept choices [T, K].

    Both exclude the additional choices of `round_to`. The mask is None if no choice can be dropped.
    With expert choice it is [T, 1]: whether at least one expert chose the token.
    """
    kept = plan.kept
    if routing_kind == "expert_choice":
        assert kept is not None, "experts choose up to a capacity"
        return kept.sum(0), kept.any(1, keepdim=True)
    if kept is not None:
        kept = kept[:, :top_k]
    return plan.counts, kept


@torch.no_grad()
def routing_stats(probs: Tensor, counts: Tensor, kept: Tensor | None, top_k: int) -> RoutingStats:
    """Statistics from probs [T, E], counts [E] and kept [T, K].

    `kept` is None if no choice can be dropped.
    """
    dropped_share = counts.new_zeros((), dtype=torch.float32)
    if kept is not None:
        dropped_share = (~kept).sum() / max(kept.numel(), 1)
    entropy = torch.special.entr(probs).sum() / max(probs.shape[0], 1)
    return RoutingStats(counts, dropped_share, entropy, needed_capacity_factor(counts, top_k))
