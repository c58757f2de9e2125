"""Reuse of large CPU buffers.

malloc returns blocks of more than 32 MiB to the system when they are freed. The system then clears
every page again at each step. Here the buffer of a freed tensor is reused for the next tensor of
its size. Buffers are allocated in huge pages. With both, a gradient of 34 MB takes 8 ms instead of
29 ms on two cores.
"""

import itertools
import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_SMALLEST = 1 << 20  # bytes; malloc reuses smaller blocks
_PAGE = 2 << 20  # bytes of a huge page
# A free buffer is dropped after this number of requests, which is many steps of a deep model.
_PATIENCE = 10_000
_AVAILABLE = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MADV_HUGEPAGE")  # Linux

# Free buffers by size, each with the number of the request at which it became free.
_free: dict[int, list[tuple[int, mmap.mmap]]] = defaultdict(list)
_requests = itertools.count()


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, reuse: bool = True
) -> Tensor:
    """As torch.empty, but large CPU tensors are allocated in huge pages.

    When the tensor's storage is freed, its memory is reused for another tensor. With `reuse` False
    it returns to the system.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _SMALLEST or not _AVAILABLE:
        return torch.empty(shape, dtype=dtype, device=device)
    if not reuse:
        view = memoryview(_new(size))
    else:
        buffer = _reused(_rounded(size))
        view = memoryview(buffer)  # lives as long as the tensor's storage
        weakref.finalize(view, _give_back, buffer).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)


def release_buffers() -> None:
    """Return the memory of all free buffers to the system."""
    _free.clear()


def _reused(size: int) -> mmap.mmap:
    request = next(_requests)
    try:
        return _free[size].pop()[1]
    except IndexError:
        _drop(request - _PATIENCE)
        return _new(size)


def _new(size: int) -> mmap.mmap:
    # Private, so that a forked process does not write to the memory of its parent.
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _give_back(buffer: mmap.mmap) -> None:
    _free[len(buffer)].append((next(_requests), buffer))


def _drop(before: int) -> None:
    for buffers in list(_free.values()):
        with suppress(IndexError):  # the list is empty; another thread may have taken the last one
            while buffers[0][0] < before:
                buffers.pop(0)


def _rounded(size: int) -> int:
    """Round a size up by at most an eighth, so that buffers have few different sizes."""
    unit = max(_PAGE, 1 << (size.bit_length() - 4))
    return -(-size // unit) * unit
