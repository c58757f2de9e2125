"""From this rank's tokens to the experts of all ranks and back, in chunks that overlap with the
experts' work.

An expert's rows n on one rank are cut in Q runs for the ranks that compute the same part of its
hidden dim (E < W), and each in d chunks. Of `Q * U` units, U = 2 (d - 1), the first and the last
chunk have one and the others two: the first one's way there and the last one's way back are what no
work can hide. Unit u begins at row `floor(n * u / (Q * U))`. Nothing is rounded up to a multiple of
d, so the degree changes neither the capacity nor which tokens are dropped. Rows travel in the order
(chunk, destination).
"""

# T tokens, W ranks, E experts, E_l experts of a rank, K top-k, N kept rows here, R rows received, M
# model dim s = max(W / E, 1) ranks of an expert: r hidden parts, each on Q = s / r ranks; d chunks

from collections.abc import Callable

import torch
from torch import Tensor

from moe_core.ops import DispatchPlan
from moe_core.parallel.all_to_all import Algorithm, Crossing, Splits
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.strategy import ParallelStrategy


class Pipeline:
    """One round trip of one call. The counts of rows are exchanged first and read back to the host,
    once.

    `plan` is the given one with its rows in the order of travel, every choice r times.
    """

    def __init__(
        self, plan: DispatchPlan, num_experts: int, group: ExpertGroup, strategy: ParallelStrategy
    ) -> None:
        self.algorithm = Algorithm(group, strategy.all_to_all, strategy.ranks_per_node)
        self.rank, self.degree, self.copies = group.rank, strategy.pipeline_degree, strategy.r
        ranks_per_expert = max(group.size // num_experts, 1)
        self.sharers = ranks_per_expert // strategy.r  # Q
        self.units = max(2 * (strategy.pipeline_degree - 1), 1)  # U
        counts = plan.offsets.diff(prepend=plan.offsets.new_zeros(1)).long()  # [E] kept rows
        by_rank = (
            counts.view(-1, 1)
            if ranks_per_expert == 1
            else counts.repeat_interleave(ranks_per_expert)
        )
        by_rank = by_rank.reshape(group.size, -1)  # [W, E_l]
        received, middle = self.algorithm.exchange_counts(by_rank)
        tables = [by_rank, received] + ([] if middle is None else [middle])
        # the one wait for the device
        on_host = torch.cat([table.flatten() for table in tables]).cpu()
        on_host = on_host.split([table.numel() for table in tables])
        self._by_rank, self._received, *middles = (
            part.view(table.shape) for part, table in zip(on_host, tables, strict=True)
        )
        self._middle = middles[0] if middles else None
        self.plan = self._arrange(plan, counts, int(self._by_rank[::ranks_per_expert].sum()))

    def run(self, rows: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """rows [r * N, M] as `plan` orders them -> the experts' results, likewise.

        `experts` maps rows [R, M] by local expert and offsets [E_l] to rows [R, M].
        """
        splits = [self._splits(chunk) for chunk in range(self.degree)]
        there = [Crossing(self.algorithm, split) for split in splits]
        back = [Crossing(self.algorithm, split, back=True) for split in splits]
        chunks = rows.split([int(split.send.sum()) for split in splits])
        pending = [crossing.depart(chunk) for crossing, chunk in zip(there, chunks, strict=True)]
        results = []
        for chunk in range(self.degree):
            arrived = there[chunk].arrive(pending[chunk])
            results.append(back[chunk].depart(self._by_expert(arrived, chunk, experts)))
        results = [crossing.arrive(result) for crossing, result in zip(back, results, strict=True)]
        return results[0] if self.degree == 1 else torch.cat(results)

    def _by_expert(self, rows: Tensor, chunk: int, experts: Callable) -> Tensor:
        """Rows [R, M] by (source, local expert) through the experts, which want them by expert."""
        counts = self._run_sizes(self._received, self._sharer(self.rank), chunk)  # [W, E_l]
        offsets = counts.sum(0).cumsum(0).int().to(rows.device)
        if counts.shape[1] == 1:
            return experts(rows, offsets)
        expert = torch.arange(counts.shape[1], device=rows.device).repeat(len(counts))
        expert = expert.repeat_interleave(counts.flatten().to(rows.device), output_size=len(rows))
        order = expert.argsort(stable=True)
        inverse = order.argsort()
        return _Permute.apply(
            experts(_Permute.apply(rows, order, inverse), offsets), inverse, order
        )

    def _arrange(self, plan: DispatchPlan, counts: Tensor, num_rows: int) -> DispatchPlan:
        """Rows in the order (chunk, expert, hidden part, sharer), each choice once for every hidden
        part."""
        chunks, copies, sharers = self.degree, self.copies, self.sharers
        choices = plan.choices[:num_rows]
        if chunks * copies * sharers == 1:
            return plan._replace(choices=choices)
        device, units = choices.device, sharers * self.units
        firsts = [
            q * self.units + self._first_unit(j) for q in range(sharers) for j in range(chunks)
        ]
        # [E, Q d + 1]
        bounds = counts.unsqueeze(1) * torch.tensor([*firsts, units], device=device) // units
        sizes = bounds.diff(dim=1).view(-1, sharers, chunks).permute(2, 0, 1)  # [d, E, Q]
        sizes = sizes.unsqueeze(2).expand(-1, -1, copies, -1)  # [d, E, r, Q]
        starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view(sizes.shape)
        # [N]
        expert = torch.arange(len(counts), device=device).repeat_interleave(
            counts, output_size=num_rows
        )
        place = torch.arange(num_rows, device=device) - (counts.cumsum(0) - counts)[expert]
        unit = (units * (place + 1) - 1) // counts[expert]
        sharer, chunk = unit // self.units, (unit % self.units + 1) // 2
        start = starts[chunk, expert, :, sharer]  # [N, r]
        rows = start + (place - bounds[expert, sharer * chunks + chunk]).unsqueeze(1)  # [N, r]
        copied = choices.unsqueeze(1) * copies + torch.arange(copies, device=device)  # [N, r]
        new_choices = torch.empty_like(copied.flatten()).scatter_(
            0, rows.flatten(), copied.flatten()
        )
        slots = choices.new_zeros(plan.slots.numel() * copies).scatter_(
            0, copied.flatten(), rows.flatten()
        )
        kept = None if plan.kept is None else plan.kept.repeat_interleave(copies, 1)
        slots = slots.view(len(plan.slots), plan.slots.shape[1] * copies)
        return plan._replace(choices=new_choices, slots=slots, kept=kept)

    def _splits(self, chunk: int) -> Splits:
        ranks = torch.arange(len(self._by_rank), device="cpu")
        send = self._run_sizes(self._by_rank, self._sharer(ranks)[:, None], chunk)
        receive = self._run_sizes(self._received, self._sharer(self.rank), chunk)
        middle = None
        if self._middle is not None:
            per_node = self.algorithm.per_node
            targets = (
                torch.arange(self.algorithm.nodes, device="cpu") * per_node + self.rank % per_node
            )
            middle = self._run_sizes(self._middle, self._sharer(targets)[None, :, None], chunk).sum(
                2
            )
        return Splits(send.sum(1), receive.sum(1), middle)

    def _sharer(self, rank: Tensor | int) -> Tensor | int:
        """Which of the Q ranks with the same hidden part of an expert."""
        return rank % self.sharers

    def _run_sizes(self, counts: Tensor, sharer: Tensor | int, chunk: int) -> Tensor:
        """How many of `counts` rows are in this chunk for this sharer."""
        units = self.sharers * self.units
        first, end = (sharer * self.units + self._first_unit(j) for j in (chunk, chunk + 1))
        return counts * end // units - counts * first // units

    def _first_unit(self, chunk: int) -> int:
        return min(max(2 * chunk - 1, 0), self.units)


class _Permute(torch.autograd.Function):
    """Rows in another order; their gradients in the inverse one, without autograd's scatter."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad.index_select(0, *ctx.saved_tensors), None, None
