"""The figures of a run report: one or two runs over their steps."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from swinv2_moe.measure.run_record import RunRecord
from swinv2_moe.plots import COLOURS, new_figure, thin, tidy, to_svg

_WIDTH, _HEIGHT = 4.6, 2.7  # inches

Points = tuple[list[int], list[float]]  # steps and values


class Panel(NamedTuple):
    """A figure of the page."""

    title: str
    note: str
    svg: str


class Figure(NamedTuple):
    """What a panel draws: the curves of each run by their labels; `from_zero`: the axis of the
    values begins there."""

    title: str
    note: str
    curves: dict[str, Callable[[RunRecord], Points]]
    from_zero: bool = True


def _step(key: str, scale: float = 1) -> Callable[[RunRecord], Points]:
    return lambda run: run.curve(lambda step: None if step.get(key) is None else scale * step[key])


def _epoch(key: str) -> Callable[[RunRecord], Points]:
    return lambda run: run.epoch_curve(key)


def _top5(run: RunRecord) -> Points:
    if run.has_top5:
        return run.epoch_curve("val_top5")
    return ([], [])


def _aux_loss(run: RunRecord) -> Points:
    return run.curve(lambda step: step.get("aux_loss") if "moe_layers" in step else None)


_FIGURES = (
    Figure(
        "Loss",
        "cross-entropy: of training with its augmentation, of validation without",
        {"training": _step("loss"), "validation": _epoch("val_loss")},
        from_zero=False,
    ),
    Figure("Accuracy", "% of the validation images", {"top-1": _epoch("val_top1"), "top-5": _top5}),
    Figure("Learning rate", "the largest of all parameter groups", {"": _step("lr")}),
    Figure(
        "Gradient norm", "over all parameters and ranks, before clipping", {"": _step("grad_norm")}
    ),
    Figure("Auxiliary loss", "load balancing, before its weight", {"": _aux_loss}),
    Figure(
        "Dropped tokens",
        "% of the choices, which found their expert full",
        {"": _step("moe/dropped_share", 100)},
    ),
    Figure(
        "Routing entropy",
        "of the router's probabilities, nats; 0: always certain",
        {"": _step("moe/entropy")},
    ),
    Figure(
        "Throughput", "images/s in training, all ranks together", {"": _step("images_per_second")}
    ),
    Figure(
        "Waiting for data", "% of a step's time, on the slowest rank", {"": _step("data_wait", 100)}
    ),
    Figure("Memory", "peak of the first rank so far, GiB", {"": _step("memory_bytes", 2**-30)}),
)


def draw_curves(runs: Sequence[RunRecord]) -> list[Panel]:
    """A panel for everything that a run has values of; two runs share their panels, except for the
    experts' loads."""
    panels = [panel for figure in _FIGURES if (panel := _draw(figure, runs))]
    return panels + [
        panel for run in runs for panel in _loads(run, f" ({run.name})" if len(runs) > 1 else "")
    ]


def _draw(figure: Figure, runs: Sequence[RunRecord]) -> Panel | None:
    lines = [
        (i, label, curve(run))
        for i, run in enumerate(runs)
        for label, curve in figure.curves.items()
    ]
    lines = [line for line in lines if line[2][0]]
    if not lines:
        return None
    canvas = new_figure(_WIDTH, _HEIGHT)
    axes = canvas.subplots()
    for i, label, points in lines:
        number = list(figure.curves).index(label)
        x, y = thin(*points)
        style = {"color": COLOURS[number]}
        if len(runs) > 1:  # colours tell the runs, dashes the curves
            style = {"color": COLOURS[i], "dashes": (4, 2) if number else ()}
        axes.plot(x, y, linewidth=1.6, marker="o" if len(x) == 1 else "", **style)
    if figure.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    # handles too: of its own accord, a legend leaves out a name that begins with _
    if len(lines) > 1:
        names = [
            f"{runs[i].name} {label}".strip() if len(runs) > 1 else label for i, label, _ in lines
        ]
        axes.legend(axes.lines, names, frameon=False, fontsize=8)
    tidy(axes)
    return Panel(figure.title, figure.note, to_svg(canvas, figure.title))


def _loads(run: RunRecord, suffix: str) -> Iterator[Panel]:
    """Each MoE layer's load over the steps, an expert a row."""
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
        title = f"Expert load, {place(layer)}{suffix}"
        yield Panel(
            title, "of an even share of the tokens, which is 1 and white", to_svg(canvas, title)
        )


def place(layer: str) -> str:
    """The stage and block of an MoE layer, counted from 1 as in papers.

    "layers.2.blocks.1.mlp.moe" -> "stage 3, block 2"; "blocks.1.mlp.moe" -> "block 2".
    """
    numbers = [int(part) + 1 for part in layer.split(".") if part.isdecimal()]
    if len(numbers) == 2:
        return "stage {}, block {}".format(*numbers)
    if len(numbers) == 1:
        return f"block {numbers[0]}"
    return layer
