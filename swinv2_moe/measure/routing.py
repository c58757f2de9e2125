"""What the experts of a checkpoint have specialised in: pictures of its routing, and mutual
information in bits.

Measured is what the expert that a token goes to tells of the token's class, position, colour and
contrast, over a validation set, dropless: no expert is ever full. The estimates are the plug-in
ones, too large where images are few (Paninski, Neural Computation 15, 2003). So beside the class
stands what is left of it when images are given each other's classes; images and not tokens, since
those of an image have its class together. Colour and contrast are cut into kinds: of themselves the
experts tell as much or more.

N images, B of a batch, S pixels a side, h x w tokens of an image, K choices of a token, A kinds of
tokens, E experts
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torchvision.datasets.folder import IMG_EXTENSIONS

from moe_core import moe_layers, prepared
from swinv2_moe.data import UnreadableImages, evaluation_loader
from swinv2_moe.data.sources import ImageFiles, Source, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure.routing_figures import classes_figure, load_figure, pictures_figure
from swinv2_moe.measure.run_record import read_run
from swinv2_moe.models import block_name
from swinv2_moe.plots import save_png
from swinv2_moe.train.deployed import Deployed, open_deployed
from swinv2_moe.train.record import Bar
from swinv2_moe.train.routing import columns, denormalise, record_choices, spread

if TYPE_CHECKING:  # importing matplotlib takes half a second
    from matplotlib.figure import Figure

_SHUFFLES = 10
_LEVELS = 4  # of each of a patch's mean red, green and blue: 64 kinds of colour
# between kinds; the standard deviation of a patch's brightness, of 255
_CONTRASTS = (1, 2, 4, 8, 16, 32, 64)
_DROPLESS = ("MODEL.MOE.EVAL_CAPACITY_FACTOR", "0.0")


def entropy(counts: np.ndarray) -> float:
    """Bits, of what occurred so many times (any shape)."""
    shares = counts[counts > 0] / counts.sum()
    return float((shares * np.log2(1 / shares)).sum())


def mutual_information(counts: np.ndarray) -> float:
    """Bits that one of two things tells of the other, from how often each pair occurred [A, E]: at
    least 0, at most either's entropy."""
    return max(0.0, entropy(counts.sum(0)) + entropy(counts.sum(1)) - entropy(counts))


def class_table(by_image: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """How often each image chose each expert [N, E] -> how often each class did [num_classes, E];
    classes [N]."""
    table = np.zeros((num_classes, by_image.shape[1]), np.int64)
    np.add.at(table, classes, by_image)
    return table


def chance_information(by_image: np.ndarray, classes: np.ndarray, num_classes: int) -> float:
    """Bits that expert and class seem to tell of each other where images are given each other's
    classes: the mean over 10 seeded shuffles. Arguments as in `class_table`."""
    shuffles = [np.random.default_rng(seed).permutation(classes) for seed in range(_SHUFFLES)]
    return float(
        np.mean(
            [mutual_information(class_table(by_image, found, num_classes)) for found in shuffles]
        )
    )


@dataclass
class LayerChoices:
    """How often what chose each expert of a layer."""

    num_experts: int
    images: list[np.ndarray] = field(default_factory=list)  # of each batch int64 [B, E]
    position: np.ndarray | int = 0  # int64 [h * w, E]
    colour: np.ndarray | int = 0  # int64 [64, E]
    contrast: np.ndarray | int = 0  # int64 [8, E]

    def add(self, ids: Tensor, pixels: Tensor) -> None:
        """The choices ids [B, h, w, K] of a batch with pixels [B, 3, S, S] in 0 to 1."""
        batch, *grid, _ = ids.shape
        self.images.append(
            self._table(torch.arange(batch, device=ids.device).view(-1, 1, 1), ids, batch)
        )
        positions = torch.arange(math.prod(grid), device=ids.device).view(grid)
        self.position += self._table(positions, ids, positions.numel())
        self.colour += self._table(_kind_of_colour(pixels, grid), ids, _LEVELS**3)
        self.contrast += self._table(_kind_of_contrast(pixels, grid), ids, len(_CONTRASTS) + 1)

    def _table(self, kinds: Tensor, ids: Tensor, num_kinds: int) -> np.ndarray:
        """The kinds of tokens, integers [B, h, w] or what expands to that, and their choices ->
        counts [A, E]."""
        pairs = (kinds[..., None] * self.num_experts + ids).flatten()
        counts = torch.bincount(pairs, minlength=num_kinds * self.num_experts)
        return counts.view(num_kinds, self.num_experts).cpu().numpy()

    def summary(self, classes: np.ndarray, num_classes: int) -> dict:
        """Load (1: an even share) and mutual information in bits, given the images' classes [N];
        ready for JSON."""
        by_image = np.concatenate(self.images)
        load = by_image.sum(0)
        return {
            "experts_used": int((load > 0).sum()),
            "load": (load / load.mean()).round(4).tolist(),
            "bits": {
                "expert": entropy(load),  # the most that it can tell of anything
                "class": mutual_information(class_table(by_image, classes, num_classes)),
                "class_by_chance": chance_information(by_image, classes, num_classes),
                "position": mutual_information(self.position),
                "colour": mutual_information(self.colour),
                "contrast": mutual_information(self.contrast),
            },
        }


def _kind_of_colour(pixels: Tensor, grid: Sequence[int]) -> Tensor:
    red, green, blue = (
        (F.adaptive_avg_pool2d(pixels, grid) * _LEVELS).long().clamp(max=_LEVELS - 1).unbind(1)
    )
    return (red * _LEVELS + green) * _LEVELS + blue


def _kind_of_contrast(pixels: Tensor, grid: Sequence[int]) -> Tensor:
    brightness = pixels.mean(1)  # [B, S, S]
    mean, squares = (F.adaptive_avg_pool2d(x, grid) for x in (brightness, brightness**2))
    return torch.bucketize(
        255 * (squares - mean**2).clamp(min=0).sqrt(), pixels.new_tensor(_CONTRASTS)
    )


@dataclass(frozen=True)
class _Drawn:
    """Some images of a source."""

    source: Source
    indices: list[int]

    @cached_property
    def targets(self) -> np.ndarray:
        return self.source.targets[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def open(self, index: int) -> Image.Image:
        return self.source.open(self.indices[index])

    def read(self, index: int) -> bytes:
        return self.source.read(self.indices[index])

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])


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
    """Write routing.png, classes.png and, where `resume` is a run, load.png into the directory
    `output`.

    Args:
        images: files and folders of images, from which `count` are drawn evenly for routing.png;
            none: from the validation images.
        limit: so many validation images, drawn evenly, in place of all of them.

    Others as in `open_deployed`.

    Returns:
        What is worth keeping, ready for JSON.

    Raises:
        UserError: several processes, a dense model, a run without metrics, other input that cannot
            be used.
    """
    _check(output, count, limit)
    with open_deployed(resume, data, dataset, [*opts, *_DROPLESS]) as deployed:
        if not deployed.model_config.experts.num_experts:
            raise UserError(
                f"checkpoint {deployed.source.directory}: a dense model, it has no experts"
            )
        run = None
        if (Path(resume) / "checkpoints").is_dir():
            run = read_run(Path(resume))
        sources = load_sources(deployed.data)
        shown = _files(images, deployed.data.max_pixels) if images else sources.val
        shown = _Drawn(shown, spread(len(shown), count))
        labels = [
            Path(shown.name(i)).stem if images else sources.class_names[t]
            for i, t in enumerate(shown.targets)
        ]
        model = deployed.model(num_classes=0)
        pictures = _paint_all(model, shown, deployed, must_be_readable=bool(images))
        measured = _Drawn(sources.val, spread(len(sources.val), limit or len(sources.val)))
        layers, classes, unreadable = _count(model, measured, deployed)
    num_classes = len(sources.class_names)
    found = {name: layer.summary(classes, num_classes) for name, layer in layers.items()}
    tables = {
        name: class_table(np.concatenate(layer.images), classes, num_classes)
        for name, layer in layers.items()
    }
    figures = {
        "routing.png": pictures_figure(
            pictures, labels, list(layers), deployed.model_config.experts.num_experts
        )
    }
    figures["classes.png"] = classes_figure(tables, sources.class_names, found)
    if run and run.layers:
        figures["load.png"] = load_figure(run)
    _save(figures, output)
    facts = deployed.facts() | {
        "images": len(classes),
        "classes": num_classes,
        "class_bits": entropy(np.bincount(classes)),
    }
    return facts | {"layers": found, "figures": list(figures), "unreadable_images": unreadable}


def _check(output: Path, count: int, limit: int | None) -> None:
    """Raise UserError for what can be seen to be wrong before anything is read."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: this is for one process, without torchrun"
        )
    for option, value in (("count", count), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"--{option} is {value}, it must be at least 1")
    if not output.parent.is_dir() or (output.exists() and not output.is_dir()):
        raise UserError(
            f"--output {output}: must be a directory, or a new one in a directory that exists"
        )


def _files(names: Sequence[str], max_pixels: int) -> ImageFiles:
    """The images that --images names, those of a folder in their order, also from folders in it."""
    found = []
    for path in map(Path, names):
        if not path.exists():
            raise UserError(f"--images {path}: no such file or directory")
        inside = (
            sorted(p for p in path.rglob("*") if p.suffix.lower() in IMG_EXTENSIONS)
            if path.is_dir()
            else [path]
        )
        if not inside:
            raise UserError(f"--images {path}: holds no images ({' '.join(IMG_EXTENSIONS)} count)")
        found += inside
    paths = np.array([os.fsencode(path) for path in found])
    return ImageFiles("", paths, np.zeros(len(found), np.int64), max_pixels)


@torch.inference_mode()
def _paint_all(
    model: nn.Module, source: Source, deployed: Deployed, must_be_readable: bool
) -> list[np.ndarray]:
    """The images, and these painted by each layer's choices: uint8 [N, s, s, 3] each."""
    data, parts = deployed.data, []
    with prepared(model), record_choices(model) as choices:
        for images, _, unreadable in evaluation_loader(data, source):
            if must_be_readable and unreadable:
                raise UserError(f"--images {unreadable[0]}: cannot be read as an image")
            _forward(model, images, deployed)
            parts.append(columns(images, choices, data.mean, data.std))
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


@torch.inference_mode()
def _count(
    model: nn.Module, source: Source, deployed: Deployed
) -> tuple[dict[str, LayerChoices], np.ndarray, list[str]]:
    """Of the images that can be read the choices in each layer and the classes [N]; the paths of
    the others."""
    data = deployed.data
    layers = {
        block_name(name): LayerChoices(layer.config.num_experts)
        for name, layer in moe_layers(model).items()
    }
    unreadable = UnreadableImages(len(source), data.max_bad_share)
    loader, console, classes = evaluation_loader(data, source), Console(), []
    with (
        prepared(model),
        record_choices(model) as choices,
        Bar(console, "validation images", len(loader), 0, visible=console.is_terminal) as bar,
    ):
        for images, targets, bad in loader:
            images, counted = _forward(model, images, deployed), targets >= 0
            pixels = denormalise(images[counted], data.mean, data.std)
            for name, ids in choices.items():
                layers[block_name(name)].add(ids[counted], pixels)
            classes.append(targets[counted].numpy())
            unreadable.add(bad)
            bar.advance("")
    return layers, np.concatenate(classes), list(unreadable.paths)


def _forward(model: nn.Module, images: Tensor, deployed: Deployed) -> Tensor:
    """Run the model, for the choices; returns the images on its device."""
    images = images.to(deployed.world.device, non_blocking=True)
    with deployed.autocast():
        model(images)
    return images


def _save(figures: "dict[str, Figure]", output: Path) -> None:
    try:
        output.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be made ({error.strerror})") from error
    for name, figure in figures.items():
        save_png(figure, output / name)
    if "load.png" not in figures:  # perhaps there is one, of another checkpoint
        (output / "load.png").unlink(missing_ok=True)
