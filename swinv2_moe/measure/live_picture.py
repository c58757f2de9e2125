"""The live display of `swinv2-moe watch`: state, curves and expert loads of a run."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.layout import Layout
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swinv2_moe.measure.live_run import LiveRun
from swinv2_moe.tables import block_place, in_words, steps_left

_HEAD = 5  # lines
_FRAME = 4  # columns of a panel's frame
_TRAINING, _VALIDATION = "cyan", "bold yellow"
_DOT = "●"
_BARS = "·▁▂▃▄▅▆▇█"  # from no tokens to at least twice an even share
_UNUSED, _CROWDED = 0.25, 2.0  # loads below and above which a bar is coloured
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


def picture(run: LiveRun, width: int, height: int, now: float) -> Layout:
    """The display of a run that has logged a step.

    Args:
        width, height: in characters.
        now: the time, in seconds since 1970.
    """
    loads = _loads(run, width - _FRAME, max(height // 3 - 2, 1))
    parts = [Layout(_head(run, now), size=_HEAD)]
    curves = Layout()
    if loads:
        curves_height = height - _HEAD - len(loads) - 2
        title = "tokens of each expert: ▄ an even share, █ twice that or more, · none"
        parts += [curves, Layout(_panel(title, loads), size=len(loads) + 2)]
    else:
        curves_height = height - _HEAD
        parts.append(curves)
    curves.split_row(*_curves(run, width, curves_height))
    layout = Layout()
    layout.split_column(*parts)
    return layout


def _panel(title: str, lines: Sequence[Text]) -> Panel:
    body = Text("\n", no_wrap=True, overflow="crop").join(lines)
    return Panel(body, title=title, title_align="left", border_style="dim")


# State


def _head(run: LiveRun, now: float) -> Panel:
    lines = Table.grid(expand=True)
    for line in (_progress(run, now), _results(run), _health(run)):
        lines.add_row(line)
    title = f"{run.name}: {run.state(now)}"
    return Panel(lines, title=Text(title), title_align="left", border_style="dim")


def _progress(run: LiveRun, now: float) -> Table:
    """The epoch, a bar and the time left."""
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    epoch = f"epoch {run.last_step['epoch']:,}"
    bar: ProgressBar | str = ""
    time_left = ""
    position = run.position()
    if position:
        epoch += f"/{position.epochs:,}"
        total = position.step + steps_left(position)
        bar = ProgressBar(total=max(total, 1), completed=position.step)
    left = run.seconds_left(now)
    if left is not None and run.state(now) not in ("finished", "stopped"):
        time_left = f"about {in_words(left)} left"
    line.add_row(epoch, bar, time_left)
    return line


def _results(run: LiveRun) -> Text:
    step = f"step {run.last_step['step']:,}"
    position = run.position()
    if position:
        step = f"step {position.step:,}/{position.step + steps_left(position):,}"
    words = [step]
    if run.losses:
        words.append(f"loss {run.losses[-1][1]:.3f}")
    if run.epochs:
        accuracies = [epoch["val_top1"] for epoch in run.epochs]
        words.append(f"top-1 {accuracies[-1]:.2f}% (best {max(accuracies):.2f}%)")
    words.append(f"{run.last_step['images_per_second']:,.0f} images/s")
    return Text("   ".join(words), no_wrap=True, overflow="ellipsis")


def _health(run: LiveRun) -> Text:
    """Signs of problems."""
    words = []
    for key, text in (
        ("moe/dropped_share", "{:.1%} of the choices dropped"),
        ("data_wait", "{:.0%} waiting for data"),
        ("lr", "learning rate {:.2e}"),
    ):
        if run.last_step.get(key) is not None:
            words.append(text.format(run.last_step[key]))
    return Text("   ".join(words), no_wrap=True, overflow="ellipsis")


# Curves


def _curves(run: LiveRun, width: int, height: int) -> list[Layout]:
    """Loss and top-1 side by side."""
    losses = [Curve(run.losses, _TRAINING)]
    losses.append(Curve(_of_epochs(run, "val_loss"), _VALIDATION, _DOT))
    accuracy = [Curve(_of_epochs(run, "val_top1"), _VALIDATION)]
    accuracy.append(accuracy[0]._replace(mark=_DOT))
    left, right = width // 2, width - width // 2
    last = max([run.last_step["step"]] + [epoch["step"] for epoch in run.epochs])
    left_lines = draw(losses, last, left - _FRAME, height - 2)
    right_lines = draw(accuracy, last, right - _FRAME, height - 2)
    return [
        Layout(_panel(f"loss: ⠒ training {_DOT} validation", left_lines), size=left),
        Layout(_panel("validation top-1, %", right_lines)),
    ]


def _of_epochs(run: LiveRun, key: str) -> list[tuple[int, float]]:
    return [(epoch["step"], epoch[key]) for epoch in run.epochs if epoch.get(key) is not None]


# Experts


def _loads(run: LiveRun, width: int, height: int) -> list[Text]:
    """The experts' loads at the last logged step, in at most `height` lines; no lines for a dense
    model.

    Layers are shown side by side if there is room.
    """
    layers = run.last_step.get("moe_layers", {})
    if not layers:
        return []
    place_width = max(len(block_place(layer)) for layer in layers)
    lines = [_load(block_place(name), place_width, layer, width) for name, layer in layers.items()]
    cell = max(len(line) for line in lines) + 3
    columns = max((width + 3) // cell, 1)
    rows = min(-(-len(lines) // columns), height)
    if rows * columns < len(lines):
        shown = rows * columns - 1
        lines[shown:] = [Text(f"and {len(lines) - shown} more layers")]
    bars = []
    for row in range(rows):
        line = Text()
        for text in lines[row::rows]:
            line.append_text(text)
            line.append(" " * (cell - len(text)))
        bars.append(line)
    return bars


def _load(place: str, place_width: int, layer: dict, width: int) -> Text:
    """One character for each expert, or for the mean of neighbouring experts if there is no
    room."""
    loads = layer["load"]
    limits = f" {min(loads, default=0):.1f}-{max(loads, default=0):.1f}"
    room = max(width - place_width - 1 - len(limits), 1)
    size = max(-(-len(loads) // room), 1)
    line = Text(f"{place:{place_width}} ")
    for start in range(0, len(loads), size):
        group = loads[start : start + size]
        load = sum(group) / len(group)
        style = ""
        if load >= _CROWDED:
            style = "red"
        elif load <= _UNUSED:
            style = "blue"
        bar = min(round(4 * load), len(_BARS) - 1)
        if load > 0:
            bar = max(bar, 1)
        line.append(_BARS[bar], style)
    line.append(limits, "dim")
    return line


# Curves in braille characters of 2 x 4 dots


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
    for label, line_cells in zip(labels, cells, strict=True):
        line = Text(f"{label:>{_LABEL}}│", no_wrap=True)
        for code, style in line_cells:
            line.append(chr(code), style)
        lines.append(line)
    first, last = f"{left:,.0f}", f"{right:,.0f}"
    space = " " * max(len(cells[0]) - len(first) - len(last), 1)
    lines.append(Text(f"{'step':>{_LABEL}} {first}{space}{last}", no_wrap=True))
    return lines
