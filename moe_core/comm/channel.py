"""Channels: one-sided communication between two ranks.

In a `put` the sender copies into the receiver's buffer, without the receiver, and then signals. The
receiver waits for the signal and reads. All ranks are processes of one machine and copy through
shared memory.

Order: data that a rank wrote before its k-th `signal` on a channel is visible to the other rank
after that rank's k-th `wait`. Signals are counted, so no signal is lost if the receiver waits late.
"""

import ctypes
import os
import select
import weakref
from datetime import timedelta
from typing import NoReturn

from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from moe_core.comm.library import library
from moe_core.comm.memory import check_machine, share_memory, watch_processes
from moe_core.ranks import CollectiveError, Ranks

# The number of polls of a wait before it sleeps. They take about 10 us, less than a sleep. More
# polls were slower when the other rank was not running, because it may need the same core.
_SPINS = 200
_SPINS_WHEN_CROWDED = 20  # if there are more ranks than cores
_ALIGNMENT = 64


class _Group(ctypes.Structure):
    """`comm::Group` of segment.hpp."""

    _fields_ = [
        ("segment", ctypes.c_void_p),
        ("num_ranks", ctypes.c_long),
        ("rank", ctypes.c_long),
        ("buffer_bytes", ctypes.c_long),
        ("spins", ctypes.c_long),
        ("timeout", ctypes.c_double),
        ("processes", ctypes.POINTER(ctypes.c_int)),
    ]


class ChannelGroup:
    """The ranks of a process group. Each has a buffer into which the other ranks can write.

    The constructor is a collective of the process group; later uses are not. Only one thread of a
    rank may use the group at a time.

    Args:
        ranks: the ranks, all on one machine.
        buffer_bytes: the size of each rank's buffer; rounded up to a multiple of 64.
        timeout: the timeout of every wait. A wait for a rank whose process has ended fails at once.
            After a failed wait the ranks are not synchronised, so every later operation of the
            group raises an error.
        purpose: describes the buffers in error messages; the same on all ranks.

    Attributes:
        buffer: this rank's buffer, a tensor of bytes.

    Raises:
        ValueError: the ranks are on several machines, or arguments differ between ranks.
        RuntimeError: a rank has no C++ compiler or too little memory.
        All of them are raised on every rank.
    """

    def __init__(
        self,
        ranks: Ranks,
        buffer_bytes: int,
        timeout: timedelta = default_pg_timeout,
        purpose: str = "buffers",
    ) -> None:
        self.ranks = ranks
        self.size = ranks.size
        self.rank = ranks.rank
        self.timeout = timeout
        self.buffer_bytes = -(-buffer_bytes // _ALIGNMENT) * _ALIGNMENT
        self._failure = ""
        check_machine(ranks)
        problem, segment_bytes = "", 0
        try:
            segment_bytes = library().comm_segment_bytes(self.size, self.buffer_bytes)
        except RuntimeError as error:
            problem = str(error)
        request = f"{purpose} of {self.buffer_bytes} bytes"
        self._segment = share_memory(ranks, segment_bytes, request, problem)
        processes = watch_processes(ranks)
        weakref.finalize(self, _close, processes)
        self._processes = (ctypes.c_int * len(processes))(*processes)
        self._native = _Group(
            self._segment.data_ptr(),
            self.size,
            self.rank,
            self.buffer_bytes,
            _num_spins(self.size),
            timeout.total_seconds(),
            self._processes,
        )
        self.pointer = ctypes.addressof(self._native)  # the first argument of the C++ functions
        first = library().comm_buffer(self.pointer, self.rank) - self._segment.data_ptr()
        self.buffer = self._segment[first : first + self.buffer_bytes]

    def channel(self, peer: int) -> "Channel":
        """The channel to another rank.

        Raises:
            ValueError: `peer` is this rank, or not a rank of the group.
        """
        return Channel(self, peer)

    def barrier(self) -> None:
        """Wait until every rank has called this. All earlier writes are then visible.

        Raises:
            CollectiveError: a rank has ended or did not come within the timeout.
        """
        self.check_usable()
        late = library().comm_barrier(self.pointer)
        if late >= 0:
            self.fail_wait(f"barrier: rank {self.rank} heard nothing from rank {late}", late)

    def check_usable(self) -> None:
        """Raise CollectiveError if an earlier operation of the group failed."""
        if self._failure:
            raise CollectiveError(f"the ranks are out of step since: {self._failure}")

    def fail(self, message: str) -> NoReturn:
        """Raise CollectiveError with the message, now and in every later operation."""
        self._failure = f"{message} ({self.ranks.description})"
        raise CollectiveError(self._failure)

    def fail_wait(self, message: str, peer: int) -> NoReturn:
        """`fail` for a wait for `peer`; says whether its process has ended."""
        process = select.poll()
        process.register(self._processes[peer], select.POLLIN)
        if process.poll(0):
            self.fail(f"{message}, which has ended")
        self.fail(f"{message} within {self.timeout.total_seconds():g} s; has it ended?")


class Channel:
    """One-sided communication with one other rank of a group, through shared memory.

    Args:
        peer: the other rank.
    """

    def __init__(self, group: ChannelGroup, peer: int) -> None:
        if peer == group.rank or not 0 <= peer < group.size:
            raise ValueError(
                f"peer ({peer}) must be another rank than {group.rank} of the {group.size}"
            )
        self.group = group
        self.peer = peer

    def put(self, dst_offset: int, src: Tensor, signal: bool = True) -> None:
        """Copy `src` into the peer's buffer, `dst_offset` bytes after its start.

        The peer may read the data after it has waited for the next signal. When this returns, `src`
        may be changed.

        Args:
            src: a contiguous CPU tensor.
            signal: whether to signal the peer afterwards.

        Raises:
            ValueError: `src` does not fit into the peer's buffer, is on a GPU or is not contiguous.
        """
        self.group.check_usable()
        if src.device.type != "cpu" or not src.is_contiguous():
            raise ValueError(
                f"put needs a contiguous CPU tensor, not strides {src.stride()} on {src.device}"
            )
        end = dst_offset + src.nbytes
        if dst_offset < 0 or end > self.group.buffer_bytes:
            raise ValueError(
                f"put of bytes {dst_offset} to {end} by rank {self.group.rank} does not fit into"
                f" the buffer of rank {self.peer} ({self.group.buffer_bytes} bytes)"
            )
        library().comm_put(
            self.group.pointer, self.peer, dst_offset, src.data_ptr(), src.nbytes, signal
        )

    def signal(self) -> None:
        """Tell the peer that all earlier puts of this channel have arrived."""
        self.group.check_usable()
        library().comm_signal(self.group.pointer, self.peer)

    def wait(self) -> None:
        """Wait for the peer's next signal.

        Raises:
            CollectiveError: the peer has ended, or no signal came within the timeout.
        """
        self.group.check_usable()
        if library().comm_wait(self.group.pointer, self.peer):
            rank = self.group.rank
            message = f"wait: rank {rank} got no signal from rank {self.peer}"
            self.group.fail_wait(message, self.peer)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _num_spins(num_ranks: int) -> int:
    cores = len(os.sched_getaffinity(0))
    if num_ranks > cores:
        return _SPINS_WHEN_CROWDED
    return _SPINS
