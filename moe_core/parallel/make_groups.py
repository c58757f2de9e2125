"""Creates expert groups over the world, and all process groups that their strategies use.

Every rank creates every process group here, in the same order. The members of a process group could
create it without the other ranks. But torch names a process group by the number of groups that the
rank has created before. With NCCL, the creation may also split the world's communicator, which
needs all ranks.
"""

# W ranks of an expert group, g ranks per node

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_core.parallel.groups import (
    ExpertGroup,
    StrategyGroups,
    local_world_size,
    ranks_on_each_node,
)
from moe_core.parallel.strategy import check_ranks_per_node
from moe_core.ranks import CollectiveError, device_of


def make_expert_groups(
    expert_parallel_size: int, timeout: timedelta | None = None, ranks_per_node: int | None = None
) -> ExpertGroup:
    """Divide the world (the default group) into expert groups of consecutive ranks.

    Ranks that own the same experts are replicas. Every rank of the world must call this. No other
    function that sets up expert parallelism has to be called by all ranks of the world.

    Args:
        expert_parallel_size: the number of ranks of an expert group.
        timeout: the timeout of all process groups that are created; None: torch's default.
        ranks_per_node: ranks of one expert group on each node; None: the value that torchrun sets.

    Raises:
        ValueError: the size does not divide the world's; ranks_per_node does not divide the size.
        CollectiveError: a rank has ended or did not come within the timeout.
    """
    num_ranks, size = dist.get_world_size(), expert_parallel_size
    if size < 1 or num_ranks % size:
        raise ValueError(
            f"expert_parallel_size ({size}) must divide the number of ranks ({num_ranks})"
        )
    if ranks_per_node is not None:
        check_ranks_per_node(ranks_per_node, size)
    groups = [list(range(first, first + size)) for first in range(0, num_ranks, size)]
    try:
        return _make(groups, timeout, ranks_per_node)
    except RuntimeError as error:
        raise CollectiveError(
            f"making the process groups of experts failed on rank {dist.get_rank()} of {num_ranks};"
            f" has another one ended, or not come in time? ({error})"
        ) from error


def _make(
    groups: list[list[int]], timeout: timedelta | None, ranks_per_node: int | None
) -> ExpertGroup:
    experts = _subgroup(groups, timeout, "experts")
    replicas = None
    if len(groups) > 1:
        same_experts = [list(ranks) for ranks in zip(*groups, strict=True)]
        replicas = _subgroup(same_experts, timeout, "replicas")
    if len(groups[0]) == 1:
        return ExpertGroup(experts, replicas, ranks_per_node, timeout=timeout)
    per_node = ranks_per_node or _common_ranks_per_node(groups, experts, replicas)
    strategy_groups = _make_strategy_groups(groups, timeout, per_node)
    return ExpertGroup(experts, replicas, ranks_per_node, strategy_groups, timeout)


def _make_strategy_groups(
    groups: list[list[int]], timeout: timedelta | None, ranks_per_node: int | None
) -> StrategyGroups:
    """The process groups of strategies. `ranks_per_node` is for 2DH; None: unknown."""
    size = len(groups[0])
    exchange = _subgroup(groups, timeout, "exchange")
    nodes = {}
    if ranks_per_node is not None and 1 < ranks_per_node < size:
        inside = _subgroup(_blocks(groups, ranks_per_node), timeout, "exchange inside a node")
        between = _subgroup(_strides(groups, ranks_per_node), timeout, "exchange between nodes")
        nodes[ranks_per_node] = (inside, between)
    owners = {}
    for block_size in range(2, size):
        if size % block_size == 0:
            owners[block_size] = _subgroup(_blocks(groups, block_size), timeout, "expert weights")
    return StrategyGroups(exchange, nodes, owners)


def _subgroup(
    partition: Sequence[list[int]], timeout: timedelta | None, purpose: str
) -> dist.ProcessGroup:
    """Create a process group for each part of the world, and return this rank's.

    The description contains `purpose`. NCCL's watchdog prints it when a collective times out.
    """
    rank = dist.get_rank()
    subgroup = None
    for ranks in partition:
        description = f"moe_core {purpose} of ranks {_ranks_name(ranks)}"
        process_group = dist.new_group(ranks, timeout=timeout, group_desc=description)
        if rank in ranks:
            subgroup = process_group
    assert subgroup is not None, "a partition of the world"
    return subgroup


def _ranks_name(ranks: list[int]) -> str:
    """Ranks at equal distances, as "0-7" or "0-24 by 8"."""
    if len(ranks) == 1:
        return str(ranks[0])
    step = ranks[1] - ranks[0]
    name = f"{ranks[0]}-{ranks[-1]}"
    if step > 1:
        name += f" by {step}"
    return name


def _blocks(groups: list[list[int]], size: int) -> list[list[int]]:
    """Divide every group into blocks of `size` consecutive ranks."""
    blocks = []
    for group in groups:
        for first in range(0, len(group), size):
            blocks.append(group[first : first + size])
    return blocks


def _strides(groups: list[list[int]], step: int) -> list[list[int]]:
    """Divide every group into subsets of ranks at distance `step`."""
    return [group[first::step] for group in groups for first in range(step)]


def _common_ranks_per_node(
    groups: list[list[int]], experts: dist.ProcessGroup, replicas: dist.ProcessGroup | None
) -> int | None:
    """The number of ranks of an expert group that share a node.

    None if torchrun does not set it, or if the expert groups differ.
    """
    size = local_world_size()
    bounds = torch.tensor([size, -size], device=device_of(experts))
    for process_group in (experts, replicas):  # together these cover the world
        if process_group is not None:
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=process_group)
    largest, smallest = int(bounds[0]), -int(bounds[1])
    if smallest == 0 or smallest != largest:
        return None
    try:
        shapes = {ranks_on_each_node(ranks, largest) for ranks in groups}
    except ValueError:  # raised again when 2DH is used
        return None
    if len(shapes) == 1:
        return shapes.pop()
    return None
