"""Settings of this process on a CPU: its number of threads, and what becomes of freed memory.

The number of threads is chosen before torch is imported, because torch's OpenMP reads it then.

A training step frees its activations, and the next step allocates as much again. By default glibc
returns freed memory to the system, and the system then clears every page before it is used again.
`moe_core.ops.buffers` reuses only the buffers of the experts.
"""

import ctypes
import os
import sys
import time
from pathlib import Path

from swinv2_moe.output import print_lines

_SAMPLE_SECONDS = 0.1
# GOMP_SPINCOUNT: how often a waiting thread of GNU's OpenMP polls before it sleeps; about 0.5 ms.
# With the default, 300,000, a step beside another program takes 6 to 12 times as long as with this
# count, and on idle cores as long (docs/log.md, "Threads that wait beside another program").
_SPINS = 10_000
# CPU quota of a container (cgroup v2): microseconds of CPU time, microseconds of a period
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# parameters of mallopt(3)
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_ARENA_MAX = -8
_NEVER = -1
_EXTRA_BYTES = 64 << 20  # by which the heap grows beyond a request that does not fit


def limit_spinning() -> None:
    """Let a thread that waits for the others sleep after half a millisecond.

    If another program takes a core, all threads wait for the one that it has stopped, and the
    system gives that one another core only if a waiting thread sleeps. OMP_WAIT_POLICY, which
    `choose_threads` may have set, and GOMP_SPINCOUNT override this. It has no effect if torch has
    been imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def choose_threads() -> None:
    """Use as many threads as there are idle cores. Prints one line if some cores are not idle.

    A thread that shares its core with another program makes all threads wait for it at the end of
    every operation. So if some cores are busy, waiting threads sleep at once. OMP_NUM_THREADS and
    OMP_WAIT_POLICY override both choices; torchrun sets OMP_NUM_THREADS.

    This does nothing if torch has been imported.
    """
    if "torch" in sys.modules:
        return
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = available_cores()
    idle = idle_cores(_SAMPLE_SECONDS)
    if idle is None:
        idle = cores
    threads = max(1, min(cores, round(idle)))
    if threads == len(os.sched_getaffinity(0)):
        return  # torch's default
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    reason = f"{cores} cores, {idle:.1f} of them idle"
    print_lines(f"{threads} CPU threads ({reason}; OMP_NUM_THREADS overrides)", file=sys.stderr)


def available_cores() -> int:
    """The cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or no quota ("max")
        return cores


def idle_cores(seconds: float) -> float | None:
    """The number of idle cores of this process, averaged over `seconds`; None if the system does
    not report it. Programs with lower priority than normal (`nice`) count as idle."""
    before = _idle_times()
    time.sleep(seconds)
    after = _idle_times()
    if not before or before.keys() != after.keys():
        return None
    idle = 0.0
    for core, (start_idle, start_total) in before.items():
        end_idle, end_total = after[core]
        if end_total > start_total:
            idle += (end_idle - start_idle) / (end_total - start_total)
    return idle


def _idle_times() -> dict[str, tuple[int, int]]:
    """Clock ticks of each of this process's cores since the machine started: idle or nice ticks,
    and all ticks.

    Source: proc_stat(5).
    """
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    times = {}
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        name, *words = line.split()
        if name in cores:
            # user, nice, system, idle, iowait, irq, softirq, steal
            ticks = [int(word) for word in words[:8]]
            times[name] = (ticks[1] + ticks[3] + ticks[4], sum(ticks))
    return times


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
