"""Timing of alternatives against each other: interleaved rounds, medians and spreads."""

import os
import statistics
import time
from collections.abc import Callable

import torch


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(alternatives: dict[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Milliseconds of each alternative in each round; a round runs all of them: they share what the machine does.

    Every other round runs them backwards: none is always the one after the most memory-hungry.
    """
    times = {name: [] for name in alternatives}
    for r in range(-warmup, rounds):
        for name in reversed(alternatives) if r % 2 else alternatives:
            synchronize()
            start = time.perf_counter()
            alternatives[name]()
            synchronize()
            if r >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def ratios(times: list[float], base: list[float]) -> list[float]:
    """Round by round: what disturbs a round disturbs both."""
    return [t / b for t, b in zip(times, base, strict=True)]


def median_and_spread(values: list[float], digits: int = 1) -> str:
    """`median (lower quartile - upper quartile)`."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def machine(device: str) -> str:
    """Device, threads, load and version, for the head of a record."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{name}; load {load} on {os.cpu_count()} cores; torch {torch.__version__}"
