"""Choose the number of CPU threads. This must happen before torch is imported, because torch's
OpenMP reads the number at import."""

import os
import sys
import time
from pathlib import Path

from swinv2_moe.output import say

_SAMPLE_SECONDS = 0.1
# CPU quota of a container (cgroup v2): microseconds of CPU time, microseconds of a period
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def choose_threads() -> None:
    """Use as many threads as there are idle cores. Prints one line if some cores are not idle.

    A thread that shares its core with another program makes all threads wait for it at the end of
    every operation. They wait actively by default, which is fastest on idle cores; if some cores
    are busy, waiting threads sleep. OMP_NUM_THREADS and OMP_WAIT_POLICY override both choices;
    torchrun sets OMP_NUM_THREADS.

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
    say(f"{threads} CPU threads ({reason}; OMP_NUM_THREADS overrides)", file=sys.stderr)


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
