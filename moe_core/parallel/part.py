"""A part of an expert group: the ranks that a step of a strategy exchanges among."""

# P ranks of a part

import torch
import torch.distributed as dist
from torch import Tensor


class Part:
    """Some ranks of an expert group. The group is cut into such parts, and all of them communicate
    at the same time.

    A part has a process group of its own, or it shares one with the other parts of the expert
    group. In a shared one an all-to-all takes place among all ranks of the expert group, and the
    ranks of other parts are sent no rows.

    Args:
        members: ranks in the expert group, this one among them.
        process_group: of the members alone, or of the whole expert group; None: one rank without
            torch.distributed.
    """

    def __init__(self, members: range, process_group: dist.ProcessGroup | None) -> None:
        self.members, self.process_group = members, process_group
        self.size = len(members)
        self._is_shared = self.size > 1 and process_group.size() > self.size

    def all_to_all(
        self, out: Tensor, rows: Tensor, receive: Tensor | None = None, send: Tensor | None = None
    ) -> None:
        """rows [sum(send), ...] by destination -> `out` [sum(receive), ...] by source.

        Args:
            receive, send: rows from and for each member [P], on the host; None: as many for each.
        """
        if self.size == 1:
            out.copy_(rows)
            return
        receive, send = self._splits(receive, len(out)), self._splits(send, len(rows))
        dist.all_to_all_single(out, rows, receive, send, group=self.process_group)

    def gather(self, own: Tensor) -> Tensor:
        """own [n, ...] of every member -> [P * n, ...], on each of them."""
        if self._is_shared:
            copies = torch.cat([own] * self.size)
            gathered = torch.empty_like(copies)
            self.all_to_all(gathered, copies)
            return gathered
        gathered = own.new_empty(self.size * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=self.process_group)
        return gathered

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """rows [P * n, ...] of every member -> this one's n of them, summed over the members."""
        rows = rows.contiguous()
        own_shape = (rows.shape[0] // self.size, *rows.shape[1:])
        if self._is_shared:
            received = torch.empty_like(rows)
            self.all_to_all(received, rows)
            return received.view(self.size, *own_shape).sum(0)
        own = rows.new_empty(own_shape)
        dist.reduce_scatter_tensor(own, rows, group=self.process_group)
        return own

    def _splits(self, sizes: Tensor | None, total: int) -> list[int] | None:
        """Rows by rank of the process group."""
        if not self._is_shared:
            return None if sizes is None else sizes.tolist()
        by_member = [total // self.size] * self.size if sizes is None else sizes.tolist()
        by_rank = [0] * self.process_group.size()
        for member, size in zip(self.members, by_member, strict=True):
            by_rank[member] = size
        return by_rank
