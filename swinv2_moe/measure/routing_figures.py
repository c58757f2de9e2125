"""Figures of routing: heat maps of expert by class, and expert load over a run.

C classes, E experts
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from swinv2_moe.measure.run_record import RunRecord
from swinv2_moe.plots import new_figure, thin, tidy
from swinv2_moe.routing_pictures import (
    expert_colours,
    expert_hatch,
    expert_legend,
    legend_height,
    shorten,
)
from swinv2_moe.tables import block_place

if TYPE_CHECKING:  # importing matplotlib takes half a second
    from matplotlib.figure import Figure

_MOST_CLASSES = 60  # maximum in a heat map


def classes_figure(
    tables: dict[str, np.ndarray], class_names: Sequence[str], summaries: dict[str, dict]
) -> "Figure":
    """One heat map for each layer: P(expert | class) / P(expert), from counts [C, E].

    `summaries`: the result of `LayerChoices.summary` for each layer.
    """
    cols = min(len(tables), 4)
    rows = -(-len(tables) // cols)
    shown = min(len(class_names), _MOST_CLASSES)
    figure = new_figure(3.4 * cols + 1, (0.15 * shown + 1.2) * rows)
    panels = figure.subplots(rows, cols, squeeze=False)
    for axes in panels.flat[len(tables) :]:
        axes.set_visible(False)
    order = class_order(list(tables.values()), shown)
    names = [shorten(class_names[i]) for i in order]
    for axes, (layer, table) in zip(panels.flat, tables.items(), strict=False):
        with np.errstate(divide="ignore"):
            ratios = np.log2(preferences(table)[order])
        image = axes.imshow(ratios, cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto")
        axes.set_yticks(range(shown), names, fontsize=6)
        axes.set_xticks(range(0, table.shape[1], -(-table.shape[1] // 8)))
        axes.set_xlabel("expert")
        bits = summaries[layer]["bits"]
        information = f"{bits['class']:.3f} bits ({bits['class_by_chance']:.3f} by chance)"
        axes.set_title(f"{block_place(layer)}\n{information}", fontsize=9)
    bar = figure.colorbar(
        image, ax=panels[0], aspect=30, extend="both", label="P(expert | class)\n/ P(expert)"
    )
    bar.set_ticks(range(-2, 3), labels=["1/4", "1/2", "1", "2", "4"])
    return figure


def preferences(table: np.ndarray) -> np.ndarray:
    """P(expert | class) / P(expert), from counts [C, E]; 1 for an expert or class without
    choices."""
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return np.divide(table, expected, out=np.ones(table.shape), where=expected > 0)


def class_order(tables: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Up to `most` classes, in the order of the rows of all panels.

    These classes have the largest share of the mutual information of class and expert, summed over
    the layers. They are sorted by their preferred expert in the last layer.

    Args:
        tables: for each layer, the number of choices of each expert by class [C, E].
    """
    information = np.zeros(len(tables[0]))
    for table in tables:
        ratios = preferences(table)
        parts = table / table.sum() * np.log2(np.where(table > 0, ratios, 1))
        information += parts.sum(1)
    chosen = np.argsort(-information, kind="stable")[:most]
    last = preferences(tables[-1])
    favourite, strength = last.argmax(1), last.max(1)
    return chosen[np.lexsort((-strength[chosen], favourite[chosen]))]


def load_figure(run: RunRecord) -> "Figure":
    """Stacked areas for each layer: each expert's share of the choices over the logged steps."""
    cols = min(len(run.layers), 3)
    rows = -(-len(run.layers) // cols)
    num_experts = len(run.load(run.layers[0])[1][0])
    figure = new_figure(4.2 * cols, 2.6 * rows + 0.5 + legend_height(num_experts, 4.2 * cols))
    panels = figure.subplots(rows, cols, squeeze=False, sharex=True, sharey=True)
    for axes in panels.flat[len(run.layers) :]:
        axes.set_visible(False)
    colours = expert_colours(num_experts) / 255
    for axes, layer in zip(panels.flat, run.layers, strict=False):
        steps, loads = run.load(layer)
        thinned = [thin(steps, expert) for expert in zip(*loads, strict=True)]
        shares = np.array([values for _, values in thinned])
        areas = axes.stackplot(thinned[0][0], shares / shares.sum(0), colors=colours, linewidth=0)
        for expert, area in enumerate(areas):
            area.set(hatch=expert_hatch(expert), edgecolor=0.45 * colours[expert])
        axes.set(title=block_place(layer), xlabel="step", ylim=(0, 1))
        axes.margins(x=0)
        tidy(axes)
    panels[0, 0].set_ylabel("share of the tokens")
    expert_legend(figure, num_experts)
    return figure
