"""The dispatch plan: which row each choice of an expert gets.

The number of rows is known from shapes alone, and `offsets` stays on the device: nothing is read
back to the host.
"""

# T tokens, E experts, K top-k, C capacity, N rows

from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.ops.backend import Request, load, select
from moe_core.ops.plan import reference


class DispatchPlan(NamedTuple):
    """Where every choice goes. A choice is the flat index `t * K + k` of token t's k-th expert.

    Rows past `offsets[-1]` belong to no expert; what they hold is never used.
    """

    choices: Tensor  # [N] int64: the choice in each row
    offsets: Tensor  # [E] int32: end of each expert's rows
    slots: Tensor  # [T, K] int64: the row of each choice; any row where dropped
    kept: Tensor | None  # [T, K] bool; None: nothing can be dropped
    counts: Tensor  # [E] int64: choices per expert before any drop


def make_plan(
    expert_ids: Tensor,
    num_experts: int,
    capacity: int | Tensor | None,
    priority: Tensor | None = None,
    kernels: str = "auto",
    num_rows: int | None = None,
) -> DispatchPlan:
    """Give every choice its row, or drop it when its expert is full.

    A token's place in its expert counts tokens in order; or by descending `priority` [T]
    (batch-prioritised routing, arXiv 2106.05974); or, for each k, by a priority of its own [T, K].
    k-th choices come after all choices before k. From place `capacity` on, choices are dropped.

    Args:
        expert_ids: [T, K] integers.
        capacity: most choices kept per expert; a tensor on the device is one number or one for each
            expert [E]. None keeps all.
        num_rows: N where the capacity is a tensor. It must be at least the number of choices that
            are kept, which only the device knows.
        kernels: see `backend.select`. All forms give the same plan, number for number.

    Raises:
        ValueError: where C++ runs, an expert id that is out of range, or num_rows too small.
    """
    form = select("plan", Request(kernels, expert_ids.device.type, expert_ids.dtype))
    num_choices = expert_ids.numel()
    limits: Tensor | None = None
    limit: int | None = None
    if capacity is None:
        num_rows = num_choices
    elif isinstance(capacity, Tensor):
        limits = capacity.long().expand(num_experts).contiguous()
    else:
        num_rows = min(num_choices, num_experts * capacity)
        if form == "plan.triton":
            limit = capacity
        else:
            limits = expert_ids.new_full((num_experts,), capacity, dtype=torch.int64)
    if num_rows is None:
        raise ValueError("num_rows is needed with a capacity that is a tensor")
    arguments = (expert_ids.long(), num_experts, limits, priority, num_rows)
    if form == "plan.reference":
        return DispatchPlan(*reference.make_plan(*arguments))
    choices, offsets, slots, kept, counts = torch.ops.moe_core.make_plan(*arguments, form, limit)
    if capacity is None:
        kept = None
    return DispatchPlan(choices, offsets, slots, kept, counts)


def inverse_plan(plan: DispatchPlan) -> DispatchPlan:
    """The plan that takes rows back to their tokens, of a plan that only reorders: K = 1 and every
    choice is kept."""
    return plan._replace(choices=plan.slots.flatten(), slots=plan.choices.unsqueeze(1))


@torch.library.custom_op("moe_core::make_plan", mutates_args=())
def _make_plan(
    expert_ids: Tensor,
    num_experts: int,
    limits: Tensor | None,
    priority: Tensor | None,
    num_rows: int,
    form: str,
    limit: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The plan's fields; `kept` is empty where nothing can be dropped.

    Args:
        limit: for "plan.triton" in place of `limits`, where it is the same for every expert.
    """
    arguments: tuple = (expert_ids, num_experts, limits, priority, num_rows)
    if limit is not None:
        arguments += (limit,)
    choices, offsets, slots, kept, counts = load(form).make_plan(*arguments)
    if kept is None:
        kept = expert_ids.new_empty(0, dtype=torch.bool)
    return choices, offsets, slots, kept, counts


@_make_plan.register_fake
def _(expert_ids, num_experts, limits, priority, num_rows, form, limit=None):
    kept_shape = 0
    if limits is not None or limit is not None:
        kept_shape = expert_ids.shape
    return (
        expert_ids.new_empty(num_rows),
        expert_ids.new_empty(num_experts, dtype=torch.int32),
        expert_ids.new_empty(expert_ids.shape),
        expert_ids.new_empty(kept_shape, dtype=torch.bool),
        expert_ids.new_empty(num_experts),
    )
