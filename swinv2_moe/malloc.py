"""Keep freed memory in this process, for the next step.

A training step frees its activations, and the next step allocates as much again. By default glibc
returns freed memory to the system, and the system then clears every page before it is used again.
"""

import ctypes
import os

# parameters of mallopt(3)
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_ARENA_MAX = -8

_NEVER = -1
_MORE_AT_ONCE = 64 << 20  # bytes


def keep_freed_memory() -> None:
    """Tell glibc to reuse freed memory and not to return it to the system.

    The process then stays as large as it was at its peak. This does nothing with another C library,
    or if the environment sets glibc's allocator (MALLOC_..., GLIBC_TUNABLES).

    Source: mallopt(3).
    """
    if _is_set_by_user():
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return
    library.mallopt(_MMAP_MAX, 0)  # a block of its own mapping returns to the system when freed
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    library.mallopt(_TOP_PAD, _MORE_AT_ONCE)
    # One heap for all threads: autograd's thread frees what the main thread has allocated, and
    # other threads' heaps hold only blocks below 64 MiB.
    library.mallopt(_ARENA_MAX, 1)


def _is_set_by_user() -> bool:
    for name in os.environ:
        if name.startswith("MALLOC_"):
            return True
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
