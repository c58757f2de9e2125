"""Calibration by its definition, accuracy per class, what is compared before anything runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, recall_score

from swinv2_moe.errors import UserError
from swinv2_moe.measure.accuracy import (
    RoutingOptions,
    accuracy_of,
    calibration_error,
    reliability,
)
from swinv2_moe.train.evaluation import Predictions

# Also the bins' own edges, which belong to the bin below
confidences = st.one_of(st.integers(1, 15).map(lambda m: m / 15), st.floats(1e-6, 1))
answers = st.lists(st.tuples(confidences, st.booleans()), min_size=1, max_size=60)


def as_arrays(pairs: list[tuple[float, bool]]) -> tuple[np.ndarray, np.ndarray]:
    confidence, hits = zip(*pairs, strict=True)
    return np.array(confidence), np.array(hits)


@given(answers)
@settings(max_examples=200, deadline=None)
def test_the_calibration_error_is_equation_3(pairs):
    expected = 0.0
    for m in range(1, 16):
        inside = [
            (confidence, hit) for confidence, hit in pairs if (m - 1) / 15 < confidence <= m / 15
        ]
        if inside:
            accuracy = sum(hit for _, hit in inside) / len(inside)
            mean = sum(confidence for confidence, _ in inside) / len(inside)
            expected += len(inside) / len(pairs) * abs(accuracy - mean)
    assert calibration_error(*as_arrays(pairs)) == pytest.approx(expected, abs=1e-12)


@given(answers)
@settings(max_examples=100, deadline=None)
def test_finer_bins_hide_less(pairs):
    """Each of 5 bins is three of 15; one bin is what is left without any."""
    confidence, hits = as_arrays(pairs)
    fine, coarse, one = (calibration_error(confidence, hits, bins) for bins in (15, 5, 1))
    assert 1 >= fine >= coarse - 1e-12 >= one - 2e-12
    assert one == pytest.approx(abs(hits.mean() - confidence.mean()), abs=1e-12)


@given(answers)
@settings(max_examples=100, deadline=None)
def test_the_bins_add_up_to_the_error(pairs):
    confidence, hits = as_arrays(pairs)
    bins = reliability(confidence, hits)
    assert sum(one["images"] for one in bins) == len(hits)
    filled = [one for one in bins if one["images"]]
    assert all(
        one["up_to"] - 100 / 15 <= one["confidence"] + 1e-9 <= one["up_to"] + 2e-9 for one in filled
    )
    error = sum(one["images"] * abs(one["top1"] - one["confidence"]) for one in filled) / len(hits)
    assert error == pytest.approx(100 * calibration_error(confidence, hits), abs=1e-9)


def test_the_calibration_error_by_hand():
    """Of two images at 0.9 one is right, 0.4 too sure; of two at 0.6 both are, 0.4 too unsure."""
    confidence, hits = np.array([0.9, 0.9, 0.6, 0.6]), np.array([True, False, True, True])
    assert calibration_error(confidence, hits) == pytest.approx(0.4)
    assert calibration_error(
        np.array([0.75] * 4), np.array([True, True, True, False])
    ) == pytest.approx(0)


def test_overall_and_by_class():
    targets, predicted = np.array([0, 0, 0, 2, 2, 5]), np.array([0, 1, 0, 2, 1, 0])
    ranks, confidence = np.array([0, 4, 0, 0, 1, 5]), np.full(6, 0.5)
    found = accuracy_of(
        Predictions(targets, predicted, ranks, confidence, np.arange(6.0), np.arange(6)),
        list("abcdef"),
    )
    assert (found["images"], found["loss"], found["confidence"], found["ece"]) == (6, 2.5, 50, 0)
    assert (found["top1"], found["top5"]) == (50, pytest.approx(100 * 5 / 6))
    expected = {
        "a": (3, pytest.approx(200 / 3)),
        "b": (0, None),
        "c": (2, 50),
        "d": (0, None),
        "e": (0, None),
    }
    assert {one["name"]: (one["images"], one["top1"]) for one in found["per_class"]} == expected | {
        "f": (1, 0)
    }
    recalls = [
        100 * value for value in recall_score(targets, predicted, average=None, zero_division=0)
    ]
    assert found["balanced_accuracy"] == pytest.approx((recalls[0] + recalls[2] + recalls[3]) / 3)
    f1 = f1_score(targets, predicted, average=None)  # of the classes a, b, c and f
    found_f1 = {one["name"]: one["f1"] for one in found["per_class"] if one["f1"] is not None}
    assert found_f1 == pytest.approx(dict(zip("abcf", 100 * f1, strict=True)))
    macro = f1_score(targets, predicted, average="macro")
    assert found["macro_f1"] == pytest.approx(100 * macro)


def test_top5_of_five_classes_says_nothing():
    found = accuracy_of(
        Predictions(*np.zeros((3, 2), int), np.full(2, 0.5), np.zeros(2), np.arange(2)),
        list("abcde"),
    )
    assert (found["top1"], found["top5"]) == (100, None)


def test_options_as_keys():
    assert RoutingOptions().opts() == []
    keys = ["MODEL.MOE.EVAL_CAPACITY_FACTOR", "0.0", "MODEL.MOE.TOP_K", "2"]
    assert RoutingOptions(0.0, 2).opts() == keys


def test_a_factor_that_cannot_be():
    with pytest.raises(UserError, match="--capacity-factor is nan, it must be finite"):
        RoutingOptions(capacity_factor=float("nan"))
