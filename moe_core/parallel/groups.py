"""The group of ranks that own a layer's experts, its subsets for strategies, and their creation.

`make_expert_groups` creates every process group, on every rank and in the same order. The members
of a process group could create it without the other ranks. But torch names a process group by the
number of groups that the rank has created before. With NCCL, the creation may also split the
world's communicator, which needs all ranks.
"""

# W ranks of the group, g ranks per node, N nodes, P ranks of a subset

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from moe_core.context import first_derivative_only
from moe_core.parallel.calls import Calls, LayerCall
from moe_core.parallel.comm_stream import CommStream
from moe_core.parallel.strategy import check_ranks_per_node
from moe_core.ranks import CollectiveError, Ranks, device_of

# The process groups inside a node and between nodes; None without torch.distributed.
NodeGroups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


@dataclass(frozen=True)
class StrategyGroups:
    """Process groups of this rank, in addition to the process group of the expert group.

    Attributes:
        exchange: another process group of all ranks of the expert group. `exchange` and `nodes` are
            for work on the communication stream.
        nodes: the key is a number of ranks per node; the value has two groups, of the ranks of this
            rank's node, and of the ranks with the same local rank on each node.
        owners: the key is a number of ranks; the value is the group of so many consecutive ranks,
            this one among them, that gather each other's weights.
    """

    exchange: dist.ProcessGroup | None
    nodes: Mapping[int, NodeGroups]
    owners: Mapping[int, dist.ProcessGroup | None]


class RankSubset:
    """A subset of the ranks of an expert group, and its collectives.

    The expert group is partitioned into subsets, which communicate at the same time. A subset has
    its own process group, or it uses the process group of the expert group. In the second case
    every collective is an all-to-all over the expert group, with no rows for ranks outside of the
    subset.

    Args:
        group: the expert group, which errors name.
        members: the members' ranks in the expert group, including this rank.
        process_group: the process group of the members or of the expert group; None: one rank
            without torch.distributed.
    """

    def __init__(
        self, group: "ExpertGroup", members: range, process_group: dist.ProcessGroup | None
    ) -> None:
        self.group = group
        self.members = members
        self.process_group = process_group
        self.size = len(members)
        self._group_size = 1 if process_group is None else process_group.size()
        self._is_shared = 1 < self.size < self._group_size

    def all_to_all(
        self, rows: Tensor, send: Tensor | None = None, receive: Tensor | None = None
    ) -> Tensor:
        """rows [sum(send), ...] by destination -> [sum(receive), ...] by source.

        Args:
            send, receive: number of rows for and from each member [P], on the host; None: equal
                splits.
        """
        if self.size == 1:
            return rows.clone()
        equal = [len(rows) // self.size] * self.size
        send_sizes = equal if send is None else send.tolist()
        receive_sizes = equal if receive is None else receive.tolist()
        received = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
        if send is None and receive is None and not self._is_shared:
            dist.all_to_all_single(received, rows, group=self.process_group)
            return received
        dist.all_to_all_single(
            received,
            rows,
            self._by_rank(receive_sizes),
            self._by_rank(send_sizes),
            group=self.process_group,
        )
        return received

    def gather(self, shard: Tensor) -> Tensor:
        """shard [n, ...] of each member -> [P * n, ...] on every member (an all-gather)."""
        if self._is_shared:
            return self.all_to_all(torch.cat([shard] * self.size))
        gathered = shard.new_empty(self.size * shard.shape[0], *shard.shape[1:])
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=self.process_group)
        return gathered

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """rows [P * n, ...] of each member -> this member's [n, ...], summed over the members."""
        rows = rows.contiguous()
        num_rows = rows.shape[0] // self.size
        shape = (num_rows, *rows.shape[1:])
        if self._is_shared:
            return self.all_to_all(rows).view(self.size, *shape).sum(0)
        reduced = rows.new_empty(shape)
        dist.reduce_scatter_tensor(reduced, rows, group=self.process_group)
        return reduced

    def _by_rank(self, sizes: list[int]) -> list[int]:
        """Sizes by member -> by rank of the process group."""
        if not self._is_shared:
            return sizes
        by_rank = [0] * self._group_size
        for member, size in zip(self.members, sizes, strict=True):
            by_rank[member] = size
        return by_rank


class ExpertGroup:
    """The ranks that share the experts of a layer, and optionally the replicas of this rank.

    `make_expert_groups` creates an ExpertGroup with all process groups that strategies use. Every
    rank of the world must call it. An ExpertGroup can also be created from an existing process
    group, by its members only. It then creates no process groups and uses the given one for all
    communication, in the order of the calls. Results are the same, with two differences:

    - Exchanges do not overlap with work.
    - A 2DH exchange, and the gather of a shared expert's weights, use an all-to-all over all ranks.

    Layers with the same ExpertGroup share process groups, shared memory and the tuner. Copies of a
    model, for example an averaged model, use the same ExpertGroup, because a process group cannot
    be copied. Operations wait for other ranks until the timeout of their process group.

    Args:
        process_group: None: a group of one rank, which needs no torch.distributed.
        replicas: the ranks that own the same experts as this one, in other expert groups; None:
            there are no replicas.
        ranks_per_node: the number of consecutive ranks of the group that share a node; None: the
            value that torchrun sets.
        strategy_groups: the process groups that `make_expert_groups` created for strategies; None:
            strategies use `process_group`.
        timeout: the timeout of waits in shared memory. Other waits use that of `process_group`.

    Attributes:
        ranks: the collectives of this group.
        replicas: the collectives of the replicas (of one rank if there are none).
        calls: compares which layers the ranks call.
        calls_of_replicas: the same of the replicas, for their averages of gradients.
        comm_stream: runs exchanges concurrently with the experts' work.
        num_ranks: all data-parallel ranks: those of the group, times the replicas.
        for_torch_tools: the backward pass averages expert gradients over all ranks (of experts
            that every rank has whole, DDP does), and `state_dict` has experts as DTensors. False:
            gradients are sums over the group until `finish_gradients` is called once per step,
            and `state_dict` has this rank's experts as plain tensors.
        averaged_elsewhere: another library is responsible for the gradients of the experts. An
            optimiser step with gradients that are not averaged is then no error.

    Raises:
        ValueError: ranks_per_node does not divide the group; this process is not a member of the
            group.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        ranks_per_node: int | None = None,
        strategy_groups: StrategyGroups | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        _check_membership(process_group, "expert-parallel")
        _check_membership(replicas, "replica")
        self.process_group = process_group
        self.size = 1 if process_group is None else process_group.size()
        self.rank = 0 if process_group is None else process_group.rank()
        self.num_replicas = 1 if replicas is None else replicas.size()
        self.replica = 0 if replicas is None else replicas.rank()
        self.num_ranks = self.size * self.num_replicas
        self.for_torch_tools = True
        self.averaged_elsewhere = False
        self._global_ranks = [0]
        if process_group is not None:
            self._global_ranks = dist.get_process_group_ranks(process_group)
        description = f"rank {self._global_ranks[self.rank]} of the {self}"
        self.timeout = timeout or default_pg_timeout
        self.ranks = Ranks(process_group, description)
        self.replicas = Ranks(replicas, description)
        self.calls = Calls.of(self.ranks)
        self.calls_of_replicas = Calls.of(self.replicas)
        if ranks_per_node is not None:
            check_ranks_per_node(ranks_per_node, self.size)
        self._given_ranks_per_node = ranks_per_node
        self._cached_local_world_sizes: list[int] | None = None
        self._strategy_groups = strategy_groups or StrategyGroups(process_group, {}, {})
        self.comm_stream = CommStream(concurrent=strategy_groups is not None)
        self.has_equal_tokens = False  # set by `equal_tokens`
        # `gather_ahead` sets it to GatherAhead.take
        self.take_gathered: Callable | None = None

    @classmethod
    def of(cls, group: "dist.ProcessGroup | ExpertGroup | None") -> "ExpertGroup":
        if isinstance(group, ExpertGroup):
            return group
        return cls(group)

    def __deepcopy__(self, memo: dict) -> "ExpertGroup":
        return self

    def __str__(self) -> str:
        return f"expert group of ranks {self._global_ranks}"

    def sum(self, values: Tensor) -> Tensor:
        """The differentiable sum of `values` over the group and its replicas, that is, over all
        data-parallel ranks."""
        for ranks in (self.ranks, self.replicas):
            if ranks.size > 1:
                values = _summed(values, ranks)
        return values

    @torch.no_grad()
    def copy_to_replicas(self, module: nn.Module) -> None:
        """Copy the parameters of `module` from the first replica to the others.

        DistributedDataParallel does the same with shared parameters. This is a collective.
        """
        if self.num_replicas == 1:
            return
        for parameter in module.parameters():
            if not parameter.is_meta:
                value = parameter.to(self.ranks.device, copy=True)
                self.replicas.broadcast(value, "broadcast of the first replica's experts")
                parameter.copy_(value)

    def most_tokens(
        self, num_tokens: int, device: torch.device, call: LayerCall | None = None
    ) -> int:
        """The largest number of tokens of a rank in this call of a layer.

        This is a collective, and the host waits for its result. Within `moe_core.equal_tokens` it
        returns `num_tokens` without communication.

        Args:
            call: compared over the ranks in the same collective.

        Raises:
            ValueError: as LayerCall.check.
        """
        if self.has_equal_tokens:
            return num_tokens
        if call is None:
            return self.ranks.max(num_tokens, device)
        tags = call.tags(device)
        values = torch.cat([torch.full((1,), num_tokens, device=device), tags, ~tags])
        self.ranks.all_reduce(values, "maximum", dist.ReduceOp.MAX)
        most_tokens, *largest, third, fourth = values.tolist()
        call.check(torch.tensor([largest, [~third, ~fourth]], device="cpu"))
        return most_tokens

    # The subsets of the group. The first three are for work on the communication stream, the last
    # is for the caller's stream or thread.

    def all_ranks(self) -> RankSubset:
        return RankSubset(self, range(self.size), self._strategy_groups.exchange)

    def inside_node(self, ranks_per_node: int) -> RankSubset:
        """The ranks of this rank's node."""
        process_group = self._node_groups(ranks_per_node)[0]
        return RankSubset(self, self._block(ranks_per_node), process_group)

    def between_nodes(self, ranks_per_node: int) -> RankSubset:
        """The ranks with the same local rank as this one, one on each node."""
        process_group = self._node_groups(ranks_per_node)[1]
        members = range(self.rank % ranks_per_node, self.size, ranks_per_node)
        return RankSubset(self, members, process_group)

    def owners(self, size: int) -> RankSubset:
        """The `size` consecutive ranks, including this one, that gather each other's weights."""
        process_group = self._strategy_groups.owners.get(size, self.process_group)
        return RankSubset(self, self._block(size), process_group)

    def _node_groups(self, ranks_per_node: int) -> NodeGroups:
        exchange = self._strategy_groups.exchange
        return self._strategy_groups.nodes.get(ranks_per_node, (exchange, exchange))

    def _block(self, size: int) -> range:
        first = self.rank // size * size
        return range(first, first + size)

    def ranks_per_node(self, given: int | None = None) -> int:
        """The number of ranks of the group on each node.

        This is `given`, or else the group's own value, or else the value that torchrun sets. In the
        last case the first call is a collective that compares the values of all ranks.

        Raises:
            ValueError: the value does not divide the group; no value is known; or the group has
                different numbers of ranks on its nodes. It is raised on all ranks.
        """
        if given is not None:
            check_ranks_per_node(given, self.size)
            return given
        if self.size == 1 or self._given_ranks_per_node:
            return self._given_ranks_per_node or 1
        sizes = self._local_world_sizes()
        if sizes[0] == 0 or len(set(sizes)) > 1:
            raise ValueError(
                f"ranks_per_node must be given: LOCAL_WORLD_SIZE of the {self} is {sizes}"
            )
        return ranks_on_each_node(self._global_ranks, sizes[0])

    def _local_world_sizes(self) -> list[int]:
        """LOCAL_WORLD_SIZE of each rank of the group (0: not set). The ranks exchange it once."""
        if self._cached_local_world_sizes is None:
            sizes = torch.zeros(self.size, dtype=torch.long, device=self.ranks.device)
            sizes[self.rank] = local_world_size()
            self.ranks.all_reduce(sizes, "comparison of nodes")
            self._cached_local_world_sizes = sizes.tolist()
        return self._cached_local_world_sizes


def _check_membership(process_group: dist.ProcessGroup | None, name: str) -> None:
    if process_group is not None and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"this process is not in the {name} group that it was given")


# torch 2.11 compiles it to a gradient of 0: https://github.com/pytorch/pytorch/issues/180642
@torch.compiler.disable
def _summed(values: Tensor, ranks: Ranks) -> Tensor:
    return _AllReduce.apply(values, ranks)


class _AllReduce(torch.autograd.Function):
    """A sum whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, values, ranks):
        ctx.ranks = ranks
        return ranks.all_reduce(values.clone(), "sum")

    @staticmethod
    def backward(ctx, grad):
        return _AllReduce.apply(grad, ctx.ranks), None


class AverageOverReplicas(torch.autograd.Function):
    """The parameters of one module of experts, whose gradients are averaged over the replicas.

    One node has all of them: their gradients are averaged in one order, although the order in which
    they are computed may differ between replicas.
    """

    @staticmethod
    def forward(ctx, group, experts, *parameters):
        ctx.experts, ctx.group = experts, group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        replicas, calls = ctx.group.replicas, ctx.group.calls_of_replicas
        calls.record(ctx.experts, backward=True)
        needed = [i for i, need in enumerate(ctx.needs_input_grad[2:]) if need]
        smallest = min(needed, key=lambda i: gradients[i].numel())
        sums, waits = {}, []
        for i in needed:
            sums[i] = (gradients[i] / replicas.size).contiguous()
            if i == smallest:
                sums[i] = calls.with_history(sums[i])
            waits.append(
                replicas.start_all_reduce(sums[i], "average of expert gradients over replicas")
            )
        for wait in waits:
            wait()
        sums[smallest] = calls.without_history(sums[smallest], gradients[smallest])
        return None, None, *(sums.get(i) for i in range(len(gradients)))


def ranks_on_each_node(ranks: Sequence[int], local_world_size: int) -> int:
    """The number of an expert group's `ranks` on each node.

    Args:
        ranks: ranks of the world.
        local_world_size: the number of ranks of the world on each node.
    """
    nodes = [rank // local_world_size for rank in ranks]
    per_node = nodes.count(nodes[0])
    in_turn = [node for node in dict.fromkeys(nodes) for _ in range(per_node)]
    if nodes != in_turn:
        raise ValueError(
            f"the expert group's ranks lie on nodes {nodes} (LOCAL_WORLD_SIZE {local_world_size}):"
            " each node must have the same number of consecutive ranks; or give ranks_per_node"
        )
    return per_node


def local_world_size() -> int:
    """The number of ranks on this node, as set by torchrun; 0: not set."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    if value.isdigit():
        return int(value)
    return 0


def largest_group(num_experts: int, num_ranks: int) -> int:
    """The largest expert-parallel size that divides the ranks and over which the experts divide: it
    divides the number of experts, or is a multiple of it."""
    sizes = (size for size in range(num_ranks, 0, -1) if num_ranks % size == 0)
    return next(size for size in sizes if max(num_experts, size) % min(num_experts, size) == 0)


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
            f"making the process groups of experts failed on rank {dist.get_rank()} of {num_ranks}:"
            f" another process may have ended, or not joined in time; see its output ({error})"
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
