"""Confusions counted from predictions, beside scikit-learn's matrix and counts by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix

from swinv2_moe.measure.report_validation import _class_rows, confusion, matrix, mistakes, worst
from swinv2_moe.train.evaluation import Predictions

CLASSES = 6


def predictions_of(pairs, confidence=None) -> Predictions:
    """Predictions from pairs of target and predicted class."""
    targets, predicted = np.array(pairs, np.int64).reshape(-1, 2).T
    ranks = (targets != predicted).astype(np.int64)
    if confidence is None:
        confidence = np.full(len(targets), 0.5)
    numbers = np.arange(len(targets))
    return Predictions(targets, predicted, ranks, np.asarray(confidence), np.zeros(0), numbers)


pairs = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1)


NAMES = list("abcdef")


@given(pairs)
def test_all_classes_are_the_confusion_matrix(pairs):
    predictions = predictions_of(pairs)
    found = matrix(confusion(predictions, CLASSES), NAMES, most=CLASSES)
    expected = confusion_matrix(*predictions[:2], labels=range(CLASSES))
    assert [row["counts"] for row in found] == expected.tolist()
    assert [row["images"] for row in found] == expected.sum(1).tolist()
    assert not any(row["elsewhere"] for row in found)


@given(pairs, st.integers(1, CLASSES - 1))
def test_some_classes_are_those_with_most_mistakes(pairs, most):
    predictions = predictions_of(pairs)
    found = matrix(confusion(predictions, CLASSES), NAMES, most)
    full = confusion_matrix(*predictions[:2], labels=range(CLASSES))
    wrong = full - np.diag(np.diag(full))
    involved = wrong.sum(0) + wrong.sum(1)
    classes = [NAMES.index(row["name"]) for row in found]
    left_out = [number for number in range(CLASSES) if number not in classes]
    assert len(classes) == most
    assert classes == sorted(classes)
    assert min(involved[classes]) >= max(involved[left_out])
    assert [row["counts"] for row in found] == full[np.ix_(classes, classes)].tolist()
    for number, row in zip(classes, found, strict=True):
        assert sum(row["counts"]) + row["elsewhere"] == row["images"] == full[number].sum()


@given(pairs)
def test_mistakes_are_counted_and_sorted(pairs):
    predictions = predictions_of(pairs)
    found = mistakes(confusion(predictions, CLASSES))
    counts = [images for _, _, images in found]
    assert sum(counts) == predictions.ranks.sum()
    assert counts == sorted(counts, reverse=True)
    for truth, predicted, images in found:
        assert truth != predicted
        assert pairs.count((truth, predicted)) == images
    rows = _class_rows([{"name": name, "top1": None} for name in NAMES], found, NAMES)
    for number, row in enumerate(rows):
        most = max((images for truth, _, images in found if truth == number), default=0)
        assert row["taken_for"].endswith(f" ({most})" if most else "")
        assert bool(row["taken_for"]) == bool(most)


def test_without_mistakes():
    predictions = predictions_of([(0, 0), (1, 1)])
    assert mistakes(confusion(predictions, 2)) == []
    assert worst(predictions, 3) == []


def test_the_worst_are_the_surest():
    predictions = predictions_of([(0, 1), (1, 1), (2, 0), (2, 1)], [0.5, 0.99, 0.9, 0.7])
    assert worst(predictions, 2) == [2, 3]
    assert mistakes(confusion(predictions, 3))[0] == (0, 1, 1)
