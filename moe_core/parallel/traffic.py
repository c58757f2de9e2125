"""Counts and replays the traffic of this rank in an expert group."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_core.parallel.groups import ExpertGroup, RankSubset


@dataclass
class Traffic:
    """Elements and messages that this rank sent, by the receiver's rank in the expert group."""

    elements: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)


@dataclass(frozen=True)
class ExchangeCall:
    """One collective of a subset of an expert group, without its values."""

    subset: "RankSubset"
    name: str  # the method of RankSubset
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[Tensor, ...]  # rows to and from each member, in an all-to-all of unequal parts
    sent_bytes: int  # to other ranks

    def replay(self) -> None:
        """Run the collective again, with zeros. All ranks of the subset call this."""
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        getattr(self.subset, self.name)(zeros, *self.sizes)


_counted: WeakKeyDictionary["ExpertGroup", Traffic] = WeakKeyDictionary()
_recorded: WeakKeyDictionary["ExpertGroup", list[ExchangeCall]] = WeakKeyDictionary()


@contextmanager
def count_traffic(group: "ExpertGroup") -> Iterator[Traffic]:
    """Count the traffic from this rank to the other ranks of `group` until the end of the block.

    Only floating-point tensors count, that is, rows and weights but not the counts of rows.
    """
    _counted[group] = Traffic()
    try:
        yield _counted[group]
    finally:
        del _counted[group]


@contextmanager
def record_exchanges(group: "ExpertGroup") -> Iterator[list[ExchangeCall]]:
    """Record the collectives that exchange rows, numbers of rows and expert weights in `group`."""
    _recorded[group] = []
    try:
        yield _recorded[group]
    finally:
        del _recorded[group]


def replay(calls: Sequence[ExchangeCall]) -> None:
    """Run recorded collectives again, one after the other. All ranks of the group call this.

    Collectives of different subsets ran at the same time, and their order may differ between ranks.
    Here the order is the same on all ranks: first rows, then weights, then gradients of weights,
    and within each of these one kind of subset after the other.
    """
    names = ("all_to_all", "gather", "reduce_scatter")

    def kind(call: ExchangeCall) -> tuple[int, int, int]:
        members = call.subset.members
        return (names.index(call.name), members.step, len(members))

    for call in sorted(calls, key=kind):
        call.replay()


def record_call(
    subset: "RankSubset",
    name: str,
    tensor: Tensor,
    sent: Mapping[int, int],
    sizes: tuple[Tensor, ...] = (),
) -> None:
    """Report a collective of `tensor` that sends `sent[rank]` elements to each rank of the expert
    group."""
    group = subset.group
    to_others = {rank: number for rank, number in sent.items() if rank != group.rank}
    # Integers are numbers of rows.
    if tensor.is_floating_point() and group in _counted:
        traffic = _counted[group]
        for rank, number in to_others.items():
            traffic.elements[rank] += number
            traffic.messages[rank] += 1
    if group in _recorded:
        sent_bytes = sum(to_others.values()) * tensor.element_size()
        call = ExchangeCall(
            subset, name, tuple(tensor.shape), tensor.dtype, tensor.device, sizes, sent_bytes
        )
        _recorded[group].append(call)
