"""Decoding of image files. The header is checked before pixels are decoded."""

import io
import os

import numpy as np
from PIL import Image, TiffImagePlugin

from swinv2_moe.config import DataConfig
from swinv2_moe.files import read_bounded

# Pillow's names. Others can do more than hold pixels: for EPS Pillow starts Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
_TILE_SIZE = (322, 323)  # TIFF's tags of its width and length
MAX_PIXELS = DataConfig.max_pixels  # where no configuration says
MAX_FILE_BYTES = 1 << 30  # of an image file


def read_file(path: str | os.PathLike) -> bytes:
    """The content of an image file.

    Raises:
        OSError: it cannot be read, is no regular file or has more than MAX_FILE_BYTES.
    """
    return read_bounded(path, MAX_FILE_BYTES)


def decode(content: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image (of an animation the first frame) in whatever mode it has.

    Raises:
        ValueError: not one of FORMATS, broken, or of more than `max_pixels` pixels.
    """
    try:
        with _open(content, max_pixels) as image:
            image.load()
    # Pillow's decoders raise OSError, SyntaxError, struct.error and others on broken files.
    except Exception as error:
        raise ValueError(str(error)) from error
    return image


def _open(content: bytes, max_pixels: int) -> Image.Image:
    """The image with its header read and its pixels not yet decoded."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.UnidentifiedImageError as error:  # its message names the file object
        raise ValueError(f"none of the formats {' '.join(FORMATS)}") from error
    sizes = [image.size]
    # A tile is decoded as one piece, and may be larger than the image.
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        sizes.append(tuple(image.tag_v2.get(tag, 0) for tag in _TILE_SIZE))
    for width, height in sizes:
        if width * height > max_pixels:
            raise ValueError(f"{width:,} x {height:,} pixels, the limit is {max_pixels:,}")
    return image


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """The image in `mode`, "RGB" or "L"."""
    if image.mode.startswith("I"):  # 16 bits a channel, which convert() would clip at 255
        image = Image.fromarray(np.clip(np.asarray(image) // 256, 0, 255).astype(np.uint8))
    if image.mode == mode:  # convert() would copy
        return image
    return image.convert(mode)
