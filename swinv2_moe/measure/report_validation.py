"""The part of a report that needs the model: predictions for the validation images, and the
confusion of their classes.

N images, C classes
"""

import base64
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy.sparse import coo_array, csr_array
from torch import nn

from moe_core import moe_layers
from swinv2_moe.checkpoints.deployed import Deployed, open_deployed
from swinv2_moe.data.datasets import ImageDataset, Sample
from swinv2_moe.data.sources import Source, Subset, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure.accuracy import accuracy_of, predict_images
from swinv2_moe.routing_pictures import columns, figure_pixels, pictures_figure, to_pixels
from swinv2_moe.tables import Console
from swinv2_moe.train.evaluation import Predictions
from swinv2_moe.train.routing import evenly_spaced, record_choices

_IMAGES = 8  # validation images that are shown with their most probable classes
_ROUTED = 4  # images that are shown with the experts of their patches
_GUESSES = 3  # predicted classes of an image
_WORST = 12  # wrong predictions that are shown
_CLASSES = 20  # classes in the confusion matrix
_PAIRS = 15  # most frequent mistakes that are shown


class Picture(NamedTuple):
    """A validation image and the model's prediction."""

    image: str  # a data URL
    truth: str
    is_right: bool
    guesses: list[tuple[str, float]]  # classes and their probabilities


class ReportValidation(NamedTuple):
    """Predictions of a run's checkpoint. If there are none, only `problem` is set.

    `problem`: the reason why there are no predictions, or a warning about them.
    """

    problem: str = ""
    about: str = ""  # the checkpoint and the images
    facts: dict[str, str] = {}  # noqa: RUF012
    # name, images, top1 (percent; None without images), taken_for: the worst first
    classes: Sequence[dict] = ()
    # name, images, counts (as each class shown), elsewhere (as others): most mistakes
    matrix: Sequence[dict] = ()
    pairs: Sequence[tuple[str, str, int, int]] = ()  # truth, prediction, mistakes, images of truth
    worst: Sequence[Picture] = ()
    samples: Sequence[Picture] = ()
    routing: str = ""  # a data URL: images and the experts of their patches


def validate(
    selected: tuple[str, str],
    data: str | None = None,
    opts: Sequence[str] = (),
    limit: int = 0,
) -> ReportValidation:
    """Predict validation images, with the configured capacity of evaluation.

    Args:
        selected: a checkpoint, as `select_checkpoint` returns it.
        data, opts: as in `open_deployed`.
        limit: maximum number of images, evenly spaced; 0: all.
    """
    resume, why = selected
    try:
        with open_deployed(resume, data, None, opts) as deployed:
            return _validate(deployed, why, limit)
    except UserError as error:
        return ReportValidation(problem=f"No predictions: {error}")


def _validate(deployed: Deployed, why: str, limit: int) -> ReportValidation:
    data = deployed.data
    sources, renamed = deployed.aligned(load_sources(data, validation_only=True))
    start = "warning: "
    warnings = [note.removeprefix(start) for note in sources.notes if note.startswith(start)]
    if renamed:
        warnings.append(renamed)
    names = sources.class_names
    source: Source = sources.val
    if limit and limit < len(source):
        source = Subset(source, evenly_spaced(len(source), limit))
    model = deployed.model(len(names))
    predictions, _ = predict_images(deployed, model, source, Console(stderr=True))
    if not np.isfinite(predictions.losses).all():
        raise UserError(f"checkpoint {deployed.source.directory}: its outputs are not finite")
    if not len(predictions.targets):
        return ReportValidation(problem="No predictions: no validation image can be read.")
    measured = accuracy_of(predictions, names)
    counts = confusion(predictions, len(names))
    order = mistakes(counts)
    samples, routing = _samples(deployed, model, source, names)
    about = f"{why or deployed.source.directory.name}. {len(predictions.targets):,} images"
    if source is not sources.val:
        about += f" of {len(sources.val):,}, evenly spaced (--images 0: all)"
    return ReportValidation(
        problem="; ".join(warnings),
        about=f"{about}.",
        facts=_facts(measured),
        classes=_class_rows(measured["per_class"], order, names),
        matrix=matrix(counts, names, _CLASSES),
        pairs=[
            (names[truth], names[predicted], images, measured["per_class"][truth]["images"])
            for truth, predicted, images in order[:_PAIRS]
        ],
        worst=_worst_pictures(deployed, source, predictions, names),
        samples=samples,
        routing=routing,
    )


def _facts(measured: dict) -> dict[str, str]:
    facts = {"top-1": f"{measured['top1']:.2f}%"}
    if measured["top5"] is not None:
        facts["top-5"] = f"{measured['top5']:.2f}%"
    facts["balanced accuracy"] = f"{measured['balanced_accuracy']:.2f}%"
    facts["macro-F1"] = f"{measured['macro_f1']:.2f}%"
    facts["cross-entropy"] = f"{measured['loss']:.3f}"
    facts["mean confidence"] = f"{measured['confidence']:.2f}%"
    facts["calibration error"] = f"{measured['ece']:.2f}%"
    return facts


def _class_rows(
    per_class: list[dict], order: Sequence[tuple[int, int, int]], names: Sequence[str]
) -> list[dict]:
    taken: dict[int, str] = {}
    for truth, predicted, images in order:
        taken.setdefault(truth, f"{names[predicted]} ({images:,})")
    rows = [entry | {"taken_for": taken.get(i, "")} for i, entry in enumerate(per_class)]
    return sorted(rows, key=lambda row: math.inf if row["top1"] is None else row["top1"])


def _worst_pictures(
    deployed: Deployed,
    source: Source,
    predictions: Predictions,
    names: Sequence[str],
) -> list[Picture]:
    """The wrong predictions with the highest confidence, with the probability of the true class."""
    data = deployed.data
    dataset = ImageDataset(source, data, is_train=False)
    pictures = []
    for position in worst(predictions, _WORST):
        image = dataset[int(predictions.indices[position])].image
        photo = to_pixels(image[None], data.mean, data.std)[0]
        truth = int(predictions.targets[position])
        guess = (names[predictions.predicted[position]], float(predictions.confidence[position]))
        true_class = (names[truth], math.exp(-predictions.losses[position]))
        pictures.append(Picture(data_url(photo), names[truth], False, [guess, true_class]))
    return pictures


@torch.inference_mode()
def _samples(
    deployed: Deployed,
    model: nn.Module,
    source: Source,
    names: Sequence[str],
) -> tuple[list[Picture], str]:
    """Evenly spaced images with their most probable classes, and the experts of some of them."""
    data = deployed.data
    dataset = ImageDataset(source, data, is_train=False)
    samples = [dataset[i] for i in evenly_spaced(len(dataset), _IMAGES)]
    samples = [sample for sample in samples if not sample.unreadable]
    if not samples:
        return [], ""
    images = torch.stack([sample.image for sample in samples])
    with record_choices(model) as choices, deployed.autocast():
        logits = model(images.to(deployed.world.device))
    probs = logits.float().softmax(1).cpu()
    photos = to_pixels(images, data.mean, data.std)
    pictures = []
    for sample, photo, row in zip(samples, photos, probs, strict=True):
        pictures.append(_picture(sample, photo, row, names))
    routing = ""
    if choices:
        shown = {name: ids[:_ROUTED].cpu() for name, ids in choices.items()}
        painted = columns(images[:_ROUTED], shown, data.mean, data.std)
        labels = [picture.truth for picture in pictures[:_ROUTED]]
        num_experts = max(layer.config.num_experts for layer in moe_layers(model).values())
        figure = pictures_figure(painted, labels, list(shown), num_experts)
        routing = data_url(figure_pixels(figure))
    return pictures, routing


def _picture(
    sample: Sample,
    photo: np.ndarray,
    probs: torch.Tensor,
    names: Sequence[str],
) -> Picture:
    best = probs.topk(min(_GUESSES, len(probs)))
    ids = best.indices.tolist()
    guesses = [
        (names[number], probability)
        for number, probability in zip(ids, best.values.tolist(), strict=True)
    ]
    is_right = ids[0] == sample.target
    return Picture(data_url(photo), names[sample.target], is_right, guesses)


def data_url(picture: np.ndarray) -> str:
    """A JPEG of uint8 [H, W, 3] inside a page."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def confusion(predictions: Predictions, num_classes: int) -> csr_array:
    """The number of images by true and predicted class, int64 [C, C]. It is sparse: C can be
    21,841."""
    pairs = (predictions.targets, predictions.predicted)
    ones = np.ones(len(pairs[0]), np.int64)
    return csr_array(coo_array((ones, pairs), (num_classes, num_classes)))


def mistakes(counts: csr_array) -> list[tuple[int, int, int]]:
    """True class, predicted class and number of images of each confusion, the most frequent
    first."""
    pairs = coo_array(counts)
    wrong = np.stack([*pairs.coords, pairs.data], 1)[pairs.row != pairs.col]
    return [tuple(row) for row in wrong[np.argsort(-wrong[:, 2], kind="stable")].tolist()]


def matrix(counts: csr_array, names: Sequence[str], most: int) -> list[dict]:
    """Rows of the confusion matrix, of all classes or of the `most` with the most mistakes: wrong
    predictions of a class's images, and of the class for images of others."""
    classes, right = np.arange(len(names)), counts.diagonal()
    if len(names) > most:
        involved = counts.sum(0) + counts.sum(1) - 2 * right
        classes = np.sort(np.argsort(-involved, kind="stable")[:most])
    shown = counts[classes][:, classes].toarray()
    rows = []
    images_of = counts.sum(1)[classes]
    for number, row, images in zip(classes.tolist(), shown, images_of.tolist(), strict=True):
        row_counts = {"counts": row.tolist(), "elsewhere": images - int(row.sum())}
        rows.append({"name": names[number], "images": images} | row_counts)
    return rows


def worst(predictions: Predictions, count: int) -> list[int]:
    """Positions of up to `count` wrong predictions, in order of decreasing confidence."""
    wrong = np.flatnonzero(predictions.ranks > 0)
    order = np.argsort(-predictions.confidence[wrong], kind="stable")
    return wrong[order][:count].tolist()
