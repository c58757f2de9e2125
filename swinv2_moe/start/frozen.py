"""The pretrained network before its training: its features, a classifier on them, and the size of
image at which that classifier is best.

N images, D features, K classes, B images per rank and batch, W ranks
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_core import equal_tokens, prepared
from moe_core.parallel import ExpertGroup
from swinv2_moe.config import AllSections
from swinv2_moe.data.build import evaluation_loader
from swinv2_moe.data.sources import Source, Sources
from swinv2_moe.data.sources.base import Subset
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel, build_model
from swinv2_moe.ranks.precision import build_autocast
from swinv2_moe.ranks.world import World, seed_everything
from swinv2_moe.start.initial import load_pretrained
from swinv2_moe.start.probe import Classifier, fit_classifier
from swinv2_moe.tables import Bar, Console, in_words

MOST = 10_000  # pictures that the classifier is fitted to
_FOR_SIZES = 500  # pictures that sizes are compared on
_SHARE = 0.1  # of the time of the training that a size may take
_CLEARLY = 0.02  # the share of the log loss by which a larger image must be better
_MUCH = 0.1  # the same, for an image smaller than those that the weights were trained on


class Features(NamedTuple):
    """Features and targets of the readable images, in the order of the data set."""

    features: np.ndarray  # float32 [N, D]
    targets: np.ndarray  # int64 [N]


class Probe(NamedTuple):
    """A classifier on the frozen network."""

    classifier: Classifier
    images: int  # that it was fitted to
    seconds: float


@torch.inference_mode()
def extract_features(
    model: MoEModel, loader, world: World, autocast, after_batch: Callable[[], None] = lambda: None
) -> tuple[Features, list[str]]:
    """The pooled features before the classifier (timm's `pre_logits`). Collective.

    Each image appears once, in the order of the data set, for any number of ranks. The main rank
    gets the features, on the CPU; the other ranks get none. The model stays in evaluation mode.

    Args:
        loader: Batches of this rank from a ValSampler, so that all ranks have equally many.

    Returns:
        Features, and the paths of unreadable images.
    """
    model.eval()
    features, targets, unreadable = [], [], []
    with prepared(model), equal_tokens(model):
        for images, labels, bad, _ in loader:
            with autocast():
                maps = model.forward_features(images.to(world.device, non_blocking=True))
                pooled = model.forward_head(maps, pre_logits=True)  # [B, D]
            labels = world.gather_rows(labels.to(world.device))  # [B * W]
            is_labelled = labels >= 0  # excludes padding and unreadable images
            features.append(world.gather_rows(pooled.float())[is_labelled])
            targets.append(labels[is_labelled])
            unreadable += bad
            after_batch()
    paths = [path for paths in world.gather(unreadable) for path in paths]
    return Features(torch.cat(features).numpy(), torch.cat(targets).numpy()), paths


def probe(
    model: MoEModel, sections: AllSections, sources: Sources, world: World, most: int
) -> Probe:
    """Fit a classifier to the features of at most `most` training images, as many of each class as
    possible. Where the classifier of `model` has rows of these classes, it is a start. Collective;
    every rank gets the same one.

    Raises:
        UserError: on every rank: fewer than two classes can be read, or features are not finite.
    """
    began = time.perf_counter()
    images = _some(sources.train, most, sections.run.seed)
    loader = evaluation_loader(sections.data, images, world.rank, world.size)
    autocast = build_autocast(sections.run.amp_enable, sections.run.amp_dtype, world)
    title = f"features at {sections.data.img_size} px"
    with Bar(Console(), title, len(loader), visible=world.is_main) as bar:
        found, _ = extract_features(model, loader, world, autocast, lambda: bar.advance(""))

    def fit() -> Classifier | None:
        if not world.is_main:
            return None
        if len(np.unique(found.targets)) < 2:
            raise UserError(
                f"DATA.PATH {sections.data.path}: of the {len(images):,} pictures that were looked"
                " at, those of fewer than two classes can be read"
            )
        if not np.isfinite(found.features).all():
            raise UserError(
                f"MODEL.PRETRAINED {sections.model.pretrained}: its features are not finite"
            )
        known = None
        if sections.model.pretrained and not sections.model.class_map:
            known = model.get_parameter(model.classifier_names()[0]).detach().cpu().double().numpy()
        return fit_classifier(found.features, found.targets, len(sources.class_names), known)

    classifier = world.agree(world.on_every_rank(fit))
    assert classifier is not None
    return Probe(classifier, len(images), time.perf_counter() - began)


def set_classifier(model: MoEModel, classifier: Classifier) -> None:
    """Give the model the weights of a classifier on its own features."""
    values = (classifier.weight, classifier.bias)
    with torch.no_grad():
        for name, value in zip(model.classifier_names(), values, strict=True):
            parameter: Tensor = model.get_parameter(name)
            parameter.copy_(torch.from_numpy(value))


def choose_size(
    candidates: Sequence[AllSections], sources: Sources, world: World, trained: int
) -> tuple[int, Probe | None, list[str]]:
    """The number of the candidate whose probe has the lowest log loss, its probe if it has seen
    every training image, and lines about the sizes of image. Collective.

    With 10 pictures a class the log loss hardly tells which of two sizes is better, so a size other
    than that of the weights needs a margin: 5 sets, 114 draws of 5 to 20 a class, top-1 of a
    network trained at 260 px: at 160 px 74.6, at 260 76.0, at the better by log loss 75.8.

    Sizes that would take more than a tenth of TRAIN.MINUTES are left out, but for the first.

    Args:
        candidates: the same but for what belongs to their size, the smallest image first.
        trained: the size that the weights were trained at, where the pictures have so many pixels.
    """
    limit = 60 * candidates[0].train.minutes * _SHARE or float("inf")
    tried: list[Probe] = []
    lines = []
    for number, sections in enumerate(candidates):
        size = sections.data.img_size
        if tried:
            before = candidates[number - 1].data.img_size
            expected = tried[-1].seconds * (size / before) ** 2
            if world.agree(expected > limit):
                lines.append(f"  {size} px: not tried, it would take about {in_words(expected)}")
                break
        _, found, _ = starting_model(sections, sources, world, most=_FOR_SIZES)
        assert found is not None
        tried.append(found)
        loss = f"log loss {found.classifier.log_loss:.2f}"
        lines.append(f"  {size} px: {found.classifier}, {loss}")
    losses = [found.classifier.log_loss for found in tried]
    best = next(i for i, loss in enumerate(losses) if loss <= (1 + _CLEARLY) * min(losses))
    why = f"the smallest whose log loss is within {_CLEARLY:.0%} of the lowest"
    largest = len(tried) - 1
    if (
        candidates[largest].data.img_size == trained
        and losses[best] > (1 - _MUCH) * losses[largest]
    ):
        best, why = largest, f"the weights' own; no smaller one has a log loss {_MUCH:.0%} lower"
    lines = ["a linear classifier on the frozen network, by size of image:", *lines]
    lines.append(f"  DATA.IMG_SIZE {candidates[best].data.img_size}: {why}")
    has_all = tried[best].images == len(sources.train)
    return best, tried[best] if has_all else None, lines


def starting_model(
    sections: AllSections,
    sources: Sources,
    world: World,
    group: ExpertGroup | None = None,
    loads: bool = True,
    probes: bool = True,
    most: int = MOST,
    known: Probe | None = None,
) -> tuple[MoEModel, Probe | None, tuple[str, ...]]:
    """The network that a training begins with, on this rank's device; the probe whose classifier it
    has, if there is one; and messages for the log. Collective.

    Args:
        group: the ranks over which experts are spread; None: every rank has all.
        loads: load MODEL.PRETRAINED, if it is given.
        probes: fit a classifier to the features of at most `most` training images.
        known: the probe, if it has been made.

    Raises:
        UserError: weights that cannot be used; also as `probe`.
    """
    seed_everything(sections.run.seed)  # the same weights on any number of ranks
    model = build_model(sections.model, len(sources.class_names), group)
    notes = load_pretrained(sections.model, model, world, sources.class_names) if loads else ()
    model = model.to(world.device)
    if not probes:
        return model, None, notes
    found = known or probe(model, sections, sources, world, most)
    set_classifier(model, found.classifier)
    return model, found, notes


def _some(source: Source, most: int, seed: int) -> Source:
    """At most `most` images of a source, as many of each class as possible."""
    if len(source) <= most:
        return source
    targets = np.asarray(source.targets)
    order = np.random.default_rng(seed).permutation(len(targets))
    order = order[np.argsort(targets[order], kind="stable")]
    _, starts, counts = np.unique(targets[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(starts, counts)  # within the class
    return Subset(source, np.sort(order[np.argsort(rank, kind="stable")[:most]]))
