"""Counts the elements and messages that this rank sends in an expert group."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from moe_core.parallel.groups import ExpertGroup


@dataclass
class Traffic:
    """Elements and messages that this rank sent, by the receiver's rank in the expert group."""

    elements: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)


_counted: WeakKeyDictionary["ExpertGroup", Traffic] = WeakKeyDictionary()


@contextmanager
def count_traffic(group: "ExpertGroup") -> Iterator[Traffic]:
    """Count what this rank sends to the other ranks of `group` until the end of the block.

    Only floating-point tensors count: rows and weights, not the counts of rows.
    """
    _counted[group] = Traffic()
    try:
        yield _counted[group]
    finally:
        del _counted[group]


def record_sent(group: "ExpertGroup", elements: Mapping[int, int]) -> None:
    """Add one message of `elements[rank]` elements to each rank, where `group` is counted."""
    traffic = _counted.get(group)
    if traffic is None:
        return
    for rank, number in elements.items():
        if rank != group.rank:
            traffic.elements[rank] += number
            traffic.messages[rank] += 1
