"""The figure of `plan-cluster`: step time by part, and the shares of communication."""

from collections.abc import Sequence
from pathlib import Path

from moe_core.parallel import ParallelStrategy
from swinv2_moe.planner import Prediction
from swinv2_moe.plots import new_figure, save_png, tidy


def draw(plan: Sequence[Prediction], user_gpus: int, title: str, path: Path) -> None:
    """Write a PNG: step time by part as stacked bars, and the shares of communication.

    The column of `user_gpus` is marked.

    Raises:
        UserError: a file that cannot be written.
    """
    figure = new_figure(11, 7.5)
    bars, shares = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 1])
    labels = [f"{row.gpus:,}\n{_short(row.strategy)}" for row in plan]
    _stack(bars, plan, labels)
    bars.set_title(title, loc="left")
    for name, marker in (("all-to-all", "o"), ("weight gather", "s")):
        percent = [100 * row.parts[name] / row.step for row in plan]
        shares.plot(labels, percent, color=_COLOURS[name], marker=marker, label=name)
    shares.set_ylabel("% of the step")
    shares.set_ylim(bottom=0)
    shares.set_xlabel("GPUs; best r, pipeline degree and all-to-all (grey: your cluster)")
    counts = [row.gpus for row in plan]
    for axes in (bars, shares):
        if user_gpus in counts:
            column = counts.index(user_gpus)
            axes.axvspan(column - 0.5, column + 0.5, color="0.9", zorder=0)
        tidy(axes)
    save_png(figure, path)


_COLOURS = {
    "trunk": "#4c72b0",
    "experts": "#55a868",
    "routing, dispatch": "#a1c9a8",
    "all-to-all": "#c44e52",
    "weight gather": "#dd8452",
    "gradient all-reduce": "#8172b3",
    "optimiser": "#937860",
}


def _stack(axes, plan: Sequence[Prediction], labels: list[str]) -> None:
    tops = [0.0] * len(plan)
    for name, colour in _COLOURS.items():
        heights = [1e3 * row.parts[name] for row in plan]
        drawn = axes.bar(labels, heights, bottom=tops, label=name, color=colour, width=0.72)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    labels = [f"{top:,.0f}" if top >= 100 else f"{top:.3g}" for top in tops]
    axes.bar_label(drawn, labels, padding=2, fontsize=9)
    axes.set_ylabel("one step, ms")
    axes.set_ylim(0, 1.3 * max(tops))
    axes.legend(ncols=4, frameon=False, loc="upper left")


def _short(strategy: ParallelStrategy | None) -> str:
    if strategy is None:
        return "-\n"
    if strategy.r == 0:
        return "r=0\n"
    return f"r={strategy.r} d={strategy.pipeline_degree}\n{strategy.all_to_all}"
