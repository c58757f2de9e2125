"""Confusion of classes: counts over the predictions of a data set.

N images, C classes
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from swinv2_moe.train.evaluation import Predictions


class Mistake(NamedTuple):
    """A class that was predicted as another one. Classes are numbers."""

    truth: int
    predicted: int
    images: int


class Matrix(NamedTuple):
    """The confusion matrix of some classes."""

    classes: list[int]
    counts: np.ndarray  # int64 [classes, classes]; a row for each true class
    # int64 [classes], images that were predicted as a class that is not shown
    elsewhere: np.ndarray


def mistakes(predictions: Predictions) -> list[Mistake]:
    """Each pair of classes with mistakes, the most frequent first."""
    wrong = predictions.ranks > 0
    pairs = np.stack([predictions.targets[wrong], predictions.predicted[wrong]], axis=1)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return [Mistake(*map(int, distinct[i]), int(counts[i])) for i in order]


def matrix(predictions: Predictions, num_classes: int, most: int) -> Matrix:
    """The confusion matrix of all classes. If there are more than `most` classes, only the `most`
    with the most mistakes are shown.

    The mistakes of a class are wrong predictions of its images, and images of other classes that
    were predicted as it.
    """
    classes = np.arange(num_classes)
    if num_classes > most:
        wrong = predictions.ranks > 0
        involved = np.bincount(predictions.targets[wrong], minlength=num_classes)
        involved += np.bincount(predictions.predicted[wrong], minlength=num_classes)
        classes = np.sort(np.argsort(-involved, kind="stable")[:most])
    targets, predicted = predictions.targets, predictions.predicted
    shown = np.isin(targets, classes) & np.isin(predicted, classes)
    rows = np.searchsorted(classes, targets[shown])
    cols = np.searchsorted(classes, predicted[shown])
    counts = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(counts, (rows, cols), 1)
    images = np.bincount(targets, minlength=num_classes)[classes]
    return Matrix(classes.tolist(), counts, images - counts.sum(1))


def worst(predictions: Predictions, count: int) -> list[int]:
    """Positions of up to `count` wrong predictions, in order of decreasing confidence."""
    wrong = np.flatnonzero(predictions.ranks > 0)
    order = np.argsort(-predictions.confidence[wrong], kind="stable")
    return wrong[order][:count].tolist()


def taken_for(all_mistakes: Sequence[Mistake]) -> dict[int, Mistake]:
    """The most frequent mistake of each true class. `all_mistakes`: a result of `mistakes`."""
    by_class: dict[int, Mistake] = {}
    for mistake in all_mistakes:
        by_class.setdefault(mistake.truth, mistake)
    return by_class
