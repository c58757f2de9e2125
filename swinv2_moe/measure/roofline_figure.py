"""The figure of a roofline: the phases under the roof, and their shares of the step."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.measure.roofline import Roofline
from swinv2_moe.plots import COLOURS, new_figure, save_png, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(roofline: Roofline, path: Path) -> None:
    """Write a PNG: the phases that compute FLOPs under the roof, and each phase's shares of the
    step and of its roof.

    Raises:
        UserError: the file cannot be written.
    """
    figure = new_figure(12, 5.2)
    roof, bars = figure.subplots(1, 2, width_ratios=[1.25, 1])
    _draw_roof(roof, roofline)
    _draw_shares(bars, roofline)
    figure.suptitle(roofline.title, fontsize=10)
    save_png(figure, path)


def _draw_roof(axes: "Axes", roofline: Roofline) -> None:
    peak, bandwidth = roofline.peaks["flops"].rate, roofline.peaks["memory"].rate
    corner = peak / bandwidth
    points = {name: phase for name, phase in roofline.phases.items() if phase.work.flops}
    intensities = [phase.work.flops / phase.work.memory for phase in points.values()]
    low = min(intensities + [corner]) / 3
    high = max(intensities + [corner]) * 10
    corners = [low, corner, high]
    axes.plot(corners, [min(peak, bandwidth * x) / 1e9 for x in corners], color="0.3", label="roof")
    axes.annotate(
        f"{peak / 1e9:,.0f} GFLOP/s",
        (high, peak / 1e9),
        (0, 4),
        textcoords="offset points",
        ha="right",
    )
    middle = math.sqrt(low * corner)
    axes.annotate(
        f"{bandwidth / 1e9:,.1f} GB/s",
        (middle, bandwidth * middle / 1e9),
        (-8, 6),
        ha="right",
        textcoords="offset points",
    )
    for i, (intensity, name) in enumerate(sorted(zip(intensities, points, strict=True))):
        rate = points[name].rate("flops") / 1e9
        axes.plot(intensity, rate, "o", color=_colour(name))
        offset = (0, 7)
        if i % 2:  # alternately above and below the point, since neighbours may be close
            offset = (0, -14)
        axes.annotate(
            name,
            (intensity, rate),
            offset,
            textcoords="offset points",
            ha="center",
            color=_colour(name),
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of memory", ylabel="GFLOP/s")
    tidy(axes)


def _draw_shares(axes: "Axes", roofline: Roofline) -> None:
    names = list(reversed(roofline.phases))
    of_step = [roofline.share_of_step(name) for name in names]
    bounds = [roofline.phases[name].bound() for name in names]
    of_roof = [share for _, share in bounds]
    _draw_bars(axes, of_step, 0.2, "of the step's time", COLOURS[0])
    _draw_bars(axes, of_roof, -0.2, "of its roof", COLOURS[5])
    labels = [f"{name}\n({resource})" for name, (resource, _) in zip(names, bounds, strict=True)]
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.set_xlabel("%; in brackets what bounds it")
    axes.set_xlim(0, 1.15 * axes.get_xlim()[1])
    tidy(axes)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", alpha=0.3)
    # above the bars
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))


def _draw_bars(
    axes: "Axes", shares: Sequence[float | None], offset: float, label: str, colour: str
) -> None:
    """Horizontal bars, one for each phase, shifted up by `offset`. A share of None has no bar."""
    places = [i + offset for i in range(len(shares))]
    percent = [100 * (share or 0) for share in shares]
    bars = axes.barh(places, percent, 0.38, color=colour, label=label)
    texts = []
    for share in shares:
        text = ""
        if share is not None:
            text = f"{share:.1%}"
        texts.append(text)
    axes.bar_label(bars, texts, padding=3, fontsize=8)


def _colour(name: str) -> str:
    return COLOURS[("trunk", "router", "dispatch", "experts", "optimiser").index(name)]
