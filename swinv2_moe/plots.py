"""What the figures of all commands share. Without pyplot: no display is needed, and nothing global
is changed."""

import re
from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from swinv2_moe.errors import UserError

if TYPE_CHECKING:  # importing matplotlib takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Readable on white and on black, and told apart by the colour-blind: Paul Tol's bright scheme,
# without its pale yellow
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#bbbbbb")
_POINTS = 400  # of a curve: more cannot be told apart
_INK = "#123456"  # a colour that no figure uses: text and axes in it take the page's own


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: "Axes") -> None:
    """Two spines and a faint grid behind what is drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def thin(steps: Sequence[int], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """A curve of at most 400 points: the means of consecutive ones, as many of them for each."""
    x, y = np.asarray(steps, float), np.asarray(values, float)
    if len(x) <= _POINTS:
        return x, y
    groups = np.arange(len(x)) * _POINTS // len(x)
    sizes = np.bincount(groups)
    return np.bincount(groups, x) / sizes, np.bincount(groups, y) / sizes


def save_png(figure: "Figure", path: Path, option: str = "--output") -> None:
    """Raises:
    UserError: a file that cannot be written; the message begins with `option`.
    """
    _take_literally(figure)
    try:
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror})") from error


def to_svg(figure: "Figure", label: str) -> str:
    """An <svg> element for a page: as wide as there is room, its text and axes in the page's
    colour.

    Args:
        label: what a screen reader says, and different for each figure of a page, since it makes
            the ids.
    """
    import matplotlib
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.tick_params(which="both", color=_INK, labelcolor=_INK)
    for part in figure.findobj(Text):
        part.set_color(_INK)
    for part in figure.findobj(Spine):
        part.set_edgecolor(_INK)
    _take_literally(figure)
    file = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):  # text stays text
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    referenced = set(re.findall(r"#([\w.-]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in referenced else "", svg)
    attributes = f'role="img" aria-label="{escape(label, quote=True)}"'
    return re.sub(r'width="[^"]*pt" height="[^"]*pt"', attributes, svg, count=1)


def _take_literally(figure: "Figure") -> None:
    """A $ in a name begins no formula. The powers of ten at a logarithmic axis are formulas."""
    from matplotlib.text import Text

    axes = [
        axis
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        if axis.get_scale() == "log"
    ]
    powers = {label for axis in axes for label in axis.get_ticklabels(which="both")}
    for text in figure.findobj(Text):
        text.set_parse_math(text in powers)
