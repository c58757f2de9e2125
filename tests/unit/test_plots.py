"""Names in figures are what they are."""

import pytest

from swinv2_moe.plots import new_figure, save_png, to_svg

NAMES = ["cat $x_$", "$5$", "_old"]


@pytest.fixture
def figure():
    """Names wherever a figure may have one, and a logarithmic axis."""
    figure = new_figure(4, 3)
    axes = figure.subplots()
    axes.legend([axes.plot([1, 2, 3], [1, 10, 1e3])[0] for _ in NAMES], NAMES)
    axes.set(yscale="log", title=NAMES[0], xlabel=NAMES[0])
    axes.set_xticks([1, 2, 3], NAMES)
    axes.annotate(NAMES[0], (1, 1))
    figure.suptitle(NAMES[0])
    return figure


def test_names_are_no_formulas(figure, tmp_path):
    save_png(figure, tmp_path / "figure.png")
    svg = to_svg(figure, "a figure")
    assert [svg.count(f">{name}<") for name in NAMES] == [6, 2, 2]
    assert ">$\\mathdefault" not in svg  # the powers of ten are
