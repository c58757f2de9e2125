"""Check a COCO annotation file before training, without needing mmdetection.

N annotations, I images
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from swinv2_moe.data.images import MAX_PIXELS
from swinv2_moe.errors import UserError, short
from swinv2_moe.files import check_inner_path, read_json

MAX_BYTES = 1 << 33  # of an annotation file. COCO's have 0.5 GB, the largest public ones 6 GB.
# Pixels by which a box may exceed its image: COCO's boxes are rounded to hundredths.
OUTSIDE = 1.0
# Allowed share of boxes without area. COCO 2017 has 2 among 860,001 (annotations 918 and 2206849),
# which mmdetection omits.
NO_AREA_SHARE = 1e-4
_MAX_NUMBER = 2**53  # absolute value; floats do not represent all larger integers
_MAX_OUTLINE = 2**24  # pixels
_TABLES = ("images", "annotations", "categories")
_KEYS = {
    "images": {"id": int, "file_name": str, "width": int, "height": int},
    "annotations": {
        "id": int,
        "image_id": int,
        "category_id": int,
        "bbox": list,
        "area": (int, float),
        "iscrowd": int,
    },
    "categories": {"id": int, "name": str},
}


@dataclass(frozen=True)
class Annotations:
    """Content of a checked annotation file."""

    file: str
    image_files: list[str]  # relative to the directory of the images
    image_sizes: np.ndarray  # [I, 2] width and height
    boxes: int
    crowd_boxes: int  # regions of many objects: ignored in training and evaluation
    thin_boxes: int  # less than a pixel wide or high: omitted
    images_without_boxes: int  # omitted from training, part of evaluation
    class_names: list[str]

    def __str__(self) -> str:
        return (
            f"{self.file}: "
            f"{len(self.image_files):,} images ({self.images_without_boxes:,} without objects), "
            f"{self.boxes:,} objects ({self.crowd_boxes:,} crowds, "
            f"{self.thin_boxes:,} thinner than a pixel), {len(self.class_names):,} classes"
        )


def check_annotations(
    file: str | Path,
    images: str | Path,
    class_names: Sequence[str] | None = None,
    masks: bool = True,
) -> Annotations:
    """Read an annotation file and check its consistency with the images and the model's classes.

    Args:
        file: in COCO's instance format, as instances_train2017.json
            (https://cocodataset.org/#format-data).
        images: the directory of the images; file names are relative to it.
        class_names: the model's classes in order; None: those of the file.
        masks: every object must have its segmentation.

    Raises:
        UserError: a missing or empty file or image, or a file of another format; duplicate or
            unknown ids; an image outside `images` or with more than MAX_PIXELS; no boxes, boxes
            outside their images, or too many without area (1 in 10,000); masks that do not fit
            their images; missing classes or another order of classes. The message names the file,
            the first annotation or image with its value, and the number of such errors.
    """
    file = str(file)
    tables = _read(file)
    for table, keys in _KEYS.items():
        _check_keys(file, table, tables[table], keys)
        _check_unique(file, table, np.array([row["id"] for row in tables[table]], np.int64))
    _check_classes(file, tables["categories"], class_names)
    rows = tables["annotations"]
    sizes = [[row["width"], row["height"]] for row in tables["images"]]
    sizes = np.array(sizes, np.int64).reshape(-1, 2)
    _check(file, _IMAGE, tables["images"], (sizes < 1).any(1), "{width} x {height} px")
    is_too_large = sizes.astype(float).prod(1) > MAX_PIXELS
    problem = f"{{width}} x {{height}} px, the limit is {MAX_PIXELS:,}"
    _check(file, _IMAGE, tables["images"], is_too_large, problem)
    image_of = _indices_of(file, rows, "image_id", tables["images"])
    _indices_of(file, rows, "category_id", tables["categories"])
    thin = _check_boxes(file, rows, sizes[image_of])
    if masks:
        without = [not row.get("segmentation") for row in rows]
        _check(file, _NAME, rows, without, "no segmentation, which a mask needs")
        _check_masks(file, rows, sizes[image_of])
    names = [row["file_name"] for row in tables["images"]]
    _check_names(file, tables["images"])
    _check_files(file, Path(images), names)
    return Annotations(
        file=file,
        image_files=names,
        image_sizes=sizes,
        boxes=len(rows),
        crowd_boxes=sum(bool(row["iscrowd"]) for row in rows),
        thin_boxes=thin,
        images_without_boxes=len(names) - len(np.unique(image_of)),
        class_names=[row["name"] for row in tables["categories"]],
    )


_NAME = "annotation {id} (image {image_id})"
_IMAGE = "image {id} ({file_name})"


def _read(file: str) -> dict[str, list[dict]]:
    try:
        content = read_json(file, MAX_BYTES)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # also what is not UTF-8
        raise UserError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{file}: not a COCO annotation file, whose JSON is an object, not a"
            f" {type(content).__name__}"
        )
    for table in _TABLES:
        if not isinstance(content.get(table), list):
            raise UserError(f'{file}: not a COCO annotation file, it has no list "{table}"')
        if not content[table]:
            raise UserError(f'{file}: the list "{table}" is empty')
    return content


def _check_keys(
    file: str, table: str, rows: list, keys: dict[str, type | tuple[type, ...]]
) -> None:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f'{file}: entry {number} of "{table}" is {short(row)}, not an object')
        for key, kind in keys.items():
            value = row.get(key)
            if not isinstance(value, kind) or (isinstance(value, int) and abs(value) > _MAX_NUMBER):
                problem = f'has no "{key}"'
                if key in row:
                    problem = f'"{key}" is {short(value)}'
                raise UserError(
                    f'{file}: entry {number} of "{table}" (id {short(row.get("id"))}): {problem}'
                )


def _check_unique(file: str, table: str, ids: np.ndarray) -> None:
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        twice = values[counts > 1]
        raise UserError(
            f'{file}: the id {twice[0]} comes more than once in "{table}"{_such(len(twice))}'
        )


def _check_classes(file: str, categories: list[dict], class_names: Sequence[str] | None) -> None:
    """Check the classes: mmdetection numbers them in the file's order and ignores missing names."""
    names = [row["name"] for row in categories]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{file}: the category {short(twice)} comes more than once")
    if class_names is None:
        return
    missing = [name for name in class_names if name not in names]
    if missing:
        raise UserError(
            f"{file}: no category {missing[0]!r}, which the model is to know{_such(len(missing))}"
        )
    file_order = [name for name in names if name in class_names]
    for expected, name in zip(class_names, file_order, strict=True):
        if expected != name:
            raise UserError(
                f"{file}: its categories come in another order than the model's: {name!r}, not"
                f" {expected!r}"
            )


def _indices_of(file: str, rows: list[dict], key: str, owners: list[dict]) -> np.ndarray:
    """The index in `owners` of the id that each row's `key` refers to, int64 [N].

    Raises:
        UserError: an id that no owner has.
    """
    ids = np.array([owner["id"] for owner in owners], np.int64)
    wanted_ids = np.array([row[key] for row in rows], np.int64)
    order = np.argsort(ids)
    place = order[np.searchsorted(ids, wanted_ids, sorter=order).clip(max=len(ids) - 1)]
    kind = key.removesuffix("_id")
    _check(file, "annotation {id}", rows, ids[place] != wanted_ids, f"there is no {kind} {{{key}}}")
    return place


def _check_boxes(file: str, rows: list[dict], sizes: np.ndarray) -> int:
    """Check the boxes and return the number of those thinner than a pixel.

    `sizes` [N, 2]: width and height of the boxes' images.
    """
    wrong = [len(row["bbox"]) != 4 or not all(map(_is_number, row["bbox"])) for row in rows]
    _check(file, _NAME, rows, wrong, "the box {bbox} is not four numbers")
    boxes = np.array([row["bbox"] for row in rows], np.float64)
    _check(file, _NAME, rows, ~np.isfinite(boxes).all(1), "the box {bbox} is not finite")
    corner, extent = boxes[:, :2], boxes[:, 2:]
    _check(file, _NAME, rows, (extent < 0).any(1), "the box {bbox} has a negative width or height")
    outside = (corner < -OUTSIDE).any(1) | (corner + extent > sizes + OUTSIDE).any(1)
    if outside.any():
        width, height = sizes[outside.argmax()]
        what = f"the box {{bbox}} reaches outside its image of {width} x {height} px"
        _check(file, _NAME, rows, outside, what)
    no_area = (extent == 0).any(1)
    if no_area.sum() > NO_AREA_SHARE * len(rows):
        _check(file, _NAME, rows, no_area, "the box {bbox} has no area")
    return int((extent < 1).any(1).sum())


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _MAX_NUMBER)


def _check_masks(file: str, rows: list[dict], sizes: np.ndarray) -> None:
    """Check the masks: pycocotools allocates as much memory as their size or outline requires.

    `sizes` as in `_check_boxes`.
    """
    wrong = []
    for row, (width, height) in zip(rows, sizes.tolist(), strict=True):
        wrong.append(not _is_drawable(row["segmentation"], width, height))
    if any(wrong):
        width, height = sizes[wrong.index(True)]
        problem = f"its segmentation does not fit an image of {width} x {height} px"
        _check(file, _NAME, rows, wrong, problem)


def _is_drawable(segmentation: object, width: int, height: int) -> bool:
    """Whether a mask has its image's size, or all polygons an outline of at most _MAX_OUTLINE."""
    if isinstance(segmentation, dict):
        return segmentation.get("size", [height, width]) == [height, width]
    try:
        return all(
            _bound(polygon) <= _MAX_OUTLINE or _outline(polygon) <= _MAX_OUTLINE
            for polygon in segmentation
        )
    except (TypeError, ValueError, OverflowError):  # no polygons, or not of numbers
        return False


def _bound(polygon: list) -> float:
    """An upper bound of the outline and each number, fast to compute for millions of polygons."""
    return 2 * sum(map(abs, polygon))


def _outline(polygon: list) -> float:
    """Pixels of the outline, or the largest number if that is larger."""
    points = np.array(polygon, np.float64).reshape(-1, 2)
    steps = np.abs(np.diff(points, axis=0, append=points[:1])).max(1)
    return np.maximum(steps.sum(), np.abs(points).max())


def _check(file: str, name: str, rows: list[dict], wrong: Iterable[bool], what: str) -> None:
    """Raise UserError for the first wrong row; its values fill the templates `name` and `what`."""
    wrong = np.asarray(wrong, bool)
    if wrong.any():
        row = {key: short(value) for key, value in rows[wrong.argmax()].items()}
        raise UserError(
            f"{file}: {name.format_map(row)}: {what.format_map(row)}{_such(int(wrong.sum()))}"
        )


def _check_names(file: str, images: list[dict]) -> None:
    """Check that the images are in the directory or in folders below it."""
    for image in images:
        try:
            check_inner_path(image["file_name"])
        except ValueError as error:
            raise UserError(f"{file}: image {image['id']}: {error}") from error


def _check_files(file: str, directory: Path, names: list[str]) -> None:
    sizes = file_sizes(directory, names)
    for problem, wrong in (("missing", None), ("empty", 0)):
        affected = [name for name in names if sizes.get(name) == wrong]
        if affected:
            share = f"{len(affected):,} of its {len(names):,} images are {problem}"
            raise UserError(f"{file}: {share} in {directory}, the first: {affected[0]}")


def file_sizes(directory: Path, names: Iterable[str]) -> dict[str, int]:
    """Size in bytes of the existing files below `directory`, from one listing for each folder.

    Raises:
        UserError: a folder that cannot be read.
    """
    folders = {os.path.dirname(name) for name in names}
    return dict(chain.from_iterable(_listing(directory, folder) for folder in folders))


def _listing(directory: Path, folder: str) -> list[tuple[str, int]]:
    try:
        with os.scandir(directory / folder) as entries:
            return [
                (os.path.join(folder, entry.name), entry.stat().st_size)
                for entry in entries
                if entry.is_file()
            ]
    except OSError as error:
        raise UserError(f"{directory / folder}: cannot be read ({error.strerror})") from error


def _such(count: int) -> str:
    if count > 1:
        return f" ({count:,} such)"
    return ""
