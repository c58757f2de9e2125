"""The objects that a detector finds in pictures, and as files.

D objects of a picture
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swinv2_moe.output import csv_text, printable


@dataclass(frozen=True)
class Found:
    """The objects in a picture, the highest score first, or the reason why it cannot be read.

    Attributes:
        file: path of the picture; "" for an image in memory.
        width, height: of the upright picture, in pixels.
        boxes: float32 [D, 4]: left, top, right, bottom, in pixels of the upright picture.
        scores: float32 [D], 0 to 1.
        labels: int64 [D], numbers of classes.
        class_names: of the objects.
        masks: of a detector with masks, run lengths as of pycocotools; otherwise None.
        error: the reason why the picture could not be read; None if it could be read.
    """

    file: str
    width: int = 0
    height: int = 0
    boxes: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), np.float32))
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    class_names: tuple[str, ...] = ()
    masks: list[dict] | None = None
    error: str | None = None


def as_csv(found: Iterable[Found]) -> str:
    """A line for each object: file, class, score, left, top, width, height; a picture that cannot
    be read, or without objects, has one line, too."""
    rows: list[list[object]] = [
        ["file", "class", "score", "left", "top", "width", "height", "error"]
    ]
    for one in found:
        if not len(one.scores):
            rows.append([one.file, *[""] * 6, one.error or ""])
        for name, score, box in zip(one.class_names, one.scores, one.boxes, strict=True):
            left, top, right, bottom = (round(float(value), 2) for value in box)
            sides = (round(right - left, 2), round(bottom - top, 2))
            rows.append([one.file, name, f"{score:.4f}", left, top, *sides, ""])
    return csv_text(rows)


def as_json(found: Iterable[Found], names: Sequence[str] | None = None) -> str:
    """COCO's results: a list with image_id (the picture's place, from 1 on), category_id (from 1
    on), bbox (left, top, width, height) and score; also file_name and category_name, and the
    segmentation of a detector with masks.

    Args:
        names: of the pictures; None: their paths.
    """
    rows = []
    for number, one in enumerate(found, 1):
        name = printable(one.file if names is None else names[number - 1])
        for i, box in enumerate(one.boxes.tolist()):
            left, top, right, bottom = (round(value, 2) for value in box)
            row: dict[str, Any] = {"image_id": number, "category_id": int(one.labels[i]) + 1}
            row["bbox"] = [left, top, round(right - left, 2), round(bottom - top, 2)]
            row |= {"score": round(float(one.scores[i]), 4), "file_name": name}
            row["category_name"] = one.class_names[i]
            if one.masks is not None:
                row["segmentation"] = one.masks[i]
            rows.append(row)
    return json.dumps(rows, indent=1) + "\n"
