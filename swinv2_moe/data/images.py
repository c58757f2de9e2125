"""Image files: which exist in a folder, and their pixels.

The header is checked before pixels are decoded. Decoded images are upright: photographs are turned
as their EXIF orientation says.
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

# Pillow's names. Others can do more than hold pixels: for EPS Pillow starts Ghostscript.
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
# Endings of image files that cannot be read here, and what would read them.
NOT_DECODED: dict[str, str] = {}

# Older versions of Pillow do not know the name.
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

# What makes an image upright, by its EXIF orientation.
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
    """The image (of an animation the first frame), upright, in whatever mode it has.

    Raises:
        ValueError: not one of FORMATS, broken, or of more than `max_pixels` pixels.
    """
    try:
        with _open(content, max_pixels) as image:
            image.load()
            return upright(image)
    # Pillow's decoders raise OSError, SyntaxError, struct.error and others on broken files.
    except Exception as error:
        raise ValueError(str(error)) from error


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


def upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF orientation says, without EXIF data; or the image itself, if it
    is upright, has no orientation or one that cannot be read."""
    # Pillow turns a TIFF as it loads it.
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
    for key in _METADATA:  # else it would be turned again where it is read next
        turned.info.pop(key, None)
    return turned


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """The image in `mode`, "RGB" or "L"."""
    if image.mode.startswith("I"):  # 16 bits a channel, which convert() would clip at 255
        image = Image.fromarray(np.clip(np.asarray(image) // 256, 0, 255).astype(np.uint8))
    if image.mode == mode:  # convert() would copy
        return image
    return image.convert(mode)


def image_paths(names: Sequence[str | os.PathLike], option: str = "") -> list[Path]:
    """The named files, and the images in the named folders and their subfolders, sorted by name.

    Of folders, files that end in one of SUFFIXES or, to be named where they cannot be read, one of
    NOT_DECODED.

    Args:
        option: what messages begin with, such as "--images ".

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
    """The files of a folder and its subfolders. Links are followed, each folder once."""
    visited = set()
    for directory, subfolders, names in os.walk(folder, followlinks=True):
        real_path = os.path.realpath(directory)
        if real_path in visited:  # a link that leads in a circle
            subfolders.clear()
            continue
        visited.add(real_path)
        for name in names:
            yield Path(directory, name)
