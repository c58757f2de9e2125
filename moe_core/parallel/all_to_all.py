"""Rows to the ranks that own their experts, and back. Unequal counts are the normal case, none at all included."""

# W ranks of the group, E experts of the layer, N rows here, R rows received, M model dim

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.parallel.groups import ExpertGroup


class Exchange:
    """One round trip of a step: `to_experts` sends rows to the experts' ranks, `to_tokens` brings results home.

    `offsets` [E] (where each expert's rows end here) is exchanged first; it is read back to the host, since the sizes
    of messages have to be known. With a group of one nothing is sent or read.
    """

    def __init__(self, offsets: Tensor, group: ExpertGroup) -> None:
        self.group = group
        self.offsets = offsets  # [E / W] after the exchange: where each local expert's rows end
        self.order = None
        if group.size > 1:
            self._exchange_counts(offsets)

    def to_experts(self, rows: Tensor) -> Tensor:
        """[N, M] by expert of the layer -> [R, M] by local expert, then by source rank."""
        if self.group.size == 1:
            return rows
        rows = _AllToAll.apply(rows[: sum(self.send)], self.send, self.receive, self.group.process_group)
        return rows if self.order is None else _Permute.apply(rows, self.order, self.order.argsort())

    def to_tokens(self, rows: Tensor) -> Tensor:
        """The way back: [R, M] -> [N, M], without the rows that hold no choice."""
        if self.group.size == 1:
            return rows
        if self.order is not None:
            rows = _Permute.apply(rows, self.order.argsort(), self.order)
        return _AllToAll.apply(rows, self.receive, self.send, self.group.process_group)

    def _exchange_counts(self, offsets: Tensor) -> None:
        group = self.group
        send = offsets.diff(prepend=offsets.new_zeros(1)).view(group.size, -1)  # [W, E / W]
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=group.process_group)
        self.send, self.receive = send.sum(1).tolist(), receive.sum(1).tolist()
        self.offsets = receive.sum(0).cumsum(0).int()
        if receive.shape[1] > 1:
            expert = torch.arange(receive.shape[1], device=receive.device).repeat(group.size)
            self.order = expert.repeat_interleave(receive.flatten()).argsort(stable=True)  # by rank -> by expert


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive, process_group):
        ctx.send, ctx.receive, ctx.process_group = send, receive, process_group
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=process_group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.receive, ctx.send, ctx.process_group), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        order, inverse = ctx.saved_tensors
        return _Permute.apply(grad, inverse, order), None, None
