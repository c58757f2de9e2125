"""Collectives of CPU tensors through the shared memory of one machine."""

# P ranks, n rows, a row has any shape [...]

import ctypes
from collections.abc import Sequence
from ctypes import c_long, c_void_p
from datetime import timedelta
from itertools import accumulate

from torch import Tensor, bfloat16, float32, float64, int32, int64
from torch.distributed.constants import default_pg_timeout

from moe_core.comm.channel import ChannelGroup
from moe_core.comm.library import library
from moe_core.ranks import Ranks

# A piece should stay in the cache until the receiver has copied it. Smaller pieces need more
# signals.
_MOST_PIECE_BYTES = 2**18
_SHARED_BYTES = 2**25  # of the slots of all ranks in one collective, unless pieces were too short
_LEAST_PIECE_BYTES = 2**12
_HEADER_BYTES = 64  # of a slot
_TIMEOUT = 1  # a status
SUM_DTYPES = (float32, float64, bfloat16, int32, int64)  # in the order of `comm::Dtype`


class _Message(ctypes.Structure):
    _fields_ = [("first_byte", c_long), ("bytes", c_long)]


class _Collective(ctypes.Structure):
    """`Collective` of collective.cpp."""

    _fields_ = [
        ("group", c_void_p),
        ("piece_bytes", c_long),
        ("round", c_long),
        ("dtype", c_long),
        ("input", c_void_p),
        ("sent", ctypes.POINTER(_Message)),
        ("output", c_void_p),
        ("received", ctypes.POINTER(_Message)),
        ("failed_rank", c_long),
        ("arrived_bytes", c_long),
    ]


class Collectives:
    """Collectives of CPU tensors through shared memory. All ranks must call each of them.

    The first call of a collective makes its shared memory. Each has its own, so that different
    collectives may run on different threads. Results are written to `out` or are new tensors. They
    have no gradients. Sums are in the order of the ranks and in the dtype of the tensors, so they
    are the same on all ranks and in every run.

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
        self._prepared: dict[str, tuple[ChannelGroup, _Collective]] = {}

    def prepare_all_to_all(self) -> None:
        """Make the memory of `all_to_all` and `exchange` now, on this thread."""
        self._prepare("all-to-all")

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
        if len(send) != self.ranks.size or min(send) < 0 or sum(send) != len(rows):
            raise ValueError(
                f"send ({list(send)}) does not split {len(rows)} rows over {self.ranks.size} ranks"
            )
        received = _result(rows, (sum(receive), *rows.shape[1:]), out)
        self._run("all-to-all", rows, _messages(rows, send), received, _messages(rows, receive))
        return received

    def all_gather(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """rows [n, ...] of each rank -> [P * n, ...] on every rank."""
        rows = _checked(rows)
        size = self.ranks.size
        gathered = _result(rows, (size * len(rows), *rows.shape[1:]), out)
        sent = [(0, rows.nbytes)] * size
        self._run("all-gather", rows, sent, gathered, _messages(rows, [len(rows)] * size))
        return gathered

    def reduce_scatter(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """rows [P * n, ...] of each rank -> this rank's [n, ...], summed over the ranks."""
        if rows.dtype not in SUM_DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUM_DTYPES)
            raise ValueError(f"sums of {rows.dtype} are not supported, only of {names}")
        rows = _checked(rows)
        splits = self._equal_splits(rows)
        reduced = _result(rows, (splits[0], *rows.shape[1:]), out)
        received = [(0, reduced.nbytes)] * self.ranks.size
        dtype = SUM_DTYPES.index(rows.dtype)
        self._run("reduce-scatter", rows, _messages(rows, splits), reduced, received, dtype)
        return reduced

    def _equal_splits(self, rows: Tensor) -> list[int]:
        size = self.ranks.size
        if len(rows) % size:
            raise ValueError(f"the number of rows ({len(rows)}) must be a multiple of {size} ranks")
        return [len(rows) // size] * size

    def _prepare(self, name: str) -> tuple[ChannelGroup, _Collective]:
        if name not in self._prepared:
            piece = piece_bytes(self.ranks.size)
            buffer_bytes = 2 * self.ranks.size * (piece + _HEADER_BYTES)
            group = ChannelGroup(self.ranks, buffer_bytes, self.timeout, f"the {name} with buffers")
            self._prepared[name] = group, _Collective(group=group.pointer, piece_bytes=piece)
        return self._prepared[name]

    def _run(
        self,
        name: str,
        source: Tensor,
        sent: Sequence[tuple[int, int]],
        result: Tensor,
        received: Sequence[tuple[int, int]],
        dtype: int = -1,
    ) -> None:
        """Send the messages in `source`, and write or add the received ones to `result`.

        Args:
            sent, received: the first byte and the number of bytes of each rank's message.
            dtype: of the sum, in SUM_DTYPES; -1: messages are not summed.
        """
        group, call = self._prepare(name)
        group.check_usable()
        call.dtype, call.input, call.output = dtype, source.data_ptr(), result.data_ptr()
        call.sent = (_Message * len(sent))(*(_Message(*each) for each in sent))
        call.received = (_Message * len(received))(*(_Message(*each) for each in received))
        status = library().comm_run(ctypes.addressof(call))
        if not status:
            return
        rank, other = group.rank, call.failed_rank
        if status == _TIMEOUT:
            group.fail_wait(f"{name}: rank {rank} got no signal from rank {other}", other)
        group.fail(
            f"{name}: rank {rank} expects {received[other][1]} bytes from rank {other}, and"
            f" {call.arrived_bytes} came"
        )


def piece_bytes(num_ranks: int) -> int:
    """The length of pieces: at most 256 KiB, and less with many ranks."""
    num_slots = 2 * num_ranks * num_ranks
    fitting = _SHARED_BYTES // num_slots // 64 * 64
    return min(max(fitting, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES)


def _messages(rows: Tensor, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The first byte and the bytes of consecutive messages, which have these numbers of rows."""
    row_bytes = rows.shape[1:].numel() * rows.element_size()
    sizes = [number * row_bytes for number in numbers]
    return list(zip(accumulate(sizes[:-1], initial=0), sizes, strict=True))


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


def _checked(rows: Tensor) -> Tensor:
    """The rows, contiguous and detached, after a check of their device."""
    if rows.device.type != "cpu":
        raise ValueError(f"channels through shared memory need CPU tensors, not {rows.device}")
    return rows.detach().contiguous()
