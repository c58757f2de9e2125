"""Timing in which the launch overhead of a single GPU call does not count.

Many calls: each alternative is called several times between two synchronisations. The host then
launches the kernels of a call while the device runs those of the previous call. If the kernels of a
call take less time than their launches, the host still limits the speed.

Graph replay: the kernels of a call are captured once as a CUDA graph and launched together. This
gives the device's time. If the host reads from the device during the call, it cannot be captured.
"""

import math
import time
from collections.abc import Callable
from functools import partial

from swinv2_moe.measure.rounds import interleaved, synchronize
from swinv2_moe.measure.spread import Times

MILLISECONDS = 20.0  # minimum time between two synchronisations
MOST_CALLS = 100
CALLS_NOTE = (
    f"times: on a GPU the mean of as many calls between two synchronisations as take"
    f" {MILLISECONDS:g} ms, at most {MOST_CALLS}; on a CPU of one call"
)


def timed(
    alternatives: dict[str, Callable[[], object]], rounds: int, device: str
) -> dict[str, Times]:
    """`interleaved`, with many calls between synchronisations on a GPU.

    Returns:
        Milliseconds of one call of each alternative in each round.
    """
    if device != "cuda":
        return interleaved(alternatives, rounds)
    calls = {name: number_of_calls(work) for name, work in alternatives.items()}
    repeated = {name: partial(repeat, work, calls[name]) for name, work in alternatives.items()}
    times = interleaved(repeated, rounds, warmup=1)
    return {name: per_call(times[name], calls[name]) for name in times}


def number_of_calls(work: Callable[[], object]) -> int:
    """Number of calls that take MILLISECONDS, estimated from the third call."""
    for _ in range(2):
        work()
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    milliseconds = 1e3 * (time.perf_counter() - start)
    return min(math.ceil(MILLISECONDS / milliseconds), MOST_CALLS)


def repeat(work: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        work()


def per_call(times: Times, calls: int) -> Times:
    return Times((milliseconds / calls for milliseconds in times), times.run)
