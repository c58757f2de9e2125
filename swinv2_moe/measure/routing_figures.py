"""Figures of routing: painted images, heat maps of expert by class, expert load over a run.

C classes, E experts
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from swinv2_moe.measure.run_record import RunRecord
from swinv2_moe.models import block_name
from swinv2_moe.plots import new_figure, thin, tidy
from swinv2_moe.train.routing import expert_colours, montage

if TYPE_CHECKING:  # importing matplotlib takes half a second
    from matplotlib.figure import Figure

_MOST_CLASSES = 60  # in a heat map
_LEGEND_ENTRY = 0.8  # inches


def pictures_figure(
    pictures: Sequence[np.ndarray], labels: Sequence[str], layers: Sequence[str], num_experts: int
) -> "Figure":
    """A grid with a row for each image and a column for each layer.

    `pictures`: the images, and the same painted by each layer's choices; uint8 [N, s, s, 3] each.
    """
    picture, side = montage(pictures), pictures[0].shape[1]
    height, width = picture.shape[:2]
    names, titles = [_shorten(label) for label in labels], [""] + list(layers)
    inches = 1.5 * len(pictures) + 0.1 * max(map(len, names)) + 0.3
    figure = new_figure(inches, 1.5 * len(labels) + 0.8 + 0.2 * _legend_rows(num_experts, inches))
    axes = figure.add_subplot()
    axes.imshow(picture)
    axes.set_xticks(np.linspace(side / 2, width - side / 2, len(pictures)), titles)
    axes.set_yticks(np.linspace(side / 2, height - side / 2, len(names)), names)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_anchor("SE")  # leave the remaining space to the labels
    _expert_legend(figure, num_experts)
    return figure


def classes_figure(
    tables: dict[str, np.ndarray], class_names: Sequence[str], summaries: dict[str, dict]
) -> "Figure":
    """For each layer a heat map of P(expert | class) / P(expert), from counts [C, E].

    `summaries`: of each layer, as `LayerChoices.summary` returns it.
    """
    cols = min(len(tables), 4)
    rows = -(-len(tables) // cols)
    shown = min(len(class_names), _MOST_CLASSES)
    figure = new_figure(3.4 * cols + 1, (0.15 * shown + 1.2) * rows)
    panels = figure.subplots(rows, cols, squeeze=False)
    for axes in panels.flat[len(tables) :]:
        axes.set_visible(False)
    for axes, (layer, table) in zip(panels.flat, tables.items(), strict=False):
        lift, order = preferences(table, shown)
        with np.errstate(divide="ignore"):
            image = axes.imshow(np.log2(lift[order]), cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto")
        axes.set_yticks(range(len(order)), [_shorten(class_names[i]) for i in order], fontsize=6)
        axes.set_xticks(range(0, table.shape[1], -(-table.shape[1] // 8)))
        axes.set_xlabel("expert")
        bits = summaries[layer]["bits"]
        axes.set_title(
            f"{layer}\n{bits['class']:.3f} bits ({bits['class_by_chance']:.3f} by chance)",
            fontsize=9,
        )
    bar = figure.colorbar(
        image, ax=panels[0], aspect=30, extend="both", label="P(expert | class) / P(expert)"
    )
    bar.set_ticks(range(-2, 3), labels=["1/4", "1/2", "1", "2", "4"])
    return figure


def preferences(table: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """P(expert | class) / P(expert), and the most informative classes.

    Args:
        table: choices of each expert by each class [C, E].
        most: the largest number of classes.

    Returns:
        The ratios [C, E], 1 where there are no choices; and up to `most` classes with the largest
        share of the mutual information, sorted by the expert that they prefer.
    """
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    lift = np.divide(table, expected, out=np.ones(table.shape), where=expected > 0)
    # each class's part of the mutual information [C]
    information = (table * np.log2(np.where(table > 0, lift, 1))).sum(1)
    chosen = np.argsort(-information, kind="stable")[:most]
    favourite, strength = lift.argmax(1), lift.max(1)
    return lift, chosen[np.lexsort((-strength[chosen], favourite[chosen]))]


def load_figure(run: RunRecord) -> "Figure":
    """Each layer's share of the choices for each expert over the logged steps, as stacked areas."""
    cols = min(len(run.layers), 3)
    rows = -(-len(run.layers) // cols)
    num_experts = len(run.load(run.layers[0])[1][0])
    figure = new_figure(4.2 * cols, 2.6 * rows + 0.5 + 0.2 * _legend_rows(num_experts, 4.2 * cols))
    panels = figure.subplots(rows, cols, squeeze=False, sharex=True, sharey=True)
    for axes in panels.flat[len(run.layers) :]:
        axes.set_visible(False)
    colours = _tints(num_experts)
    for axes, layer in zip(panels.flat, run.layers, strict=False):
        steps, loads = run.load(layer)
        thinned = [thin(steps, expert) for expert in zip(*loads, strict=True)]
        shares = np.array([values for _, values in thinned])
        axes.stackplot(thinned[0][0], shares / shares.sum(0), colors=colours, linewidth=0)
        axes.set(title=block_name(layer), xlabel="step", ylim=(0, 1))
        axes.margins(x=0)
        tidy(axes)
    panels[0, 0].set_ylabel("share of the tokens")
    _expert_legend(figure, num_experts)
    return figure


def _tints(num_experts: int) -> np.ndarray:
    """The experts' colours on medium grey: RGB from 0 to 1 [E, 3]."""
    return (expert_colours(num_experts) / 255 + 0.5) / 2


def _legend_rows(num_experts: int, inches: float) -> int:
    return math.ceil(num_experts / int(inches / _LEGEND_ENTRY))


def _expert_legend(figure: "Figure", num_experts: int) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colour, label=str(expert)) for expert, colour in enumerate(_tints(num_experts))
    ]
    cols = math.ceil(num_experts / _legend_rows(num_experts, figure.get_figwidth()))
    figure.legend(
        handles=handles, title="expert", ncols=cols, loc="outside lower center", frameon=False
    )


def _shorten(label: str) -> str:
    if len(label) <= 18:
        return label
    return f"{label[:17]}…"
