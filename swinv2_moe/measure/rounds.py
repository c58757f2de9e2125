"""Measuring alternatives against each other: interleaved rounds, spreads, peak memory, the peak of
matrix products."""

import ctypes
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from yacs.config import CfgNode

from moe_core import release_buffers
from swinv2_moe.config import default_config, flatten, merge_opts
from swinv2_moe.errors import UserError
from swinv2_moe.train.distributed import World

# A training step that can be repeated: one batch, and an update that changes nothing.
REPEATABLE = {
    "AUG.MIXUP": 0,
    "AUG.CUTMIX": 0,
    "TRAIN.ACCUMULATION_STEPS": 1,
    "TRAIN.EMA_DECAY": 0,
    "TRAIN.BASE_LR": 0,
    "TRAIN.WARMUP_LR": 0,
    "TRAIN.MIN_LR": 0,
}
_PRODUCT_SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices whose product stands for the peak


class Times(list[float]):
    """Milliseconds of one alternative, one a round; `run` tells the rounds that it was timed in
    from all others."""

    def __init__(self, milliseconds: Iterable[float], run: str) -> None:
        super().__init__(milliseconds)
        self.run = run


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(
    alternatives: dict[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    world: World | None = None,
    turns: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    before_round: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Time alternatives in rounds, each of which runs all of them.

    Other work on the machine slows all of them alike. Every other turn runs them backwards, so that
    none always follows the one that needs most memory.

    Args:
        warmup: rounds before the first that counts.
        world: every rank calls this with the same alternatives; they begin each together, and the
            slowest rank's time counts. None: this process alone.
        turns: calls of each alternative in a round; their times are added.
        clock: seconds, such as `time.process_time`.
        before_round: called before each round, outside of the times.

    Returns:
        Milliseconds of each alternative in each round.
    """
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    for r in range(-warmup, rounds):
        before_round()
        seconds = dict.fromkeys(alternatives, 0.0)
        for turn in range(turns):
            is_backwards = (r + turn) % 2 == 1
            names = list(alternatives)
            if is_backwards:
                names.reverse()
            for name in names:
                if world is not None:
                    world.barrier()
                seconds[name] += _seconds(alternatives[name], clock)
        if r >= 0:
            for name in alternatives:
                times[name].append(1e3 * seconds[name])
    run = uuid.uuid4().hex[:8]
    everyone = [times]
    if world is not None:
        everyone = world.gather(times)
    slowest = {}
    for name in alternatives:
        ranks = [times_of_rank[name] for times_of_rank in everyone]
        slowest[name] = Times(map(max, zip(*ranks, strict=True)), run)
    return slowest


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    synchronize()
    start = clock()
    work()
    synchronize()
    return clock() - start


def check_rounds(rounds: int, warmup: int) -> None:
    """Raises:
    UserError: --rounds or --warmup is too small.
    """
    for option, value, least in (("rounds", rounds, 1), ("warmup", warmup, 0)):
        if value < least:
            raise UserError(f"--{option} is {value}, it must be at least {least}")


def check_opts(opts: Sequence[str], config: CfgNode, why: dict[str, str]) -> None:
    """Whether `config`, which is measured, is what --opts asks for.

    Args:
        why: for some keys, what decides on them.

    Raises:
        UserError: a key of `opts` has another value in `config`; an unknown key, a value of the
            wrong type.
    """
    asked = default_config()
    merge_opts(asked, opts)
    wanted, measured = flatten(asked), flatten(config)
    for key in opts[::2]:
        if wanted[key] != measured[key]:
            reason = why.get(key, f"what is measured has {measured[key]!r}")
            raise UserError(f"--opts {key} is {wanted[key]!r}, but {reason}")


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round: what disturbs a round disturbs both.

    Raises:
        ValueError: the two are of different runs of `interleaved`, or of different numbers of
            rounds.
    """
    _common_run(times, base)
    return [t / b for t, b in zip(times, base, strict=True)]


def summed(parts: Sequence[Times]) -> Times:
    """What the parts took together, round by round. Raises what `ratios` raises."""
    return Times(map(sum, zip(*parts, strict=True)), _common_run(*parts))


def _common_run(*many: Sequence[float]) -> str | None:
    """None for plain lists, whose common rounds are their maker's word."""
    runs = [getattr(times, "run", None) for times in many]
    if len(set(runs)) > 1:
        raise ValueError(
            f"times of different runs ({', '.join(map(str, runs))}) cannot be compared: measure"
            " them in one"
        )
    return runs[0]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median, the upper quartile; of one value, three times that."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def median_and_spread(values: Sequence[float], digits: int = 1) -> str:
    """`median (lower quartile - upper quartile)`."""
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def latencies(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99, interpolated between the values; of fewer than 100 the largest in the place
    of p99."""
    if len(values) == 1:
        return dict.fromkeys(("p50", "p90", "max"), values[0])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    shown = {"p50": cuts[49], "p90": cuts[89]}
    if len(values) >= 100:
        return shown | {"p99": cuts[98]}
    return shown | {"max": max(values)}


def machine(device: str) -> str:
    """Device, threads, load and version, for the head of a record."""
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
    """Bytes that `work` needs at its highest point beyond what is in use before; None where no one
    counts them.

    On a GPU torch's allocator counts; on Linux the kernel does (the process's largest resident set,
    reset before).
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
    release_buffers()  # what earlier passes freed must not serve this one unseen
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    work()
    return max(_resident("VmHWM") - before, 0)


def _resident(name: str) -> int:
    """Bytes that /proc/self/status gives under this name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
