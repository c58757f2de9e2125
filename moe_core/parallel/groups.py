"""The ranks that share a layer's experts, and the smaller groups that its strategies need."""

# W ranks of the group, g ranks per node, N nodes

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.parallel.lane import Lane


class CollectiveError(RuntimeError):
    """A collective that did not come to its end; names the operation and the group."""


@dataclass
class Traffic:
    """What this rank sent, by the receiver's rank in the expert group; metadata (counts of rows) is not in it."""

    elements: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)

    def add(self, rank: int, elements: int) -> None:
        self.elements[rank] += elements
        self.messages[rank] += 1


class ExpertGroup:
    """A process group over which experts are spread, and optionally the group of this rank's replicas.

    Layers that are given the same ExpertGroup share the process groups that their strategies need; those are made when
    first used. Copies of a model (an averaged one, say) share it: a process group cannot be copied.

    Args:
        process_group: None is a group of one, which needs no torch.distributed.
        replicas: the ranks that own the same experts as this one, in other expert groups; None: there are none.
        timeout: of the process groups made here; None: torch's default.
        ranks_per_node: consecutive ranks of the group that share a node; None: as torchrun says.

    Raises:
        ValueError: ranks_per_node does not divide the group; this process is not a member of the group.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        for group, name in ((process_group, "expert-parallel"), (replicas, "replica")):
            if group is not None and group == dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(f"this process is not in the {name} group that it was given")
        self.process_group, self.replicas, self.timeout = process_group, replicas, timeout
        self.size = 1 if process_group is None else process_group.size()
        self.rank = 0 if process_group is None else process_group.rank()
        self.num_replicas = 1 if replicas is None else replicas.size()
        self.replica = 0 if replicas is None else replicas.rank()
        self._given_ranks_per_node = None if ranks_per_node is None else self.ranks_per_node(ranks_per_node)
        self._found_local_world_sizes: list[int] | None = None
        self.lane = Lane()
        self.traffic: Traffic | None = None
        self.tuner = None  # set by moe_core.parallel.tuner, which shares its findings between the group's layers
        self._made: dict[tuple, dist.ProcessGroup] = {}

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
        self, values: Tensor, process_group: dist.ProcessGroup, what: str, op: dist.ReduceOp = dist.ReduceOp.SUM
    ) -> None:
        """In place, over the group's own or its replicas' process group, with this group's timeout."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        if self.timeout is not None:  # dist.all_reduce knows the process group's alone
            options.timeout = self.timeout
        with self.named_errors(what):
            work = process_group.allreduce([values], options)
            if work is not None:
                work.wait()

    def sum(self, values: Tensor) -> Tensor:
        """The differentiable sum of `values` over the group and its replicas: over all data-parallel ranks."""
        for process_group in (self.process_group, self.replicas):
            if process_group is not None and process_group.size() > 1:
                values = _AllReduce.apply(values, self, process_group)
        return values

    def whole(self, purpose: str) -> dist.ProcessGroup:
        """The same ranks once more, for the one purpose."""
        return self._make((purpose,), range(self.size))

    def block(self, size: int, purpose: str) -> dist.ProcessGroup | None:
        """This rank and those beside it, `size` consecutive ranks; None for a block of one."""
        first = self.rank // size * size
        return self._make((purpose, size), range(first, first + size))

    def stride(self, step: int, purpose: str) -> dist.ProcessGroup | None:
        """The ranks `step` apart from each other that this one belongs to; None for one rank."""
        return self._make((purpose, -step), range(self.rank % step, self.size, step))

    def ranks_per_node(self, given: int | None = None) -> int:
        """`given`, or what the group was given, or as torchrun's variables say.

        Raises:
            ValueError: it does not divide the group; nothing is known; the group takes unequal parts of its nodes.
                Without a given value the ranks compare theirs first, so that all of them raise.
        """
        if given is not None:
            if self.size % given:
                raise ValueError(f"ranks_per_node ({given}) must divide the expert-parallel size ({self.size})")
            return given
        if self.size == 1 or self._given_ranks_per_node:
            return self._given_ranks_per_node or 1
        found = self._local_world_sizes()
        if found[0] == 0 or len(set(found)) > 1:
            raise ValueError(f"ranks_per_node must be given: LOCAL_WORLD_SIZE of the {self} is {found}")
        local = found[0]
        nodes = [rank // local for rank in self._global_ranks()]
        here = nodes.count(nodes[0])
        if nodes != [node for node in dict.fromkeys(nodes) for _ in range(here)]:
            raise ValueError(
                f"the expert group's ranks lie on nodes {nodes} (LOCAL_WORLD_SIZE {local}): each node must hold"
                " equally many, side by side; or give ranks_per_node"
            )
        return here

    def _local_world_sizes(self) -> list[int]:
        """What torchrun told each rank of the group, 0 for nothing; asked once."""
        if self._found_local_world_sizes is None:
            local = os.environ.get("LOCAL_WORLD_SIZE", "")
            sizes = torch.zeros(self.size, dtype=torch.long, device=self.device)
            sizes[self.rank] = int(local) if local.isdigit() else 0
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
        """Gives a failed collective the name of the operation and the group: a peer has died, or did not come."""
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"{operation} failed on rank {self._global_ranks()[self.rank]} of the {self}; has another one ended, or"
                f" not come in time? ({error})"
            ) from error

    def _make(self, key: tuple, members: range) -> dist.ProcessGroup | None:
        if len(members) == 1:
            return None
        if key not in self._made:
            ranks = self._global_ranks()
            with self._equal_history(), self.named_errors(f"making a process group ({key[0]})"):
                self._made[key] = dist.new_group(
                    [ranks[member] for member in members],
                    timeout=self.timeout,
                    use_local_synchronization=True,  # ranks outside of this group know nothing of it
                    group_desc=f"moe_core {key[0]}",
                )
        return self._made[key]

    @contextmanager
    def _equal_history(self) -> Iterator[None]:
        """torch (2.11) names a group after its ranks and the number of groups its process is in. Where that number
        differs between ranks, say because one of them has another group, they would wait for each other forever."""
        names = dist.distributed_c10d._world.pg_names
        missing = self.max(len(names), self.device) - len(names)
        strangers = [object() for _ in range(missing)]
        names.update(dict.fromkeys(strangers, ""))
        try:
            yield
        finally:
            for stranger in strangers:
                del names[stranger]

    @property
    def device(self) -> torch.device:
        """Where the group's collectives take their tensors."""
        on_gpu = "nccl" in dist.get_backend(self.process_group)
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def _global_ranks(self) -> list[int]:
        return [0] if self.process_group is None else dist.get_process_group_ranks(self.process_group)


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


def make_expert_groups(
    expert_parallel_size: int, timeout: timedelta | None = None, ranks_per_node: int | None = None
) -> ExpertGroup:
    """Cut the world (the default group) into expert groups of consecutive ranks; ranks that own the same experts are
    replicas. Every rank of the world calls this.

    Args:
        timeout: of all process groups made for experts.
        ranks_per_node: in one expert group; None: as torchrun says.

    Raises:
        ValueError: the size does not divide the world's; ranks_per_node does not divide the size.
    """
    ranks = list(range(dist.get_world_size()))
    size = expert_parallel_size
    if size < 1 or len(ranks) % size:
        raise ValueError(f"expert_parallel_size ({size}) must divide the number of ranks ({len(ranks)})")
    groups = [ranks[i : i + size] for i in range(0, len(ranks), size)]
    experts, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout)
    replicas, _ = dist.new_subgroups_by_enumeration([list(same) for same in zip(*groups, strict=True)], timeout=timeout)
    return ExpertGroup(experts, replicas if len(groups) > 1 else None, timeout, ranks_per_node)
