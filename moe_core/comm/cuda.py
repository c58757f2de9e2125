"""Memory channels between the GPUs of one machine, with the interface of channel.py.

Every operation is launched on the current stream and returns at once. The host reads nothing from
the device. A wait is a kernel that polls until the timeout. After a failed wait, later waits poll
only once, and rows that are read have all bits set (NaN for floating point). The host raises
CollectiveError in the next operation that it starts after the failure, or in `synchronize`.

The kernels count signals on the device, not on the host, so a CUDA graph of them can be replayed.
This module has not been run on a GPU yet.
"""

# P ranks

from datetime import timedelta
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from moe_core.comm.gpu_memory import share_gpu_memory
from moe_core.ranks import CollectiveError, Ranks

_ALIGNMENT = 64
_COUNTER_BYTES = 8
# Rows of P counters after the buffer.
_CHANNEL, _BARRIER, _NUM_ROWS = range(3)


class CudaMemoryGroup:
    """The ranks of a process group. Each has a GPU buffer into which the other ranks can write.

    The constructor is a collective of the process group; later uses are not. A rank may use the
    group only on one stream at a time.

    Args:
        ranks: the ranks, all on one machine, each on its current CUDA device.
        buffer_bytes: the size of each rank's buffer; rounded up to a multiple of 64.
        timeout: the timeout of every wait. After a failed wait, every operation raises an error.
        purpose: describes the buffers in error messages; the same on all ranks.

    Attributes:
        buffer: this rank's buffer, a tensor of bytes.
        received_counts: [P], the number of rows in the last put with counts of each rank.

    Raises:
        ValueError: the ranks are on several machines, or have different arguments.
        RuntimeError: a rank has no CUDA device, no Triton or no symmetric memory.
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
        row_bytes = self.size * _COUNTER_BYTES
        self._memory = share_gpu_memory(ranks, self.buffer_bytes + 3 * row_bytes, purpose)
        local = self._memory.local
        self.buffer = local[: self.buffer_bytes]
        counters = local[self.buffer_bytes :].view(torch.int64).view(3, self.size)
        self._signals = counters[:_NUM_ROWS]
        self.received_counts = counters[_NUM_ROWS]
        device = local.device
        self._addresses = torch.tensor(self._memory.addresses, device=device)
        self._waited = torch.zeros(2, self.size, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(self.size, dtype=torch.int64, device=device)
        self._failed = torch.zeros(1, dtype=torch.int64, device=device)
        # Pinned, because kernels write it and the host reads it without waiting for them.
        self._report = torch.zeros(1, dtype=torch.int64, pin_memory=local.is_cuda)

    def channel(self, peer: int) -> "CudaChannel":
        """The channel to another rank.

        Raises:
            ValueError: `peer` is this rank, or not a rank of the group.
        """
        return CudaChannel(self, peer)

    def barrier(self) -> None:
        """Make the stream wait until the streams of all ranks have reached this barrier."""
        everyone = range(self.size)
        self.signal(everyone, _BARRIER)
        self.wait(everyone, _BARRIER)

    def synchronize(self) -> None:
        """Wait, on the host, for the current stream.

        Raises:
            CollectiveError: an operation has failed.
        """
        if self.buffer.is_cuda:
            torch.cuda.current_stream(self.buffer.device).synchronize()
        self.check_usable()

    def check_usable(self) -> None:
        """Raise CollectiveError if an operation is known to have failed.

        It does not wait for the GPU.
        """
        if self._failure:
            raise CollectiveError(f"the ranks are out of step since: {self._failure}")
        report = int(self._report)
        if report > 0:
            seconds = self.timeout.total_seconds()
            self._fail(
                f"wait: rank {self.rank} got no signal from rank {report - 1} within {seconds:g} s;"
                " has it ended?"
            )
        if report < 0:
            self._fail(
                f"put: rank {self.rank} has more rows for rank {-report - 1} than the capacity, or"
                " a negative number"
            )

    def put(
        self,
        src: Tensor,
        peers: range,
        dst_offset: int,
        piece: tuple[int, int],
        counts: Tensor | None = None,
        row_bytes: int = 1,
        signal: bool = True,
    ) -> None:
        """Copy bytes [first, first + length) of each peer's block to `dst_offset` in its buffer.

        Args:
            src: a contiguous block for each peer, on the buffer's device.
            piece: (first, length).
            counts: [P], on the device: the number of rows of each block to copy. They are written
                to the peer's `received_counts`. None: all rows.
            row_bytes: the size of a row, if there are counts.
        """
        from moe_core.comm import triton_channel

        self.check_usable()
        first, length = piece
        block_bytes = src.nbytes // len(peers)
        sizes = (dst_offset, first, length, block_bytes, row_bytes * (counts is not None))
        word = triton_channel.word_type(src, self.buffer, sizes=sizes)
        words = [size // word.itemsize for size in (first, length, block_bytes, row_bytes)]
        capacity = block_bytes // max(row_bytes, 1)
        offsets = (dst_offset, self._counter(_CHANNEL), self._counter(_NUM_ROWS))
        with torch.cuda.device_of(self.buffer):
            triton_channel.put(
                src.detach().view(-1).view(word),
                self._addresses,
                self._arrived,
                counts,
                self._failed,
                self._report,
                peers,
                offsets,
                (words[0], words[1], words[2]),
                (capacity, words[3]),
                signal,
            )

    def signal(self, peers: range, counter: int = _CHANNEL) -> None:
        """Tell the peers that all earlier work of this stream is done."""
        from moe_core.comm import triton_channel

        self.check_usable()
        with torch.cuda.device_of(self.buffer):
            triton_channel.signal(self._addresses, peers, self._counter(counter))

    def wait(self, peers: range, counter: int = _CHANNEL) -> None:
        """Make the stream wait for the next signal of each peer."""
        from moe_core.comm import triton_channel

        self.check_usable()
        limit = int(self.timeout.total_seconds() * 1e9)
        with torch.cuda.device_of(self.buffer):
            triton_channel.wait(
                self._signals[counter],
                self._waited[counter],
                self._failed,
                self._report,
                peers,
                limit,
            )

    def read(
        self,
        out: Tensor,
        slot_bytes: int,
        piece: tuple[int, int],
        with_counts: bool = False,
        row_bytes: int = 1,
    ) -> None:
        """Copy the slot of each rank to bytes [first, first + length) of the rank's block in `out`.

        Args:
            out: [P, ...], contiguous; a block for each rank.
            piece: (first, length).
            with_counts: whether to set the rows after the `received_counts` to 0.
        """
        from moe_core.comm import triton_channel

        self.check_usable()
        first, length = piece
        block_bytes = out.nbytes // self.size
        sizes = (slot_bytes, first, length, block_bytes, row_bytes * with_counts)
        word = triton_channel.word_type(out, self.buffer, sizes=sizes)
        words = [size // word.itemsize for size in (slot_bytes, first, length, block_bytes)]
        counts = None
        if with_counts:
            counts = self.received_counts
        with torch.cuda.device_of(self.buffer):
            triton_channel.read(
                self.buffer.view(word),
                out.view(-1).view(word).view(self.size, -1),
                counts,
                self._failed,
                words[0],
                (words[1], words[2], words[3]),
                row_bytes // word.itemsize,
            )

    def _counter(self, row: int) -> int:
        """The offset in bytes of this rank's counter in the memory of a peer."""
        return self.buffer_bytes + (row * self.size + self.rank) * _COUNTER_BYTES

    def _fail(self, message: str) -> NoReturn:
        self._failure = f"{message} ({self.ranks.description})"
        raise CollectiveError(self._failure)


class CudaChannel:
    """One-sided communication with one other rank of a group, on the current stream.

    Args:
        peer: the other rank.

    Raises, in every method:
        CollectiveError: an earlier operation of the group is known to have failed.
    """

    def __init__(self, group: CudaMemoryGroup, peer: int) -> None:
        if peer == group.rank or not 0 <= peer < group.size:
            raise ValueError(
                f"peer ({peer}) must be another rank than {group.rank} of the {group.size}"
            )
        self.group = group
        self.peer = peer
        self._peers = range(peer, peer + 1)

    def put(self, dst_offset: int, src: Tensor, signal: bool = True) -> None:
        """Copy `src` into the peer's buffer, `dst_offset` bytes after its start.

        Later work of this stream may change `src`.

        Args:
            src: a contiguous tensor on this rank's GPU.
            signal: whether to signal the peer afterwards.

        Raises:
            ValueError: `src` does not fit into the peer's buffer, is on another device or is not
                contiguous.
        """
        device = self.group.buffer.device
        if src.device != device or not src.is_contiguous():
            raise ValueError(
                f"put needs a contiguous tensor on {device}, not strides {src.stride()} on"
                f" {src.device}"
            )
        end = dst_offset + src.nbytes
        if dst_offset < 0 or end > self.group.buffer_bytes:
            raise ValueError(
                f"put of bytes {dst_offset} to {end} by rank {self.group.rank} does not fit into"
                f" the buffer of rank {self.peer} ({self.group.buffer_bytes} bytes)"
            )
        self.group.put(src, self._peers, dst_offset, (0, src.nbytes), signal=signal)

    def signal(self) -> None:
        """Tell the peer that all earlier puts of this channel have arrived."""
        self.group.signal(self._peers)

    def wait(self) -> None:
        """Make the stream wait for the peer's next signal. Every signal ends one wait.

        If no signal comes within the timeout, a later operation or `CudaMemoryGroup.synchronize`
        raises CollectiveError.
        """
        self.group.wait(self._peers)

    def flush(self) -> None:
        """Do nothing: later work of this stream may change the sources of earlier puts."""
        self.group.check_usable()
