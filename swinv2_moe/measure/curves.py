"""The figures of a run report: curves of one or two runs over their steps."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from swinv2_moe.measure.run_record import RunRecord
from swinv2_moe.plots import (
    COLOURS,
    Reading,
    add_readings,
    new_figure,
    thin,
    tidy,
    to_svg,
)
from swinv2_moe.tables import block_place

_WIDTH, _HEIGHT = 4.6, 2.7  # inches
_READINGS = 100  # number of steps of a panel at which it shows values

Points = tuple[list[int], list[float]]  # steps and values


class Panel(NamedTuple):
    """A figure of the page."""

    title: str
    note: str
    svg: str
    part: str = "training"  # of the page: training, routing, machine


class Figure(NamedTuple):
    """The content of a panel: the curves of each run by label. `from_zero`: the y axis starts at
    0. `part`: as of Panel."""

    title: str
    note: str
    curves: dict[str, Callable[[RunRecord], Points]]
    from_zero: bool = True
    part: str = "training"


def _step(key: str, scale: float = 1) -> Callable[[RunRecord], Points]:
    def scaled(step: dict) -> float | None:
        value = step.get(key)
        if value is None:
            return None
        return scale * value

    return lambda run: run.curve(scaled)


def _epoch(key: str) -> Callable[[RunRecord], Points]:
    return lambda run: run.epoch_curve(key)


def _top5(run: RunRecord) -> Points:
    if run.has_top5:
        return run.epoch_curve("val_top5")
    return ([], [])


def _aux_loss(run: RunRecord) -> Points:
    if not run.layers:
        return [], []
    return run.curve(lambda step: step.get("aux_loss"))


_FIGURES = (
    Figure(
        "Loss",
        "cross-entropy: of training with its augmentation, of validation without",
        {"training": _step("loss"), "validation": _epoch("val_loss")},
        from_zero=False,
    ),
    Figure(
        "Loss of labels and teacher",
        "in training, before their weights",
        {"labels": _step("label_loss"), "teacher": _step("teacher_loss")},
        from_zero=False,
    ),
    Figure("Accuracy", "% of the validation images", {"top-1": _epoch("val_top1"), "top-5": _top5}),
    Figure("Learning rate", "the largest of all parameter groups", {"": _step("lr")}),
    Figure(
        "Gradient norm", "over all parameters and ranks, before clipping", {"": _step("grad_norm")}
    ),
    Figure("Auxiliary loss", "load balancing, before its weight", {"": _aux_loss}, part="routing"),
    Figure(
        "Dropped tokens",
        "% of the choices that exceed an expert's capacity",
        {"": _step("moe/dropped_share", 100)},
        part="routing",
    ),
    Figure(
        "Routing entropy",
        "of the router's probabilities, in nats; 0: one expert has probability 1",
        {"": _step("moe/entropy")},
        part="routing",
    ),
    Figure(
        "Throughput",
        "images/s in training, all ranks together",
        {"": _step("images_per_second")},
        part="machine",
    ),
    Figure(
        "Waiting for data",
        "% of a step's time, on the slowest rank",
        {"": _step("data_wait", 100)},
        part="machine",
    ),
    Figure(
        "Memory",
        "peak of the first rank so far, GiB",
        {"": _step("memory_bytes", 2**-30)},
        part="machine",
    ),
)


def draw_curves(runs: Sequence[RunRecord]) -> list[Panel]:
    """The panels of all quantities that a run has logged.

    Two runs share a panel, except that each has its own panels of expert load.
    """
    drawn = [_draw(figure, runs) for figure in _FIGURES]
    panels = [panel for panel in drawn if panel is not None]
    for run in runs:
        suffix = ""
        if len(runs) > 1:
            suffix = f" ({run.name})"
        panels += _loads(run, suffix)
    return panels


class _Line(NamedTuple):
    """A curve of a panel."""

    run: int
    curve: int
    name: str
    points: Points

    def style(self, num_runs: int) -> dict:
        """The line style. With several runs, the colour shows the run and the dashes show the
        curve."""
        if num_runs == 1:
            return {"color": COLOURS[self.curve]}
        if self.curve == 0:
            return {"color": COLOURS[self.run]}
        return {"color": COLOURS[self.run], "dashes": (4, 2)}


def _lines(figure: Figure, runs: Sequence[RunRecord]) -> list[_Line]:
    lines = []
    for i, run in enumerate(runs):
        for j, (label, curve) in enumerate(figure.curves.items()):
            name = label
            if len(runs) > 1:
                name = f"{run.name} {label}".strip()
            points = curve(run)
            if points[0]:
                lines.append(_Line(i, j, name, points))
    return lines


def _draw(figure: Figure, runs: Sequence[RunRecord]) -> Panel | None:
    lines = _lines(figure, runs)
    if not lines:
        return None
    canvas = new_figure(_WIDTH, _HEIGHT)
    axes = canvas.subplots()
    for line in lines:
        steps, values = line.points
        x, y = thin(steps, values)
        marker = "o" if len(x) == 1 else ""  # a single point has no line
        axes.plot(x, y, linewidth=1.6, marker=marker, **line.style(len(runs)))
    if figure.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    if len(lines) > 1:
        # With explicit handles: otherwise the legend omits names that begin with _.
        axes.legend(axes.lines, [line.name for line in lines], frameon=False, fontsize=8)
    tidy(axes)
    svg = to_svg(canvas, figure.title)
    svg = add_readings(svg, axes, _readings(lines))
    return Panel(figure.title, figure.note, svg, figure.part)


def _readings(lines: list[_Line]) -> list[Reading]:
    """The values of all curves at up to 100 steps of the longest curve. A curve without a value at
    a step has its last earlier value."""
    longest = max((line.points[0] for line in lines), key=len)
    numbers = np.linspace(0, len(longest) - 1, min(len(longest), _READINGS)).round().astype(int)
    readings = []
    for step in np.asarray(longest)[numbers]:
        texts = [f"step {step:,}"]
        for line in lines:
            steps, values = line.points
            last = np.searchsorted(steps, step, side="right") - 1
            if last >= 0:
                texts.append(f"{line.name} {values[last]:,.4g}".strip())
        readings.append(Reading(float(step), texts))
    return readings


def _loads(run: RunRecord, suffix: str) -> Iterator[Panel]:
    """A panel for each MoE layer: a heat map of its experts' load over the steps."""
    for layer in run.layers:
        steps, loads = run.load(layer)
        rows = [thin(steps, expert)[1] for expert in zip(*loads, strict=True)]
        canvas = new_figure(_WIDTH, 1.9)
        axes = canvas.subplots()
        image = axes.imshow(
            np.asarray(rows),
            aspect="auto",
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            extent=(steps[0], max(steps[-1], steps[0] + 1), len(rows) - 0.5, -0.5),
            interpolation="nearest",
        )
        canvas.colorbar(image, ax=axes, ticks=[0, 1, 2]).ax.set_yticklabels(["0", "1", "≥ 2"])
        axes.set_xlabel("step")
        axes.set_ylabel("expert")
        axes.locator_params(axis="y", integer=True)
        title = f"Expert load, {block_place(layer)}{suffix}"
        note = "tokens relative to an even share, which is 1 and white"
        yield Panel(title, note, to_svg(canvas, title), "routing")
