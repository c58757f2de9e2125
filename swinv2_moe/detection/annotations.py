"""Check a COCO annotation file before training, without needing mmdetection.

N annotations, I images
"""

import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from swinv2_moe.data.images import MAX_PIXELS, is_of_the_machine
from swinv2_moe.errors import UserError, one_line, short
from swinv2_moe.files import check_inner_path, read_json

MAX_BYTES = 1 << 33  # of an annotation file. COCO's have 0.5 GB, the largest public ones 6 GB.
# Pixels by which a box may exceed its image: COCO's boxes are rounded to hundredths.
OUTSIDE = 1.0
# Allowed share of objects without area. COCO 2017 has 2 among 860,001 (annotations 918 and
# 2206849), which mmdetection omits.
NO_AREA_SHARE = 1e-4
# Images whose size is compared with their file, evenly spaced. A header takes 0.1 ms on a local
# disk, so that the 118,287 of COCO 2017 would take 13 s, and minutes on a network's disk.
MAX_HEADERS = 10_000
_MAX_NUMBER = 2**53  # absolute value; floats do not represent all larger integers
# Pillow's names of the formats that OpenCV decodes for mmdetection, and those among them that it
# turns by their EXIF orientation. Pillow gives the turned size of a TIFF, as OpenCV does.
_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "JPEG2000")
_TURNED_FORMATS = ("JPEG", "MPO", "PNG")
_MAX_OUTLINE = 2**24  # pixels: pycocotools allocates memory for each pixel of a polygon's outline
_MAX_CHARACTERS = 7  # of a number in compressed run lengths: 35 bits
_POLYGON = "a polygon is an even number of finite numbers, at least 6"
_TABLES = ("images", "annotations", "categories")
_KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "images": {"id": (int,), "file_name": (str,), "width": (int,), "height": (int,)},
    "annotations": {
        "id": (int,),
        "image_id": (int,),
        "category_id": (int,),
        "bbox": (list,),
        "area": (int, float),
        "iscrowd": (int,),
    },
    "categories": {"id": (int,), "name": (str,)},
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
    sizes_compared: int  # images whose size was compared with their file
    images_of_classes: int  # images with objects of the model's classes
    objects_of_classes: int  # objects of the model's classes that are no crowds
    class_names: list[str]
    missing_classes: list[str]  # classes of the model that the file does not have
    unknown_classes: list[str]  # classes of the file that the model does not have: ignored

    def __str__(self) -> str:
        text = (
            f"{self.file}: "
            f"{len(self.image_files):,} images ({self.images_without_boxes:,} without objects), "
            f"{self.boxes:,} objects ({self.crowd_boxes:,} crowds, "
            f"{self.thin_boxes:,} thinner than a pixel), {len(self.class_names):,} classes"
        )
        if self.sizes_compared < len(self.image_files):
            text += f"; size compared with the file for {self.sizes_compared:,} images"
        if not self.objects_of_classes:
            text += "; none can be found: an average precision of this file is undefined"
        if self.missing_classes:
            text += f"; evaluated without the model's classes {listed(self.missing_classes)}"
        if self.unknown_classes:
            text += f"; ignores the classes {listed(self.unknown_classes)}, not the model's"
        return text


def check_annotations(
    file: str | Path,
    images: str | Path,
    class_names: Sequence[str] | None = None,
    masks: bool = True,
    *,
    by_runner: bool = False,
    turned: bool = True,
) -> Annotations:
    """Read an annotation file and check its consistency with the images and the model's classes.

    Args:
        file: in COCO's instance format, as instances_train2017.json
            (https://cocodataset.org/#format-data).
        images: the directory of the images; file names are relative to it.
        class_names: the model's classes in order; None: those of the file.
        masks: every object must have its segmentation.
        by_runner: the file is used by MoERunner, which numbers annotations again and finds classes
            by name. mmdetection alone needs annotation ids from 1 on, and the model's classes, all
            and in order.
        turned: images are read upright, according to their EXIF orientation.

    Raises:
        UserError: a missing, empty or unreadable file or image, or a file of another format;
            duplicate, negative or unknown ids; an image outside `images`, of another size than
            its file, or with more than MAX_PIXELS; boxes outside their images, areas
            larger than them, or too many without area (1 in 10,000); masks that cannot be drawn in
            their images; missing classes or another order of classes. The message names the file,
            the first annotation or image with its value, and the number of such errors.
    """
    file = str(file)
    tables = _read(file)
    for table, keys in _KEYS.items():
        _check_keys(file, table, tables[table], keys)
        ids = np.array([row["id"] for row in tables[table]], np.int64)
        _check_ids(file, table, ids, by_runner)
    rows, categories = tables["annotations"], tables["categories"]
    names = [row["name"] for row in categories]
    missing, unknown = _compare_classes(file, names, class_names, by_runner)
    sizes = _image_sizes(file, tables["images"])
    image_of = _indices_of(file, rows, "image_id", tables["images"])
    category_of = _indices_of(file, rows, "category_id", categories)
    is_known = np.array([name not in unknown for name in names])[category_of]
    is_crowd = np.array([row["iscrowd"] for row in rows], bool)
    thin = _check_objects(file, rows, sizes[image_of], masks)
    image_files = [row["file_name"] for row in tables["images"]]
    _check_names(file, tables["images"])
    _check_files(file, Path(images), image_files)
    return Annotations(
        file=file,
        image_files=image_files,
        image_sizes=sizes,
        boxes=len(rows),
        crowd_boxes=sum(row["iscrowd"] for row in rows),
        thin_boxes=thin,
        images_without_boxes=len(image_files) - len(np.unique(image_of)),
        sizes_compared=_check_headers(file, Path(images), tables["images"], turned),
        images_of_classes=len(np.unique(image_of[is_known])),
        objects_of_classes=int((is_known & ~is_crowd).sum()),
        class_names=names,
        missing_classes=missing,
        unknown_classes=unknown,
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
        if not content[table] and table != "annotations":  # of negatives, images without objects
            raise UserError(f'{file}: the list "{table}" is empty')
    return content


def _check_keys(file: str, table: str, rows: list, keys: dict[str, tuple[type, ...]]) -> None:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f'{file}: entry {number} of "{table}" is {short(row)}, not an object')
        for key, kind in keys.items():
            value = row.get(key)
            # not isinstance: True is an int
            if type(value) not in kind or (type(value) is int and abs(value) > _MAX_NUMBER):
                problem = f'has no "{key}"'
                if key in row:
                    problem = f'"{key}" is {short(value)}'
                raise UserError(
                    f'{file}: entry {number} of "{table}" (id {short(row.get("id"))}): {problem}'
                )


def _check_ids(file: str, table: str, ids: np.ndarray, by_runner: bool) -> None:
    if not len(ids):
        return
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        twice = values[counts > 1]
        raise UserError(
            f'{file}: the id {twice[0]} comes more than once in "{table}"{_such(len(twice))}'
        )
    first, reason = 0, "ids start at 0"
    if table == "annotations":
        if by_runner:
            return
        first, reason = 1, "COCO's evaluation takes 0 for no match; number annotations from 1 on"
    if values[0] < first:
        wrong = _such(int((values < first).sum()))
        raise UserError(f'{file}: the id {values[0]} in "{table}": {reason}{wrong}')


def _compare_classes(
    file: str, names: list[str], class_names: Sequence[str] | None, by_runner: bool
) -> tuple[list[str], list[str]]:
    """The model's classes that the file lacks, and those of the file that the model lacks.

    mmdetection numbers classes in the file's order and ignores missing names.
    """
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{file}: the category {short(twice)} comes more than once")
    if class_names is None:
        return [], []
    missing = [name for name in class_names if name not in names]
    unknown = [name for name in names if name not in class_names]
    if missing and (not by_runner or len(missing) == len(class_names)):
        also = ""
        if unknown:
            also = f"; it has {listed(unknown)}, not the model's"
        raise UserError(
            f"{file}: no category {missing[0]!r}, a class of the model{_such(len(missing))}{also}"
        )
    if not by_runner:
        file_order = [name for name in names if name in class_names]
        for expected, name in zip(class_names, file_order, strict=True):
            if expected != name:
                raise UserError(
                    f"{file}: its categories come in another order than the model's: {name!r}, not"
                    f" {expected!r}"
                )
    return missing, unknown


def _image_sizes(file: str, images: list[dict]) -> np.ndarray:
    """Width and height of each image as the file gives them, int64 [I, 2]."""
    sizes = np.array([[row["width"], row["height"]] for row in images], np.int64).reshape(-1, 2)
    _check(file, _IMAGE, images, (sizes < 1).any(1), "{width} x {height} px")
    is_too_large = sizes.astype(float).prod(1) > MAX_PIXELS
    problem = f"{{width}} x {{height}} px, the limit is {MAX_PIXELS:,}"
    _check(file, _IMAGE, images, is_too_large, problem)
    return sizes


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


def _check_objects(file: str, rows: list[dict], sizes: np.ndarray, masks: bool) -> int:
    """Check boxes, areas and masks, and return the number of boxes thinner than a pixel.

    `sizes` [N, 2]: width and height of the objects' images.
    """
    is_odd = [row["iscrowd"] not in (0, 1) for row in rows]
    _check(file, _NAME, rows, is_odd, '"iscrowd" is {iscrowd}, neither 0 nor 1')
    extent = _check_boxes(file, rows, sizes)
    area = np.array([row["area"] for row in rows], np.float64)
    # A box may exceed its image on both sides. The evaluation ignores objects from 10^10 px² on.
    fits = (area >= 0) & (area <= (sizes + 2 * OUTSIDE).prod(1))
    _check_of_image(file, rows, sizes, ~fits, "the area {area} is not between 0 and that of")
    no_area = (extent == 0).any(1)
    _check_share(file, rows, no_area, "the box {bbox} has no area")
    _check_share(file, rows, area == 0, 'its "area" is 0, so that mmdetection omits it')
    if masks:
        _check_masks(file, rows, sizes)
    return int((extent < 1).any(1).sum())


def _check_boxes(file: str, rows: list[dict], sizes: np.ndarray) -> np.ndarray:
    """Check the boxes and return their widths and heights, [N, 2]. `sizes` as above."""
    wrong = [len(row["bbox"]) != 4 or not all(map(_is_number, row["bbox"])) for row in rows]
    _check(file, _NAME, rows, wrong, "the box {bbox} is not four numbers")
    boxes = np.array([row["bbox"] for row in rows], np.float64).reshape(-1, 4)
    _check(file, _NAME, rows, ~np.isfinite(boxes).all(1), "the box {bbox} is not finite")
    corner, extent = boxes[:, :2], boxes[:, 2:]
    _check(file, _NAME, rows, (extent < 0).any(1), "the box {bbox} has a negative width or height")
    outside = (corner < -OUTSIDE).any(1) | (corner + extent > sizes + OUTSIDE).any(1)
    _check_of_image(file, rows, sizes, outside, "the box {bbox} reaches outside")
    return extent


def _check_of_image(file: str, rows: list[dict], sizes: np.ndarray, wrong: Any, what: str) -> None:
    if wrong.any():
        width, height = sizes[wrong.argmax()]
        _check(file, _NAME, rows, wrong, f"{what} its image of {width} x {height} px")


def _check_share(file: str, rows: list[dict], wrong: Sequence[bool], what: str) -> None:
    if sum(wrong) > NO_AREA_SHARE * len(rows):
        _check(file, _NAME, rows, wrong, what)


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _MAX_NUMBER)


def _check_masks(file: str, rows: list[dict], sizes: np.ndarray) -> None:
    """Check the masks: pycocotools fails, or allocates as much memory as their outline requires.

    `sizes` as in `_check_objects`.
    """
    without = [not row.get("segmentation") for row in rows]
    _check(file, _NAME, rows, without, "no segmentation, which a mask needs")
    masks = [row["segmentation"] for row in rows]
    problems = [
        _mask_problem(mask, *size) for mask, size in zip(masks, sizes.tolist(), strict=True)
    ]
    _check_problems(file, _NAME, rows, problems)
    empty = [not _has_area(mask, *size) for mask, size in zip(masks, sizes.tolist(), strict=True)]
    _check_share(file, rows, empty, "segmentation {segmentation} has no pixel in its image")


def _mask_problem(segmentation: object, width: int, height: int) -> str | None:
    """What makes a mask unusable for an image of `width` x `height` px; None: nothing."""
    if isinstance(segmentation, dict):
        return _rle_problem(segmentation, width, height)
    if not isinstance(segmentation, list):
        return f"segmentation {short(segmentation)} is neither a list of polygons nor an RLE"
    for number, polygon in enumerate(segmentation):
        if problem := _polygon_problem(polygon, is_first=number == 0):
            return problem
    return None


def _has_area(segmentation: dict | list, width: int, height: int) -> bool:
    """Whether a mask without a problem can have a pixel. The evaluation never matches others."""
    if isinstance(segmentation, dict):
        return bool(_run_lengths(segmentation["counts"])[1::2].any())
    return any(_is_area(polygon, width, height) for polygon in segmentation if len(polygon) >= 6)


def _polygon_problem(polygon: object, is_first: bool) -> str | None:
    if not isinstance(polygon, list) or not set(map(type, polygon)) <= {int, float}:
        return f"polygon {short(polygon)} is not a list of numbers"
    # From the first polygon pycocotools tells polygons from boxes. Later ones of fewer than 6
    # numbers have no effect.
    if len(polygon) % 2 or (is_first and len(polygon) < 6):
        return f"polygon {short(polygon)} has {len(polygon)} numbers; {_POLYGON}"
    try:
        is_finite = math.isfinite(sum(polygon))
    except OverflowError:  # an integer that no float can represent
        is_finite = False
    if not is_finite:
        return f"polygon {short(polygon)} has a number that is not finite; {_POLYGON}"
    # The first bound is fast to compute for millions of polygons.
    largest = max(max(polygon, default=0), -min(polygon, default=0))
    if largest * len(polygon) > _MAX_OUTLINE and _outline(polygon) > _MAX_OUTLINE:
        return f"polygon {short(polygon)} has an outline of more than {_MAX_OUTLINE:,} px"
    return None


def _outline(polygon: list) -> float:
    """Pixels of the outline, or the largest number if that is larger."""
    points = np.array(polygon, np.float64).reshape(-1, 2)
    steps = np.abs(np.diff(points, axis=0, append=points[:1])).max(1)
    return np.maximum(steps.sum(), np.abs(points).max())


def _is_area(polygon: list, width: int, height: int) -> bool:
    """Whether a polygon encloses an area and reaches into its image."""
    x, y = polygon[::2], polygon[1::2]
    if min(x) >= width or max(x) <= 0 or min(y) >= height or max(y) <= 0:
        return False
    # the shoelace formula; rounding leaves 1e-9 px² of a line
    area = sum(map(mul, x, y[1:] + y[:1])) - sum(map(mul, y, x[1:] + x[:1]))
    return abs(area) > 1e-6


def _rle_problem(rle: dict, width: int, height: int) -> str | None:
    size, counts = rle.get("size"), rle.get("counts")
    if size != [height, width] or set(map(type, size)) != {int}:
        return (
            f"RLE has the size {short(size)}, not [{height}, {width}], its image's height and width"
        )
    if isinstance(counts, list):
        if not set(map(type, counts)) <= {int} or min(counts, default=0) < 0:
            return f"RLE has the counts {short(counts)}, not integers from 0 on"
        num_pixels = sum(counts)
    elif isinstance(counts, str):
        try:
            num_pixels = int(_run_lengths(counts).sum())
        except ValueError:
            return f"RLE has the counts {short(counts)}, which cannot be decoded"
    else:
        return f"RLE has the counts {short(counts)}, neither a list nor a string"
    if num_pixels != width * height:
        return f"RLE has counts of {num_pixels:,} px, not {width * height:,}"
    return None


def _run_lengths(counts: list[int] | str) -> np.ndarray:
    """Lengths of the runs of background and foreground in turn, int64.

    Source of the compressed form: rleToString of pycocotools. A character has 5 bits, the lowest
    ones first, and a bit that says whether the number continues. From the fourth number on they are
    differences to the number before the last.

    Raises:
        ValueError: no such string.
    """
    if isinstance(counts, list):
        return np.array(counts, np.int64)
    codes = np.frombuffer(counts.encode("latin-1"), np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(codes & 32 == 0)
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or ends[-1:] != len(codes) - 1:
        raise ValueError("not a string of run lengths")
    starts = np.concatenate([[0], ends[:-1] + 1])
    if (ends - starts).max() >= _MAX_CHARACTERS:
        raise ValueError("a run length of too many characters")
    places = np.arange(len(codes)) - np.repeat(starts, ends - starts + 1)
    numbers = np.add.reduceat((codes & 31) << 5 * places, starts)
    is_negative = codes[ends] & 16 > 0
    numbers[is_negative] -= 1 << 5 * (ends - starts + 1)[is_negative]
    numbers[1::2] = numbers[1::2].cumsum()
    numbers[2::2] = numbers[2::2].cumsum()
    if (numbers < 0).any():
        raise ValueError("a negative run length")
    return numbers


def _check(file: str, name: str, rows: list[dict], wrong: Any, what: str) -> None:
    """Raise UserError for the first wrong row; its values fill the templates `name` and `what`."""
    wrong = np.asarray(wrong, bool)
    if wrong.any():
        row = {key: short(value) for key, value in rows[wrong.argmax()].items()}
        raise UserError(
            f"{file}: {name.format_map(row)}: {what.format_map(row)}{_such(int(wrong.sum()))}"
        )


def _check_problems(file: str, name: str, rows: list[dict], problems: list[str | None]) -> None:
    """Raise UserError for the first row that has a problem, a text with values of the file."""
    first = next(filter(None, problems), "")
    literal = first.replace("{", "{{").replace("}", "}}")  # braces of values are no fields
    _check(file, name, rows, [problem is not None for problem in problems], literal)


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


def _check_headers(file: str, directory: Path, images: list[dict], turned: bool) -> int:
    """Compare sizes with those of the files, and return the number of compared images."""
    count = min(len(images), MAX_HEADERS)
    rows = [images[i * len(images) // count] for i in range(count)]
    with ThreadPoolExecutor(16) as pool:  # a network's disk takes milliseconds to answer
        problems = list(pool.map(lambda row: _header_problem(directory, row, turned), rows))
    _check_problems(file, _IMAGE, rows, problems)
    return count


def _header_problem(directory: Path, row: dict, turned: bool) -> str | None:
    """What contradicts the size of an image in its file as mmdetection reads it; None: nothing."""
    try:
        with Image.open(directory / row["file_name"], formats=_FORMATS) as image:
            stored, size = image.size, image.size
            if turned and image.format in _TURNED_FORMATS and _orientation(image) in (5, 6, 7, 8):
                size = stored[::-1]
    except UnidentifiedImageError:
        return f"not an image in a format that mmdetection reads: {', '.join(_FORMATS)}"
    except Exception as error:  # Pillow's readers raise OSError, SyntaxError and others
        if is_of_the_machine(error):
            raise
        return f"not an image that can be read ({one_line(str(error))})"
    if size == (row["width"], row["height"]):
        return None
    said = f"{row['width']} x {row['height']} px here, {size[0]} x {size[1]} in its file"
    if size != stored:
        said += (
            f", which an EXIF orientation turns; if boxes follow the stored {stored[0]} x"
            f" {stored[1]} px, set color_type='color_ignore_orientation' in LoadImageFromFile"
        )
    return said


def _orientation(image: Image.Image) -> int | None:
    """The orientation in EXIF data. OpenCV does not read the one that XMP may have."""
    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif", b""))
        return exif.get(ExifTags.Base.Orientation)
    except Exception:  # broken data: Pillow raises SyntaxError, struct.error and others
        return None


def file_sizes(directory: Path, names: Iterable[str]) -> dict[str, int]:
    """The size in bytes of each file in the folders of `names`, by its path relative to
    `directory`. `names` are such paths. Each folder is listed once, without its subfolders.

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


def listed(names: list[str]) -> str:
    """The first three names and the number of further ones."""
    text = ", ".join(map(short, names[:3]))
    if len(names) > 3:
        text += f" and {len(names) - 3:,} more"
    return text


def _such(count: int) -> str:
    if count > 1:
        return f" ({count:,} such)"
    return ""
