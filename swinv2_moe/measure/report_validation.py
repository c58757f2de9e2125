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
from torch import nn

from moe_core import moe_layers
from swinv2_moe.checkpoints.deployed import Deployed, open_deployed
from swinv2_moe.data.build import evaluation_loader
from swinv2_moe.data.datasets import ImageDataset, Sample, UnreadableImages
from swinv2_moe.data.sources import Source, Subset, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure.accuracy import accuracy_of
from swinv2_moe.routing_pictures import columns, figure_pixels, pictures_figure, to_pixels
from swinv2_moe.tables import Bar, Console
from swinv2_moe.train.evaluation import Predictions, predict
from swinv2_moe.train.routing import evenly_spaced, record_choices

_IMAGES = 8  # validation images that are shown with their most probable classes
_ROUTED = 4  # images that are shown with the experts of their patches
_GUESSES = 3  # predicted classes of an image
_WORST = 12  # wrong predictions that are shown
_CLASSES = 20  # classes in the confusion matrix
_PAIRS = 15  # most frequent mistakes that are shown


class Mistake(NamedTuple):
    """A class that was predicted as another one. Classes are numbers."""

    truth: int
    predicted: int
    images: int


class Matrix(NamedTuple):
    """The confusion matrix of some classes."""

    classes: list[int]
    counts: np.ndarray  # int64 [classes, classes]; a row for each true class
    # int64 [classes], images that were predicted as a class that is not shown
    elsewhere: np.ndarray


class Guess(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float


class Picture(NamedTuple):
    """A validation image and the model's prediction."""

    image: str  # a data URL
    truth: str
    is_right: bool
    guesses: list[Guess]


class ClassRow(NamedTuple):
    """A row for a class of the data. `taken_for` is its most frequent mistake, with the number of
    images."""

    name: str
    images: int
    top1: float | None  # percent; None without images
    taken_for: str


class MatrixRow(NamedTuple):
    """A row of the confusion matrix: how many images of a class were predicted as each class shown,
    and as other classes."""

    name: str
    images: int
    counts: list[int]
    elsewhere: int


class ReportValidation(NamedTuple):
    """Predictions of a run's checkpoint. If there are none, only `problem` is set.

    `problem`: the reason why there are no predictions, or a warning about them.
    """

    problem: str = ""
    about: str = ""  # the checkpoint and the images
    facts: dict[str, str] = {}  # noqa: RUF012
    classes: Sequence[ClassRow] = ()  # the worst first
    matrix: Sequence[MatrixRow] = ()  # the classes with the most mistakes
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
    predictions = _predict(deployed, model, source)
    if not len(predictions.targets):
        return ReportValidation(problem="No predictions: no validation image can be read.")
    measured = accuracy_of(predictions, names)
    all_mistakes = mistakes(predictions)
    samples, routing = _samples(deployed, model, source, names)
    about = f"{why or deployed.source.directory.name}. {len(predictions.targets):,} images"
    if source is not sources.val:
        about += f" of {len(sources.val):,}, evenly spaced (--images 0: all)"
    return ReportValidation(
        problem="; ".join(warnings),
        about=f"{about}.",
        facts=_facts(measured),
        classes=_class_rows(measured["per_class"], taken_for(all_mistakes), names),
        matrix=_matrix_rows(predictions, names),
        pairs=_pairs(all_mistakes, predictions, names),
        worst=_worst_pictures(deployed, source, predictions, names),
        samples=samples,
        routing=routing,
    )


def _predict(deployed: Deployed, model: nn.Module, source: Source) -> Predictions:
    """Predict the images of `source`. Raises UserError if too many images cannot be read, or
    outputs are not finite."""
    data, world = deployed.data, deployed.world
    loader = evaluation_loader(data, source, shuffle=data.shuffle_val)
    with Bar(Console(stderr=True), "images", len(loader)) as bar:
        predictions, unreadable = predict(
            model,
            loader,
            world,
            deployed.autocast,
            lambda: bar.advance(""),
            loader.sampler.order,
        )
    UnreadableImages(len(source), data.max_bad_share).add(unreadable)
    if not np.isfinite(predictions.losses).all():
        raise UserError(f"checkpoint {deployed.source.directory}: its outputs are not finite")
    return predictions


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
    per_class: list[dict], taken: dict[int, Mistake], names: Sequence[str]
) -> list[ClassRow]:
    rows = []
    for number, entry in enumerate(per_class):
        text = ""
        if number in taken:
            text = f"{names[taken[number].predicted]} ({taken[number].images:,})"
        rows.append(ClassRow(entry["name"], entry["images"], entry["top1"], text))
    return sorted(rows, key=lambda row: math.inf if row.top1 is None else row.top1)


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
        guess = Guess(
            names[predictions.predicted[position]], float(predictions.confidence[position])
        )
        true_class = Guess(names[truth], math.exp(-predictions.losses[position]))
        pictures.append(Picture(data_url(photo), names[truth], False, [guess, true_class]))
    return pictures


def _matrix_rows(predictions: Predictions, names: Sequence[str]) -> list[MatrixRow]:
    shown = matrix(predictions, len(names), _CLASSES)
    totals = shown.counts.sum(1) + shown.elsewhere
    rows = []
    for i, number in enumerate(shown.classes):
        counts = shown.counts[i].tolist()
        rows.append(MatrixRow(names[number], int(totals[i]), counts, int(shown.elsewhere[i])))
    return rows


def _pairs(
    all_mistakes: Sequence[Mistake], predictions: Predictions, names: Sequence[str]
) -> list[tuple[str, str, int, int]]:
    totals = np.bincount(predictions.targets, minlength=len(names)).tolist()
    pairs = []
    for truth, predicted, images in all_mistakes[:_PAIRS]:
        pairs.append((names[truth], names[predicted], images, totals[truth]))
    return pairs


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
    guesses = []
    for number, probability in zip(ids, best.values.tolist(), strict=True):
        guesses.append(Guess(names[number], probability))
    is_right = ids[0] == sample.target
    return Picture(data_url(photo), names[sample.target], is_right, guesses)


def data_url(picture: np.ndarray) -> str:
    """A JPEG of uint8 [H, W, 3] inside a page."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def mistakes(predictions: Predictions) -> list[Mistake]:
    """Each pair of classes with mistakes, the most frequent first."""
    wrong = predictions.ranks > 0
    pairs = np.stack([predictions.targets[wrong], predictions.predicted[wrong]], axis=1)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    found = []
    for i in order:
        truth, predicted = map(int, distinct[i])
        found.append(Mistake(truth, predicted, int(counts[i])))
    return found


def matrix(predictions: Predictions, num_classes: int, most: int) -> Matrix:
    """The confusion matrix of all classes. If there are more than `most` classes, only the `most`
    with the most mistakes are shown.

    The mistakes of a class are wrong predictions of its images, and images of other classes that
    were predicted as it.
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
    """Positions of up to `count` wrong predictions, in order of decreasing confidence."""
    wrong = np.flatnonzero(predictions.ranks > 0)
    order = np.argsort(-predictions.confidence[wrong], kind="stable")
    return wrong[order][:count].tolist()


def taken_for(all_mistakes: Sequence[Mistake]) -> dict[int, Mistake]:
    """The most frequent mistake of each true class. `all_mistakes`: a result of `mistakes`."""
    by_class: dict[int, Mistake] = {}
    for mistake in all_mistakes:
        by_class.setdefault(mistake.truth, mistake)
    return by_class
