"""Functions that the figures of all commands share.

They do not use pyplot, so they need no display and change no global state.
"""

import re
from collections.abc import Sequence
from html import escape
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from swinv2_moe.errors import UserError
from swinv2_moe.output import printable

if TYPE_CHECKING:  # importing matplotlib takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's bright scheme without its pale yellow: readable on white and on black, and
# distinguishable by the colour-blind.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#bbbbbb")
_POINTS = 400  # maximum number of points of a curve: more cannot be distinguished
_INK = "#123456"  # a colour that no figure uses, which `to_svg` replaces by the page's text colour


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of `width` x `height` inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: "Axes") -> None:
    """Leave two spines, and draw a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def thin(steps: Sequence[int], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a curve to at most 400 points: means of groups of consecutive points."""
    x, y = np.asarray(steps, float), np.asarray(values, float)
    if len(x) <= _POINTS:
        return x, y
    groups = np.arange(len(x)) * _POINTS // len(x)
    sizes = np.bincount(groups)
    return np.bincount(groups, x) / sizes, np.bincount(groups, y) / sizes


def save_png(figure: "Figure", path: Path) -> None:
    """Write the figure as a PNG.

    Raises:
        UserError: a file that cannot be written.
    """
    disable_formulas(figure)
    try:
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error


def to_svg(figure: "Figure", label: str) -> str:
    """An <svg> element for a page, as wide as its container, in the page's text colour.

    Args:
        label: text for screen readers. It must be unique in the page, since ids derive from it.
    """
    import matplotlib
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.tick_params(which="both", color=_INK, labelcolor=_INK)
    for part in figure.findobj(Text):
        part.set_color(_INK)
    for spine in figure.findobj(Spine):
        spine.set_edgecolor(_INK)
    disable_formulas(figure)
    file = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):  # text stays text
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    referenced = set(re.findall(r"#([\w.-]+)", svg))

    def keep_referenced(attribute: re.Match) -> str:
        return attribute[0] if attribute[1] in referenced else ""

    svg = re.sub(r' id="([^"]+)"', keep_referenced, svg)
    attributes = f'role="img" aria-label="{escape(printable(label), quote=True)}"'
    # A function: in a string, re.sub would read the backslashes of a name.
    return re.sub(r'width="[^"]*pt" height="[^"]*pt"', lambda match: attributes, svg, count=1)


class Reading(NamedTuple):
    """The text that a page shows while the pointer is near `x` of a figure."""

    x: float
    lines: list[str]


def add_readings(svg: str, axes: "Axes", readings: Sequence[Reading]) -> str:
    """Add readings to the <svg> that `to_svg` made from the figure of `axes`. They need no script.

    The page's style hides elements of class "reading", unless the pointer is over their element of
    class "near".
    """
    from matplotlib.figure import Figure

    figure = axes.figure
    assert isinstance(figure, Figure)
    width, height = 72 * figure.get_size_inches()  # the units of the <svg>
    to_figure = axes.transData + figure.transFigure.inverted()
    box = axes.get_position()
    left, right = box.x0 * width, box.x1 * width
    top, bottom = (1 - box.y1) * height, (1 - box.y0) * height
    places = [to_figure.transform((reading.x, 0))[0] * width for reading in readings]
    middles = [(one + other) / 2 for one, other in pairwise(places)]
    edges = [left] + middles + [right]
    groups = []
    for i, reading in enumerate(readings):
        anchor, shift = "start", 4
        if places[i] > (left + right) / 2:
            anchor, shift = "end", -4
        text = []
        for number, line in enumerate(reading.lines):
            y = top + 10 * (number + 1)
            shown = escape(printable(line))
            text.append(f'<tspan x="{places[i] + shift:.1f}" y="{y:.1f}">{shown}</tspan>')
        groups.append(
            f'<g class="near"><rect x="{edges[i]:.1f}" y="{top:.1f}"'
            f' width="{max(0, edges[i + 1] - edges[i]):.1f}" height="{bottom - top:.1f}"/>'
            f'<g class="reading"><path d="M{places[i]:.1f} {top:.1f}V{bottom:.1f}"/>'
            f'<text text-anchor="{anchor}">{"".join(text)}</text></g></g>'
        )
    return svg.replace("</svg>", "".join(groups) + "</svg>")


def disable_formulas(figure: "Figure") -> None:
    """Draw names as text: $ as it is, control characters as escapes. Only the tick labels of
    logarithmic axes remain formulas."""
    from matplotlib.text import Text

    powers: set[Text] = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                powers.update(axis.get_ticklabels(which="both"))
    for text in figure.findobj(Text):
        text.set_parse_math(text in powers)
        text.set_text(printable(text.get_text(), keep="\n"))
