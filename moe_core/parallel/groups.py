"""The group of ranks that own a layer's experts, and its subsets for strategies."""

# W ranks of the group, g ranks per node, N nodes

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from moe_core.parallel.comm_stream import CommStream
from moe_core.parallel.rank_subset import RankSubset
from moe_core.parallel.strategy import check_ranks_per_node
from moe_core.ranks import Ranks

# The process groups inside a node and between nodes; None without torch.distributed.
NodeGroups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


@dataclass(frozen=True)
class StrategyGroups:
    """Process groups of this rank, in addition to the process group of the expert group.

    Attributes:
        exchange: another process group of all ranks of the expert group. `exchange` and `nodes` are
            for work on the communication stream.
        nodes: by ranks per node: the ranks of this rank's node, and the ranks with the same local
            rank on each node.
        owners: by size: this many consecutive ranks, which gather each other's weights.
    """

    exchange: dist.ProcessGroup | None
    nodes: Mapping[int, NodeGroups]
    owners: Mapping[int, dist.ProcessGroup | None]


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
        comm_stream: runs exchanges concurrently with the experts' work.
        num_ranks: all data-parallel ranks: those of the group, times the replicas.
        for_torch_tools: the backward pass averages expert gradients over all ranks, and
            `state_dict` has experts as DTensors. False: gradients are sums over the group until
            `average_expert_gradients` is called once per step, and `state_dict` has this rank's
            experts as plain tensors.

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
        self._global_ranks = [0]
        if process_group is not None:
            self._global_ranks = dist.get_process_group_ranks(process_group)
        description = f"rank {self._global_ranks[self.rank]} of the {self}"
        self.timeout = timeout or default_pg_timeout
        self.ranks = Ranks(process_group, description)
        self.replicas = Ranks(replicas, description)
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

    def most_tokens(self, num_tokens: int, device: torch.device) -> int:
        """The largest number of tokens of a rank in this call of a layer.

        This is a collective, and the host waits for its result. Within `moe_core.equal_tokens` it
        returns `num_tokens` without communication.
        """
        if self.has_equal_tokens:
            return num_tokens
        return self.ranks.max(num_tokens, device)

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


def ranks_on_each_node(ranks: Sequence[int], local_world_size: int) -> int:
    """The number of an expert group's `ranks` on each node.

    Args:
        ranks: ranks of the world.
        local_world_size: the number of ranks of the world on each node.
    """
    nodes = [rank // local_world_size for rank in ranks]
    per_node = nodes.count(nodes[0])
    if nodes != [node for node in dict.fromkeys(nodes) for _ in range(per_node)]:
        raise ValueError(
            f"the expert group's ranks lie on nodes {nodes} (LOCAL_WORLD_SIZE {local_world_size}):"
            " each node must hold equally many, side by side; or give ranks_per_node"
        )
    return per_node


def local_world_size() -> int:
    """The number of ranks on this node, as set by torchrun; 0: not set."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    if value.isdigit():
        return int(value)
    return 0
