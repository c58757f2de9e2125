"""Triton kernels of the channels between GPUs.

The memory of a rank consists of its buffer and three rows of P counters (int64), which the other
ranks write: signals of channels, signals of barriers, and numbers of rows. Rank i writes to counter
i of its peer. Pointers to the peers' memory are in the table `addresses`.

Order: a put and its signal are one kernel. The last program for a peer sends the signal, with
release order at system scope. Before that it has read, with acquire order, that all other programs
for this peer have copied.
"""

# P ranks. A word is 8 bytes, or 1 byte if lengths or addresses are not multiples of 8.

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

_BLOCK = 1024  # words that a program copies at a time
_MOST_PROGRAMS = 64  # programs for one peer
_WORD_BYTES = 8


@triton.jit
def _pointer(addresses, peer, offset, like):
    """A pointer to byte `offset` of the peer's memory, of the type of the pointer `like`."""
    return (tl.load(addresses + peer) + offset).to(like.dtype)


@triton.jit
def _present_words(count, row_words, first, length):
    """The number of words in [first, first + length) that are in a block's first `count` rows."""
    return tl.minimum(tl.maximum(count * row_words - first, 0), length)


@triton.jit(
    do_not_specialize=[
        "first_peer", "destination", "counter", "count_slot", "first", "length", "stride",
        "capacity", "row_words",
    ]
)  # fmt: skip
def put_kernel(
    src, addresses, arrived, counts, failed, report, first_peer, destination, counter, count_slot,
    first, length, stride, capacity, row_words, SIGNAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(1)
    peer = first_peer + index
    length = length.to(tl.int64)
    count = capacity.to(tl.int64)
    if counts is not None:
        count = tl.load(counts + peer)
        if (count < 0) | (count > capacity):
            tl.store(failed, 1)
            tl.store(report, -1 - peer)
            count = tl.minimum(tl.maximum(count, 0), capacity)
        length = _present_words(count, row_words, first, length)
    source = src + index.to(tl.int64) * stride + first
    target = _pointer(addresses, peer, destination, src)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < length:
        words = start + tl.arange(0, BLOCK)
        inside = words < length
        tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)
        start += tl.num_programs(0) * BLOCK
    if SIGNAL:
        tl.debug_barrier()  # all threads have copied before one of them reports it
        num_done = tl.atomic_add(arrived + peer, 1, sem="acq_rel", scope="gpu")
        if num_done == tl.num_programs(0) - 1:
            tl.store(arrived + peer, 0)
            if counts is not None:
                tl.store(_pointer(addresses, peer, count_slot, counts), count)
            signals = _pointer(addresses, peer, counter, arrived)
            tl.atomic_add(signals, 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["first_peer", "counter"])
def signal_kernel(addresses, first_peer, counter):
    peer = first_peer + tl.program_id(0)
    signals = _pointer(addresses, peer, counter, addresses)
    tl.atomic_add(signals, 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["first_peer", "limit"])
def wait_kernel(signals, waited, failed, report, first_peer, limit, TIMED: tl.constexpr):
    """Wait for one more signal of each peer.

    With TIMED, `limit` is in nanoseconds, otherwise it is a number of polls. After an earlier
    failure the kernel polls once.
    """
    peer = first_peer + tl.program_id(0)
    expected = tl.load(waited + peer) + 1
    limit = limit.to(tl.int64)
    has_failed = tl.load(failed) != 0
    elapsed = tl.where(has_failed, limit, 0).to(tl.int64)
    begin = elapsed
    if TIMED:
        begin = globaltimer()
    seen = tl.atomic_add(signals + peer, 0, sem="acquire", scope="sys")
    while (seen < expected) & (elapsed < limit):
        seen = tl.atomic_add(signals + peer, 0, sem="acquire", scope="sys")
        if TIMED:
            elapsed = globaltimer() - begin
        else:
            elapsed += 1
    tl.store(waited + peer, expected)
    if (seen < expected) & (has_failed == 0):
        tl.store(failed, 1)
        tl.store(report, 1 + peer)


@triton.jit(do_not_specialize=["slot_words", "first", "length", "stride", "row_words"])
def read_kernel(
    buffer, out, counts, failed, slot_words, first, length, stride, row_words, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy slots of the buffer to blocks of `out`.

    Words after the last row are 0. After a failure all bits are 1.
    """
    peer = tl.program_id(1).to(tl.int64)
    length = length.to(tl.int64)
    present = length
    if counts is not None:
        present = _present_words(tl.load(counts + peer), row_words, first, length)
    has_failed = tl.load(failed) != 0
    ones = tl.full([BLOCK], -1, tl.int64).to(out.dtype.element_ty)
    source = buffer + peer * slot_words
    target = out + peer * stride + first
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < length:
        words = start + tl.arange(0, BLOCK)
        values = tl.load(source + words, mask=words < present, other=0)
        values = tl.where(has_failed, ones, values)
        tl.store(target + words, values, mask=words < length)
        start += tl.num_programs(0) * BLOCK


def word_type(*tensors: Tensor, sizes: tuple[int, ...]) -> torch.dtype:
    """int64 if all addresses and sizes in bytes are multiples of 8, otherwise uint8."""
    numbers = [*sizes, *(tensor.data_ptr() for tensor in tensors)]
    if any(number % _WORD_BYTES for number in numbers):
        return torch.uint8
    return torch.int64


def programs(num_words: int) -> int:
    """The number of programs that copy `num_words` words for one peer."""
    return min(max(-(-num_words // _BLOCK), 1), _MOST_PROGRAMS)


def put(
    src: Tensor,
    addresses: Tensor,
    arrived: Tensor,
    counts: Tensor | None,
    failed: Tensor,
    report: Tensor,
    peers: range,
    offsets: tuple[int, int, int],
    piece: tuple[int, int, int],
    rows: tuple[int, int],
    signal: bool,
) -> None:
    """Copy a piece of a block of words for each peer into the peer's buffer.

    Args:
        src: the blocks, in words.
        addresses: int64 [P], the address of each rank's memory.
        arrived: int64 [P], zeros. They are zeros again after each put.
        counts: int64 [P], the number of rows of each block to send; None: all.
        failed, report: int64 [1], written if a count is negative or exceeds the capacity.
        peers: the ranks that receive a block.
        offsets: bytes in the peer's memory of the destination, the signal and the number of rows.
        piece: the first word of the piece in a block, its words, and the words of a block.
        rows: the capacity of a block in rows, and the words of a row.
        signal: whether to signal the peers afterwards.
    """
    grid = (programs(piece[1]), len(peers))
    put_kernel[grid](
        src, addresses, arrived, counts, failed, report, peers.start, *offsets, *piece, *rows,
        SIGNAL=signal, BLOCK=_BLOCK,
    )  # fmt: skip


def signal(addresses: Tensor, peers: range, counter: int) -> None:
    """Add one to the counter at byte `counter` of each peer's memory."""
    signal_kernel[(len(peers),)](addresses, peers.start, counter, num_warps=1)


def wait(
    signals: Tensor, waited: Tensor, failed: Tensor, report: Tensor, peers: range, limit: int
) -> None:
    """Wait for one more signal of each peer.

    Args:
        signals: int64 [P], the counters that the peers write.
        waited: int64 [P], the number of signals that earlier waits have used.
        failed: int64 [1] on the GPU, set if no signal came.
        report: int64 [1], in memory that the host can read at any time: 1 + the late peer.
        limit: nanoseconds on a GPU; a number of polls in Triton's interpreter.
    """
    wait_kernel[(len(peers),)](
        signals, waited, failed, report, peers.start, limit,
        TIMED=signals.device.type != "cpu", num_warps=1,
    )  # fmt: skip


def read(
    buffer: Tensor,
    out: Tensor,
    counts: Tensor | None,
    failed: Tensor,
    slot_words: int,
    piece: tuple[int, int, int],
    row_words: int,
) -> None:
    """Copy the piece that each rank has put to the blocks of `out`. It is the inverse of `put`."""
    grid = (programs(piece[1]), len(out))
    read_kernel[grid](
        buffer, out, counts, failed, slot_words, *piece, row_words, BLOCK=_BLOCK
    )  # fmt: skip
