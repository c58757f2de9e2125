"""All-to-all of rows over a group of ranks. Every algorithm gives the same result."""

# W ranks, E experts, E_l experts of a rank, C rows per expert and rank, M model dim

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_core.parallel.algorithm import RowCounts
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.row_exchange import PendingExchange, RowExchange


def all_to_all(
    rows: Tensor,
    group: ExpertGroup,
    send: Sequence[int] | None = None,
    algorithm: str = "linear",
    ranks_per_node: int | None = None,
) -> Tensor:
    """rows [N, ...] by destination rank -> rows by source rank; differentiable.

    Args:
        send: the number of rows for each rank; None: equally many for each.
        algorithm: a registered name (moe_core.register_all_to_all).

    Raises:
        ValueError: the rows do not divide over the ranks, or their number is not the sum of `send`;
            ranks_per_node does not divide the group; the algorithm is not registered.
    """
    exchange = RowExchange(group, algorithm, ranks_per_node)
    if send is None and len(rows) % group.size:
        raise ValueError(
            f"the number of rows ({len(rows)}) must be divisible by the group's size ({group.size})"
        )
    if send is not None and (len(send) != group.size or sum(send) != len(rows) or min(send) < 0):
        raise ValueError(
            f"send ({list(send)}) must be {group.size} counts that add up to the {len(rows)} rows"
        )
    if group.size == 1:
        return rows
    if send is None:
        counts = exchange.algorithm.equal_counts(len(rows) // group.size)
    else:
        counts = _exchange_counts(exchange, send, rows.device)
    pending = PendingExchange(exchange, counts)
    return pending.arrive(pending.depart(rows))


def _exchange_counts(exchange: RowExchange, send: Sequence[int], device: torch.device) -> RowCounts:
    column = torch.tensor(send, device=device).unsqueeze(1)  # [W, 1]
    received, relayed = exchange.exchange_counts(column)
    if relayed is not None:
        relayed = relayed[..., 0].cpu()
    return RowCounts(torch.tensor(send, device="cpu"), received[:, 0].cpu(), relayed)


def flexible_all_to_all(
    x: Tensor,
    group: ExpertGroup,
    back: bool = False,
    algorithm: str = "linear",
    ranks_per_node: int | None = None,
) -> Tensor:
    """An all-to-all of equal splits whose result has all rows of an expert in one block.

    x [E, C, M] of this rank's tokens -> [E_l, W * C, M] of this rank's experts; with `back`, the
    inverse. So the number of rows in a matrix product does not decrease as ranks are added.

    Raises:
        ValueError: the experts (with `back`, the rows) do not divide over the group.

    Source: arXiv 2206.03382, section 3.3 (Flexible all-to-all).
    """
    size = group.size
    divided, name = x.shape[0], "experts"
    if back:
        divided, name = x.shape[1], "rows"
    if divided % size:
        raise ValueError(f"the number of {name} ({divided}) must be divisible by the size ({size})")
    options = (group, None, algorithm, ranks_per_node)
    if back:
        local_experts, num_rows, dim = x.shape
        capacity = num_rows // size
        by_rank = x.view(local_experts, size, capacity, dim).transpose(0, 1)  # [W, E_l, C, M]
        out = all_to_all(by_rank.reshape(local_experts * num_rows, dim), *options)
        return out.view(size * local_experts, capacity, dim)
    num_experts, capacity, dim = x.shape
    out = all_to_all(x.reshape(num_experts * capacity, dim), *options)
    by_rank = out.view(size, num_experts // size, capacity, dim)  # [W, E_l, C, M]
    return by_rank.transpose(0, 1).reshape(num_experts // size, size * capacity, dim)
