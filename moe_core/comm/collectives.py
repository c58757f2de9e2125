"""Collectives of CPU tensors as plans, on one machine."""

# P ranks, n rows, a row has any shape [...]

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from moe_core.comm.plan import Plan
from moe_core.comm.plans import (
    linear_all_gather,
    linear_all_to_all,
    linear_reduce_scatter,
)
from moe_core.comm.runner import SUM_DTYPES, PlanRunner
from moe_core.ranks import Ranks

# A piece should stay in the cache until the receiver has copied it. Smaller pieces need more
# signals.
_MOST_PIECE_BYTES = 2**18
_SHARED_BYTES = 2**25  # of the slots of all ranks in one plan, unless pieces would be too short
_LEAST_PIECE_BYTES = 2**12


class Collectives:
    """Collectives of CPU tensors through shared memory. All ranks must call each of them.

    The first call of a collective creates its plan and shared memory. Results are written to `out`
    or are new tensors. They have no gradients. Sums are in the order of the ranks and in the dtype
    of the tensors, so they are the same on all ranks and in every run.

    Args:
        ranks: the ranks, all on one machine. Their process group is used to set up shared memory.
        timeout: the timeout of every wait for another rank.

    Raises, in every method:
        ValueError: a tensor is on a GPU, or its rows do not fit the splits; `out` has another shape
            or dtype; the ranks are on several machines (first call, on all ranks).
        RuntimeError: no C++ compiler, or too little memory (first call, on all ranks).
        CollectiveError: a rank does not come within the timeout, or sends another number of rows.
    """

    def __init__(self, ranks: Ranks, timeout: timedelta = default_pg_timeout) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self._runners: dict[Callable[[int], Plan], PlanRunner] = {}

    def prepare_all_to_all(self) -> None:
        """Create the plan of `all_to_all` and `exchange` now, on this thread."""
        self._runner(linear_all_to_all)

    def all_to_all(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """rows [P * n, ...] by destination -> [P * n, ...] by source."""
        splits = self._equal_splits(rows)
        return self.exchange(rows, splits, splits, out)

    def exchange(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        out: Tensor | None = None,
    ) -> Tensor:
        """rows [sum(send), ...] by destination -> [sum(receive), ...] by source.

        Args:
            send, receive: the number of rows for each rank, and from each rank [P].
        """
        rows = _checked(rows)
        _check_splits(rows, send, self.ranks.size)
        row_bytes = _row_bytes(rows)
        received = _result(rows, (sum(receive), *rows.shape[1:]), out)
        self._runner(linear_all_to_all).run(
            rows,
            [number * row_bytes for number in send],
            received,
            [number * row_bytes for number in receive],
        )
        return received

    def all_gather(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """rows [n, ...] of each rank -> [P * n, ...] on every rank."""
        rows = _checked(rows)
        size = self.ranks.size
        gathered = _result(rows, (size * len(rows), *rows.shape[1:]), out)
        self._runner(linear_all_gather).run(rows, [rows.nbytes], gathered, [rows.nbytes] * size)
        return gathered

    def reduce_scatter(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """rows [P * n, ...] of each rank -> this rank's [n, ...], summed over the ranks."""
        rows = _checked_for_sums(rows)
        num_rows = self._equal_splits(rows)[0]
        reduced = _result(rows, (num_rows, *rows.shape[1:]), out)
        inputs = [reduced.nbytes] * self.ranks.size
        self._runner(linear_reduce_scatter).run(rows, inputs, reduced, [reduced.nbytes])
        return reduced

    def _equal_splits(self, rows: Tensor) -> list[int]:
        size = self.ranks.size
        if len(rows) % size:
            raise ValueError(f"the number of rows ({len(rows)}) must be a multiple of {size} ranks")
        return [len(rows) // size] * size

    def _runner(self, make_plan: Callable[[int], Plan]) -> PlanRunner:
        if make_plan not in self._runners:
            plan = make_plan(self.ranks.size)
            self._runners[make_plan] = PlanRunner(plan, self.ranks, piece_bytes(plan), self.timeout)
        return self._runners[make_plan]


def piece_bytes(plan: Plan) -> int:
    """The length of a plan's pieces: at most 256 KiB, and less if the plan has many slots."""
    num_slots = 2 * plan.num_ranks * plan.num_slots
    fitting = _SHARED_BYTES // num_slots // 64 * 64
    return min(max(fitting, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES)


def _result(rows: Tensor, shape: tuple[int, ...], out: Tensor | None) -> Tensor:
    """`out`, or a new tensor."""
    if out is None:
        return rows.new_empty(shape)
    if out.shape != shape or out.dtype != rows.dtype or not out.is_contiguous():
        raise ValueError(
            f"out has shape {list(out.shape)}, strides {list(out.stride())} and {out.dtype}, not"
            f" contiguous {list(shape)} and {rows.dtype}"
        )
    return _checked(out)


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()


def _checked(rows: Tensor) -> Tensor:
    """The rows, contiguous and detached, after a check of their device."""
    if rows.device.type != "cpu":
        raise ValueError(f"channels through shared memory need CPU tensors, not {rows.device}")
    return rows.detach().contiguous()


def _checked_for_sums(rows: Tensor) -> Tensor:
    if rows.dtype not in SUM_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUM_DTYPES)
        raise ValueError(f"sums of {rows.dtype} are not supported, only of {names}")
    return _checked(rows)


def _check_splits(rows: Tensor, send: Sequence[int], size: int) -> None:
    if len(send) != size or min(send) < 0 or sum(send) != len(rows):
        raise ValueError(f"send ({list(send)}) does not split {len(rows)} rows over {size} ranks")
