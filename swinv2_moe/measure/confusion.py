"""What a model takes for what: counts over the predictions of a data set.

N images, C classes
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from swinv2_moe.train.evaluation import Predictions


class Mistake(NamedTuple):
    """A class that was taken for another one; classes are their numbers."""

    truth: int
    predicted: int
    images: int


class Matrix(NamedTuple):
    """The confusion matrix of some classes."""

    classes: list[int]
    counts: np.ndarray  # int64 [classes, classes]; a row for each true class
    elsewhere: np.ndarray  # int64 [classes], images taken for a class that is not shown


def mistakes(predictions: Predictions) -> list[Mistake]:
    """Each pair of classes with mistakes, the most frequent first."""
    wrong = predictions.ranks > 0
    pairs = np.stack([predictions.targets[wrong], predictions.predicted[wrong]], axis=1)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return [Mistake(*map(int, distinct[i]), int(counts[i])) for i in order]


def matrix(predictions: Predictions, num_classes: int, most: int) -> Matrix:
    """The confusion matrix of all classes or, of more than `most`, of those with most mistakes.

    A class has the mistakes on its own images and those that were taken for it.
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
    """Positions of up to `count` wrong predictions, those with the highest confidence first."""
    wrong = np.flatnonzero(predictions.ranks > 0)
    order = np.argsort(-predictions.confidence[wrong], kind="stable")
    return wrong[order][:count].tolist()


def taken_for(all_mistakes: Sequence[Mistake]) -> dict[int, Mistake]:
    """For each true class its most frequent mistake; `all_mistakes` as `mistakes` returns it."""
    by_class: dict[int, Mistake] = {}
    for mistake in all_mistakes:
        by_class.setdefault(mistake.truth, mistake)
    return by_class
