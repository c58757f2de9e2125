"""Capacity of the experts, the capacity factor that a load needs, and statistics of routing."""

# T tokens, E experts, K top-k, f capacity factor

import math
from typing import NamedTuple, overload

import torch
from torch import Tensor


@overload
def expert_capacity(
    num_tokens: int, num_experts: int, top_k: int, capacity_factor: float
) -> int | None: ...
@overload
def expert_capacity(
    num_tokens: Tensor, num_experts: int, top_k: int, capacity_factor: float | Tensor
) -> Tensor | None: ...
@overload
def expert_capacity(
    num_tokens: int, num_experts: int, top_k: int, capacity_factor: float | Tensor
) -> int | Tensor | None: ...
def expert_capacity(
    num_tokens: int | Tensor, num_experts: int, top_k: int, capacity_factor: float | Tensor
) -> int | Tensor | None:
    """The number of rows that one rank may send to one expert: `K * floor(|f| * ceil(T / E))`.

    Args:
        num_tokens: T. If ranks have different numbers of tokens, the largest one.
        capacity_factor: f. A tensor must be a scalar other than 0.

    Returns:
        None (no limit) for f = 0. An int64 tensor if one of the arguments is a tensor.
    """
    if isinstance(capacity_factor, Tensor):
        per_expert = (num_tokens + num_experts - 1) // num_experts
        return top_k * (capacity_factor.double().abs() * per_expert).floor().long()
    if capacity_factor == 0:
        return None
    if isinstance(num_tokens, Tensor):
        per_expert = (num_tokens + num_experts - 1) // num_experts
        # fp64, so that the result equals that of Python numbers
        return top_k * (per_expert.double() * abs(capacity_factor)).floor().long()
    return top_k * math.floor(abs(capacity_factor) * math.ceil(num_tokens / num_experts))


@torch.no_grad()
def needed_capacity_factor(counts: Tensor, top_k: int, drop_share: float = 0.0) -> Tensor:
    """The smallest capacity factor with which one rank drops at most a share of its choices.

    With this factor `expert_capacity` returns the smallest sufficient capacity, even if the factor
    is rounded to fp32. The factor is above 0 even for a capacity of 0, because 0 means dropless.

    Args:
        counts: int64 [E], the rank's choices per expert before any drop.
        drop_share: the share of choices that may be dropped, from 0 to 1.

    Returns:
        fp64 scalar, on the device of `counts`.
    """
    largest = counts.sort(descending=True).values.double()
    num_experts = counts.shape[0]
    num_choices = largest.sum()
    # The drops at capacity C are the maximum over k of (choices of the k largest) - k * C.
    k = torch.arange(1, num_experts + 1, dtype=torch.float64, device=counts.device)
    capacity = ((largest.cumsum(0) - drop_share * num_choices) / k).amax()
    rows = (capacity.ceil().clamp(min=0) / top_k).ceil()
    tokens_per_expert = (num_choices / (top_k * num_experts)).ceil().clamp(min=1)
    # Without the quarter of a row, rounding of the quotient could lose a row.
    return (rows + 0.25) / tokens_per_expert


class RoutingStats(NamedTuple):
    """Statistics of this rank's tokens in a forward pass: detached tensors on the device."""

    counts: Tensor  # [E] choices per expert, before any drop
    dropped_share: Tensor  # scalar: share of these choices that the capacity dropped
    entropy: Tensor  # scalar: mean entropy of the router's probabilities, in nats
    needed_factor: Tensor  # scalar: smallest capacity factor with which no choice is dropped


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
