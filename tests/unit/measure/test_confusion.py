"""Confusions counted from predictions, beside scikit-learn's matrix and counts by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix

from swinv2_moe.measure.report_validation import Mistake, matrix, mistakes, taken_for, worst
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


@given(pairs)
def test_all_classes_are_the_confusion_matrix(pairs):
    predictions = predictions_of(pairs)
    found = matrix(predictions, CLASSES, most=CLASSES)
    expected = confusion_matrix(*predictions[:2], labels=range(CLASSES))
    assert (found.counts == expected).all()
    assert not found.elsewhere.any()


@given(pairs, st.integers(1, CLASSES - 1))
def test_some_classes_are_those_with_most_mistakes(pairs, most):
    predictions = predictions_of(pairs)
    found = matrix(predictions, CLASSES, most)
    full = confusion_matrix(*predictions[:2], labels=range(CLASSES))
    wrong = full - np.diag(np.diag(full))
    involved = wrong.sum(0) + wrong.sum(1)
    left_out = [number for number in range(CLASSES) if number not in found.classes]
    assert len(found.classes) == most
    assert min(involved[found.classes]) >= max(involved[left_out])
    assert (found.counts == full[np.ix_(found.classes, found.classes)]).all()
    assert (found.counts.sum(1) + found.elsewhere == full[found.classes].sum(1)).all()


@given(pairs)
def test_mistakes_are_counted_and_sorted(pairs):
    predictions = predictions_of(pairs)
    found = mistakes(predictions)
    assert sum(mistake.images for mistake in found) == predictions.ranks.sum()
    counts = [mistake.images for mistake in found]
    assert counts == sorted(counts, reverse=True)
    for mistake in found:
        assert pairs.count((mistake.truth, mistake.predicted)) == mistake.images
    for truth, mistake in taken_for(found).items():
        assert mistake.images == max(one.images for one in found if one.truth == truth)


def test_without_mistakes():
    predictions = predictions_of([(0, 0), (1, 1)])
    assert mistakes(predictions) == []
    assert worst(predictions, 3) == []
    assert taken_for([]) == {}


def test_the_worst_are_the_surest():
    predictions = predictions_of([(0, 1), (1, 1), (2, 0), (2, 1)], [0.5, 0.99, 0.9, 0.7])
    assert worst(predictions, 2) == [2, 3]
    assert mistakes(predictions)[0] == Mistake(0, 1, 1)
