"""What is in a picture? python examples/classify.py EXPORTED_DIR PICTURE; needs onnxruntime, numpy
and pillow alone."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

# for others, such as EPS, Pillow may start programs
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
MAX_PIXELS = 120_000_000


def prepare(picture: Image.Image, spec: dict) -> np.ndarray:
    """The picture resized, its middle cut out and normalised as in training: float32 [channels,
    side, side]."""
    how, side = spec["preprocessing"], spec["input"]["shape"][-1]
    short = how["resize"]  # None: the whole picture, squashed into a square
    size = [short * length // min(picture.size) if short else side for length in picture.size]
    left, top = (round((length - side) / 2) for length in size)
    if picture.mode.startswith("I"):  # 16 bits a channel
        picture = Image.fromarray((np.asarray(picture) // 256).clip(0, 255).astype(np.uint8))
    picture = picture.convert(how["mode"]).resize(
        size, Image.Resampling[how["interpolation"].upper()]
    )
    pixels = (
        np.asarray(picture.crop((left, top, left + side, top + side)), np.float32).reshape(
            side, side, -1
        )
        / 255
    )
    return ((pixels - np.float32(how["mean"])) / np.float32(how["std"])).transpose(2, 0, 1)


def read(file: str) -> Image.Image:
    """The picture, decoded if its header says that it is not too large."""
    try:
        picture = Image.open(file, formats=FORMATS)
        if picture.width * picture.height > MAX_PIXELS:
            sys.exit(
                f"{file}: {picture.width} x {picture.height} pixels, the limit is {MAX_PIXELS}"
            )
        picture.load()
    # a broken file: Pillow raises OSError, SyntaxError, ValueError and more
    except Exception as error:
        sys.exit(f"{file}: not a picture that can be read ({error})")
    return picture


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    directory, file = Path(sys.argv[1]), sys.argv[2]
    if not (directory / "model.onnx").is_file():
        sys.exit(f"{directory}: no model.onnx, which tools/export.py --format onnx writes")
    spec = json.loads((directory / "model.json").read_text())
    # as many as it takes
    images = np.stack([prepare(read(file), spec)] * (spec["input"]["shape"][0] or 1))
    logits = onnxruntime.InferenceSession(directory / "model.onnx").run(
        None, {spec["input"]["name"]: images}
    )[0][0]
    odds = np.exp(logits - logits.max())
    for best in odds.argsort()[:-6:-1]:
        print(f"{odds[best] / odds.sum():6.1%}  {spec['class_names'][best]}")
