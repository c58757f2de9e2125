"""How well an accuracy is known: counts, and the interval that holds the truth 19 of 20 times."""

import math

_Z = 1.959964  # 95% of a normal distribution lie within so many standard deviations


def interval(hits: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share of which `hits` of `count` were observed, in percent.

    Source: Wilson's score interval (1927), which holds for few pictures and near 0 or 100%, too.

    Raises:
        ValueError: not 0 <= hits <= count, or count is 0.
    """
    if not 0 <= hits <= count or not count:
        raise ValueError(f"{hits} of {count} is no share")
    share, z2 = hits / count, _Z**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) * _Z / (1 + z2 / count)
    return 100 * max(0.0, center - half), 100 * min(1.0, center + half)


def accuracy_in_words(hits: int, count: int, pictures: str = "held-out pictures") -> str:
    """As "82 of 100 held-out pictures, 82% (73 to 89)"."""
    if not count:
        return f"0 of 0 {pictures}"
    low, high = interval(hits, count)
    return f"{hits:,} of {count:,} {pictures}, {100 * hits / count:.0f}% ({low:.0f} to {high:.0f})"
