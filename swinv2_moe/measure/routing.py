"""Expert specialisation of a checkpoint: pictures of its routing, and mutual information in bits.

The mutual information is measured between a token's expert and its class, position, colour or
contrast. It is measured on a validation set with dropless routing: no expert has a capacity limit.

The plug-in estimates are biased upwards for few images (Paninski, Neural Computation 15, 2003). The
bias for classes is estimated by shuffling the classes of images. Images are shuffled, not tokens,
because all tokens of an image have the same class. Colour and contrast are quantised, which gives a
lower bound of their mutual information.

N images, B of a batch, S pixels a side, h x w tokens of an image, K choices of a token, A kinds of
tokens, E experts
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core import moe_layers, prepared
from swinv2_moe.checkpoints.deployed import Deployed, check_alone, open_deployed
from swinv2_moe.data.build import evaluation_loader
from swinv2_moe.data.datasets import UnreadableImages
from swinv2_moe.data.images import image_paths
from swinv2_moe.data.section import DATASETS, DataConfig
from swinv2_moe.data.sources import ImageFiles, Source, Sources, Subset, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure.routing_figures import classes_figure, load_figure
from swinv2_moe.measure.run_record import read_run
from swinv2_moe.models import block_name
from swinv2_moe.plots import save_png
from swinv2_moe.routing_pictures import columns, denormalise, pictures_figure
from swinv2_moe.tables import Bar, Console
from swinv2_moe.train.routing import evenly_spaced, record_choices

if TYPE_CHECKING:  # importing matplotlib takes half a second
    from matplotlib.figure import Figure

_SHUFFLES = 10
_LEVELS = 4  # levels of a patch's mean red, green and blue: 64 kinds of colour
# Boundaries between the kinds of contrast: standard deviation of a patch's brightness, from 0 to
# 255.
_CONTRASTS = (1, 2, 4, 8, 16, 32, 64)
_DROPLESS = ("MODEL.MOE.EVAL_CAPACITY_FACTOR", "0.0")


def entropy(counts: np.ndarray) -> float:
    """Entropy in bits of a distribution, given by counts of any shape."""
    shares = counts[counts > 0] / counts.sum()
    return float((shares * np.log2(1 / shares)).sum())


def mutual_information(counts: np.ndarray) -> float:
    """Mutual information in bits of two variables, from the counts of each pair [A, E].

    It is at least 0 and at most the entropy of either variable.
    """
    return max(0.0, entropy(counts.sum(0)) + entropy(counts.sum(1)) - entropy(counts))


def class_table(by_image: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """Counts of each expert's choices by image [N, E] -> by class [num_classes, E]. `classes` [N]
    are the images' classes."""
    table = np.zeros((num_classes, by_image.shape[1]), np.int64)
    np.add.at(table, classes, by_image)
    return table


def chance_information(by_image: np.ndarray, classes: np.ndarray, num_classes: int) -> float:
    """Estimated mutual information of expert and class when the images' classes are shuffled.

    The mean over 10 seeded shuffles. Arguments as in `class_table`.
    """
    bits = []
    for seed in range(_SHUFFLES):
        shuffled = np.random.default_rng(seed).permutation(classes)
        bits.append(mutual_information(class_table(by_image, shuffled, num_classes)))
    return float(np.mean(bits))


@dataclass
class LayerChoices:
    """Counts of the choices of each expert of a layer, by image and by kind of token."""

    num_experts: int
    images: list[np.ndarray] = field(default_factory=list)  # int64 [B, E] of each batch
    position: np.ndarray | int = 0  # int64 [h * w, E]
    colour: np.ndarray | int = 0  # int64 [64, E]
    contrast: np.ndarray | int = 0  # int64 [8, E]

    def add(self, ids: Tensor, pixels: Tensor) -> None:
        """Count the choices `ids` [B, h, w, K] for a batch of images `pixels` [B, 3, S, S], from 0
        to 1."""
        batch, height, width, _ = ids.shape
        grid = (height, width)
        numbers = torch.arange(batch, device=ids.device).view(-1, 1, 1)
        self.images.append(self._table(numbers, ids, batch))
        positions = torch.arange(height * width, device=ids.device).view(grid)
        self.position += self._table(positions, ids, positions.numel())
        self.colour += self._table(_kind_of_colour(pixels, grid), ids, _LEVELS**3)
        self.contrast += self._table(_kind_of_contrast(pixels, grid), ids, len(_CONTRASTS) + 1)

    def _table(self, kinds: Tensor, ids: Tensor, num_kinds: int) -> np.ndarray:
        """Count the choices of each kind of token.

        Args:
            kinds: integers that broadcast to [B, h, w], below `num_kinds` (A).
            ids: the tokens' experts [B, h, w, K].

        Returns:
            Counts [A, E].
        """
        pairs = (kinds[..., None] * self.num_experts + ids).flatten()
        counts = torch.bincount(pairs, minlength=num_kinds * self.num_experts)
        return counts.view(num_kinds, self.num_experts).cpu().numpy()

    def summary(self, classes: np.ndarray, num_classes: int) -> dict:
        """The loads (1: an even share) and the mutual information in bits, ready for JSON.

        `classes` [N]: the images' classes.
        """
        by_image = np.concatenate(self.images)
        load = by_image.sum(0)
        return {
            "experts_used": int((load > 0).sum()),
            "load": (load / load.mean()).round(4).tolist(),
            "bits": {
                "expert": entropy(load),  # upper bound of the mutual information below
                "class": mutual_information(class_table(by_image, classes, num_classes)),
                "class_by_chance": chance_information(by_image, classes, num_classes),
                "position": mutual_information(np.asarray(self.position)),
                "colour": mutual_information(np.asarray(self.colour)),
                "contrast": mutual_information(np.asarray(self.contrast)),
            },
        }


def _kind_of_colour(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    levels = (F.adaptive_avg_pool2d(pixels, grid) * _LEVELS).long().clamp(max=_LEVELS - 1)
    red, green, blue = levels.unbind(1)
    return (red * _LEVELS + green) * _LEVELS + blue


def _kind_of_contrast(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    brightness = pixels.mean(1)  # [B, S, S]
    mean = F.adaptive_avg_pool2d(brightness, grid)
    mean_square = F.adaptive_avg_pool2d(brightness**2, grid)
    deviation = (mean_square - mean**2).clamp(min=0).sqrt()
    return torch.bucketize(255 * deviation, pixels.new_tensor(_CONTRASTS))


def draw_routing(
    resume: str,
    output: Path,
    images: Sequence[str] = (),
    data: str | None = None,
    dataset: str | None = None,
    opts: Sequence[str] = (),
    count: int = 8,
    limit: int | None = None,
) -> dict:
    """Write routing.png, classes.png and, if `resume` is in a run, load.png into the directory
    `output`.

    Args:
        images: files and folders of images for routing.png; empty: the validation images. With
            images, without `data`, and where the data set of the training is not here, routing.png
            is all that is made.
        data, dataset, opts: as in `open_deployed`.
        count: number of images in routing.png, evenly spaced.
        limit: number of validation images to measure on, evenly spaced; None: all.

    Returns:
        The results, ready for JSON.

    Raises:
        UserError: several processes, a dense model, a run without metrics, other input that cannot
            be used.
    """
    _check(output, count, limit)
    opts = list(opts) + list(_DROPLESS)
    with open_deployed(resume, data, dataset, opts) as deployed:
        num_experts = deployed.model_config.experts.num_experts
        if not num_experts:
            raise UserError(
                f"checkpoint {deployed.source.directory}: a dense model, it has no experts"
            )
        run = None
        directory = deployed.source.directory.parent.parent
        if (Path(resume) / "checkpoints").is_dir() or (directory / "metrics.jsonl").is_file():
            run = read_run(directory)
        sources = None
        if not (images and data is None and _is_elsewhere(deployed.data)):
            sources = load_sources(deployed.data, validation_only=True)
        shown, labels = _choose(images, count, sources)
        model = deployed.model(num_classes=0)
        pictures = _paint_all(model, shown, deployed, must_be_readable=bool(images))
        painted = pictures_figure(
            pictures, labels, list(map(block_name, moe_layers(model))), num_experts
        )
        if sources is None:
            _save({"routing.png": painted}, output)
            return deployed.facts() | {"images": 0, "layers": {}, "figures": ["routing.png"]}
        all_images = len(sources.val)
        measured = Subset(sources.val, evenly_spaced(all_images, limit or all_images))
        layers, classes, unreadable = _count(model, measured, deployed)
    num_classes = len(sources.class_names)
    summaries, tables = {}, {}
    for name, layer in layers.items():
        summaries[name] = layer.summary(classes, num_classes)
        tables[name] = class_table(np.concatenate(layer.images), classes, num_classes)
    figures = {
        "routing.png": painted,
        "classes.png": classes_figure(tables, sources.class_names, summaries),
    }
    if run and run.layers:
        figures["load.png"] = load_figure(run)
    _save(figures, output)
    results = deployed.facts() | {
        "images": len(classes),
        "limit": limit,
        "classes": num_classes,
        "class_bits": entropy(np.bincount(classes)),
    }
    results |= {"layers": summaries, "figures": list(figures), "unreadable_images": unreadable}
    return results


def _is_elsewhere(data: DataConfig) -> bool:
    """Whether the data set is in a folder that is not on this machine."""
    return DATASETS[data.dataset].needs_files and not os.path.exists(data.path)


def _choose(names: Sequence[str], count: int, sources: Sources | None) -> tuple[Subset, list[str]]:
    """`count` of the named images, or of the validation images if there are no names; and their
    labels."""
    if names:
        files: Source = _files(names)
        chosen = Subset(files, evenly_spaced(len(files), count))
        labels = [Path(chosen.name(i)).stem for i in range(len(chosen))]
    else:
        assert sources is not None
        chosen = Subset(sources.val, evenly_spaced(len(sources.val), count))
        labels = [sources.class_names[target] for target in chosen.targets]
    return chosen, labels


def _check(output: Path, count: int, limit: int | None) -> None:
    """Check the arguments before reading any file.

    Raises:
        UserError: several processes, or a wrong argument.
    """
    check_alone()
    for option, value in (("count", count), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"--{option} is {value}, it must be at least 1")
    if not output.parent.is_dir() or (output.exists() and not output.is_dir()):
        raise UserError(
            f"--output {output}: must be a directory, or a new one in a directory that exists"
        )


def _files(names: Sequence[str]) -> ImageFiles:
    """The images of --images. Images of a folder and its subfolders are sorted by name."""
    paths = np.array([os.fsencode(path) for path in image_paths(names, "--images ")])
    return ImageFiles("", paths, np.zeros(len(paths), np.int64))


@torch.inference_mode()
def _paint_all(
    model: nn.Module, source: Source, deployed: Deployed, must_be_readable: bool
) -> list[np.ndarray]:
    """The images, and the images painted with each layer's choices: arrays of uint8 [N, s, s,
    3]."""
    data = deployed.data
    parts = []  # one for each batch
    with prepared(model), record_choices(model) as choices:
        for images, _, unreadable, _ in evaluation_loader(data, source):
            if must_be_readable and unreadable:
                raise UserError(f"--images {unreadable[0]}: cannot be read as an image")
            _forward(model, images, deployed, choices)
            parts.append(columns(images, choices, data.mean, data.std))
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


@torch.inference_mode()
def _count(
    model: nn.Module, source: Source, deployed: Deployed
) -> tuple[dict[str, LayerChoices], np.ndarray, list[str]]:
    """Count the choices of all images that can be read.

    Returns:
        The choices in each layer, the images' classes [N], and the paths of unreadable images.
    """
    data = deployed.data
    layers: dict[str, LayerChoices] = {}
    counts = {name: layer.config.num_experts for name, layer in moe_layers(model).items()}
    unreadable = UnreadableImages(len(source), data.max_bad_share)
    loader = evaluation_loader(data, source)
    classes = []  # one for each batch
    with (
        prepared(model),
        record_choices(model) as choices,
        Bar(Console(), "validation images", len(loader)) as bar,
    ):
        for images, targets, bad, _ in loader:
            images = _forward(model, images, deployed, choices)
            counted = targets >= 0
            pixels = denormalise(images[counted], data.mean, data.std)
            for name, ids in choices.items():
                layer = layers.setdefault(block_name(name), LayerChoices(counts[name]))
                layer.add(ids[counted], pixels)
            classes.append(targets[counted].numpy())
            unreadable.add(bad)
            bar.advance("")
    return layers, np.concatenate(classes), list(unreadable.paths)


def _forward(
    model: nn.Module, images: Tensor, deployed: Deployed, choices: dict[str, Tensor]
) -> Tensor:
    """Run the model while its choices are recorded, and return the images on its device.

    Raises:
        UserError: no layer's tokens have known places.
    """
    images = images.to(deployed.world.device, non_blocking=True)
    with deployed.autocast():
        model(images)
    if not choices:
        config = deployed.model_config
        raise UserError(
            f"{config.title}: the order of its tokens is not known, so that their"
            " experts cannot be shown in the image"
        )
    return images


def _save(figures: "dict[str, Figure]", output: Path) -> None:
    try:
        output.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be made ({error.strerror})") from error
    for name, figure in figures.items():
        save_png(figure, output / name)
    if "load.png" not in figures:  # remove the figure of another checkpoint
        (output / "load.png").unlink(missing_ok=True)
