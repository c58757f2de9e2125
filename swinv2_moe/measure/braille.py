"""Curves in a terminal: braille characters have 2 x 4 dots each."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.text import Text

_BLANK = 0x2800
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bit of each dot, by column and row
_LABEL = 8  # width of the numbers beside the axis, in characters


class Curve(NamedTuple):
    """Points from left to right. `mark` is drawn at each point in place of a line of dots."""

    points: Sequence[tuple[float, float]]
    style: str
    mark: str = ""


class Limits(NamedTuple):
    """The ranges of the axes."""

    left: float
    right: float
    low: float
    high: float


def draw(curves: Sequence[Curve], last_step: int, width: int, height: int) -> list[Text]:
    """The curves over steps from 0 to `last_step`, as `height` lines of `width` characters.

    Points in the same column of dots are averaged. The result is empty if there are no points or no
    room.
    """
    values = [value for curve in curves for _, value in curve.points]
    columns, rows = width - _LABEL - 1, height - 1
    if not values or columns < 2 or rows < 1:
        return []
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    limits = Limits(0, max(last_step, 1), low, high)
    cells = [[(_BLANK, "")] * columns for _ in range(rows)]
    for curve in curves:
        dots = _dots(curve.points, limits, 2 * columns, 4 * rows)
        if curve.mark:
            for x, y in dots:
                cells[y // 4][x // 2] = (ord(curve.mark), curve.style)
        else:
            _join(cells, dots, curve.style)
    return _with_axes(cells, limits)


def _dots(
    points: Sequence[tuple[float, float]], limits: Limits, columns: int, rows: int
) -> list[tuple[int, int]]:
    """The points as dots, averaged in each column: positions counted from the left and from the
    top."""
    left, right, low, high = limits
    by_column: dict[int, list[float]] = {}
    for x, y in points:
        column = round((x - left) / (right - left) * (columns - 1))
        by_column.setdefault(column, []).append(y)
    dots = []
    for column, values in sorted(by_column.items()):
        mean = sum(values) / len(values)
        dots.append((column, round((high - mean) / (high - low) * (rows - 1))))
    return dots


def _join(cells: list[list[tuple[int, str]]], dots: Sequence[tuple[int, int]], style: str) -> None:
    """Draw a line between successive dots."""
    line = list(dots[:1])
    for (x, y), (next_x, next_y) in pairwise(dots):
        across, down = next_x - x, next_y - y
        length = max(across, abs(down))
        for i in range(1, length + 1):
            line.append((x + round(across * i / length), y + round(down * i / length)))
    for x, y in line:
        code, _ = cells[y // 4][x // 2]
        cells[y // 4][x // 2] = (code | _BITS[x % 2][y % 4], style)


def _with_axes(cells: list[list[tuple[int, str]]], limits: Limits) -> list[Text]:
    left, right, low, high = limits
    labels = [""] * len(cells)
    for row in {0, len(cells) // 2, len(cells) - 1}:
        value = high
        if len(cells) > 1:
            value = high - (high - low) * row / (len(cells) - 1)
        labels[row] = f"{value:.4g}"
        if len(labels[row]) > _LABEL:
            labels[row] = f"{value:.1e}"
    lines = []
    for label, row in zip(labels, cells, strict=True):
        line = Text(f"{label:>{_LABEL}}│", no_wrap=True)
        for code, style in row:
            line.append(chr(code), style)
        lines.append(line)
    first, last = f"{left:,.0f}", f"{right:,.0f}"
    space = " " * max(len(cells[0]) - len(first) - len(last), 1)
    lines.append(Text(f"{'step':>{_LABEL}} {first}{space}{last}", no_wrap=True))
    return lines
