"""The ranks that share a layer's experts, and the subsets of them that strategies exchange
among."""

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
    """Process groups of this rank, beside the expert group's own.

    Attributes:
        exchange: all ranks of the expert group once more. This one and `nodes` are for work on the
            communication stream.
        nodes: by ranks per node: the ranks of this rank's node, and the ranks with its place in
            each node.
        owners: by size: so many consecutive ranks, which gather each other's weights.
    """

    exchange: dist.ProcessGroup | None
    nodes: Mapping[int, NodeGroups]
    owners: Mapping[int, dist.ProcessGroup | None]


class ExpertGroup:
    """A process group over which experts are spread, and optionally the group of this rank's
    replicas.

    `make_expert_groups` makes one, with all process groups that strategies use; every rank of the
    world calls it. An ExpertGroup of your own process group needs the members of that alone, and
    makes no other. Its results are the same, and everything it sends goes over that process group,
    in the order of the calls:

    - Exchanges do not overlap with work.
    - A 2DH exchange and the weights of an expert that several ranks share go through all-to-alls
      over all its ranks.

    Layers that are given the same ExpertGroup share what their strategies set up. Copies of a model
    (an averaged one, say) share it: a process group cannot be copied. Operations wait for other
    ranks as long as their process group's timeout says.

    Args:
        process_group: None is a group of one, which needs no torch.distributed.
        replicas: the ranks that own the same experts as this one, in other expert groups; None:
            there are none.
        ranks_per_node: consecutive ranks of the group that share a node; None: as torchrun says.
        strategy_groups: what `make_expert_groups` made for the strategies; None: they share
            `process_group`.
        timeout: of waits outside of `process_group`, which has its own: those of shared memory.

    Attributes:
        ranks: the collectives of this group.
        replicas: the collectives of the replicas; of one rank where there are none.
        comm_stream: runs exchanges beside the experts' work.

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
        self.has_equal_tokens = False  # what `equal_tokens` promises
        # what `gather_ahead` sets: GatherAhead.take
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
        """The differentiable sum of `values` over the group and its replicas: over all
        data-parallel ranks."""
        for ranks in (self.ranks, self.replicas):
            if ranks.size > 1:
                values = _summed(values, ranks)
        return values

    @torch.no_grad()
    def copy_to_replicas(self, module: nn.Module) -> None:
        """Copy the parameters of the first replica's `module` to the others, as
        DistributedDataParallel does with shared parameters. Collective."""
        if self.num_replicas == 1:
            return
        for parameter in module.parameters():
            if not parameter.is_meta:
                value = parameter.to(self.ranks.device, copy=True)
                self.replicas.broadcast(value, "broadcast of the first replica's experts")
                parameter.copy_(value)

    def most_tokens(self, num_tokens: int, device: torch.device) -> int:
        """The largest number of tokens that a rank has in this call of a layer.

        A collective, whose result the host waits for, unless the caller promises equal numbers.
        """
        if self.has_equal_tokens:
            return num_tokens
        return self.ranks.max(num_tokens, device)

    # The subsets that the group is cut into. The first three are for work on the communication
    # stream, the last for work beside it.

    def all_ranks(self) -> RankSubset:
        return RankSubset(self, range(self.size), self._strategy_groups.exchange)

    def inside_node(self, ranks_per_node: int) -> RankSubset:
        """The ranks of this rank's node."""
        process_group = self._node_groups(ranks_per_node)[0]
        return RankSubset(self, self._block(ranks_per_node), process_group)

    def between_nodes(self, ranks_per_node: int) -> RankSubset:
        """The rank of each node that has this one's place in it."""
        process_group = self._node_groups(ranks_per_node)[1]
        members = range(self.rank % ranks_per_node, self.size, ranks_per_node)
        return RankSubset(self, members, process_group)

    def owners(self, size: int) -> RankSubset:
        """This rank and those beside it, `size` in all, that gather each other's weights."""
        process_group = self._strategy_groups.owners.get(size, self.process_group)
        return RankSubset(self, self._block(size), process_group)

    def _node_groups(self, ranks_per_node: int) -> NodeGroups:
        exchange = self._strategy_groups.exchange
        return self._strategy_groups.nodes.get(ranks_per_node, (exchange, exchange))

    def _block(self, size: int) -> range:
        first = self.rank // size * size
        return range(first, first + size)

    def ranks_per_node(self, given: int | None = None) -> int:
        """`given`, or what the group was given, or as torchrun's variables say.

        Raises:
            ValueError: it does not divide the group; nothing is known; the group takes unequal
                parts of its nodes. Without a given value the ranks compare theirs first, so that
                all of them raise.
        """
        if given is not None:
            return check_ranks_per_node(given, self.size)
        if self.size == 1 or self._given_ranks_per_node:
            return self._given_ranks_per_node or 1
        sizes = self._local_world_sizes()
        if sizes[0] == 0 or len(set(sizes)) > 1:
            raise ValueError(
                f"ranks_per_node must be given: LOCAL_WORLD_SIZE of the {self} is {sizes}"
            )
        return ranks_on_each_node(self._global_ranks, sizes[0])

    def _local_world_sizes(self) -> list[int]:
        """What torchrun told each rank of the group, 0 for nothing; asked once."""
        if self._cached_local_world_sizes is None:
            sizes = torch.zeros(self.size, dtype=torch.long, device=self.ranks.device)
            sizes[self.rank] = local_world_size()
            self.ranks.all_reduce(sizes, "comparison of nodes")
            self._cached_local_world_sizes = sizes.tolist()
        return self._cached_local_world_sizes


def _check_membership(process_group: dist.ProcessGroup | None, name: str) -> None:
    if process_group is not None and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"this process is not in the {name} group that it was given")


# Compiled by torch 2.11, the gradient is 0: https://github.com/pytorch/pytorch/issues/180642
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
    """How many of an expert group's `ranks` lie on each node, where so many ranks of the world
    do."""
    nodes = [rank // local_world_size for rank in ranks]
    per_node = nodes.count(nodes[0])
    if nodes != [node for node in dict.fromkeys(nodes) for _ in range(per_node)]:
        raise ValueError(
            f"the expert group's ranks lie on nodes {nodes} (LOCAL_WORLD_SIZE {local_world_size}):"
            " each node must hold equally many, side by side; or give ranks_per_node"
        )
    return per_node


def local_world_size() -> int:
    """The ranks of this node as torchrun says; 0: it says nothing."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    if value.isdigit():
        return int(value)
    return 0
