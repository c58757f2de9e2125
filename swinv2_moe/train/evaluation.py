"""Accuracy of a model on a loader over all ranks, and its prediction for each image.

B images per rank and batch, C classes, N labelled images over all ranks, T temperatures
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core import equal_tokens, prepared
from swinv2_moe.checkpoints.novelty import novelty_of, with_features
from swinv2_moe.data.datasets import IGNORE, Batch
from swinv2_moe.ranks.world import World
from swinv2_moe.train.graph import PassGraph


class Accuracy(NamedTuple):
    """Percentages and mean cross-entropy over `images` labelled images."""

    top1: float
    top5: float
    balanced: float  # mean of the accuracies of the classes that have images
    loss: float
    images: int
    unreadable: list[str]
    # by which the logits are divided for the lowest cross-entropy; of few images nearer to 1
    temperature: float = 1.0
    calibrated: float = 0.0  # the lowest cross-entropy
    novelty: dict[str, Any] | None = None  # which pictures are unlike these: `Novelty.state`

    def score(self, best_by: str) -> float:
        """The measure of TRAIN.BEST_BY, higher for a better model and always finite."""
        if best_by in ("loss", "calibrated"):
            loss = {"loss": self.loss, "calibrated": self.calibrated}[best_by]
            return -min(1e30, loss)  # also for NaN
        return {"top1": self.top1, "balanced": self.balanced}[best_by]


# Temperatures at which the loss is measured, T in number: from 1/4 to 4
_PRIOR = 30  # images whose temperature is taken to be 1, beside those that are measured
_TEMPERATURES = 2.0 ** (np.arange(-8, 9) / 4)
_MOST_KNOWN = 2000  # images whose features say what is unlike them


class Predictions(NamedTuple):
    """Predictions for the labelled images, in the order of the data set."""

    targets: np.ndarray  # int64 [N]
    predicted: np.ndarray  # int64 [N]
    # int64 [N]: number of classes ranked above the target. A top-k hit has a rank below k.
    ranks: np.ndarray
    confidence: np.ndarray  # float64 [N], the softmax probability of the predicted class
    losses: np.ndarray  # float64 [N], cross-entropy in nats
    indices: np.ndarray  # int64 [N], the images' places in the data set


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader,
    world: World,
    autocast,
    after_batch: Callable[[], None] = lambda: None,
    novelty: bool = False,
) -> Accuracy:
    """Compute the accuracy and the mean cross-entropy. Every rank calls this.

    Every image counts once, for any number of ranks. Targets of -1 (padding, unreadable images) do
    not count. The model is in evaluation mode during the call. Afterwards each module has its
    previous mode again, even if `after_batch` raises.

    Args:
        novelty: compute Accuracy.novelty of the first images, at the temperature found.
    """
    rows: list[Tensor] = []  # target, logits and features of the first images
    seen = 0
    totals = torch.zeros(1, dtype=torch.float64, device=world.device)
    unreadable: list[str] = []
    with _evaluation_mode(model):
        for batch, outputs in _outputs(model, loader, world, autocast, novelty):
            num_classes = outputs.shape[1]
            if novelty:
                num_classes = _num_classes(model)
            totals = totals + _count(outputs[:, :num_classes], batch.targets)
            if outputs.shape[1] > num_classes and seen * world.size < _MOST_KNOWN:
                rows.append(torch.cat([batch.targets[:, None].float(), outputs], 1))
                seen += len(outputs)
            unreadable += batch.unreadable
            after_batch()
    top5, *rest = world.sum(totals).tolist()
    losses, by_class = np.split(np.array(rest), [len(_TEMPERATURES)])
    images, hits = np.reshape(by_class, (2, -1))  # [C]
    count = int(images.sum())
    recalls = hits[images > 0] / images[images > 0]
    share = 1 / max(count, 1)
    temperature, calibrated = _lowest(losses * share)
    temperature **= count / (count + _PRIOR)
    known = None
    if rows:
        gathered = world.gather_rows(torch.cat(rows)).numpy().astype(np.float64)
        known = world.agree(_novelty(gathered, num_classes, temperature))
    return Accuracy(
        100 * float(hits.sum()) * share,
        100 * top5 * share,
        100 * float(recalls.sum()) / max(len(recalls), 1),
        float(losses[_TEMPERATURES == 1].sum()) * share,
        count,
        unreadable,
        temperature,
        calibrated,
        known,
    )


def _num_classes(model: nn.Module) -> int:
    names: Any = model.classifier_names  # of MoEModel
    return len(model.get_parameter(names()[0]))


def _novelty(rows: np.ndarray, num_classes: int, temperature: float) -> dict[str, Any] | None:
    """The state of `Novelty`, of target, logits and features of images [N, 1 + C + D]."""
    labelled = rows[rows[:, 0] >= 0, 1:]
    logits, features = np.split(labelled, [num_classes], axis=1)
    found = novelty_of(features, logits / temperature)
    return found.state() if found else None


@torch.inference_mode()
def predict(
    model: nn.Module,
    loader,
    world: World,
    autocast,
    after_batch: Callable[[], None] = lambda: None,
    order: np.ndarray | None = None,
) -> tuple[Predictions, list[str]]:
    """Predict every labelled image. Every rank calls this.

    Images count as in `evaluate`.

    Args:
        loader: Batches of this rank from a ValSampler, so that all ranks have equally many images.
        order: int64 [images], the sampler's order without padding; None: the order of the data set,
            also without padding.

    Returns:
        The predictions, on the main rank; the other ranks get predictions of no images. And the
        paths of unreadable images.
    """
    rows, unreadable = [], []
    with _evaluation_mode(model):
        for batch, logits in _outputs(model, loader, world, autocast):
            rows.append(_describe(logits, batch.targets))
            unreadable += batch.unreadable
            after_batch()
    gathered = world.gather_rows(torch.cat(rows)).numpy()
    if order is not None and world.is_main:
        by_position = gathered[: len(order)]  # without padding
        gathered = np.empty_like(by_position)
        gathered[order] = by_position
    indices = np.flatnonzero(gathered[:, 0] != IGNORE)
    gathered = gathered[indices]
    targets, predicted, ranks = gathered[:, :3].astype(np.int64).T
    confidence, losses = gathered[:, 3:].T
    paths = [path for paths in world.gather(unreadable) for path in paths]
    return Predictions(targets, predicted, ranks, confidence, losses, indices), paths


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with prepared(model), equal_tokens(model):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _outputs(
    model: nn.Module, loader, world: World, autocast, features: bool = False
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch, on the device, and its logits, float32 [B, C]. The next step of the iterator may
    overwrite the logits. With `features`, as `with_features`."""

    def logits_of(images: Tensor) -> Tensor:
        with autocast():
            return with_features(model, images) if features else model(images).float()

    forward = PassGraph(model, logits_of, world.device)
    for images, targets, unreadable, _ in loader:
        images, targets = (
            images.to(world.device, non_blocking=True),
            targets.to(world.device, non_blocking=True),
        )
        yield Batch(images, targets, unreadable), forward(images)


def _count(logits: Tensor, targets: Tensor) -> Tensor:
    """[1 + T + 2 C] of a batch: its top-5 hits, its summed loss at each temperature, the images of
    each class, and the top-1 hits of each class."""
    logits, targets = logits[targets >= 0], targets[targets >= 0]
    best = logits.topk(min(5, logits.shape[1])).indices
    hits = best == targets.unsqueeze(1)
    losses = [
        F.cross_entropy(logits / temperature, targets, reduction="sum")
        for temperature in _TEMPERATURES.tolist()
    ]
    by_class = [
        torch.bincount(classes, minlength=logits.shape[1])
        for classes in (targets, targets[hits[:, 0]])
    ]
    return torch.cat([torch.stack([hits.any(1).sum(), *losses]), *by_class])


def _lowest(losses: np.ndarray) -> tuple[float, float]:
    """The temperature of the lowest loss, and that loss, from the losses at `_TEMPERATURES` [T].

    It is the minimum of a parabola through the lowest three, over the logarithm of the temperature.

    Source: temperature scaling, arXiv 1706.04599, section 4.2.
    """
    if not np.isfinite(losses).all():
        return 1.0, float("nan")
    i = int(losses.argmin())
    if i in (0, len(losses) - 1):
        return float(_TEMPERATURES[i]), float(losses[i])
    before, lowest, after = losses[i - 1 : i + 2]
    curvature = before - 2 * lowest + after
    if curvature <= 0:  # flat
        return float(_TEMPERATURES[i]), float(lowest)
    shift = (before - after) / (2 * curvature)  # in steps of a quarter of an octave
    return float(_TEMPERATURES[i] * 2 ** (shift / 4)), float(lowest - curvature * shift**2 / 2)


def _describe(logits: Tensor, targets: Tensor) -> Tensor:
    """float64 [B, 5]: the columns of Predictions. If the target is IGNORE, the other columns are
    undefined."""
    target_logits = logits.gather(1, targets.clamp(min=0)[:, None])  # [B, 1]
    earlier = torch.arange(logits.shape[1], device=logits.device) < targets[:, None]  # [B, C]
    # among equally probable classes the first one ranks higher, as in argmax
    ranks = ((logits > target_logits) | ((logits == target_logits) & earlier)).sum(1)
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    columns = (targets, logits.argmax(1), ranks, logits.softmax(1).amax(1), losses)
    return torch.stack([column.double() for column in columns], dim=1)
