"""Keep freed memory in this process, for the next step.

A training step frees its activations, and the next step allocates as much again. By default glibc
returns freed memory to the system, and the system then clears every page before it is used again.
`moe_core.ops.buffers` reuses only the buffers of the experts.
"""

import ctypes
import os

# parameters of mallopt(3)
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_ARENA_MAX = -8

_NEVER = -1
_EXTRA_BYTES = 64 << 20  # by which the heap grows beyond a request that does not fit


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
    # Large blocks come from the heap, too. As mappings of their own they would be returned.
    library.mallopt(_MMAP_MAX, 0)
    # The free end of the heap is not returned.
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    library.mallopt(_TOP_PAD, _EXTRA_BYTES)
    # All threads, such as autograd's, use the main heap. The others cannot hold blocks of 64 MiB.
    library.mallopt(_ARENA_MAX, 1)


def _is_set_by_user() -> bool:
    for name in os.environ:
        if name.startswith("MALLOC_"):
            return True
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
