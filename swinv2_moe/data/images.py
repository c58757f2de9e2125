"""Image files: finding them in folders, and decoding them.

The header is checked before pixels are decoded. Decoded images are upright: they are turned
according to their EXIF orientation.
"""

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, TiffImagePlugin, features

from swinv2_moe.config import DataConfig
from swinv2_moe.errors import UserError
from swinv2_moe.files import read_bounded

# Pillow's names. Other formats do more than store pixels: for EPS, Pillow starts Ghostscript.
FORMATS: tuple[str, ...] = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
# Endings of image files in folders: torchvision's IMG_EXTENSIONS. The content decides the format.
SUFFIXES: tuple[str, ...] = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)
# Endings of image files that are not supported, and the package that could decode them.
NOT_DECODED: dict[str, str] = {}

# Older versions of Pillow do not have this name.
if "avif" in features.modules and features.check("avif"):
    FORMATS += ("AVIF",)
    SUFFIXES += (".avif",)
else:
    NOT_DECODED[".avif"] = "Pillow 11.3 or newer"
try:
    from pillow_heif import register_heif_opener
except ImportError:
    NOT_DECODED[".heic"] = NOT_DECODED[".heif"] = "the package pillow-heif"
else:
    register_heif_opener()
    FORMATS += ("HEIF",)
    SUFFIXES += (".heic", ".heif")

# The operation that makes an image upright, by EXIF orientation.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow's names of the metadata that may hold an orientation.
_METADATA = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
_TILE_SIZE = (322, 323)  # tags of the width and length of a TIFF's tiles
MAX_PIXELS = DataConfig.max_pixels  # default without a configuration
MAX_FILE_BYTES = 1 << 30  # limit of an image file


def read_file(path: str | os.PathLike) -> bytes:
    """The content of an image file.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than MAX_FILE_BYTES.
    """
    return read_bounded(path, MAX_FILE_BYTES)


def decode(content: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image and turn it upright. The mode of the image is kept. Of an animation, the
    first frame is decoded.

    Raises:
        ValueError: the content is not in one of FORMATS, is broken, or has more than `max_pixels`
            pixels.
    """
    try:
        with _open(content, max_pixels) as image:
            image.load()
            return upright(image)
    # Pillow's decoders raise OSError, SyntaxError, struct.error and others on broken files.
    except Exception as error:
        raise ValueError(str(error)) from error


def _open(content: bytes, max_pixels: int) -> Image.Image:
    """Read the image's header. Its pixels are not decoded yet."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.UnidentifiedImageError as error:  # Pillow's message names the file object
        raise ValueError(f"none of the formats {' '.join(FORMATS)}") from error
    sizes = [image.size]
    # Each tile is decoded at once, and a tile may be larger than the image.
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        sizes.append(tuple(image.tag_v2.get(tag, 0) for tag in _TILE_SIZE))
    for width, height in sizes:
        if width * height > max_pixels:
            raise ValueError(f"{width:,} x {height:,} pixels, the limit is {max_pixels:,}")
    return image


def upright(image: Image.Image) -> Image.Image:
    """Turn the image according to its EXIF orientation, and remove the EXIF data. The image is
    returned unchanged if it is upright, or has no readable orientation."""
    # Pillow turns a TIFF when it loads it.
    if image.info.keys().isdisjoint(_METADATA):  # most images; getexif() takes 4 us
        return image
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    # Pillow raises SyntaxError, struct.error and others on broken EXIF data.
    except Exception:
        return image
    turn = _TURNS.get(orientation)
    if turn is None:
        return image
    turned = image.transpose(turn)
    for key in _METADATA:  # otherwise a later reader would turn the image again
        turned.info.pop(key, None)
    return turned


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """The image in `mode`, "RGB" or "L"."""
    if image.mode.startswith("I"):  # 16 bits per channel; convert() would clip at 255
        image = Image.fromarray(np.clip(np.asarray(image) // 256, 0, 255).astype(np.uint8))
    if image.mode == mode:  # convert() would copy
        return image
    return image.convert(mode)


def image_paths(names: Sequence[str | os.PathLike], option: str = "") -> list[Path]:
    """The named files, and the images in the named folders and their subfolders, sorted by name.

    In folders, files with an ending in SUFFIXES are found. Files with an ending in NOT_DECODED are
    also included, so that a message can name them.

    Args:
        option: beginning of messages, such as "--images ".

    Raises:
        UserError: no such file or directory, or a directory without images.
    """
    endings = SUFFIXES + tuple(NOT_DECODED)
    files: list[Path] = []
    for path in map(Path, names):
        if not path.exists():
            raise UserError(f"{option}{path}: no such file or directory")
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(file for file in _files_below(path) if file.suffix.lower() in endings)
        if not inside:
            raise UserError(f"{option}{path}: holds no images ({' '.join(SUFFIXES)} count)")
        files += inside
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder and its subfolders. Links are followed; each folder is visited once."""
    visited = set()
    for directory, subfolders, names in os.walk(folder, followlinks=True):
        real_path = os.path.realpath(directory)
        if real_path in visited:  # a link in a circle
            subfolders.clear()
            continue
        visited.add(real_path)
        for name in names:
            yield Path(directory, name)
