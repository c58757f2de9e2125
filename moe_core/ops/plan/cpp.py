"""The dispatch plan in C++: one pass over the choices."""

# T tokens, E experts, K top-k, N rows

import torch
from torch import Tensor

from moe_core.ops.native.library import call


def make_plan(
    expert_ids: Tensor,
    num_experts: int,
    limit: int | Tensor | None,
    priority: Tensor | None,
    num_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The same results as `reference.make_plan`, number for number.

    Raises:
        ValueError: an expert id is out of range, or num_rows is too small.
    """
    num_tokens, top_k = expert_ids.shape
    assert expert_ids.numel() < 2**31, "offsets are int32"
    expert_ids = expert_ids.contiguous()
    order, order_stride = None, 0
    if priority is not None:
        order = _descending(priority.t())
        if order.dim() == 2:  # [K, T]; with [T] every k has the same order
            order_stride = num_tokens
    kept, most = None, num_tokens * top_k
    if limit is not None:
        most = int(limit)
        kept = torch.empty_like(expert_ids, dtype=torch.bool)
    choices = expert_ids.new_empty(num_rows)
    slots = torch.empty_like(expert_ids)
    counts = expert_ids.new_empty(num_experts)
    offsets = expert_ids.new_empty(num_experts, dtype=torch.int32)
    tensors = (expert_ids, order, choices, offsets, slots, kept, counts)
    sizes = (num_tokens, top_k, num_experts, num_rows, order_stride, most)
    if call("make_plan", tensors, sizes):
        raise ValueError(
            f"expert_ids must be at least 0 and below num_experts ({num_experts}), and num_rows"
            f" ({num_rows}) at least the number of choices that are kept"
        )
    return choices, offsets, slots, kept, counts


def _descending(priority: Tensor) -> Tensor:
    """The stable descending order of each row of `priority` [T] or [K, T]."""
    if priority.dtype != torch.float32:
        return priority.argsort(descending=True, stable=True).contiguous()
    priority = priority.contiguous()
    order = torch.empty_like(priority, dtype=torch.int64)
    num_tokens = priority.shape[-1]
    num_rows = priority.numel() // max(num_tokens, 1)
    call("descending", (priority, order), (num_rows, num_tokens))
    return order
