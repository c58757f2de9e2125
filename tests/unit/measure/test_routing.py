"""Mutual information of experts with what they could specialise in, and the figures made of it."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from sklearn.metrics import mutual_info_score

from swinv2_moe.measure.routing import (
    LayerChoices,
    chance_information,
    class_table,
    entropy,
    mutual_information,
)
from swinv2_moe.measure.routing_figures import class_order, classes_figure, load_figure, preferences
from swinv2_moe.measure.run_record import RunRecord
from swinv2_moe.plots import save_png
from swinv2_moe.routing_pictures import pictures_figure

tables = arrays(
    np.int64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.integers(0, 1000)
).filter(np.any)


@given(tables)
def test_information_is_at_most_either_entropy(table):
    found = mutual_information(table)
    assert 0 <= found <= min(entropy(table.sum(0)), entropy(table.sum(1))) + 1e-12
    expected = mutual_info_score(None, None, contingency=table) / np.log(2)
    assert found == pytest.approx(expected, abs=1e-9)


@given(tables, st.randoms(use_true_random=False))
def test_names_and_order_do_not_matter(table, random):
    rows, cols = list(range(table.shape[0])), list(range(table.shape[1]))
    random.shuffle(rows)
    random.shuffle(cols)
    found = mutual_information(table)
    assert mutual_information(table[rows][:, cols]) == pytest.approx(found, abs=1e-9)
    assert mutual_information(table.T) == pytest.approx(found, abs=1e-9)


@given(tables)
def test_coarser_kinds_tell_less(table):
    merged = np.concatenate([table[:1] + table[-1:], table[1:-1]]) if len(table) > 1 else table
    assert mutual_information(merged) <= mutual_information(table) + 1e-9


def test_known_information():
    for table, bits in (
        (np.eye(8, dtype=int) * 5, 3),  # an expert for each class
        (np.ones((3, 8), int), 0),  # no matter which class
        (np.outer([1, 2, 5], [4, 0, 3]), 0),
        ([[2, 0], [0, 1], [0, 1]], 1),  # two classes share an expert
        ([[3, 1], [1, 3]], 2 - entropy(np.array([3, 1, 1, 3]))),
    ):
        assert mutual_information(np.asarray(table)) == pytest.approx(bits, abs=1e-12)
    assert f"{entropy(np.array([7, 0])):.2f}" == "0.00"  # and not -0.00


def test_chance_shuffles_images_and_not_tokens():
    """An expert for each of four classes: all of 2 bits. With one image a class, shuffled classes
    tell as much: it says nothing of specialisation. With a hundred they tell next to nothing."""
    for images_a_class, low, high in ((1, 2, 2), (100, 0, 0.1)):
        classes = np.repeat(np.arange(4), images_a_class)
        by_image = 64 * np.eye(4, dtype=np.int64)[classes]
        table = class_table(by_image, classes, 4)
        assert table.tolist() == (64 * images_a_class * np.eye(4, dtype=int)).tolist()
        assert mutual_information(table) == 2
        assert low <= chance_information(by_image, classes, 4) <= high


def test_of_routing_at_random_only_chance_is_left():
    """Each image has experts of its own: of few images a class that looks like specialisation."""
    rng = np.random.default_rng(0)
    by_image = rng.multinomial(16, rng.dirichlet(0.3 * np.ones(8), 2000))
    classes = np.arange(2000) % 100
    found = mutual_information(class_table(by_image, classes, 100))
    chance = chance_information(by_image, classes, 100)
    assert found == pytest.approx(chance, rel=0.2)
    # about what shuffled tokens would leave
    assert chance > 3 * 99 * 7 / (2 * 2000 * 16 * np.log(2))


@pytest.fixture
def choices():
    """Two batches (of 2 images and of 1) of a layer with 3 experts and 2 x 2 tokens of 4 x 4
    pixels, K = 2."""
    layer = LayerChoices(3)
    of_black = [[[0, 1], [1, 2]], [[0, 1], [0, 1]]]
    first = torch.tensor([of_black, [[[2, 0], [2, 0]], [[2, 0], [2, 0]]]])
    black, white = torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8)
    layer.add(first, torch.cat([black, white]))
    striped = white * (torch.arange(8) % 2)  # black and white columns
    layer.add(torch.zeros(1, 2, 2, 2, dtype=torch.int64), striped)
    return layer


def test_what_a_layer_counts(choices):
    assert np.concatenate(choices.images).tolist() == [[3, 4, 1], [4, 0, 4], [8, 0, 0]]
    assert choices.position.tolist() == [[4, 1, 1], [3, 1, 2], [4, 1, 1], [4, 1, 1]]  # row by row
    assert {i: row.tolist() for i, row in enumerate(choices.colour) if row.any()} == {
        0: [3, 4, 1],  # black
        2 * (16 + 4 + 1): [8, 0, 0],  # between
        63: [4, 0, 4],
    }
    assert {i: row.tolist() for i, row in enumerate(choices.contrast) if row.any()} == {
        0: [7, 4, 5],
        7: [8, 0, 0],
    }


def test_the_summary_of_a_layer(choices):
    found = json.loads(json.dumps(choices.summary(np.array([0, 0, 1]), 3)))
    assert found["experts_used"] == 3
    assert found["load"] == [1.875, 0.5, 0.625]
    bits = found["bits"]
    assert bits["expert"] == pytest.approx(entropy(np.array([15, 4, 5])))
    by_class = np.array([[7, 4, 5], [8, 0, 0], [0, 0, 0]])
    assert bits["class"] == pytest.approx(mutual_information(by_class))
    assert all(0 <= value <= bits["expert"] for value in bits.values())


def test_preferences():
    table = [[0, 50, 50, 0], [90, 5, 5, 0], [40, 30, 30, 0], [0, 0, 0, 0], [70, 15, 15, 0]]
    table = np.array(table)
    ratios = preferences(table)
    assert ratios[:3, 0] == pytest.approx([0, 1.8, 0.8])  # half of all tokens go to expert 0
    assert (ratios[:, 3] == 1).all()  # an expert without tokens
    assert (ratios[3] == 1).all()  # a class without images
    # by preferred expert, the strongest first; class 2 tells least
    assert class_order([table], 3).tolist() == [1, 4, 0]
    assert sorted(class_order([table], 9)) == [0, 1, 2, 3, 4]
    # the last layer decides
    first = np.array([[90, 10], [50, 50], [10, 90]])
    last = np.array([[10, 90], [50, 50], [90, 10]])
    assert class_order([first, last], 2).tolist() == [2, 0]


def test_figures(tmp_path):
    """More classes than a heat map shows, more steps than a curve: the PNGs are of a size that can
    be looked at."""
    rng, num_classes, experts = np.random.default_rng(0), 70, 64
    names = ["layers.2.blocks.0", "layers.2.blocks.1"]
    tables = {name: rng.integers(0, 9, (num_classes, experts)) for name in names}
    bits = {name: {"bits": {"class": 0.5, "class_by_chance": 0.1}} for name in names}
    pictures = [rng.integers(0, 256, (2, 128, 128, 3), dtype=np.uint8)] * 3
    titles = ["cat $x_$", "a name that is longer than the room"]
    loads = [{f"{name}.mlp.moe": {"load": rng.dirichlet(np.ones(experts))} for name in names}
             for _ in range(450)]  # fmt: skip
    steps = [{"step": i, "loss": 1.0, "moe_layers": load} for i, load in enumerate(loads)]
    one_step = {"step": 0, "loss": 1.0, "moe_layers": {"b.mlp.moe": {"load": np.array([0.5, 1.5])}}}
    figures = {
        "routing": pictures_figure(pictures, titles, names, experts),
        "classes": classes_figure(tables, ["$x_$", *["class " * 9] * (num_classes - 1)], bits),
        "load": load_figure(RunRecord(tmp_path, "run", None, steps, [], [], None, 0)),
        "one step": load_figure(RunRecord(tmp_path, "run", None, [one_step], [], [], None, 0)),
    }
    for name, figure in figures.items():
        save_png(figure, tmp_path / "figure.png")
        assert max(Image.open(tmp_path / "figure.png").size) < 3000, name
