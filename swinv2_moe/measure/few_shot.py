"""How much a checkpoint's frozen features are worth: n-shot linear classifiers and nearest
neighbours on them.

For each n, and each of several seeded draws, a linear classifier is fitted to the features of n
training images a class and measured on the whole validation set. Draw i of a data set is the same
images for every model (shards hold them in another order: other images), and its 1-shot images are
among its 5-shot ones. The regularisation is fixed: with so few images there is nothing to tune it
on but the validation set.

- ridge: least squares on targets of -1 and 1, as V-MoE's few-shot transfer (arXiv 2106.05974), with
  the settings of google-research/big_vision: features standardised by the shots' mean and
  deviation, an L2 penalty of 2^10. Swin-MoE's paper reports 5-shot linear accuracy on ImageNet-1K
  (arXiv 2206.03382).
- logistic: multinomial, on features standardised likewise. C = 0.01, for hundreds of them add up:
  at scikit-learn's 1 ten images a class of Imagenette gave 4 points less (256 features of a model
  trained on Tiny-ImageNet).
- k-NN: all training images; the k of the largest cosine similarity s vote with exp(s / 0.07) (DINO,
  arXiv 2104.14294).

N images, D features, W ranks, B images per rank and batch
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from sklearn.base import ClassifierMixin
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from moe_core import prepared
from swinv2_moe.data import UnreadableImages, evaluation_loader
from swinv2_moe.data.sources import Source, Sources, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.train.agreement import check_same_data
from swinv2_moe.train.deployed import Deployed, open_deployed
from swinv2_moe.train.distributed import World
from swinv2_moe.train.record import Bar

CLASSIFIERS: dict[str, Callable[[], ClassifierMixin]] = {
    "ridge": partial(RidgeClassifier, alpha=2**10),
    "logistic": partial(LogisticRegression, C=0.01, max_iter=1000),
}
_TEMPERATURE = 0.07  # of the neighbours' votes
# images whose neighbours are sought at a time: with ImageNet-22K's 14 million, 7 GB of similarities
_QUERIES = 128


@dataclass(frozen=True)
class Protocol:
    """What is measured.

    Raises:
        UserError: a number that is too small, a classifier that is none of CLASSIFIERS.
    """

    shots: tuple[int, ...] = (1, 5, 10)  # images a class
    draws: int = 5
    classifier: str = "ridge"
    neighbors: int = 20

    def __post_init__(self) -> None:
        for option, value in (
            ("shots", min(self.shots, default=0)),
            ("draws", self.draws),
            ("knn", self.neighbors),
        ):
            if value < 1:
                raise UserError(f"--{option} is {value}, it must be at least 1")
        if self.classifier not in CLASSIFIERS:
            raise UserError(
                f"--classifier is {self.classifier!r}, allowed: {', '.join(CLASSIFIERS)}"
            )


class Features(NamedTuple):
    """Of the images that could be read, in the order of the data set."""

    features: np.ndarray  # float32 [N, D]
    targets: np.ndarray  # int64 [N]


def evaluate_few_shot(
    resume: str,
    data: str | None = None,
    dataset: str | None = None,
    opts: Sequence[str] = (),
    protocol: Protocol = Protocol(),
) -> dict | None:
    """Few-shot and k-NN top-1, in percent, of the checkpoint or run `resume`. Every rank calls
    this.

    Arguments as in `open_deployed`.

    Returns:
        On the main rank what is worth keeping, ready for JSON; on the others None.

    Raises:
        UserError: input that cannot be used, a class with fewer images than shots, features that
            are not finite.
    """
    with open_deployed(resume, data, dataset, opts, asdict(protocol)) as deployed:
        world, config = deployed.world, deployed.data
        sources = world.everywhere(lambda: load_sources(config))
        check_same_data(config.path, world, sources.train, sources.val, sources.class_names)
        _check_counts(sources.train.targets, sources, protocol, "training images")
        model = deployed.model(num_classes=0)
        unreadable = UnreadableImages(len(sources.train) + len(sources.val), config.max_bad_share)
        train = _extract(deployed, model, sources.train, "training images", unreadable)
        val = _extract(deployed, model, sources.val, "validation images", unreadable)
    if not world.is_main:  # the fits take longer than a collective may
        return None
    _check_counts(train.targets, sources, protocol, "training images that can be read")
    if not len(val.targets):
        raise UserError(
            f"none of the {len(sources.val)} validation images can be read; the first:"
            f" {sources.val.name(0)}"
        )
    if not all(np.isfinite(found.features).all() for found in (train, val)):
        raise UserError(f"checkpoint {deployed.source.directory}: its features are not finite")
    measured = measure(train, val, protocol, world.device)
    facts = deployed.facts() | {"classes": len(sources.class_names)}
    return facts | measured | {"unreadable_images": list(unreadable.paths)}


@torch.inference_mode()
def extract_features(
    model: nn.Module, loader, world: World, autocast, after_batch: Callable[[], None] = lambda: None
) -> tuple[Features, list[str]]:
    """The pooled features before the classifier (timm's `pre_logits`), and the paths of unreadable
    images.

    Every image comes once, and in the order of the data set, whatever the number of ranks. Every
    rank calls this; the features are the main rank's, on the CPU, and of no rows on the others. The
    model is left in evaluation mode.

    Args:
        loader: Batches of this rank by ValSampler, so that all ranks have as many.
    """
    model.eval()
    features, targets, unreadable = [], [], []
    with prepared(model):
        for images, labels, bad in loader:
            with autocast():
                maps = model.forward_features(images.to(world.device, non_blocking=True))
                pooled = model.forward_head(maps, pre_logits=True)  # [B, D]
            labels = world.gather_rows(labels.to(world.device))  # [B * W]
            counted = labels >= 0  # neither padding nor unreadable
            features.append(world.gather_rows(pooled.float())[counted])
            targets.append(labels[counted])
            unreadable += bad
            after_batch()
    paths = [path for paths in world.gather(unreadable) for path in paths]
    return Features(torch.cat(features).numpy(), torch.cat(targets).numpy()), paths


def draw_shots(targets: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """`shots` images of each class that occurs in targets [N], drawn without replacement.

    A draw of more shots with the same seed holds those of fewer.

    Returns:
        int64 [classes * shots], class by class.

    Raises:
        ValueError: a class has fewer.
    """
    order = np.random.default_rng(seed).permutation(len(targets))
    order = order[np.argsort(targets[order], kind="stable")]  # class by class, shuffled in each
    classes, starts, counts = np.unique(targets[order], return_index=True, return_counts=True)
    if counts.min() < shots:
        raise ValueError(
            f"class {classes[counts.argmin()]} has {counts.min()} images, fewer than shots"
            f" ({shots})"
        )
    return order[(starts[:, None] + np.arange(shots)).ravel()]


def few_shot_accuracy(
    train: Features, val: Features, shots: int, draws: int, classifier: str
) -> list[float]:
    """Top-1 in percent on `val` of a classifier (one of CLASSIFIERS) fitted to each draw from
    `train`."""
    found = []
    for seed in range(draws):
        chosen = draw_shots(train.targets, shots, seed)
        linear = make_pipeline(StandardScaler(), CLASSIFIERS[classifier]())
        linear.fit(train.features[chosen], train.targets[chosen])
        found.append(100 * float(linear.score(val.features, val.targets)))
    return found


def knn_accuracy(
    train: Features, val: Features, neighbors: int, device: torch.device | str = "cpu"
) -> float:
    """Top-1 in percent on `val` by the weighted votes of the nearest of `train`, which must be as
    many.

    In torch, for the GPU that gave the features: a million images' would take scikit-learn minutes
    on many cores.
    """
    keys, labels = (
        F.normalize(torch.from_numpy(train.features).to(device)),
        torch.from_numpy(train.targets).to(device),
    )
    hits = 0
    for features, targets in zip(
        *(torch.from_numpy(part).split(_QUERIES) for part in val), strict=True
    ):
        # [queries, k]
        cosine, nearest = (F.normalize(features.to(device)) @ keys.T).topk(neighbors)
        votes = torch.zeros(len(features), int(train.targets.max()) + 1, device=device)
        votes.scatter_add_(1, labels[nearest], (cosine / _TEMPERATURE).exp())
        hits += int((votes.argmax(1).cpu() == targets).sum())
    return 100 * hits / len(val.targets)


def measure(
    train: Features, val: Features, protocol: Protocol, device: torch.device | str = "cpu"
) -> dict:
    """Everything that the protocol asks for; the deviation is the sample's, None of a single
    draw."""
    few_shot = {}
    for shots in sorted(set(protocol.shots)):
        top1 = few_shot_accuracy(train, val, shots, protocol.draws, protocol.classifier)
        std = None
        if len(top1) > 1:
            std = float(np.std(top1, ddof=1))
        few_shot[str(shots)] = {"mean": float(np.mean(top1)), "std": std, "top1": top1}
    knn = {
        "neighbors": protocol.neighbors,
        "top1": knn_accuracy(train, val, protocol.neighbors, device),
    }
    sizes = {
        "train_images": len(train.targets),
        "val_images": len(val.targets),
        "features": train.features.shape[1],
    }
    return sizes | {"classifier": protocol.classifier, "few_shot": few_shot, "knn": knn}


def _check_counts(targets: np.ndarray, sources: Sources, protocol: Protocol, what: str) -> None:
    counts = np.bincount(targets, minlength=len(sources.class_names))
    if len(counts) < 2:
        raise UserError(
            f"the data has 1 class ({sources.class_names[0]!r}), a classifier needs 2 or more"
        )
    fewest, shots = int(counts.argmin()), max(protocol.shots)
    if counts[fewest] < shots:
        raise UserError(
            f"--shots {shots}: class {sources.class_names[fewest]!r} has {counts[fewest]} {what}"
        )
    if len(targets) < protocol.neighbors:
        raise UserError(f"--knn {protocol.neighbors}: there are {len(targets)} {what}")


def _extract(
    deployed: Deployed,
    model: nn.Module,
    images: Source,
    description: str,
    unreadable: UnreadableImages,
) -> Features:
    """The features of the images, with a progress bar; unreadable images are added to
    `unreadable`."""
    world = deployed.world
    loader = evaluation_loader(deployed.data, images, world.rank, world.size)
    console = Console()
    visible = world.is_main and console.is_terminal
    with Bar(console, description, len(loader), 0, visible) as bar:
        features, paths = extract_features(
            model, loader, world, deployed.autocast, lambda: bar.advance("")
        )
    unreadable.add(paths)
    return features
