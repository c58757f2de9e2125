"""Accuracy of a checkpoint: overall, per class, its calibration, and how both follow the capacity
factor.

- Top-k: the target is among the k likeliest classes; of equally likely ones the first counts as
  likelier.
- Calibration: the expected calibration error in 15 bins of equal width (Guo et al. 2017, arXiv
  1706.04599, equation 3).
- Dropped share: of all choices of an expert by a token, those that found it full; over all MoE
  layers and batches, repeated and blank images included.
- Speed: forward passes of one batch of the images, already on the device; the slowest rank's time
  counts.

Every image counts once on any number of ranks. Dropless (capacity factor 0), what is said of an
image depends, rounding aside, neither on that number nor on the batch size. With a limit it does:
which tokens find their expert full is up to the images that share a batch.

N images, C classes
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from moe_core import moe_layers, prepared
from swinv2_moe.config import as_opts
from swinv2_moe.data import UnreadableImages, evaluation_loader
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure.rounds import interleaved, machine, quartiles, ratios
from swinv2_moe.models import MoEMlp
from swinv2_moe.plots import COLOURS, new_figure, save_png, tidy
from swinv2_moe.train.agreement import check_same_data
from swinv2_moe.train.checkpoint import Checkpoint
from swinv2_moe.train.deployed import Deployed, open_deployed
from swinv2_moe.train.distributed import World
from swinv2_moe.train.evaluation import Predictions, predict
from swinv2_moe.train.record import Bar

BINS = 15
ROUNDS, WARMUP = 20, 2  # of timing
_SWEPT = ("top1", "top5", "loss", "ece", "dropped_share")  # what is kept of each factor in a sweep


@dataclass(frozen=True)
class RoutingOptions:
    """Routing other than the checkpoint's configuration says; each is None or empty where it is not
    asked for.

    Raises:
        UserError: a factor that is not finite.
    """

    capacity_factor: float | None = None
    top_k: int | None = None
    sweep: tuple[float, ...] = ()  # capacity factors to compare with that one

    def __post_init__(self) -> None:
        for option, factors in (
            ("capacity-factor", [self.capacity_factor or 0.0]),
            ("sweep", self.sweep),
        ):
            for factor in factors:
                if not math.isfinite(factor):
                    raise UserError(f"--{option} is {factor}, it must be finite (0: dropless)")

    def opts(self) -> list[str]:
        """As KEY VALUE ..."""
        keys = {
            "MODEL.MOE.EVAL_CAPACITY_FACTOR": self.capacity_factor,
            "MODEL.MOE.TOP_K": self.top_k,
        }
        return as_opts({key: value for key, value in keys.items() if value is not None})

    def check_experts(self, source: Checkpoint, num_experts: int) -> None:
        """Raise UserError where something is asked for that a dense model has not."""
        asked = {
            "capacity-factor": self.capacity_factor,
            "top-k": self.top_k,
            "sweep": self.sweep or None,
        }
        for option, value in asked.items():
            if value is not None and not num_experts:
                raise UserError(
                    f"--{option}: checkpoint {source.directory} is a dense model's, it has no"
                    " experts"
                )


def evaluate_checkpoint(
    resume: str,
    data: str | None = None,
    dataset: str | None = None,
    opts: Sequence[str] = (),
    routing: RoutingOptions = RoutingOptions(),
) -> dict | None:
    """All that the head of this module says, of the checkpoint or run `resume`. Every rank calls
    this.

    Other arguments as in `open_deployed`.

    Returns:
        On the main rank what is worth keeping, ready for JSON: accuracy, confidence and calibration
        in percent, dropped shares of 1. On the others None.

    Raises:
        UserError: input that cannot be used, other classes in the data, outputs that are not
            finite.
    """
    with open_deployed(
        resume, data, dataset, [*opts, *routing.opts()], asdict(routing)
    ) as deployed:
        experts, world = deployed.model_config.experts, deployed.world
        routing.check_experts(deployed.source, experts.num_experts)
        subject = _Subject.of(deployed)
        own = experts.eval_capacity_factor
        factors = sorted({own, *routing.sweep}, key=_room)
        passes = {factor: subject.predictions(factor) for factor in factors}
        speeds = None
        if routing.sweep:
            speeds = subject.speeds(factors, own)
    if not world.is_main:
        return None
    if not all(np.isfinite(one.predictions.losses).all() for one in passes.values()):
        raise UserError(f"checkpoint {deployed.source.directory}: its outputs are not finite")
    measured = {factor: one.measured(subject.class_names) for factor, one in passes.items()}
    found = deployed.facts() | subject.facts() | measured[own]
    if (layer := experts.layer) is not None:
        found |= {"num_experts": layer.num_experts, "top_k": layer.top_k, "capacity_factor": own}
        found |= {"dropped_share_by_layer": passes[own].by_layer}
    if speeds:
        accuracy = {factor: {key: one[key] for key in _SWEPT} for factor, one in measured.items()}
        rows = [
            {"capacity_factor": factor} | accuracy[factor] | speeds[factor] for factor in factors
        ]
        found |= {"rounds": ROUNDS, "sweep": rows}
    return found


def measure(found: Predictions, class_names: Sequence[str]) -> dict:
    """Accuracy, mean confidence and calibration in percent and the mean cross-entropy. None: the
    accuracy of a class without images, and top-5 where there are no more than five classes.

    Args:
        found: of at least one image.
    """
    hits = found.ranks == 0
    counts = np.bincount(found.targets, minlength=len(class_names))
    correct = np.bincount(found.targets[hits], minlength=len(class_names))
    per_class = zip(class_names, counts.tolist(), correct.tolist(), strict=True)
    return {
        "images": len(hits),
        "top1": 100 * float(hits.mean()),
        "top5": 100 * float((found.ranks < 5).mean()) if len(class_names) > 5 else None,
        "loss": float(found.losses.mean()),
        "confidence": 100 * float(found.confidence.mean()),
        "ece": 100 * calibration_error(found.confidence, hits),
        "reliability": reliability(found.confidence, hits),
        "per_class": [
            {"name": name, "images": n, "top1": 100 * c / n if n else None}
            for name, n, c in per_class
        ],
    }


def calibration_error(confidence: np.ndarray, hits: np.ndarray, bins: int = BINS) -> float:
    """The expected calibration error: the mean over bins, by their images, of |accuracy - mean
    confidence|; of 1.

    Args:
        confidence: [N], N > 0, of 1: the softmax probability of the predicted class.
        hits: bool [N], whether that is the target.

    Source: Guo et al. 2017, arXiv 1706.04599, equation 3.
    """
    gaps = np.bincount(_bin_of(confidence, bins), weights=hits - confidence)
    return float(np.abs(gaps).sum() / len(hits))


def reliability(confidence: np.ndarray, hits: np.ndarray, bins: int = BINS) -> list[dict]:
    """Each bin of `calibration_error` up to a confidence: its images, mean confidence and accuracy,
    in percent."""
    chosen = [_bin_of(confidence, bins) == m for m in range(bins)]
    return [
        {
            "up_to": 100 * (m + 1) / bins,
            "images": int(own.sum()),
            "confidence": 100 * float(confidence[own].mean()) if own.any() else None,
            "top1": 100 * float(hits[own].mean()) if own.any() else None,
        }
        for m, own in enumerate(chosen)
    ]


def _bin_of(confidence: np.ndarray, bins: int) -> np.ndarray:
    """m for a confidence above m / bins and up to (m + 1) / bins."""
    return np.digitize(confidence, np.arange(1, bins) / bins, right=True)


def draw_sweep(found: dict, path: Path) -> None:
    """A PNG of what `evaluate_checkpoint` found in a sweep: top-1 against images/s, with the
    quartiles of the rounds.

    Raises:
        UserError: a file that cannot be written.
    """
    figure = new_figure(9, 5)
    axes = figure.subplots()
    rows = sorted(
        found["sweep"],
        key=lambda row: (row["top1"], row["images_per_second"]["median"]),
        reverse=True,
    )
    colours = [COLOURS[row["capacity_factor"] == found["capacity_factor"]] for row in rows]
    for row, colour in zip(rows, colours, strict=True):
        speed, (low, high) = row["images_per_second"].values()
        axes.errorbar(
            speed,
            row["top1"],
            xerr=[[speed - low], [high - speed]],
            fmt="o",
            capsize=3,
            color=colour,
        )
    bottom, top = axes.get_ylim()
    # of the last label: they stand in a column, for points may lie close together
    height = math.inf
    style = {"textcoords": ("axes fraction", "data"), "va": "center", "fontsize": 9, "zorder": 0}
    style["arrowprops"] = {"arrowstyle": "-", "color": COLOURS[5], "relpos": (0, 0.5)}
    for row, colour in zip(rows, colours, strict=True):
        height = min(row["top1"], height - 0.05 * (top - bottom))
        label = f"f = {row['capacity_factor']:g}, {row['dropped_share']:.1%} dropped"
        point = row["images_per_second"]["median"], row["top1"]
        axes.annotate(label, point, (1.02, height), color=colour, **style)
    axes.set_title(
        f"{found['checkpoint']}, {found['num_experts']} experts, K = {found['top_k']}", loc="left"
    )
    axes.set_xlabel(
        f"images/s, median and quartiles of {found['rounds']} rounds\n{found['machine']}"
    )
    axes.set_ylabel("top-1, %")
    tidy(axes)
    save_png(figure, path)


def _room(factor: float) -> float:
    """For sorting by the room that tokens find."""
    return abs(factor) or math.inf


def _spread(values: list[float]) -> dict:
    low, median, high = quartiles(values)
    return {"median": median, "quartiles": [low, high]}


class _Pass(NamedTuple):
    """Over all validation images, at one capacity factor."""

    predictions: Predictions
    dropped_share: float | None  # of a dense model None
    by_layer: dict[str, float]

    def measured(self, class_names: Sequence[str]) -> dict:
        return measure(self.predictions, class_names) | {"dropped_share": self.dropped_share}


@dataclass(frozen=True)
class _Subject:
    """A checkpoint's model on its device, and the validation images; every method is for all
    ranks."""

    world: World
    model: nn.Module
    loader: DataLoader
    autocast: partial
    class_names: list[str]
    renamed: str | None
    unreadable: UnreadableImages

    @classmethod
    def of(cls, deployed: Deployed) -> "_Subject":
        world, data = deployed.world, deployed.data
        sources = world.everywhere(lambda: load_sources(data))
        check_same_data(data.path, world, *sources)
        renamed = deployed.compare_classes(sources.class_names)
        return cls(
            world,
            deployed.model(len(sources.class_names)),
            evaluation_loader(data, sources.val, world.rank, world.size),
            deployed.autocast,
            sources.class_names,
            renamed,
            UnreadableImages(len(sources.val), data.max_bad_share),
        )

    def facts(self) -> dict:
        return {
            "classes": len(self.class_names),
            "other_class_names": self.renamed,
            "batch_size": self.loader.batch_size,
            "machine": machine(self.world.device.type),
            "unreadable_images": list(self.unreadable.paths),
        }

    def predictions(self, factor: float) -> _Pass:
        """Raises UserError where too many images cannot be read."""
        layers = moe_layers(self.model)
        # dropped choices, choices
        totals = torch.zeros(len(layers), 2, dtype=torch.float64, device=self.world.device)

        def after_batch() -> None:
            for total, layer in zip(totals, layers.values(), strict=True):
                choices = layer.last_routing.counts.sum()
                total += torch.stack([layer.last_routing.dropped_share * choices, choices])
            bar.advance("")

        what = "images"
        if layers:
            what = f"capacity factor {factor:g}"
        with _capacity_factor(self.model, factor), self._bar(what, len(self.loader)) as bar:
            found, paths = predict(self.model, self.loader, self.world, self.autocast, after_batch)
        self.unreadable.add(paths)
        dropped, choices = self.world.sum(totals).T  # [layers]
        share = None
        if layers:
            share = float(dropped.sum() / choices.sum())
        return _Pass(found, share, dict(zip(layers, (dropped / choices).tolist(), strict=True)))

    def speeds(self, factors: list[float], base: float) -> dict[float, dict]:
        """Images/s of all ranks together at each factor, and over those at `base` in the same
        rounds."""
        images = next(iter(self.loader)).images.to(self.world.device)

        @torch.inference_mode()
        def forward(factor: float) -> None:
            with _capacity_factor(self.model, factor), self.autocast():
                self.model(images)
            bar.advance("")

        with prepared(self.model), self._bar("timing", len(factors) * (WARMUP + ROUNDS)) as bar:
            passes = {str(factor): partial(forward, factor) for factor in factors}
            times = interleaved(passes, ROUNDS, WARMUP, self.world)
        count, found = sum(self.world.gather(len(images))), {}
        for factor in factors:
            own = times[str(factor)]
            found[factor] = {
                "images_per_second": _spread([1e3 * count / milliseconds for milliseconds in own])
            }
            found[factor]["speed_ratio"] = _spread(ratios(times[str(base)], own))
        return found

    def _bar(self, what: str, total: int) -> Bar:
        console = Console()
        return Bar(console, what, total, 0, visible=self.world.is_main and console.is_terminal)


@contextmanager
def _capacity_factor(model: nn.Module, factor: float) -> Iterator[None]:
    """Every MoE layer's in evaluation, for the block's length."""
    layers = [module for module in model.modules() if isinstance(module, MoEMlp)]
    before = [layer.eval_capacity_factor for layer in layers]
    try:
        for layer in layers:
            layer.eval_capacity_factor = factor
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.eval_capacity_factor = own
