"""Copies of pictures with the predicted classes and their probabilities below, or with the boxes
of objects."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from swinv2_moe.data.images import decode, read_file, to_mode
from swinv2_moe.errors import UserError
from swinv2_moe.output import printable
from swinv2_moe.plots import COLOURS
from swinv2_moe.predict.objects import Found
from swinv2_moe.predict.prediction import ClassProbability, Prediction

_LONG_SIDE = 1024  # pixels of the photograph in the copy, at most
_LEAST_WIDTH = 256  # pixels of the copy, so that the text fits
_TEXT_SHARE = 24  # the text's height is the picture's width divided by this
_LEAST_TEXT = 12
_BACKGROUND = (34, 34, 34)
_BAR = (68, 119, 170)
_TEXT = (255, 255, 255)
_QUALITY = 90
_JPEG_SUFFIXES = (".jpg", ".jpeg")


def annotate(image: Image.Image, top: tuple[ClassProbability, ...]) -> Image.Image:
    """An RGB copy of the image. Below the image is a row for each class, with its probability (as a
    number and a bar) and its name."""
    photo = _resized(to_mode(image, "RGB"))
    width = max(_LEAST_WIDTH, photo.width)
    text_height = max(_LEAST_TEXT, width // _TEXT_SHARE)
    row_height = round(1.5 * text_height)
    copy = Image.new("RGB", (width, photo.height + row_height * len(top)), _BACKGROUND)
    copy.paste(photo)
    draw = ImageDraw.Draw(copy)
    font = _font(text_height)
    margin = text_height // 2
    for row, guess in enumerate(top):
        y = photo.height + row * row_height
        bar_end = round(guess.probability * width)
        if bar_end:
            draw.rectangle((0, y + 1, bar_end - 1, y + row_height - 2), _BAR)
        text = f"{guess.probability:.1%}  {printable(guess.label)}"
        text = _shortened(text, font, width - 2 * margin)
        draw.text((margin, y + row_height // 2), text, _TEXT, font, anchor="lm")
    return copy


class Box(NamedTuple):
    """A box to draw, in pixels of the picture."""

    left: float
    top: float
    right: float
    bottom: float
    text: str
    colour: str  # as "#4477aa"
    mask: np.ndarray | None = None  # bool, of the picture's shape


def draw_boxes(image: Image.Image, boxes: Sequence[Box]) -> Image.Image:
    """An RGB copy of the image with boxes and their texts, the last one on top."""
    photo = to_mode(image, "RGB")
    for box in boxes:
        if box.mask is not None:
            tint = Image.new("RGB", photo.size, box.colour)
            photo = Image.composite(
                Image.blend(photo, tint, 0.45), photo, Image.fromarray(255 * box.mask.astype("u1"))
            )
    copy = _resized(photo.copy())
    scale = copy.width / image.width
    draw = ImageDraw.Draw(copy)
    text_height = max(_LEAST_TEXT, copy.width // (2 * _TEXT_SHARE))
    font = _font(text_height)
    for box in boxes:
        left, top, right, bottom = (scale * edge for edge in box[:4])
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=box.colour, width=2)
        text = _shortened(printable(box.text), font, copy.width)
        width = font.getlength(text) + 4
        x = max(0.0, min(left, copy.width - width))
        y = max(0.0, top - text_height - 4)
        draw.rectangle((x, y, x + width, y + text_height + 4), fill=box.colour)
        draw.text((x + 2, y + 2 + text_height // 2), text, _text_on(box.colour), font, anchor="lm")
    return copy


def _text_on(colour: str) -> tuple[int, int, int]:
    """Black on light colours, white on dark ones."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else _TEXT


def save_boxes(found: Found, target: Path) -> None:
    """Write a copy of a readable picture with the boxes of its objects, as a JPEG.

    Raises:
        UserError: `target` cannot be written.
    """
    _save(lambda: draw_boxes(decode(read_file(found.file)), boxes_of(found)), target)


def boxes_of(found: Found) -> list[Box]:
    """The boxes of a picture's objects, the highest score last, a colour for each class."""
    boxes = []
    for i in reversed(range(len(found.scores))):
        mask = None
        if found.masks is not None:
            import pycocotools.mask

            mask = pycocotools.mask.decode(found.masks[i]) > 0
        text = f"{found.class_names[i]} {found.scores[i]:.0%}"
        colour = COLOURS[int(found.labels[i]) % len(COLOURS)]
        left, top, right, bottom = found.boxes[i].tolist()
        boxes.append(Box(left, top, right, bottom, text, colour, mask))
    return boxes


def _resized(photo: Image.Image) -> Image.Image:
    """The photograph, enlarged if it is narrow, and reduced if its long side exceeds _LONG_SIDE."""
    factor = max(1.0, _LEAST_WIDTH / photo.width)
    factor = min(factor, _LONG_SIDE / max(photo.size))
    if factor == 1:
        return photo
    size = [max(1, round(side * factor)) for side in photo.size]
    return photo.resize(size, Image.Resampling.BICUBIC)


@cache
def _font(height: int) -> ImageFont.FreeTypeFont:
    """matplotlib's DejaVu Sans, which has more scripts than Pillow's own font."""
    import matplotlib

    file = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return ImageFont.truetype(file, height)


def _shortened(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def save_annotated(prediction: Prediction, target: Path) -> None:
    """Write the annotated copy of a readable picture as a JPEG.

    Raises:
        UserError: `target` cannot be written.
    """
    _save(lambda: annotate(decode(read_file(prediction.file)), prediction.top), target)


def _save(make: Callable[[], Image.Image], target: Path) -> None:
    try:
        copy = make()
        target.parent.mkdir(parents=True, exist_ok=True)
        copy.save(target, "JPEG", quality=_QUALITY)
    except (OSError, ValueError) as error:  # ValueError: the picture has changed since it was read
        raise UserError(f"--pictures {target}: cannot be written ({error})") from error


def copy_name(name: str) -> str:
    """The name of a picture's annotated copy, which is a JPEG."""
    if name.lower().endswith(_JPEG_SUFFIXES):
        return name
    return f"{name}.jpg"
