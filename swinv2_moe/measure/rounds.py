"""Interleaved timing of alternatives, CUDA graphs, peak memory, and the peak rate of products."""

import ctypes
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from moe_core import release_buffers
from swinv2_moe.measure.spread import Times
from swinv2_moe.ranks.world import World
from swinv2_moe.train import graph

# Side of the square matrices whose product measures the peak rate.
_PRODUCT_SIDE = {"cpu": 2048, "cuda": 8192}
_PASSES_BEFORE_CAPTURE = 3  # they compile kernels and fill the caches of `prepared`


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(
    alternatives: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    world: World | None = None,
) -> dict[str, Times]:
    """Time alternatives in rounds. Each round runs all of them.

    Other work on the machine then slows all alternatives alike. Every second round runs them in
    reverse order, so that no alternative always follows the one with the largest memory use.

    Args:
        warmup: rounds that are run first and not counted.
        world: every rank calls this with the same alternatives. The ranks start each alternative
            together, and the slowest rank's time counts. None: this process alone.

    Returns:
        Milliseconds of each alternative in each round.
    """
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    for round_number in range(-warmup, rounds):
        names = list(alternatives)
        if round_number % 2 == 1:
            names.reverse()
        for name in names:
            if world is not None:
                world.barrier()
            seconds = _seconds(alternatives[name])
            if round_number >= 0:
                times[name].append(1e3 * seconds)
    run = uuid.uuid4().hex[:8]
    times_of_ranks = [times]
    if world is not None:
        times_of_ranks = world.gather(times)
    slowest = {}
    for name in alternatives:
        by_rank = [times_of_rank[name] for times_of_rank in times_of_ranks]
        slowest[name] = Times(map(max, zip(*by_rank, strict=True)), run)
    return slowest


def _seconds(work: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def capture(run: Callable[[], object]) -> Callable[[], None]:
    """As `swinv2_moe.train.graph.capture`, after passes that are not captured.

    The tensors that `run` reads, weights included, must stay at their addresses, and the caches of
    `moe_core.prepared` must live as long as the graph: call both within the same context.

    Raises:
        RuntimeError: `run` reads from the device on the host.
    """
    torch.cuda.synchronize()  # another stream does not wait for the operations of this one
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(_PASSES_BEFORE_CAPTURE):
            run()
    return graph.capture(run)


def machine(device: str) -> str:
    """One line with the device, the number of threads, the load and torch's version."""
    name = f"CPU, {torch.get_num_threads()} threads"
    if device == "cuda":
        name = torch.cuda.get_device_name()
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{name}; load {load} on {os.cpu_count()} cores; torch {torch.__version__}"


def matrix_product(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], object], int]:
    """A product of square matrices, and its FLOPs: two for each multiply-add."""
    side = _PRODUCT_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b, 2 * side**3


def working_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of `work` in bytes, beyond what is in use before it.

    On a GPU the value is from torch's allocator. On a CPU under Linux it is from the process's peak
    resident set, which is reset before. None if neither is available.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # see proc_pid_clear_refs(5)
    except OSError:
        return None
    # Memory that earlier passes freed must be returned, or its reuse would not be counted.
    release_buffers()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    work()
    return max(_resident("VmHWM") - before, 0)


def _resident(name: str) -> int:
    """The value of a field of /proc/self/status, such as "VmRSS", in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            kibibytes = int(line.split()[1])
            return 1024 * kibibytes
    raise KeyError(name)
