"""Accuracy and calibration of a checkpoint, overall, per class and by capacity factor.

- Top-k: the target is among the k most probable classes. Of equally probable classes, the first one
  ranks higher.
- Calibration: the expected calibration error in 15 bins of equal width (Guo et al. 2017, arXiv
  1706.04599, equation 3).
- Dropped share: the share of token-expert choices that exceed the expert's capacity, over all MoE
  layers and batches. Repeated and blank images are included.
- Speed: forward passes of one batch that is already on the device. The slowest rank's time counts.

Every image counts once on any number of ranks. Without capacity (factor 0), an image's result
depends neither on the number of ranks nor on the batch size, except for rounding. With a capacity
it does: the images of a batch compete for the experts.

N images, C classes
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from moe_core import MoEConfig, moe_layers, prepared
from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.checkpoints.deployed import Deployed, check_capacity_factor, open_deployed
from swinv2_moe.config import as_opts
from swinv2_moe.data.build import Loader, evaluation_loader
from swinv2_moe.data.datasets import UnreadableImages
from swinv2_moe.data.samplers import ValSampler
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure.rounds import interleaved, machine
from swinv2_moe.measure.spread import quartiles, ratios
from swinv2_moe.models import MoEMlp
from swinv2_moe.ranks.agreement import check_same_data
from swinv2_moe.ranks.world import World
from swinv2_moe.tables import Bar, Console
from swinv2_moe.train.evaluation import Predictions, predict

BINS = 15
ROUNDS, WARMUP = 20, 2  # of timing
_SWEPT = ("top1", "top5", "loss", "ece", "dropped_share")  # reported for each factor of a sweep


@dataclass(frozen=True)
class RoutingOptions:
    """Options that override the checkpoint's routing; None or empty leaves it as configured.

    Raises:
        UserError: a factor that is not finite.
    """

    capacity_factor: float | None = None
    top_k: int | None = None
    sweep: tuple[float, ...] = ()  # further capacity factors to compare with

    def __post_init__(self) -> None:
        if self.capacity_factor is not None:
            _check_finite("capacity-factor", self.capacity_factor)
        for factor in self.sweep:
            _check_finite("sweep", factor)

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
        options = {
            "capacity-factor": self.capacity_factor,
            "top-k": self.top_k,
            "sweep": self.sweep or None,
        }
        for option, value in options.items():
            if value is not None and layer is None:
                raise UserError(
                    f"--{option}: checkpoint {source.directory} is a dense model's, it has no"
                    " experts"
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
        for factor in self.sweep:
            check_capacity_factor("sweep", factor, layer)


def _check_finite(option: str, factor: float) -> None:
    if not math.isfinite(factor):
        raise UserError(f"--{option} is {factor}, it must be finite (0: dropless)")


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
        experts, world = deployed.model_config.experts, deployed.world
        routing.check_experts(deployed.source, experts.layer)
        subject = _Subject.of(deployed)
        configured = experts.eval_capacity_factor
        factors = sorted({configured} | set(routing.sweep), key=_capacity_order)
        passes = {factor: subject.predictions(factor) for factor in factors}
        speeds = {}
        if routing.sweep:
            speeds = subject.speeds(factors, configured)
    if not world.is_main:
        return None
    for evaluated in passes.values():
        if not np.isfinite(evaluated.predictions.losses).all():
            raise UserError(f"checkpoint {deployed.source.directory}: its outputs are not finite")
    measured = {factor: passes[factor].measured(subject.class_names) for factor in factors}
    results = deployed.facts() | subject.facts() | measured[configured]
    layer = experts.layer
    if layer is not None:
        results["num_experts"] = layer.num_experts
        results["top_k"] = layer.top_k
        results["capacity_factor"] = configured
        results["batch_prioritized"] = subject.batch_prioritized()
        results["dropped_share_by_layer"] = passes[configured].by_layer
    if speeds:
        rows = []
        for factor in factors:
            accuracy = {key: measured[factor][key] for key in _SWEPT}
            rows.append({"capacity_factor": factor} | accuracy | speeds[factor])
        results["rounds"] = ROUNDS
        results["sweep"] = rows
    return results


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


def _capacity_order(factor: float) -> float:
    """Sort key: by capacity, unlimited (0) last."""
    return abs(factor) or math.inf


def _spread(values: list[float]) -> dict:
    low, median, high = quartiles(values)
    return {"median": median, "quartiles": [low, high]}


class _Pass(NamedTuple):
    """Results of all validation images at one capacity factor."""

    predictions: Predictions
    dropped_share: float | None  # None for a dense model
    by_layer: dict[str, float]

    def measured(self, class_names: Sequence[str]) -> dict:
        return accuracy_of(self.predictions, class_names) | {"dropped_share": self.dropped_share}


@dataclass(frozen=True)
class _Subject:
    """A checkpoint's model on its device, and the validation images. All ranks call each method."""

    world: World
    model: nn.Module
    loader: Loader[ValSampler]
    autocast: partial
    shuffled: bool  # the images come in a random order
    class_names: list[str]
    notes: tuple[str, ...]  # messages of the dataset
    renamed: str | None
    unreadable: UnreadableImages

    @classmethod
    def of(cls, deployed: Deployed) -> "_Subject":
        world, data = deployed.world, deployed.data
        sources = world.on_every_rank(lambda: load_sources(data, validation_only=True))
        check_same_data(data.path, world, sources.train, sources.val, sources.class_names)
        sources, renamed = deployed.aligned(sources)
        return cls(
            world,
            deployed.model(len(sources.class_names)),
            evaluation_loader(data, sources.val, world.rank, world.size, data.shuffle_val),
            deployed.autocast,
            data.shuffle_val,
            sources.class_names,
            sources.notes,
            renamed,
            UnreadableImages(len(sources.val), data.max_bad_share),
        )

    def facts(self) -> dict:
        return {
            "classes": len(self.class_names),
            "other_class_names": self.renamed,
            "data_notes": list(self.notes),
            "batch_size": self.loader.batch_size,
            "shuffled": self.shuffled,
            "machine": machine(self.world.device.type),
            "unreadable_images": list(self.unreadable.paths),
        }

    def batch_prioritized(self) -> bool:
        """Whether a full expert keeps the tokens with the highest probability in evaluation."""
        layers = [module for module in self.model.modules() if isinstance(module, MoEMlp)]
        if layers[0].eval_batch_prioritized is None:
            return layers[0].moe.config.batch_prioritized
        return layers[0].eval_batch_prioritized

    def predictions(self, factor: float) -> _Pass:
        """Predict all validation images at a capacity factor. Raises UserError if too many images
        cannot be read."""
        layers = moe_layers(self.model)
        # [layers, 2]: number of dropped choices, number of choices
        totals = torch.zeros(len(layers), 2, dtype=torch.float64, device=self.world.device)

        def after_batch() -> None:
            for total, layer in zip(totals, layers.values(), strict=True):
                routing = layer.last_routing
                assert routing is not None
                choices = routing.counts.sum()
                total += torch.stack([routing.dropped_share * choices, choices])
            bar.advance("")

        what = "images"
        if layers:
            what = f"capacity factor {factor:g}"
        with _capacity_factor(self.model, factor), self._bar(what, len(self.loader)) as bar:
            order = self.loader.sampler.order
            predictions, paths = predict(
                self.model, self.loader, self.world, self.autocast, after_batch, order
            )
        self.unreadable.add(paths)
        dropped, choices = self.world.sum(totals).T  # [layers]
        share = None
        if layers:
            share = float(dropped.sum() / choices.sum())
        share_of_layers = (dropped / choices).tolist()
        return _Pass(predictions, share, dict(zip(layers, share_of_layers, strict=True)))

    def speeds(self, factors: list[float], base: float) -> dict[float, dict]:
        """Images/s of all ranks together at each factor, and the ratio to the speed at `base` in
        each round."""
        images = next(iter(self.loader)).images.to(self.world.device)

        @torch.inference_mode()
        def forward(factor: float) -> None:
            with _capacity_factor(self.model, factor), self.autocast():
                self.model(images)
            bar.advance("")

        with prepared(self.model), self._bar("timing", len(factors) * (WARMUP + ROUNDS)) as bar:
            passes = {str(factor): partial(forward, factor) for factor in factors}
            times = interleaved(passes, ROUNDS, WARMUP, self.world)
        num_images = sum(self.world.gather(len(images)))
        speeds = {}
        for factor in factors:
            rounds = times[str(factor)]
            rates = [1e3 * num_images / milliseconds for milliseconds in rounds]
            relative = ratios(times[str(base)], rounds)
            speeds[factor] = {
                "images_per_second": _spread(rates),
                "speed_ratio": _spread(relative),
            }
        return speeds

    def _bar(self, what: str, total: int) -> Bar:
        return Bar(Console(), what, total, visible=self.world.is_main)


@contextmanager
def _capacity_factor(model: nn.Module, factor: float) -> Iterator[None]:
    """Set the evaluation capacity factor of every MoE layer within the block."""
    layers = [module for module in model.modules() if isinstance(module, MoEMlp)]
    before = [layer.eval_capacity_factor for layer in layers]
    try:
        for layer in layers:
            layer.eval_capacity_factor = factor
        yield
    finally:
        for layer, configured in zip(layers, before, strict=True):
            layer.eval_capacity_factor = configured
