"""Generate a data set for detection: circles, squares and triangles on textures, in COCO's format.

    python data/make_shapes.py data/shapes
    swinv2-moe detect train detection/shapes/mask_rcnn

A detector learns it from 40 images in minutes on a CPU: each class has a range of hues, and the
background is nearly grey.
"""

import colorsys
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from swinv2_moe.commands.call import run_command
from swinv2_moe.commands.options import CommandParser
from swinv2_moe.errors import UserError
from swinv2_moe.files import make_directory, new_file
from swinv2_moe.output import print_lines

CLASSES = ("circle", "square", "triangle")
_CORNERS = (48, 4, 3)  # of each class's polygon
_HUES = (0.02, 0.35, 0.62)  # of each class, from 0 to 1: red, green, blue
_EDGE = 4  # oversampling of masks, for smooth edges
_SPLITS = ("train", "val")


@dataclass(frozen=True)
class Options:
    """Options of a generated data set.

    Raises:
        UserError: values out of range.
    """

    train: int = 40
    val: int = 10
    min_size: int = 160  # pixels; height and width are drawn independently
    max_size: int = 256
    max_objects: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        minimum = {"train": 1, "val": 1, "min_size": 64, "max_objects": 1, "seed": 0}
        for name, least in minimum.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}, it must be at least {least}")
        if self.max_size < self.min_size:
            raise UserError(
                f"max_size ({self.max_size}) must be at least min_size ({self.min_size})"
            )


def make_shapes(directory: Path, options: Options) -> dict[str, int]:
    """Write train/*.png, val/*.png and annotations/instances_{train,val}.json.

    The same options give the same bytes. An image depends only on the seed, the split and its
    number.

    Returns:
        The number of objects of each split.

    Raises:
        UserError: a directory that is not new or empty, or cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: must be a new or empty directory")
    return {split: _make_split(directory, split, options) for split in _SPLITS}


def _make_split(directory: Path, split: str, options: Options) -> int:
    images: list[dict] = []
    annotations: list[dict] = []
    make_directory(str(directory / split))
    make_directory(str(directory / "annotations"))
    for number in range(getattr(options, split)):
        rng = np.random.default_rng([options.seed, _SPLITS.index(split), number])
        picture, objects = _draw_image(rng, options)
        name = f"{number:06d}.png"
        with new_file(str(directory / split / name)) as file:
            picture.save(file, "png")  # type: ignore[arg-type]  # Pillow only writes
        images.append(
            {"id": number + 1, "file_name": name, "width": picture.width, "height": picture.height}
        )
        for label, polygon in objects:
            annotations.append(_annotation(len(annotations) + 1, number + 1, label, polygon))
    categories = [{"id": label + 1, "name": name} for label, name in enumerate(CLASSES)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    with new_file(str(directory / "annotations" / f"instances_{split}.json")) as file:
        file.write(json.dumps(content).encode())
    return len(annotations)


def _annotation(number: int, image: int, label: int, polygon: np.ndarray) -> dict:
    polygon = polygon.round(2)
    low, high = polygon.min(0), polygon.max(0)
    x, y = polygon.T
    area = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
    return {
        "id": number,
        "image_id": image,
        "category_id": label + 1,
        "bbox": np.concatenate([low, high - low]).round(2).tolist(),
        "area": round(float(area), 2),
        "iscrowd": 0,
        "segmentation": [polygon.flatten().tolist()],
    }


def _draw_image(
    rng: np.random.Generator, options: Options
) -> tuple[Image.Image, list[tuple[int, np.ndarray]]]:
    """An image and its objects: class, and corners [N, 2] in pixels, x and y."""
    width, height = (int(side) for side in rng.integers(options.min_size, options.max_size + 1, 2))
    background = rng.uniform(60, 200) + rng.uniform(-10, 10, 3)
    picture = Image.fromarray(_texture(rng, width, height, background))
    num_objects = int(rng.integers((options.max_objects + 1) // 2, options.max_objects + 1))
    objects: list[tuple[int, np.ndarray]] = []
    for _ in range(num_objects):
        label = int(rng.integers(len(CLASSES)))
        polygon = _place(rng, label, width, height, [other for _, other in objects])
        if polygon is not None:
            surface = Image.fromarray(_texture(rng, width, height, _colour(rng, label)))
            picture.paste(surface, mask=_mask(polygon, width, height))
            objects.append((label, polygon))
    return picture, objects


def _place(
    rng: np.random.Generator, label: int, width: int, height: int, others: list
) -> np.ndarray | None:
    """Corners [N, 2] of an object whose box overlaps no other; None after 50 failed attempts."""
    corners = _CORNERS[label]
    for _ in range(50):
        radius = rng.uniform(0.14, 0.24) * min(width, height)
        centre = rng.uniform(radius, [width - radius, height - radius])
        angles = rng.uniform(0, 2 * math.pi) + np.arange(corners) * 2 * math.pi / corners
        polygon = centre + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
        if not any(_overlap(polygon, other) for other in others):
            return polygon
    return None


def _overlap(polygon: np.ndarray, other: np.ndarray) -> bool:
    start = np.maximum(polygon.min(0), other.min(0))
    end = np.minimum(polygon.max(0), other.max(0))
    return bool((start < end).all())


def _mask(polygon: np.ndarray, width: int, height: int) -> Image.Image:
    large = Image.new("L", (width * _EDGE, height * _EDGE))
    ImageDraw.Draw(large).polygon([tuple(corner) for corner in polygon * _EDGE - 0.5], fill=255)
    return large.resize((width, height), Image.Resampling.BOX)


def _colour(rng: np.random.Generator, label: int) -> np.ndarray:
    hue = _HUES[label] + rng.uniform(-0.08, 0.08)
    saturation = rng.uniform(0.6, 1)
    value = rng.uniform(0.5, 1)
    return 255 * np.array(colorsys.hsv_to_rgb(hue, saturation, value))


def _texture(rng: np.random.Generator, width: int, height: int, colour: np.ndarray) -> np.ndarray:
    """uint8 [height, width, 3]: a colour (0 to 255) with blotches, stripes and grain."""
    blotches = [Image.fromarray(grid) for grid in rng.normal(0, 6, (3, 4, 4)).astype(np.float32)]
    smooth = np.stack(
        [np.asarray(grid.resize((width, height), Image.Resampling.BICUBIC)) for grid in blotches],
        -1,
    )
    angle, wave = rng.uniform(0, 2 * math.pi), rng.uniform(4, 16)
    x, y = np.arange(width), np.arange(height)[:, None]
    stripes = rng.uniform(0, 10) * np.sin(
        2 * math.pi * (x * math.cos(angle) + y * math.sin(angle)) / wave
    )
    pixels = colour + smooth + stripes[..., None] + rng.normal(0, 4, (height, width, 1))
    return pixels.clip(0, 255).astype(np.uint8)


def main() -> None:
    parser = CommandParser(prog="swinv2-moe make-shapes", description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="new or empty")
    default = Options()
    parser.add_setting("--train", default.train, "images")
    parser.add_setting("--val", default.val, "images")
    parser.add_setting("--min-size", default.min_size, "", "PX")
    parser.add_setting("--max-size", default.max_size, "", "PX")
    parser.add_setting("--max-objects", default.max_objects, "of an image")
    parser.add_setting("--seed", default.seed, "")
    args = vars(parser.parse_args())
    directory = args.pop("directory")
    for split, objects in make_shapes(directory, Options(**args)).items():
        print_lines(f"{directory / split}: {args[split]:,} images, {objects:,} objects")


if __name__ == "__main__":
    run_command(main)
