"""Counts what this rank sends to the other ranks of an expert group through torch.distributed."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist

from moe_core.parallel import ExpertGroup


@dataclass
class Traffic:
    """Elements and messages that this rank sent, by the receiver's rank in the expert group."""

    elements: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)


@contextmanager
def count_traffic(group: ExpertGroup) -> Iterator[Traffic]:
    """Count the traffic from this rank to others until the end of the block.

    Only floating-point tensors count, that is, rows and weights but not the counts of rows.
    """
    everyone = dist.get_process_group_ranks(group.process_group)
    traffic = Traffic()

    def send(tensor, numbers: list[int], process_group) -> None:
        """Count `numbers` [P] of elements to each rank of a process group."""
        if not tensor.is_floating_point():
            return
        members = dist.get_process_group_ranks(process_group)
        for member, number in zip(members, numbers, strict=True):
            rank = everyone.index(member)
            if rank != group.rank and number:
                traffic.elements[rank] += number
                traffic.messages[rank] += 1

    originals = {
        name: getattr(dist, name)
        for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    }

    def all_to_all_single(received, rows, receive=None, sizes=None, group=None):
        row = rows[:1].numel()
        sizes_of_all = sizes or [len(rows) // group.size()] * group.size()
        send(rows, [size * row for size in sizes_of_all], group)
        return originals["all_to_all_single"](received, rows, receive, sizes, group=group)

    def all_gather_into_tensor(gathered, part, group=None):
        send(part, [part.numel()] * group.size(), group)
        return originals["all_gather_into_tensor"](gathered, part, group=group)

    def reduce_scatter_tensor(reduced, rows, group=None):
        send(rows, [reduced.numel()] * group.size(), group)
        return originals["reduce_scatter_tensor"](reduced, rows, group=group)

    with pytest.MonkeyPatch.context() as patch:
        for function in (all_to_all_single, all_gather_into_tensor, reduce_scatter_tensor):
            patch.setattr(dist, function.__name__, function)
        yield traffic
