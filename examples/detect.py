"""The objects in pictures by an exported detector, without this project.

    swinv2-moe detect export output/photos exported
    python examples/detect.py exported PICTURE ... [--threshold 0.3]

Needs numpy, pillow and onnxruntime. Prints a line for each object: file, class, score, left, top,
width, height.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def on_canvas(picture: Image.Image, spec: dict) -> tuple[np.ndarray, float]:
    """The program's input [1, 3, H, W], and the factor from the picture's pixels to its own."""
    _, _, height, width = spec["input"]["shape"]
    factor = min(width / picture.width, height / picture.height)
    # pixels of the canvas are averages of the picture's, so large ones are reduced first
    size = [max(1, round(factor * side)) for side in picture.size]
    how = Image.Resampling.BILINEAR if factor > 1 else Image.Resampling.BOX
    grey = (spec["input"]["background"],) * 3
    canvas = Image.new("RGB", (width, height), grey)
    canvas.paste(picture.resize(size, how))
    return np.asarray(canvas, np.float32).transpose(2, 0, 1)[None], factor


def choose(rows: np.ndarray, spec: dict, threshold: float) -> list[tuple[int, float, np.ndarray]]:
    """Class, score and box of the objects: of boxes of a class that overlap, the best one.

    Args:
        rows: the program's output [N, 4 + classes].
    """
    boxes, scores = rows[:, :4], rows[:, 4:]
    least = max(threshold, spec["least_score"])
    found = []
    for label in range(scores.shape[1]):
        left = np.flatnonzero(scores[:, label] > least)
        left = left[np.argsort(-scores[left, label], kind="stable")]
        while len(left):
            best, left = left[0], left[1:]
            found.append((label, float(scores[best, label]), boxes[best]))
            left = left[overlap(boxes[best], boxes[left]) <= spec["iou_threshold"]]
    return sorted(found, key=lambda one: -one[1])[: spec["max_objects"]]


def overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of a box [4] with others [n, 4]."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    shared = (high - low).clip(0).prod(1)
    areas = (others[:, 2:] - others[:, :2]).prod(1) + (box[2:] - box[:2]).prod()
    return shared / np.maximum(areas - shared, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exported", type=Path)
    parser.add_argument("pictures", nargs="+", type=Path)
    parser.add_argument("--threshold", type=float, default=0.3)
    args = parser.parse_args()
    spec = json.loads((args.exported / "model.json").read_text())
    session = onnxruntime.InferenceSession(str(args.exported / "model.onnx"))
    writer = csv.writer(sys.stdout)
    writer.writerow(["file", "class", "score", "left", "top", "width", "height"])
    for file in args.pictures:
        picture = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
        images, factor = on_canvas(picture, spec)
        (rows,) = session.run(None, {spec["input"]["name"]: images})
        for label, score, box in choose(rows[0], spec, args.threshold):
            left, top, right, bottom = (box / factor).clip(0, [*picture.size] * 2)
            sides = [left, top, right - left, bottom - top]
            numbers = [f"{side:.2f}" for side in sides]
            # ascii: names of others may hold commands to a terminal
            names = [ascii(str(name))[1:-1] for name in (file, spec["class_names"][label])]
            writer.writerow([*names, f"{score:.4f}", *numbers])


if __name__ == "__main__":
    main()
