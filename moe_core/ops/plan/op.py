"""The dispatch plan: the row of each choice of an expert.

The number of rows is computed from shapes, and `offsets` stays on the device. So the host reads
nothing from the device.
"""

# T tokens, E experts, K top-k, C capacity, N rows

from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.ops.autograd import op
from moe_core.ops.backend import Kernels, chosen, load
from moe_core.ops.plan import reference


class DispatchPlan(NamedTuple):
    """The row of every choice. A choice is the flat index `t * K + k` of token t's k-th expert.

    Rows past `offsets[-1]` belong to no expert. Their content is not used.
    """

    choices: Tensor  # [N] int64: the choice in each row
    offsets: Tensor  # [E] int32: end of each expert's rows
    slots: Tensor  # [T, K] int64: the row of each choice; an arbitrary row for dropped choices
    kept: Tensor | None  # [T, K] bool; None: nothing can be dropped
    counts: Tensor  # [E] int64: choices per expert before any drop


def make_plan(
    expert_ids: Tensor,
    num_experts: int,
    capacity: int | Tensor | None,
    priority: Tensor | None = None,
    kernels: str | Kernels = "auto",
) -> DispatchPlan:
    """Assign every choice a row, or drop it if its expert is full.

    Each expert keeps its first `capacity` choices. All first choices of tokens come before all
    second choices, and so on. Among the k-th choices the order is that of the tokens or, with
    `priority`, that of descending priority (batch-prioritised routing, arXiv 2106.05974).

    Args:
        expert_ids: [T, K] integers.
        capacity: the largest number of choices kept per expert: a number, or a scalar tensor on
            the device. None: all choices are kept.
        priority: [T], or [T, K] with a separate priority for each k.
        kernels: see `backend.chosen`. All forms give the same plan, number for number.

    Raises:
        ValueError: there are 2^31 choices or more; an expert id is out of range (only in C++).
    """
    if not torch.compiler.is_compiling() and expert_ids.numel() >= 2**31:
        raise ValueError(
            f"expert_ids {list(expert_ids.shape)} has 2^31 or more choices, and rows are numbered"
            " in 32 bits: split the tokens"
        )
    language = chosen(kernels, expert_ids).language
    num_rows = expert_ids.numel()
    limit: int | None = None
    device_limit: Tensor | None = None
    if isinstance(capacity, Tensor):
        device_limit = capacity.long()
    elif capacity is not None:
        limit = capacity
        num_rows = min(num_rows, num_experts * capacity)
    expert_ids = expert_ids.long()
    if language == "torch":
        most = limit if device_limit is None else device_limit
        plan = reference.make_plan(expert_ids, num_experts, most, priority, num_rows)
        return DispatchPlan(*plan)
    choices, offsets, slots, kept, counts = _make_plan(
        expert_ids, num_experts, limit, device_limit, priority, num_rows, language
    )
    if capacity is None:
        kept = None
    return DispatchPlan(choices, offsets, slots, kept, counts)


def inverse_plan(plan: DispatchPlan) -> DispatchPlan:
    """The plan that returns rows to their tokens.

    `plan` must be a permutation: K = 1 and every choice is kept.
    """
    return plan._replace(choices=plan.slots.flatten(), slots=plan.choices.unsqueeze(1))


@op("moe_core::make_plan")
def _make_plan(
    expert_ids: Tensor,
    num_experts: int,
    limit: int | None,
    device_limit: Tensor | None,
    priority: Tensor | None,
    num_rows: int,
    language: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The plan's fields. `kept` is empty if no choice can be dropped.

    Args:
        limit, device_limit: the capacity as a number or as a scalar int64 tensor; both None: all
            choices are kept.
    """
    capacity: int | Tensor | None = limit
    if device_limit is not None:
        capacity = device_limit
    plan = load("plan", language).make_plan(expert_ids, num_experts, capacity, priority, num_rows)
    choices, offsets, slots, kept, counts = plan
    if kept is None:
        kept = expert_ids.new_empty(0, dtype=torch.bool)
    return choices, offsets, slots, kept, counts


@_make_plan.register_fake
def _(expert_ids, num_experts, limit, device_limit, priority, num_rows, language):
    kept_shape = 0
    if limit is not None or device_limit is not None:
        kept_shape = expert_ids.shape
    return (
        expert_ids.new_empty(num_rows),
        expert_ids.new_empty(num_experts, dtype=torch.int32),
        expert_ids.new_empty(expert_ids.shape),
        expert_ids.new_empty(kept_shape, dtype=torch.bool),
        expert_ids.new_empty(num_experts),
    )
