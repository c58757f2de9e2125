"""Accuracy and calibration of a checkpoint, overall and per class.

- Top-k: the target is among the k most probable classes. Of equally probable classes, the first one
  ranks higher.
- Calibration: the expected calibration error in 15 bins of equal width (Guo et al. 2017, arXiv
  1706.04599, equation 3).
- Dropped share: the share of token-expert choices that exceed the expert's capacity, over all MoE
  layers and batches. Repeated and blank images are included.

Every image counts once on any number of ranks. Without capacity (factor 0), an image's result
depends neither on the number of ranks nor on the batch size, except for rounding. With a capacity
it does: the images of a batch compete for the experts.

N images, C classes
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn

from moe_core import MoEConfig, moe_layers
from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.checkpoints.deployed import Deployed, check_capacity_factor, open_deployed
from swinv2_moe.config import as_opts
from swinv2_moe.data.build import evaluation_loader
from swinv2_moe.data.datasets import UnreadableImages
from swinv2_moe.data.sources import Source, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure.rounds import machine
from swinv2_moe.ranks.agreement import check_same_data
from swinv2_moe.tables import Bar, Console
from swinv2_moe.train.evaluation import Predictions, predict

BINS = 15


@dataclass(frozen=True)
class RoutingOptions:
    """Options that override the checkpoint's routing; None leaves it as configured.

    Raises:
        UserError: a factor that is not finite.
    """

    capacity_factor: float | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        factor = self.capacity_factor
        if factor is not None and not math.isfinite(factor):
            raise UserError(f"--capacity-factor is {factor}, it must be finite (0: dropless)")

    def opts(self) -> list[str]:
        """The overrides as KEY VALUE pairs."""
        keys = {
            "MODEL.MOE.EVAL_CAPACITY_FACTOR": self.capacity_factor,
            "MODEL.MOE.TOP_K": self.top_k,
        }
        return as_opts({key: value for key, value in keys.items() if value is not None})

    def check_experts(self, source: Checkpoint, layer: MoEConfig | None) -> None:
        """Check that the options have an effect on the model's layers.

        Args:
            layer: configuration of the MoE layers; None: the model is dense.

        Raises:
            UserError: an option for a dense model; top_k for Soft MoE; also raised by
                `check_capacity_factor`.
        """
        options = {"capacity-factor": self.capacity_factor, "top-k": self.top_k}
        given = [option for option, value in options.items() if value is not None]
        if layer is None and given:
            raise UserError(
                f"--{given[0]}: checkpoint {source.directory} is a dense model's, it has no experts"
            )
        if layer is None:
            return
        if self.top_k is not None and layer.routing == "soft":
            raise UserError(
                f"--top-k {self.top_k}: with MODEL.MOE.ROUTER {layer.router!r} every token gets the"
                " results of all experts"
            )
        if self.capacity_factor is not None:
            check_capacity_factor("capacity-factor", self.capacity_factor, layer)


def evaluate_checkpoint(
    resume: str,
    data: str | None = None,
    dataset: str | None = None,
    opts: Sequence[str] = (),
    routing: RoutingOptions = RoutingOptions(),
) -> dict | None:
    """Measure the checkpoint or run `resume` as described at the head of this module. Every rank
    calls this.

    Args:
        data, dataset, opts: as in `open_deployed`.

    Returns:
        On the main rank the results, ready for JSON: accuracy, confidence and calibration in
        percent, dropped shares from 0 to 1. None on the other ranks.

    Raises:
        UserError: input that cannot be used, no common class in the data, outputs that are not
            finite.
    """
    opts = list(opts) + routing.opts()
    with open_deployed(resume, data, dataset, opts, asdict(routing)) as deployed:
        layer, world = deployed.model_config.experts.layer, deployed.world
        routing.check_experts(deployed.source, layer)
        facts, predictions = _predicted(deployed)
    if not world.is_main:
        return None
    if not np.isfinite(predictions.losses).all():
        raise UserError(f"checkpoint {deployed.source.directory}: its outputs are not finite")
    class_names = facts.pop("class_names")
    results = deployed.facts() | facts | accuracy_of(predictions, class_names)
    if layer is not None:
        results["num_experts"] = layer.num_experts
        results["top_k"] = layer.top_k
        results["capacity_factor"] = layer.eval_capacity_factor
        results["batch_prioritized"] = layer.batch_prioritized
    return results


def _predicted(deployed: Deployed) -> tuple[dict, Predictions]:
    """Facts about the images and the routing of their tokens, and the predictions for them. Raises
    UserError if too many images cannot be read."""
    world, data = deployed.world, deployed.data
    sources = world.on_every_rank(lambda: load_sources(data, validation_only=True))
    check_same_data(data.path, world, sources.train, sources.val, sources.class_names)
    sources, renamed = deployed.aligned(sources)
    model = deployed.model(len(sources.class_names))
    layers = moe_layers(model)
    # [layers, 2]: number of dropped choices, number of choices
    totals = torch.zeros(len(layers), 2, dtype=torch.float64, device=world.device)

    def after_batch() -> None:
        for total, layer in zip(totals, layers.values(), strict=True):
            routing = layer.last_routing
            assert routing is not None
            choices = routing.counts.sum()
            total += torch.stack([routing.dropped_share * choices, choices])

    predictions, unreadable = predict_images(deployed, model, sources.val, Console(), after_batch)
    facts = {
        "class_names": sources.class_names,
        "classes": len(sources.class_names),
        "other_class_names": renamed,
        "data_notes": list(sources.notes),
        "batch_size": data.batch_size,
        "shuffled": data.shuffle_val,
        "machine": machine(world.device.type),
        "unreadable_images": unreadable,
        "dropped_share": None,
    }
    if layers:
        dropped, choices = world.sum(totals).T  # [layers]
        facts["dropped_share"] = float(dropped.sum() / choices.sum())
        shares = (dropped / choices).tolist()
        facts["dropped_share_by_layer"] = dict(zip(layers, shares, strict=True))
    return facts, predictions


def predict_images(
    deployed: Deployed,
    model: nn.Module,
    images: Source,
    console: Console,
    after_batch: Callable[[], None] = lambda: None,
) -> tuple[Predictions, list[str]]:
    """`predict` for all of `images` with a progress bar, and the paths of unreadable ones. Raises
    UserError if there are too many of these."""
    world, data = deployed.world, deployed.data
    loader = evaluation_loader(data, images, world.rank, world.size, data.shuffle_val)

    def count() -> None:
        after_batch()
        bar.advance("")

    with Bar(console, "images", len(loader), visible=world.is_main) as bar:
        order = loader.sampler.order
        predictions, paths = predict(model, loader, world, deployed.autocast, count, order)
    unreadable = UnreadableImages(len(images), data.max_bad_share)
    unreadable.add(paths)
    return predictions, list(unreadable.paths)


def accuracy_of(predictions: Predictions, class_names: Sequence[str]) -> dict:
    """Accuracy, mean confidence and calibration in percent, and the mean cross-entropy.

    `balanced_accuracy` and `macro_f1` are means over classes, in which each class counts the same:
    of the recall (the `top1` of a class) and of F1, the harmonic mean of recall and precision.

    None stands for the accuracy of a class without images, for F1 of a class that has no images and
    was never predicted, and for top-5 of at most five classes.

    Args:
        predictions: for at least one image.
    """
    hits = predictions.ranks == 0
    top5 = None
    if len(class_names) > 5:
        top5 = _percent(predictions.ranks < 5)
    per_class = _per_class(predictions, hits, class_names)
    return {
        "images": len(hits),
        "top1": _percent(hits),
        "top5": top5,
        "balanced_accuracy": _mean_of(per_class, "top1"),
        "macro_f1": _mean_of(per_class, "f1"),
        "loss": float(predictions.losses.mean()),
        "confidence": _percent(predictions.confidence),
        "ece": 100 * calibration_error(predictions.confidence, hits),
        "reliability": reliability(predictions.confidence, hits),
        "per_class": per_class,
    }


def _per_class(
    predictions: Predictions, hits: np.ndarray, class_names: Sequence[str]
) -> list[dict]:
    targets = predictions.targets
    counts = [
        np.bincount(numbers, minlength=len(class_names)).tolist()
        for numbers in (targets, predictions.predicted, targets[hits])
    ]
    classes = []
    for name, images, predicted, right in zip(class_names, *counts, strict=True):
        top1, f1 = None, None
        if images:
            top1 = 100 * right / images
        if images or predicted:
            f1 = 200 * right / (images + predicted)
        classes.append({"name": name, "images": images, "top1": top1, "f1": f1})
    return classes


def _mean_of(classes: list[dict], key: str) -> float:
    return float(np.mean([entry[key] for entry in classes if entry[key] is not None]))


def _percent(shares: np.ndarray) -> float | None:
    """100 times the mean; None for an empty array."""
    if not len(shares):
        return None
    return 100 * float(shares.mean())


def calibration_error(confidence: np.ndarray, hits: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error, from 0 to 1.

    It is the mean of |accuracy - mean confidence| over the bins, weighted by their images.

    Args:
        confidence: [N], N > 0: the softmax probability of the predicted class, from 0 to 1.
        hits: bool [N], whether the predicted class is the target.

    Source: Guo et al. 2017, arXiv 1706.04599, equation 3.
    """
    gaps = np.bincount(_bin_of(confidence, bins), weights=hits - confidence)
    return float(np.abs(gaps).sum() / len(hits))


def reliability(confidence: np.ndarray, hits: np.ndarray, bins: int = BINS) -> list[dict]:
    """The bins of `calibration_error`: upper confidence, images, mean confidence and accuracy.

    Confidence and accuracy are in percent; None in an empty bin.
    """
    bin_of_image = _bin_of(confidence, bins)
    rows = []
    for m in range(bins):
        in_bin = bin_of_image == m
        row: dict[str, float | None] = {"up_to": 100 * (m + 1) / bins, "images": int(in_bin.sum())}
        row |= {"confidence": _percent(confidence[in_bin]), "top1": _percent(hits[in_bin])}
        rows.append(row)
    return rows


def _bin_of(confidence: np.ndarray, bins: int) -> np.ndarray:
    """The index m of the bin of each confidence: m / bins < confidence <= (m + 1) / bins."""
    return np.digitize(confidence, np.arange(1, bins) / bins, right=True)
