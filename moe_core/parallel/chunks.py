"""How the rows of each expert are cut over ranks and chunks.

An expert's n rows on one rank are cut into Q runs for the ranks that compute the same part of its
hidden dim (E < W), and each of these into d chunks. Of `Q * U` units, U = 2 (d - 1), the first and
the last chunk have one and the others two: the dispatch of the first chunk and the return of the
last one are what no work can hide. Unit u begins at row `floor(n * u / (Q * U))`. Nothing is
rounded up to a multiple of d, so the degree changes neither the capacity nor which tokens are
dropped.
"""

# W ranks, E experts, E_l experts of a rank, K top-k, N kept rows, s = max(W / E, 1) ranks of an
# expert: r hidden parts, each on Q = s / r ranks; d chunks

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.ops import DispatchPlan
from moe_core.parallel.strategy import ParallelStrategy


@dataclass(frozen=True)
class ChunkLayout:
    """The runs of rows of one strategy: one for each expert, sharer (of Q) and chunk (of d)."""

    num_ranks: int
    num_sharers: int  # Q
    num_parts: int  # r
    num_chunks: int  # d

    @classmethod
    def of(cls, num_experts: int, num_ranks: int, strategy: ParallelStrategy) -> "ChunkLayout":
        ranks_per_expert = max(num_ranks // num_experts, 1)
        num_sharers = ranks_per_expert // strategy.r
        return cls(num_ranks, num_sharers, strategy.r, strategy.pipeline_degree)

    def run_sizes(self, counts: Tensor) -> Tensor:
        """counts [E] of each expert's rows -> [E, Q, d] of each run's."""
        units_per_sharer = max(2 * (self.num_chunks - 1), 1)
        num_units = self.num_sharers * units_per_sharer
        first_units = []
        for sharer in range(self.num_sharers):
            for chunk in range(self.num_chunks):
                first_units.append(sharer * units_per_sharer + max(2 * chunk - 1, 0))
        limits = torch.tensor([*first_units, num_units], device=counts.device)
        bounds = counts.unsqueeze(1) * limits // num_units  # [E, Q d + 1]
        return bounds.diff(dim=1).view(-1, self.num_sharers, self.num_chunks)

    def by_rank(self, run_sizes: Tensor) -> Tensor:
        """Runs [E, Q, d] -> the rows [W, E_l, d] that each rank's experts are sent."""
        by_part = run_sizes.unsqueeze(1).expand(-1, self.num_parts, -1, -1)  # [E, r, Q, d]
        return by_part.reshape(self.num_ranks, -1, self.num_chunks)

    def arrange(self, plan: DispatchPlan, run_sizes: Tensor, num_rows: int) -> DispatchPlan:
        """The plan with its rows in the order in which they are sent: by chunk, then by
        destination, then by expert. Each choice has a row for every hidden part.

        Args:
            run_sizes: [E, Q, d].
            num_rows: N, the sum of run_sizes.
        """
        choices = plan.choices[:num_rows]  # [N]
        if self.num_chunks * self.num_parts * self.num_sharers == 1:
            return plan._replace(choices=choices)
        device = choices.device
        sizes = run_sizes.flatten()  # [E Q d]
        run_of_row = torch.arange(len(sizes), device=device)
        run_of_row = run_of_row.repeat_interleave(sizes, output_size=num_rows)  # [N]
        place_in_run = torch.arange(num_rows, device=device) - _starts(sizes)[run_of_row]
        starts = self._sent_starts(run_sizes)  # [E Q d, r]
        rows = starts[run_of_row] + place_in_run.unsqueeze(1)  # [N, r]
        return self._with_rows(plan, choices, rows)

    def _sent_starts(self, run_sizes: Tensor) -> Tensor:
        """The first row of each run, for each hidden part, in the order of sending [E Q d, r]."""
        sent_order = run_sizes.permute(2, 0, 1).unsqueeze(2)  # [d, E, 1, Q]
        sent_order = sent_order.expand(-1, -1, self.num_parts, -1)  # [d, E, r, Q]
        starts = _starts(sent_order.flatten()).view(sent_order.shape)
        return starts.permute(1, 3, 0, 2).reshape(-1, self.num_parts)

    def _with_rows(self, plan: DispatchPlan, choices: Tensor, rows: Tensor) -> DispatchPlan:
        """The plan whose choices [N] lie in `rows` [N, r]; choice c becomes r choices from r c."""
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


def _starts(sizes: Tensor) -> Tensor:
    """Where each of consecutive blocks begins."""
    return sizes.cumsum(0) - sizes
