"""A subset of the ranks of an expert group, and its collectives."""

# P ranks of a subset, M model dim

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.parallel.traffic import record_call

if TYPE_CHECKING:
    from moe_core.parallel.groups import ExpertGroup


class RankSubset:
    """A subset of the ranks of an expert group, and its collectives.

    The expert group is partitioned into subsets, which communicate at the same time. A subset has
    its own process group, or it uses the process group of the expert group. In the second case
    every collective is an all-to-all over the expert group, with no rows for ranks outside of the
    subset.

    Args:
        group: the expert group, to which `count_traffic` attributes the traffic.
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
        sizes: tuple[Tensor, ...] = ()
        if send is not None and receive is not None:
            sizes = (send, receive)
        self._record("all_to_all", rows, send_sizes, sizes)
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
        self._record("gather", shard, [len(shard)] * self.size)
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
        self._record("reduce_scatter", rows, [num_rows] * self.size)
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

    def _record(
        self, name: str, rows: Tensor, rows_to: list[int], sizes: tuple[Tensor, ...] = ()
    ) -> None:
        """Report a collective that sends `rows_to` [P] rows to each member."""
        width = rows.shape[1:].numel()
        sent = {m: size * width for m, size in zip(self.members, rows_to, strict=True)}
        record_call(self, name, rows, sent, sizes)
