"""Tokens to rows grouped by expert, and back.

1. `make_plan` gives every choice (token t, k-th expert) a row, or drops it when its expert is full.
2. `dispatch` gathers the tokens into rows: expert 0's first, then expert 1's, ...
3. `combine` adds up each token's rows, weighted by its gate values; dropped choices add 0.

No padding, no one-hot, and nothing is read back to the host: the number of rows is known from
shapes alone, and `offsets` (where each expert's rows end) stays on the device. Rows past
`offsets[-1]` belong to no expert; what they hold is never used.
"""

# T tokens, E experts, K top-k, C capacity, N rows, M model dim

from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.kernels import combine_rows, dispatch_rows, routing


class DispatchPlan(NamedTuple):
    """Where every choice goes. A choice is the flat index `t * K + k`."""

    choices: Tensor  # [N] int64: the choice in each row
    offsets: Tensor  # [E] int32: end of each expert's rows
    slots: Tensor  # [T, K] int64: the row of each choice; any row where dropped
    kept: Tensor | None  # [T, K] bool; None: nothing can drop
    counts: Tensor  # [E] int64: choices per expert before any drop


def make_plan(
    expert_ids: Tensor,
    num_experts: int,
    capacity: int | Tensor | None,
    priority: Tensor | None = None,
    kernels: str = "auto",
    num_rows: int | None = None,
) -> DispatchPlan:
    """Give every choice its row.

    A token's place in its expert counts tokens in order, or by descending `priority` [T]
    (batch-prioritised routing, arXiv 2106.05974), or for each k by a priority of its own [T, K];
    k-th choices come after all choices before k. From place `capacity` on, choices are dropped.

    Args:
        expert_ids: [T, K].
        capacity: most choices kept per expert, one number or one for each [E]; None keeps all.
        num_rows: with a capacity for each, N: no less than what is kept, of which only the device
            knows.
        kernels: see kernels.routing.choose; all give the same plan, number for number.
    """
    if (chosen := routing.choose(kernels, expert_ids.device.type)) != "torch":
        return DispatchPlan(
            *routing.make_plan(expert_ids, num_experts, capacity, priority, num_rows, chosen)
        )
    num_tokens, top_k = expert_ids.shape
    device = expert_ids.device
    order = torch.arange(num_tokens, device=device)
    if priority is not None:
        order = priority.t().argsort(descending=True, stable=True)  # [T] or [K, T]
    # [K*T], by precedence
    choices = (order * top_k + torch.arange(top_k, device=device).unsqueeze(1)).flatten()
    experts, by_expert = expert_ids.flatten()[choices].sort(stable=True)
    choices = choices[by_expert]
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    rows = torch.arange(num_tokens * top_k, device=device)
    if capacity is None:
        slots = torch.empty_like(choices).scatter_(0, choices, rows).view(num_tokens, top_k)
        return DispatchPlan(choices, ends.int(), slots, None, counts)
    if num_rows is None:
        num_rows = min(num_tokens * top_k, num_experts * capacity)
    return _drop_over_capacity(choices, experts, rows, ends, counts, capacity, top_k, num_rows)


def _drop_over_capacity(
    choices: Tensor,
    experts: Tensor,
    rows: Tensor,
    ends: Tensor,
    counts: Tensor,
    capacity: int | Tensor,
    top_k: int,
    num_rows: int,
) -> DispatchPlan:
    """Close the gaps that dropped choices leave between the experts' rows."""
    kept_counts = counts.clamp(max=capacity)
    kept_ends = kept_counts.cumsum(0)
    place = rows - (ends - counts)[experts]
    kept = place < (capacity[experts] if isinstance(capacity, Tensor) else capacity)
    # num_rows: the bin for dropped ones
    row = torch.where(kept, (kept_ends - kept_counts)[experts] + place, num_rows)
    kept_choices = choices.new_zeros(num_rows + 1).scatter_(0, row, choices)[:num_rows]
    slots = (
        torch.empty_like(choices).scatter_(0, choices, torch.where(kept, row, 0)).view(-1, top_k)
    )
    kept = torch.empty_like(kept).scatter_(0, choices, kept).view(-1, top_k)
    return DispatchPlan(kept_choices, kept_ends.int(), slots, kept, counts)


def dispatch(tokens: Tensor, plan: DispatchPlan, kernels: str = "auto") -> Tensor:
    """tokens [T, M] -> rows [N, M]."""
    return dispatch_rows(tokens, plan.choices, plan.slots, plan.kept, kernels)


def combine(rows: Tensor, gates: Tensor, plan: DispatchPlan, kernels: str = "auto") -> Tensor:
    """rows [N, M], gates [T, K] -> `y_t = sum_k gate_tk * row of (t, k)` [T, M], in the wider of
    both dtypes."""
    return combine_rows(rows, gates, plan.choices, plan.slots, plan.kept, kernels)
