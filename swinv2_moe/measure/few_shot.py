"""Few-shot evaluation of a checkpoint's frozen features: linear classifiers and k-NN.

For each number of shots n, and each of several seeded draws, a linear classifier is fitted to the
features of n training images per class and tested on the whole validation set. Draw i of a data set
has the same images for every model. (In shards the images have another order, so the draws differ.)
The 1-shot images of a draw are among its 5-shot images. The regularisation is fixed, since only the
validation set would be available to tune it.

- ridge: least squares on targets of -1 and 1, as V-MoE's few-shot transfer (arXiv 2106.05974), with
  the settings of google-research/big_vision: features standardised by the shots' mean and
  deviation, an L2 penalty of 2^10. Swin-MoE's paper reports 5-shot linear accuracy on ImageNet-1K
  (arXiv 2206.03382).
- logistic: multinomial logistic regression on features standardised likewise, with C = 0.01.
  scikit-learn's default C = 1 overfits hundreds of features: with 10 images per class of
  Imagenette it gave 4 points less (256 features of a model trained on Tiny-ImageNet).
- k-NN: among all training images, the k with the largest cosine similarity s vote with weight
  exp(s / 0.07) (DINO, arXiv 2104.14294).

N images, D features
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import ClassifierMixin
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from swinv2_moe.checkpoints.deployed import Deployed, open_deployed
from swinv2_moe.data.build import evaluation_loader, in_recorded_order
from swinv2_moe.data.datasets import UnreadableImages
from swinv2_moe.data.sources import Source, Sources, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel
from swinv2_moe.ranks.agreement import check_same_data
from swinv2_moe.start.frozen import Features, extract_features
from swinv2_moe.tables import Bar, Console

CLASSIFIERS: dict[str, Callable[[], ClassifierMixin]] = {
    "ridge": partial(RidgeClassifier, alpha=2**10),
    "logistic": partial(LogisticRegression, C=0.01, max_iter=1000),
}
_TEMPERATURE = 0.07  # of the neighbours' votes
# Images per product with all training features. With the 14 million of ImageNet-22K the
# similarities of 128 take 7 GB.
_QUERY_BATCH = 128


@dataclass(frozen=True)
class Protocol:
    """The settings of a few-shot evaluation.

    Raises:
        UserError: a number that is too small, an unknown classifier.
    """

    shots: tuple[int, ...] = (1, 5, 10)  # images per class
    draws: int = 5
    classifier: str = "ridge"
    neighbors: int = 20

    def __post_init__(self) -> None:
        values = {
            "shots": min(self.shots, default=0),
            "draws": self.draws,
            "knn": self.neighbors,
        }
        for option, value in values.items():
            if value < 1:
                raise UserError(f"--{option} is {value}, it must be at least 1")
        if self.classifier not in CLASSIFIERS:
            raise UserError(
                f"--classifier is {self.classifier!r}, allowed: {', '.join(CLASSIFIERS)}"
            )


def evaluate_few_shot(
    resume: str,
    data: str | None = None,
    dataset: str | None = None,
    opts: Sequence[str] = (),
    protocol: Protocol = Protocol(),
) -> dict | None:
    """Few-shot and k-NN top-1, in percent, of the checkpoint or run `resume`. Collective.

    Arguments as in `open_deployed`.

    Returns:
        The results as JSON values on the main rank; None on the others.

    Raises:
        UserError: input that cannot be used, a class with fewer images than shots, features that
            are not finite.
    """
    with open_deployed(resume, data, dataset, opts, asdict(protocol)) as deployed:
        world, config = deployed.world, deployed.data
        sources = world.on_every_rank(lambda: load_sources(config))
        sources = in_recorded_order(sources, deployed.source.meta["class_names"])
        check_same_data(config.path, world, sources.train, sources.val, sources.class_names)
        _check_counts(sources.train.targets, sources, protocol, "training images")
        model = deployed.model(num_classes=0)
        unreadable = UnreadableImages(len(sources.train) + len(sources.val), config.max_bad_share)
        train = _extract(deployed, model, sources.train, "training images", unreadable)
        val = _extract(deployed, model, sources.val, "validation images", unreadable)
    # the others do not wait: fitting may take longer than a collective's timeout
    if not world.is_main:
        return None
    _check_counts(train.targets, sources, protocol, "training images that can be read")
    if not len(val.targets):
        raise UserError(
            f"none of the {len(sources.val)} validation images can be read; the first:"
            f" {sources.val.name(0)}"
        )
    for split in (train, val):
        if not np.isfinite(split.features).all():
            raise UserError(f"checkpoint {deployed.source.directory}: its features are not finite")
    measured = measure(train, val, protocol, world.device)
    facts = deployed.facts() | {"classes": len(sources.class_names)}
    return facts | measured | {"unreadable_images": list(unreadable.paths)}


def draw_shots(targets: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Draw `shots` images of each class in targets [N], without replacement.

    With the same seed, a draw of more shots contains the draw of fewer shots.

    Returns:
        Indices, int64 [classes * shots], sorted by class.

    Raises:
        ValueError: a class has fewer than `shots` images.
    """
    order = np.random.default_rng(seed).permutation(len(targets))
    # sorted by class; the order within a class is random
    order = order[np.argsort(targets[order], kind="stable")]
    classes, starts, counts = np.unique(targets[order], return_index=True, return_counts=True)
    if counts.min() < shots:
        raise ValueError(
            f"class {classes[counts.argmin()]} has {counts.min()} images, fewer than shots"
            f" ({shots})"
        )
    positions = starts[:, None] + np.arange(shots)  # [classes, shots]
    return order[positions.ravel()]


def few_shot_accuracy(
    train: Features, val: Features, shots: int, draws: int, classifier: str
) -> list[float]:
    """Top-1 in percent on `val`, for each draw from `train`.

    Args:
        classifier: a name of CLASSIFIERS.
    """
    accuracies = []
    for seed in range(draws):
        chosen = draw_shots(train.targets, shots, seed)
        linear = make_pipeline(StandardScaler(), CLASSIFIERS[classifier]())
        linear.fit(train.features[chosen], train.targets[chosen])
        accuracies.append(100 * float(linear.score(val.features, val.targets)))
    return accuracies


def knn_accuracy(
    train: Features, val: Features, neighbors: int, device: torch.device | str = "cpu"
) -> float:
    """Top-1 in percent on `val` by weighted votes of the nearest images of `train`.

    Computed with torch, so that it can run on a GPU. For a million images scikit-learn takes
    minutes on many cores.

    Args:
        neighbors: at most the number of images of `train`.
    """
    keys = F.normalize(torch.from_numpy(train.features).to(device))  # [N, D]
    labels = torch.from_numpy(train.targets).to(device)
    num_classes = int(train.targets.max()) + 1
    feature_batches = torch.from_numpy(val.features).split(_QUERY_BATCH)
    target_batches = torch.from_numpy(val.targets).split(_QUERY_BATCH)
    hits = 0
    for features, targets in zip(feature_batches, target_batches, strict=True):
        queries = F.normalize(features.to(device))
        similarity, nearest = (queries @ keys.T).topk(neighbors)  # [queries, k]
        votes = torch.zeros(len(features), num_classes, device=device)
        votes.scatter_add_(1, labels[nearest], (similarity / _TEMPERATURE).exp())
        hits += int((votes.argmax(1).cpu() == targets).sum())
    return 100 * hits / len(val.targets)


def measure(
    train: Features, val: Features, protocol: Protocol, device: torch.device | str = "cpu"
) -> dict:
    """The results of a protocol as JSON values.

    "std" is the sample standard deviation over the draws; None for a single draw.
    """
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
    model: MoEModel,
    images: Source,
    description: str,
    unreadable: UnreadableImages,
) -> Features:
    """`extract_features` with a progress bar. Adds unreadable images to `unreadable`."""
    world = deployed.world
    loader = evaluation_loader(deployed.data, images, world.rank, world.size)
    with Bar(Console(), description, len(loader), visible=world.is_main) as bar:
        features, paths = extract_features(
            model, loader, world, deployed.autocast, lambda: bar.advance("")
        )
    unreadable.add(paths)
    return features
