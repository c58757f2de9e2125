"""Capacity of the experts, and the capacity factor that a load needs."""

# T tokens, E experts, K top-k, f capacity factor

import math
from typing import overload

import torch
from torch import Tensor


@overload
def expert_capacity(
    num_tokens: int, num_experts: int, top_k: int, capacity_factor: float
) -> int | None: ...
@overload
def expert_capacity(
    num_tokens: Tensor, num_experts: int, top_k: int, capacity_factor: float
) -> Tensor | None: ...
@overload
def expert_capacity(
    num_tokens: int, num_experts: int, top_k: int, capacity_factor: float | Tensor
) -> int | Tensor | None: ...
def expert_capacity(
    num_tokens: int | Tensor, num_experts: int, top_k: int, capacity_factor: float | Tensor
) -> int | Tensor | None:
    """Rows that one rank may send to one expert: `K * floor(|f| * ceil(T / E))`; None (no limit)
    for f = 0.

    `num_tokens` is the group's maximum when ranks hold unequal counts. From an int64 tensor follows
    an int64 tensor, the same number; from a scalar tensor f, which is not 0, too.
    """
    if isinstance(capacity_factor, Tensor):
        per_expert = (num_tokens + num_experts - 1) // num_experts
        return top_k * (capacity_factor.double().abs() * per_expert).floor().long()
    if capacity_factor == 0:
        return None
    if isinstance(num_tokens, Tensor):
        per_expert = (num_tokens + num_experts - 1) // num_experts
        # fp64, as Python's numbers are
        return top_k * (per_expert.double() * abs(capacity_factor)).floor().long()
    return top_k * math.floor(abs(capacity_factor) * math.ceil(num_tokens / num_experts))


@torch.no_grad()
def needed_capacity_factor(counts: Tensor, top_k: int, drop_share: float = 0.0) -> Tensor:
    """The smallest capacity factor with which one rank drops at most a share of its choices.

    `expert_capacity` of the factor is the smallest sufficient capacity, also after the factor has
    been rounded to fp32, and also if that capacity is 0: the factor is never 0, which is dropless.

    Args:
        counts: int64 [E], the rank's choices per expert before any drop.
        drop_share: from 0 to 1; 0: no choice is dropped.

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
