"""The dispatch plan in plain torch: the specification."""

# T tokens, E experts, K top-k, N rows

import torch
from torch import Tensor


def make_plan(
    expert_ids: Tensor,
    num_experts: int,
    limit: int | Tensor | None,
    priority: Tensor | None,
    num_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The fields of `DispatchPlan`.

    Args:
        expert_ids: [T, K] int64.
        limit: the largest number of choices that an expert keeps, a number or a scalar; None: all
            are kept.
        priority: [T] or [T, K]; see `op.make_plan`.
        num_rows: N.
    """
    num_tokens, top_k = expert_ids.shape
    device = expert_ids.device
    order = torch.arange(num_tokens, device=device)
    if priority is not None:
        order = priority.t().argsort(descending=True, stable=True)  # [T] or [K, T]
    ranks = torch.arange(top_k, device=device).unsqueeze(1)
    choices = (order * top_k + ranks).flatten()  # [K * T], by precedence
    experts, by_expert = expert_ids.flatten()[choices].sort(stable=True)
    choices = choices[by_expert]
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    rows = torch.arange(num_tokens * top_k, device=device)
    if limit is None:
        slots = torch.empty_like(choices).scatter(0, choices, rows).view(num_tokens, top_k)
        return choices, ends.int(), slots, None, counts
    # Close the gaps that dropped choices leave between the experts' rows.
    kept_counts = counts.clamp(max=limit)
    kept_ends = kept_counts.cumsum(0)
    place = rows - (ends - counts)[experts]
    kept = place < limit
    kept_row = (kept_ends - kept_counts)[experts] + place
    row_or_bin = torch.where(kept, kept_row, num_rows)  # row N collects the dropped choices
    kept_choices = choices.new_zeros(num_rows + 1).scatter(0, row_or_bin, choices)[:num_rows]
    slots = torch.empty_like(choices).scatter(0, choices, torch.where(kept, kept_row, 0))
    kept = torch.empty_like(kept).scatter(0, choices, kept)
    return kept_choices, kept_ends.int(), slots.view(-1, top_k), kept.view(-1, top_k), counts
