"""The ranks that share a layer's experts, and the parts of them that its strategies exchange
among."""

# W ranks of the group, g ranks per node, N nodes

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.parallel.lane import Lane
from moe_core.parallel.part import Part


class CollectiveError(RuntimeError):
    """A collective that did not come to its end; names the operation and the group."""


@dataclass
class Traffic:
    """What this rank sent, by the receiver's rank in the expert group; metadata (counts of rows) is
    not in it."""

    elements: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)

    def add(self, rank: int, elements: int) -> None:
        self.elements[rank] += elements
        self.messages[rank] += 1


@dataclass(frozen=True)
class StrategyGroups:
    """Process groups of this rank, beside the expert group's own.

    Attributes:
        exchange: all ranks of the expert group once more. This one and `nodes` are for work on the
            lane.
        nodes: by ranks per node: the ranks of this rank's node, and the ranks with its place in
            each node.
        owners: by size: so many consecutive ranks, which gather each other's weights.
    """

    exchange: dist.ProcessGroup
    nodes: Mapping[int, tuple[dist.ProcessGroup, dist.ProcessGroup]]
    owners: Mapping[int, dist.ProcessGroup]


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
    ) -> None:
        for group, name in ((process_group, "expert-parallel"), (replicas, "replica")):
            if group is not None and group == dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(f"this process is not in the {name} group that it was given")
        self.process_group, self.replicas = process_group, replicas
        self.size = 1 if process_group is None else process_group.size()
        self.rank = 0 if process_group is None else process_group.rank()
        self.num_replicas = 1 if replicas is None else replicas.size()
        self.replica = 0 if replicas is None else replicas.rank()
        if ranks_per_node is not None:
            check_ranks_per_node(ranks_per_node, self.size)
        self._given_ranks_per_node = ranks_per_node
        self._found_local_world_sizes: list[int] | None = None
        self._strategy_groups = strategy_groups or StrategyGroups(process_group, {}, {})
        self.lane = Lane(concurrent=strategy_groups is not None)
        self.traffic: Traffic | None = None
        # set by moe_core.parallel.tuner, which shares its findings between the group's layers
        self.tuner = None

    @classmethod
    def of(cls, group: "dist.ProcessGroup | ExpertGroup | None") -> "ExpertGroup":
        return group if isinstance(group, ExpertGroup) else cls(group)

    def __deepcopy__(self, memo: dict) -> "ExpertGroup":
        return self

    def __str__(self) -> str:
        return f"expert group of ranks {self._global_ranks()}"

    def max(self, value: int, device: torch.device) -> int:
        """The largest `value` of the group."""
        if self.size == 1:
            return value
        largest = torch.tensor(value, device=device)
        self.all_reduce(largest, self.process_group, "maximum", dist.ReduceOp.MAX)
        return int(largest)

    def all_reduce(
        self,
        values: Tensor,
        process_group: dist.ProcessGroup,
        what: str,
        op: dist.ReduceOp = dist.ReduceOp.SUM,
    ) -> None:
        """In place, over the group's own or its replicas' process group."""
        with self.named_errors(what):
            dist.all_reduce(values, op, group=process_group)

    def sum(self, values: Tensor) -> Tensor:
        """The differentiable sum of `values` over the group and its replicas: over all
        data-parallel ranks."""
        for process_group in (self.process_group, self.replicas):
            if process_group is not None and process_group.size() > 1:
                values = _AllReduce.apply(values, self, process_group)
        return values

    # The parts that the group is cut into. The first three are for work on the lane, the last for
    # work beside it.

    def all_ranks(self) -> Part:
        return Part(range(self.size), self._strategy_groups.exchange)

    def inside_node(self, ranks_per_node: int) -> Part:
        """The ranks of this rank's node."""
        group = self._node_groups(ranks_per_node)[0]
        return Part(self._block(ranks_per_node), group)

    def between_nodes(self, ranks_per_node: int) -> Part:
        """The rank of each node that has this one's place in it."""
        group = self._node_groups(ranks_per_node)[1]
        return Part(range(self.rank % ranks_per_node, self.size, ranks_per_node), group)

    def owners(self, size: int) -> Part:
        """This rank and those beside it, `size` in all, that gather each other's weights."""
        group = self._strategy_groups.owners.get(size, self.process_group)
        return Part(self._block(size), group)

    def _node_groups(self, ranks_per_node: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
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
        found = self._local_world_sizes()
        if found[0] == 0 or len(set(found)) > 1:
            raise ValueError(
                f"ranks_per_node must be given: LOCAL_WORLD_SIZE of the {self} is {found}"
            )
        return ranks_on_each_node(self._global_ranks(), found[0])

    def _local_world_sizes(self) -> list[int]:
        """What torchrun told each rank of the group, 0 for nothing; asked once."""
        if self._found_local_world_sizes is None:
            sizes = torch.zeros(self.size, dtype=torch.long, device=self.device)
            sizes[self.rank] = local_world_size()
            self.all_reduce(sizes, self.process_group, "comparison of nodes")
            self._found_local_world_sizes = sizes.tolist()
        return self._found_local_world_sizes

    @contextmanager
    def count_traffic(self) -> Iterator[Traffic]:
        """Counts what this rank sends to other ranks of the group until the end of the block."""
        self.traffic = Traffic()
        try:
            yield self.traffic
        finally:
            self.traffic = None

    @contextmanager
    def named_errors(self, operation: str) -> Iterator[None]:
        """Gives a failed collective the name of the operation and the group: a peer has died, or
        did not come."""
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"{operation} failed on rank {self._global_ranks()[self.rank]} of the {self}; has"
                " another one ended, or"
                f" not come in time? ({error})"
            ) from error

    @property
    def device(self) -> torch.device:
        """Where the group's collectives take their tensors."""
        return device_of(self.process_group)

    def _global_ranks(self) -> list[int]:
        return (
            [0] if self.process_group is None else dist.get_process_group_ranks(self.process_group)
        )


class _AllReduce(torch.autograd.Function):
    """A sum whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, values, group, process_group):
        ctx.group, ctx.process_group = group, process_group
        values = values.clone()
        group.all_reduce(values, process_group, "sum")
        return values

    @staticmethod
    def backward(ctx, grad):
        return _AllReduce.apply(grad, ctx.group, ctx.process_group), None, None


def check_ranks_per_node(given: int, size: int) -> int:
    if size % given:
        raise ValueError(f"ranks_per_node ({given}) must divide the expert-parallel size ({size})")
    return given


def ranks_on_each_node(ranks: Sequence[int], local_world_size: int) -> int:
    """How many of an expert group's `ranks` lie on each node, where so many ranks of the world
    do."""
    nodes = [rank // local_world_size for rank in ranks]
    here = nodes.count(nodes[0])
    if nodes != [node for node in dict.fromkeys(nodes) for _ in range(here)]:
        raise ValueError(
            f"the expert group's ranks lie on nodes {nodes} (LOCAL_WORLD_SIZE {local_world_size}):"
            " each node must hold"
            " equally many, side by side; or give ranks_per_node"
        )
    return here


def local_world_size() -> int:
    """The ranks of this node as torchrun says; 0: it says nothing."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() else 0


def device_of(process_group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend(process_group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
