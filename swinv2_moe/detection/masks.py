"""Check the masks of a COCO annotation file: polygons or run lengths (RLE)."""

import math
from operator import mul

import numpy as np

from swinv2_moe.errors import short

_MAX_OUTLINE = 2**24  # pixels: pycocotools allocates memory for each pixel of a polygon's outline
_MAX_CHARACTERS = 7  # of a number in compressed run lengths: 35 bits
_POLYGON = "a polygon is an even number of finite numbers, at least 6"


def mask_problem(segmentation: object, width: int, height: int) -> str | None:
    """What makes a mask unusable for an image of `width` x `height` px; None: nothing."""
    if isinstance(segmentation, dict):
        return _rle_problem(segmentation, width, height)
    if not isinstance(segmentation, list):
        return f"segmentation {short(segmentation)} is neither a list of polygons nor an RLE"
    for number, polygon in enumerate(segmentation):
        if problem := _polygon_problem(polygon, is_first=number == 0):
            return problem
    return None


def has_area(segmentation: dict | list, width: int, height: int) -> bool:
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
