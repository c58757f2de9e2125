"""Memory channels: one-sided communication between two ranks of one machine.

The receiver takes no part in a `put`: the sender copies into the receiver's buffer and signals. The
receiver waits for the signal and reads.

Order: what a rank wrote before its k-th `signal` on a channel is visible to the other rank after
its k-th `wait`. Signals are counted, so none is lost when the receiver waits late.
"""

import ctypes
import os
from datetime import timedelta
from typing import NoReturn

from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from moe_core.comm.library import library
from moe_core.comm.memory import share_memory
from moe_core.parallel.ranks import CollectiveError, Ranks

# A wait looks so often before it sleeps: for some 10 us, less than a sleep costs. Longer spins were
# slower wherever the other rank was not running: on a busy machine it may need this very core.
_SPINS = 200
_SPINS_WHEN_CROWDED = 20  # where ranks outnumber the cores
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
    ]


class MemoryGroup:
    """The ranks of a process group with a buffer each, into which the others can write.

    Making one is a collective of the process group. The rest of its life needs none. One thread of
    a rank uses it at a time.

    Args:
        ranks: all on one machine.
        buffer_bytes: of each rank's buffer; rounded up to a multiple of 64.
        timeout: of every wait; as that of the process group, say. After a wait that failed, ranks
            are out of step and the group only raises.
        purpose: what the buffers are for; the same on all ranks.

    Attributes:
        buffer: this rank's buffer, a tensor of bytes.

    Raises:
        ValueError: ranks on several machines, or with different arguments; on all ranks.
        RuntimeError: no C++ compiler, or too little memory on a rank; on all ranks.
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
        problem, segment_bytes = "", 0
        try:
            segment_bytes = library().comm_segment_bytes(self.size, self.buffer_bytes)
        except RuntimeError as error:
            problem = str(error)
        request = f"{purpose} of {self.buffer_bytes} bytes"
        self._segment = share_memory(ranks, segment_bytes, request, problem)
        self._native = _Group(
            self._segment.data_ptr(),
            self.size,
            self.rank,
            self.buffer_bytes,
            _num_spins(self.size),
            timeout.total_seconds(),
        )
        self.pointer = ctypes.addressof(self._native)  # of the C++ functions' first argument
        first = library().comm_buffer(self.pointer, self.rank) - self._segment.data_ptr()
        self.buffer = self._segment[first : first + self.buffer_bytes]

    def channel(self, peer: int) -> "Channel":
        """The channel to another rank.

        Raises:
            ValueError: `peer` is this rank, or none of the group.
        """
        return Channel(self, peer)

    def barrier(self) -> None:
        """Wait until every rank has called this. What they wrote before is then visible.

        Raises:
            CollectiveError: a rank did not come within the timeout.
        """
        self.check_usable()
        late = library().comm_barrier(self.pointer)
        if late >= 0:
            self.fail_wait(f"barrier: rank {self.rank} heard nothing from rank {late}")

    def check_usable(self) -> None:
        """Raise CollectiveError if an earlier operation of the group failed."""
        if self._failure:
            raise CollectiveError(f"the ranks are out of step since: {self._failure}")

    def fail(self, message: str) -> NoReturn:
        """Raise CollectiveError with the message, now and at every later use."""
        self._failure = f"{message} ({self.ranks.description})"
        raise CollectiveError(self._failure)

    def fail_wait(self, message: str) -> NoReturn:
        """`fail` after a wait that ran out of time."""
        self.fail(f"{message} within {self.timeout.total_seconds():g} s; has it ended?")


class Channel:
    """One-sided communication with one other rank of a group.

    Args:
        peer: the other rank.
    """

    def __init__(self, group: MemoryGroup, peer: int) -> None:
        if peer == group.rank or not 0 <= peer < group.size:
            raise ValueError(
                f"peer ({peer}) must be another rank than {group.rank} of the {group.size}"
            )
        self.group = group
        self.peer = peer

    def put(self, dst_offset: int, src: Tensor, signal: bool = True) -> None:
        """Copy `src` into the peer's buffer, `dst_offset` bytes after its start.

        Returns when the bytes are copied: `src` may then change.

        Args:
            src: a contiguous CPU tensor.
            signal: whether to signal the peer afterwards.

        Raises:
            ValueError: it does not fit into the peer's buffer; `src` is on a GPU or not contiguous.
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
        """Wait for the peer's next signal. Every signal ends one wait.

        Raises:
            CollectiveError: none came within the timeout.
        """
        self.group.check_usable()
        if library().comm_wait(self.group.pointer, self.peer):
            rank = self.group.rank
            self.group.fail_wait(f"wait: rank {rank} got no signal from rank {self.peer}")

    def flush(self) -> None:
        """Wait until the sources of earlier puts may change.

        A put through memory has copied its source when it returns, so there is nothing to wait for.
        A channel whose puts run in the background would wait here.
        """
        self.group.check_usable()


def _num_spins(num_ranks: int) -> int:
    cores = len(os.sched_getaffinity(0))
    if num_ranks > cores:
        return _SPINS_WHEN_CROWDED
    return _SPINS
