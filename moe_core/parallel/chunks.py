"""How the rows of each expert are divided over ranks and chunks.

If several ranks share an expert (E < W), Q of them compute the same part of its hidden dim. The n
rows that one rank has for an expert are divided into Q parts, one for each of these sharers. Each
part is divided into d chunks. One chunk of one sharer is a run.

The rows are divided in units: U = 2 (d - 1) for each sharer, or 1 if d = 1. The first and the last
chunk have one unit, the other chunks two, because nothing overlaps with the dispatch of the first
chunk and the return of the last. Unit u starts at row `floor(n * u / (Q * U))`. Nothing is rounded
up to a multiple of d, so the degree changes neither the capacity nor which tokens are dropped.

Results are on the device of the inputs. Nothing here waits for a device.
"""

# W ranks, E experts, E_l experts of a rank, K top-k, N kept rows, R rows received, s = max(W / E,
# 1) ranks of an expert: r hidden parts, each on Q = s / r ranks; d chunks

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.ops import DispatchPlan
from moe_core.parallel.strategy import ParallelStrategy


@dataclass(frozen=True)
class ChunkLayout:
    """The runs of rows of a strategy: one for each expert, sharer (of Q) and chunk (of d)."""

    num_ranks: int
    num_sharers: int  # Q
    num_parts: int  # r
    num_chunks: int  # d

    @classmethod
    def of(cls, num_experts: int, num_ranks: int, strategy: ParallelStrategy) -> "ChunkLayout":
        ranks_per_expert = max(num_ranks // num_experts, 1)
        num_sharers = ranks_per_expert // strategy.r
        return cls(num_ranks, num_sharers, strategy.r, strategy.pipeline_degree)

    @property
    def units_per_sharer(self) -> int:
        """U, the number of units of one sharer."""
        return max(2 * (self.num_chunks - 1), 1)

    def sharers(self, device: torch.device) -> Tensor:
        """The index of each rank [W] among the Q sharers of the same part of an expert."""
        return torch.arange(self.num_ranks, device=device) % self.num_sharers

    def by_rank(self, counts: Tensor) -> Tensor:
        """counts [E] -> [W, E_l]: the counts of each rank's experts."""
        ranks_per_expert = self.num_parts * self.num_sharers
        return counts.unsqueeze(1).expand(-1, ranks_per_expert).reshape(self.num_ranks, -1)

    def chunk_sizes(self, counts: Tensor, sharers: Tensor) -> Tensor:
        """The number of rows of each chunk [..., d].

        Args:
            counts: [...], the rows of experts.
            sharers: [...], for each of them the index of the sharer.
        """
        num_units = self.num_sharers * self.units_per_sharer
        if num_units == 1:
            return counts.unsqueeze(-1)
        chunk = torch.arange(self.num_chunks, device=counts.device)
        first_units = (2 * chunk - 1).clamp_(min=0)  # [d]
        last_units = (2 * chunk + 1).clamp_(max=self.units_per_sharer)
        shift = (sharers * self.units_per_sharer).unsqueeze(-1)
        counts = counts.unsqueeze(-1)
        ends = counts * (shift + last_units) // num_units
        return ends - counts * (shift + first_units) // num_units

    def run_sizes(self, counts: Tensor) -> Tensor:
        """counts [E], the rows of each expert -> [E, Q, d], the rows of each run."""
        sharers = torch.arange(self.num_sharers, device=counts.device)
        return self.chunk_sizes(counts.unsqueeze(1), sharers)

    def capacity_of_chunks(self, capacity: int) -> list[int]:
        """The rows of an expert in each chunk [d], if every expert has `capacity` rows."""
        sizes = self.chunk_sizes(
            torch.tensor(capacity, device="cpu"), torch.tensor(0, device="cpu")
        )
        return sizes.tolist()

    def places(self, plan: DispatchPlan, capacity: int) -> "Places":
        """Assign the rows of a plan to places: `capacity` for each expert, by (chunk, expert).

        Ranks own consecutive experts, so each chunk is sorted by destination. This needs whole
        experts (Q = r = 1).
        """
        device = plan.choices.device
        num_experts = len(plan.offsets)
        num_places = num_experts * capacity
        row = torch.arange(len(plan.choices), device=device)  # [N]
        expert = torch.searchsorted(plan.offsets.long(), row, right=True)
        starts = plan.offsets - kept_counts(plan)  # [E]
        is_used = expert < num_experts  # rows past the end belong to no expert
        expert = expert.clamp(max=num_experts - 1)
        rank = row - starts[expert]  # within the expert
        place = torch.zeros_like(row)
        first_rank = 0
        for size in self.capacity_of_chunks(capacity):
            in_chunk = num_experts * first_rank + expert * size + rank - first_rank
            place = torch.where(rank >= first_rank, in_chunk, place)
            first_rank += size
        return Places.of(plan, place, is_used, num_places)

    def arrange(self, plan: DispatchPlan, num_rows: int) -> DispatchPlan:
        """The plan with its rows in the order of sending: by chunk, destination and expert.

        Each choice has one row for every hidden part.

        Args:
            num_rows: N, the end of the last expert's rows.
        """
        choices = plan.choices[:num_rows]  # [N]
        if self.num_chunks * self.num_parts * self.num_sharers == 1:
            return plan._replace(choices=choices)
        run_sizes = self.run_sizes(kept_counts(plan))  # [E, Q, d]
        sizes = run_sizes.flatten()  # [E Q d]
        run_of_row = _blocks(sizes, num_rows)  # [N]
        device = choices.device
        place_in_run = torch.arange(num_rows, device=device) - _starts(sizes)[run_of_row]
        starts = self._sent_starts(run_sizes)  # [E Q d, r]
        rows = starts[run_of_row] + place_in_run.unsqueeze(1)  # [N, r]
        return self._with_rows(plan, choices, rows)

    def _sent_starts(self, run_sizes: Tensor) -> Tensor:
        """The first row of each run for each hidden part [E Q d, r], in the order of sending."""
        sent_order = run_sizes.permute(2, 0, 1).unsqueeze(2)  # [d, E, 1, Q]
        sent_order = sent_order.expand(-1, -1, self.num_parts, -1)  # [d, E, r, Q]
        starts = _starts(sent_order.flatten()).view(sent_order.shape)
        return starts.permute(1, 3, 0, 2).reshape(-1, self.num_parts)

    def _with_rows(self, plan: DispatchPlan, choices: Tensor, rows: Tensor) -> DispatchPlan:
        """The plan whose choices [N] are in `rows` [N, r]. Choice c becomes choices r c to
        r c + r - 1."""
        copies = torch.arange(self.num_parts, device=choices.device)
        copied = (choices.unsqueeze(1) * self.num_parts + copies).flatten()  # [N r]
        rows = rows.flatten()
        num_tokens, top_k = plan.slots.shape
        new_choices = torch.empty_like(copied).scatter_(0, rows, copied)
        slots = choices.new_zeros(num_tokens * top_k * self.num_parts).scatter_(0, copied, rows)
        slots = slots.view(num_tokens, top_k * self.num_parts)
        kept = plan.kept
        if kept is not None:
            kept = kept.repeat_interleave(self.num_parts, dim=1)
        return plan._replace(choices=new_choices, slots=slots, kept=kept)


class Places(NamedTuple):
    """Two plans that move rows to P places and back. Some places stay empty.

    Attributes:
        padded: moves tokens to places. Empty places get a copy of the first token.
        returned: moves places to the rows of the original plan. Each place is a "token" with one
            choice. The gradient of an empty place is 0.
        is_taken: [P] bool; False for empty places.
    """

    padded: DispatchPlan
    returned: DispatchPlan
    is_taken: Tensor

    @classmethod
    def of(cls, plan: DispatchPlan, place: Tensor, is_used: Tensor, num_places: int) -> "Places":
        """Create the plans.

        Args:
            place: int64 [N], the place of each row.
            is_used: bool [N], False for rows that have no place.
        """
        row = torch.arange(len(place), device=place.device)
        place_or_bin = torch.where(is_used, place, num_places)
        row_of_place = place.new_full((num_places + 1,), -1).scatter_(0, place_or_bin, row)
        row_of_place = row_of_place[:num_places]
        is_taken = row_of_place >= 0
        row_of_place = row_of_place.clamp(min=0)
        place = torch.where(is_used, place, 0)
        choices = plan.choices.new_zeros(num_places)
        slots = torch.zeros_like(plan.slots)
        if len(row) > 0:
            choices = torch.where(is_taken, plan.choices[row_of_place], 0)
            slots = place[plan.slots]
        padded = plan._replace(choices=choices, slots=slots)
        returned = DispatchPlan(
            choices=place,
            offsets=plan.offsets,
            slots=row_of_place.unsqueeze(1),
            kept=is_taken.unsqueeze(1),
            counts=plan.counts,
        )
        return cls(padded, returned, is_taken)


def kept_counts(plan: DispatchPlan) -> Tensor:
    """The number of rows of each expert [E]: its choices that were not dropped."""
    return plan.offsets.diff(prepend=plan.offsets.new_zeros(1)).long()


def plan_received(counts: Tensor, num_rows: int) -> DispatchPlan:
    """The plan that sorts received rows by expert.

    The received rows are sorted by (source, expert). Row r is a "token" whose one choice is its
    expert.

    Args:
        counts: [W, E_l], the rows from every rank for every expert.
        num_rows: R, the sum of `counts`.
    """
    by_expert = counts.t()  # [E_l, W]
    starts = _starts(counts.flatten())  # by (source, expert)
    sorted_starts = _starts(by_expert.flatten()).view(by_expert.shape).t().flatten()
    row = torch.arange(num_rows, device=counts.device)
    slots = row + (sorted_starts - starts)[_blocks(counts.flatten(), num_rows)]  # [R]
    choices = torch.empty_like(slots).scatter_(0, slots, row)
    per_expert = counts.sum(0)
    return DispatchPlan(
        choices, per_expert.cumsum(0).int(), slots.unsqueeze(1), kept=None, counts=per_expert
    )


def _blocks(sizes: Tensor, num_rows: int) -> Tensor:
    """The block of each row, for consecutive blocks of these sizes with `num_rows` rows in all."""
    block = torch.arange(len(sizes), device=sizes.device)
    return block.repeat_interleave(sizes, output_size=num_rows)


def _starts(sizes: Tensor) -> Tensor:
    """The start of each of the consecutive blocks of these sizes."""
    return sizes.cumsum(0) - sizes
