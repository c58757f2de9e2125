"""Whether a picture is unlike those that a model was trained for: noise, text, another domain.

The score of a picture is the sum of two numbers, each in standard deviations of the held-out
pictures: the logarithm of the squared Mahalanobis distance of its features from their mean, and the
energy of its logits. The covariance has 8 principal directions and one variance for the rest, and
is drawn towards a multiple of the identity. 96% of the held-out pictures have a score below the
threshold; each is measured with statistics of the others.

Source: arXiv 1807.03888 (distance), 2010.03759 (energy).

N pictures, D features, K classes, R principal directions
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from swinv2_moe.errors import UserError

_LEAST = 20  # held-out pictures
_DIRECTIONS = 8
_SHRINKAGE = 0.6
_FOLDS = 10
_SHARE = 0.96
_DIGITS = 5  # of the numbers in a checkpoint


class _Spread(NamedTuple):
    """The mean [D] of features, and their covariance: variances [R] in directions [R, D], and one
    variance for the rest."""

    mean: np.ndarray
    directions: np.ndarray
    variances: np.ndarray
    rest: float

    def distances(self, features: np.ndarray) -> np.ndarray:
        """The logarithm of the squared distance of each picture [N]."""
        centered = features - self.mean
        along = centered @ self.directions.T
        beside = np.maximum((centered**2).sum(1) - (along**2).sum(1), 0)
        return np.log((along**2 / self.variances).sum(1) + beside / self.rest + 1e-12)


def _spread(features: np.ndarray) -> _Spread:
    count, dims = features.shape
    mean = features.mean(0)
    _, values, directions = np.linalg.svd(features - mean, full_matrices=False)
    variances = values**2 / count
    common = variances.sum() / dims + 1e-12
    size = min(_DIRECTIONS, len(variances), dims - 1)
    rest = variances[size:].sum() / (dims - size)
    return _Spread(
        mean,
        directions[:size],
        (1 - _SHRINKAGE) * variances[:size] + _SHRINKAGE * common,
        float((1 - _SHRINKAGE) * rest + _SHRINKAGE * common),
    )


class Novelty(NamedTuple):
    """Statistics of held-out pictures, and the threshold of the score."""

    spread: _Spread
    distance: tuple[float, float]  # mean and standard deviation
    energy: tuple[float, float]
    threshold: float

    def is_unlike(self, features: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """bool [N], of features [N, D] and logits [N, K]."""
        return self._scores(self.spread.distances(features), logits) > self.threshold

    def _scores(self, distances: np.ndarray, logits: np.ndarray) -> np.ndarray:
        scores = (distances - self.distance[0]) / self.distance[1]
        return scores + (_energy(logits) - self.energy[0]) / self.energy[1]

    def state(self) -> dict[str, Any]:
        """For meta.json."""
        spread = self.spread
        return {
            "mean": _rounded(spread.mean),
            "directions": [_rounded(direction) for direction in spread.directions],
            "variances": _rounded(spread.variances),
            "rest": spread.rest,
            "distance": list(self.distance),
            "energy": list(self.energy),
            "threshold": self.threshold,
        }


def novelty_of(features: np.ndarray, logits: np.ndarray) -> Novelty | None:
    """The statistics of held-out pictures: features [N, D] and logits [N, K]. None if there are
    fewer than 20 pictures, or values that are not finite."""
    count = len(features)
    finite = np.isfinite(features).all() and np.isfinite(logits).all()
    if count < _LEAST or features.shape[1] < 2 or not finite:
        return None
    folds, distances = np.arange(count) % _FOLDS, np.empty(count)
    for fold in range(_FOLDS):
        distances[folds == fold] = _spread(features[folds != fold]).distances(
            features[folds == fold]
        )
    moments = [
        (float(values.mean()), float(values.std()) + 1e-9)
        for values in (distances, _energy(logits))
    ]
    found = Novelty(_spread(features), moments[0], moments[1], 0.0)
    scores = np.sort(found._scores(distances, logits))
    place = min(count, int(np.ceil((count + 1) * _SHARE)))
    return found._replace(threshold=float(scores[place - 1]))


def read_novelty(meta: Mapping[str, Any], num_features: int, where: str) -> Novelty | None:
    """The statistics in a checkpoint's meta.json, if any.

    Raises:
        UserError: they are not of a model with so many features.
    """
    state = meta.get("novelty")
    if state is None:
        return None
    mean, directions = np.array(state["mean"]), state["directions"]
    sizes = {len(mean), *map(len, directions)}
    if sizes != {num_features} or len(directions) != len(state["variances"]):
        raise UserError(f"{where}: its novelty is not that of {num_features} features")
    spread = _Spread(mean, np.array(directions), np.array(state["variances"]), state["rest"])
    return Novelty(
        spread,
        (state["distance"][0], max(state["distance"][1], 1e-9)),
        (state["energy"][0], max(state["energy"][1], 1e-9)),
        state["threshold"],
    )


def num_features(model: nn.Module) -> int:
    """D, the inputs of the model's classifier."""
    return _classifier(model).weight.shape[1]


def with_features(model: nn.Module, images: Tensor) -> Tensor:
    """The logits and the inputs of the classifier, float32 [B, K + D]; the logits alone [B, K]
    where the inputs are not seen, as in a compiled model."""
    seen: list[Tensor] = []
    hook = _classifier(model).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        logits = model(images)
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0].ndim != 2:
        return logits.float()
    return torch.cat([logits.float(), seen[0].float()], 1)


def _classifier(model: nn.Module) -> Any:
    names: Any = model.classifier_names  # of MoEModel
    return model.get_submodule(names()[0].rpartition(".")[0])


def _energy(logits: np.ndarray) -> np.ndarray:
    """-log sum exp of each row [N, K]."""
    highest = logits.max(1)
    return -highest - np.log(np.exp(logits - highest[:, None]).sum(1))


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values]
