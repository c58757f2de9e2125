"""Large CPU buffers that are used again.

malloc gives what exceeds 32 MiB back to the system at once, so that each step has the system clear
every page anew: on two cores a gradient of 34 MB costs 29 ms in place of 8. Here a buffer whose
tensor is gone serves the next one of its size, and lies in huge pages.
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

_SMALLEST = 1 << 20  # bytes; malloc reuses what is smaller
_PAGE = 2 << 20  # bytes of a huge page
# requests that a buffer waits for the next of its size: many steps of a deep model
_PATIENCE = 10_000
_AVAILABLE = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MADV_HUGEPAGE")  # Linux

# by size; the request that it has been free since
_free: dict[int, list[tuple[int, mmap.mmap]]] = defaultdict(list)
_requests = itertools.count()


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, reuse: bool = True
) -> Tensor:
    """torch.empty; a large one on the CPU in huge pages, whose memory serves another tensor when
    this one's storage is gone, or with `reuse` False goes back to the system."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _SMALLEST or not _AVAILABLE:
        return torch.empty(shape, dtype=dtype, device=device)
    buffer = _reused(_rounded(size)) if reuse else _new(size)
    view = memoryview(buffer)  # lives as long as the tensor's storage
    if reuse:
        weakref.finalize(view, _give_back, buffer).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)


def release_buffers() -> None:
    """Give the memory that waits for the next large tensors of its size back to the system."""
    _free.clear()


def _reused(size: int) -> mmap.mmap:
    request = next(_requests)
    try:
        return _free[size].pop()[1]
    except IndexError:
        _drop(request - _PATIENCE)
        return _new(size)


def _new(size: int) -> mmap.mmap:
    # private: a fork's writes are its own
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _give_back(buffer: mmap.mmap) -> None:
    _free[len(buffer)].append((next(_requests), buffer))


def _drop(before: int) -> None:
    for buffers in list(_free.values()):
        with suppress(IndexError):  # none is left; another thread may have taken it
            while buffers[0][0] < before:
                buffers.pop(0)


def _rounded(size: int) -> int:
    """Few different sizes, so that one serves another; at most an eighth more."""
    unit = max(_PAGE, 1 << (size.bit_length() - 4))
    return -(-size // unit) * unit
