"""Statistics of times in interleaved rounds: ratios, quartiles, percentiles."""

import statistics
from collections.abc import Iterable, Sequence

from swinv2_moe.errors import UserError


class Times(list[float]):
    """Milliseconds of one alternative in each round.

    Attributes:
        run: identifies the call of `interleaved`. Only times of the same call may be compared.
    """

    def __init__(self, milliseconds: Iterable[float], run: str) -> None:
        super().__init__(milliseconds)
        self.run = run


def check_rounds(rounds: int, warmup: int) -> None:
    """Raises:
    UserError: --rounds or --warmup is too small.
    """
    for option, value, least in (("rounds", rounds, 1), ("warmup", warmup, 0)):
        if value < least:
            raise UserError(f"--{option} is {value}, it must be at least {least}")


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """The ratio `times / base` in each round.

    Raises:
        ValueError: the two are from different calls of `interleaved`, or have different numbers of
            rounds.
    """
    _common_run(times, base)
    return [t / b for t, b in zip(times, base, strict=True)]


def _common_run(*many: Sequence[float]) -> None:
    """Raise ValueError unless all times are from one call of `interleaved`.

    For plain lists the caller guarantees that they are from the same rounds.
    """
    runs = [getattr(times, "run", None) for times in many]
    if len(set(runs)) > 1:
        raise ValueError(
            f"times of different runs ({', '.join(map(str, runs))}) cannot be compared: measure"
            " them in one"
        )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile. A single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def median_and_spread(values: Sequence[float], digits: int = 1) -> str:
    """`median (lower quartile - upper quartile)`."""
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def latencies(values: Sequence[float]) -> dict[str, float]:
    """The percentiles p50, p90 and p99, interpolated between the values.

    With fewer than 100 values, the maximum replaces p99.
    """
    if len(values) == 1:
        return dict.fromkeys(("p50", "p90", "max"), values[0])
    percentiles = statistics.quantiles(values, n=100, method="inclusive")
    result = {"p50": percentiles[49], "p90": percentiles[89]}
    if len(values) >= 100:
        result["p99"] = percentiles[98]
    else:
        result["max"] = max(values)
    return result
