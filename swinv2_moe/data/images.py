"""Image files: finding them in folders, and decoding them.

The header is checked before pixels are decoded. Decoded images are upright: they are turned
according to their EXIF orientation.
"""

import errno
import io
import math
import os
import re
import unicodedata
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, TiffImagePlugin, features

from moe_core.files import open_regular
from swinv2_moe.errors import UserError, short
from swinv2_moe.files import read_bounded
from swinv2_moe.output import printable

# Large collections of photographs have thousands of files with broken EXIF tags, and Pillow warns
# about each. The filter is set on import, so that it also holds in loader workers.
warnings.filterwarnings("ignore", module=r"PIL\.")

# Pillow's names. Other formats do more than store pixels: for EPS, Pillow starts Ghostscript.
FORMATS: tuple[str, ...] = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
# Endings of image files in folders: torchvision's IMG_EXTENSIONS and other names of the formats
# above. The content decides the format.
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
    ".gif",
    ".jfif",
    ".jpe",
    ".apng",
    ".dib",
    ".pbm",
    ".pnm",
)
# Endings of image files that are not decoded, and the reason.
_OTHER_FORMATS = ".arw .cr2 .cr3 .dcm .dng .exr .hdr .ico .j2k .jp2 .jpx .jxl .nef .orf .pcx .pfm"
_OTHER_FORMATS += " .psd .raf .rw2 .svg .tga .xcf"
NOT_DECODED: dict[str, str] = dict.fromkeys(_OTHER_FORMATS.split(), "not supported")

# Older versions of Pillow do not have this name.
if "avif" in features.modules and features.check("avif"):
    FORMATS += ("AVIF",)
    SUFFIXES += (".avif",)
else:
    NOT_DECODED[".avif"] = "needs Pillow 11.3 or newer"
try:
    from pillow_heif import register_heif_opener
except ImportError:
    NOT_DECODED[".heic"] = NOT_DECODED[".heif"] = "needs the package pillow-heif"
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
# Folders that systems make beside a user's files, in small letters: macOS, Synology, QNAP, Windows,
# Linux, Python.
_SYSTEM_FOLDERS = {"__macosx", "@eadir", "@tmp", "#recycle", "#snapshot", "@recycle", "@__thumb"}
_SYSTEM_FOLDERS |= {"@recently-snapshot", "$recycle.bin", "recycler", "found.000"}
_SYSTEM_FOLDERS |= {"system volume information", "lost+found", "__pycache__"}
# Tags of a TIFF about its values.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_MIN_SAMPLE_VALUE, _MAX_SAMPLE_VALUE = 280, 281
_SMIN_SAMPLE_VALUE, _SMAX_SAMPLE_VALUE = 340, 341
_VALUE_TAGS = (
    *(_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT, _MIN_SAMPLE_VALUE),
    *(_MAX_SAMPLE_VALUE, _SMIN_SAMPLE_VALUE, _SMAX_SAMPLE_VALUE),
)
_NUM_BANDS, _KIND_OF_PAGE = 277, 254  # tags of a TIFF
_NO_PAGE = 1 | 4  # in _KIND_OF_PAGE: the page is a smaller copy, or a mask, of another one
_PAGED = ("TIFF", "GIF", "WEBP", "PNG", "AVIF")  # formats that may hold several pages or frames
_BLOCK_PIXELS = 1 << 20  # number of pixels that are scaled at a time
_WHOLE_NUMBER = re.compile(r"(-?\d{1,18})(\.0+)?")  # the name of a class; digits of any script
MAX_PIXELS = 120_000_000  # limit of an image
MAX_FILE_BYTES = 1 << 30  # limit of an image file
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_of_the_machine(error: BaseException) -> bool:
    """Whether reading failed for lack of memory or of file descriptors: the file may be intact."""
    if isinstance(error, OSError):
        return error.errno in _LACKS
    return isinstance(error, MemoryError)


def read_file(path: str | os.PathLike) -> bytes:
    """The content of an image file.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than MAX_FILE_BYTES.
    """
    return read_bounded(path, MAX_FILE_BYTES)


def decode(content: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image and turn it upright. The result has 8 bits per channel (`to_8_bits`),
    otherwise the mode of the image is kept. Of an animation, the first frame is decoded.

    Raises:
        ValueError: the content is not in one of FORMATS, is broken, has more than `max_pixels`
            pixels, or does not say which values are black and white.
        MemoryError: memory has run out.
    """
    try:
        with _open(content, max_pixels) as image:
            image.load()
            return upright(to_8_bits(image))
    # Pillow's decoders raise OSError, SyntaxError, struct.error and others on broken files.
    except Exception as error:
        if is_of_the_machine(error):
            raise
        raise ValueError(str(error)) from error


def _open(content: bytes, max_pixels: int) -> Image.Image:
    """Read the image's header. Its pixels are not decoded yet."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.UnidentifiedImageError as error:  # Pillow's message names the file object
        problem = _bands_problem(io.BytesIO(content))
        raise ValueError(problem or f"none of the formats {' '.join(FORMATS)}") from error
    sizes = [image.size]
    # Each tile is decoded at once, and a tile may be larger than the image.
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        sizes.append(tuple(image.tag_v2.get(tag, 0) for tag in _TILE_SIZE))
    for width, height in sizes:
        if width * height > max_pixels:
            raise ValueError(f"{width:,} x {height:,} pixels, the limit is {max_pixels:,}")
    return image


def _bands_problem(file: BinaryIO) -> str:
    """Why Pillow knows no way to read the bands of a TIFF; "" if the file is no TIFF."""
    try:
        file.seek(0)
        start = file.read(8)
        if start[2:3] == b"+":  # BigTIFF
            start += file.read(8)
        tags = TiffImagePlugin.ImageFileDirectory_v2(start)
        file.seek(tags.next)
        tags.load(file)
        num_bands = int(tags.get(_NUM_BANDS, 1))
        bits = sorted(set(tags.get(_BITS_PER_SAMPLE, (1,))))
    except Exception as error:  # no TIFF, or a broken one: SyntaxError, struct.error and others
        if is_of_the_machine(error):
            raise
        return ""
    if num_bands < 2:
        return ""
    return (
        f"a TIFF of {num_bands} bands with {short(bits, 40).strip('[]')} bits each, in an"
        " arrangement that is not supported; convert it to 1 or 3 bands of 8 bits"
    )


class Header(NamedTuple):
    """What the header of an image file says."""

    width: int  # pixels
    height: int
    unused: str  # what `decode` leaves out; "" if nothing


def read_header(file: str | os.PathLike | BinaryIO) -> Header:
    """The header of an image file.

    Raises:
        ValueError: the file cannot be read as an image, or has more than MAX_PIXELS pixels.
    """
    problem = ""
    try:
        with ExitStack() as stack:
            if isinstance(file, str | os.PathLike):
                file = stack.enter_context(open_regular(file))
            try:
                image = stack.enter_context(Image.open(file, formats=FORMATS))
            except Image.UnidentifiedImageError:
                problem = _bands_problem(file)
                raise
            header = Header(*image.size, _unused(image))
    except Image.DecompressionBombError as error:
        raise ValueError(f"has more pixels than the limit, {MAX_PIXELS:,}") from error
    # Pillow's decoders raise OSError, SyntaxError, struct.error and others on broken files.
    except Exception as error:
        if is_of_the_machine(error):
            raise
        problem = getattr(error, "strerror", None) or problem or "no readable image"
        raise ValueError(problem) from error
    width, height = header[:2]
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width:,} x {height:,} pixels, the limit is {MAX_PIXELS:,}")
    return header


def upright_size(path: str | os.PathLike) -> tuple[int, int]:
    """Width and height of an image as `decode` turns it, in pixels, from its header.

    Raises:
        ValueError: as `read_header`.
    """
    width, height, _ = read_header(path)
    # suppress: Pillow raises many errors on broken EXIF data, which `upright` ignores, too
    with suppress(Exception), Image.open(path, formats=FORMATS) as image:
        # Pillow turns a TIFF when it loads it, and gives its turned size.
        orientation = image.getexif().get(ExifTags.Base.Orientation)
        if image.format != "TIFF" and orientation in (5, 6, 7, 8):
            return height, width
    return width, height


def _unused(image: Image.Image) -> str:
    """What `decode` leaves out of an opened image; "" if nothing. It may seek to the second
    page."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        num_bands = image.tag_v2.get(_NUM_BANDS, 1)
        if isinstance(num_bands, int) and num_bands > len(image.getbands()):
            return "bands beyond grey or RGB"
    # The second picture of a JPEG (MPO) is a preview or a map of brightness.
    if image.format in _PAGED and getattr(image, "is_animated", False):
        image.seek(1)
        tags = getattr(image, "tag_v2", {})
        if not tags.get(_KIND_OF_PAGE, 0) & _NO_PAGE:
            return "pages or frames beyond the first"
    return ""


def upright(image: Image.Image) -> Image.Image:
    """Turn the image according to its EXIF orientation, and remove the EXIF data. The image is
    returned unchanged if it is upright, or has no readable orientation."""
    # Pillow turns a TIFF when it loads it.
    if image.info.keys().isdisjoint(_METADATA):  # most images; getexif() takes 4 us
        return image
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    # Pillow raises SyntaxError, struct.error and others on broken EXIF data.
    except Exception as error:
        if is_of_the_machine(error):
            raise
        return image
    if orientation not in _TURNS:
        return image
    turn = _TURNS[orientation]
    turned = image.transpose(turn)
    for key in _METADATA:  # otherwise a later reader would turn the image again
        turned.info.pop(key, None)
    return turned


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """The image in `mode`, "RGB" or "L".

    Raises:
        ValueError: it is not known which values are black and white.
    """
    image = to_8_bits(image)
    if image.mode == mode:  # convert() would copy
        return image
    return image.convert(mode)


def to_8_bits(image: Image.Image) -> Image.Image:
    """The image with 8 bits per channel. Images of Pillow's modes "I..." and "F" are scaled from
    the range of `_value_range`, others are returned unchanged.

    Raises:
        ValueError: the range is not known, or a value is NaN or infinite.
    """
    _check_high_bytes(image)
    if not image.mode.startswith(("I", "F")):
        return image
    low, high = _value_range(image)
    values = np.asarray(image)  # [H, W]
    scaled = np.empty(values.shape, np.uint8)
    tags = _tiff_tags(image)
    if image.mode == "I" and tags.get(_SAMPLE_FORMAT) == 1:
        values = values.view(np.uint32)  # Pillow reads unsigned integers as signed
    num_levels = high - low
    if image.mode != "F":
        num_levels += 1
    num_rows = max(1, _BLOCK_PIXELS // image.width)
    for start in range(0, image.height, num_rows):  # few rows at a time take little memory
        rows = values[start : start + num_rows].astype(np.float64)
        if not np.isfinite(rows).all():
            raise ValueError("holds values that are NaN or infinite")
        levels = np.floor((rows - low) * (256 / num_levels)).clip(0, 255)
        scaled[start : start + num_rows] = levels
    if tags.get(_PHOTOMETRIC) == 0:  # white is zero; Pillow inverts 8 bits only
        scaled = 255 - scaled
    narrow = Image.fromarray(scaled)
    narrow.info = image.info  # with its orientation
    return narrow


def _value_range(image: Image.Image) -> tuple[float, float]:
    """The values of black and white in an image of mode "I..." or "F".

    These are the tags (S)MinSampleValue and (S)MaxSampleValue of a TIFF, or else 0 and the highest
    number of BitsPerSample. Pillow scales PNG and PPM to 16 bits.

    Raises:
        ValueError: 32-bit or signed values without these tags.
    """
    tags = _tiff_tags(image)
    low = tags.get(_SMIN_SAMPLE_VALUE, tags.get(_MIN_SAMPLE_VALUE))
    high = tags.get(_SMAX_SAMPLE_VALUE, tags.get(_MAX_SAMPLE_VALUE))
    if image.mode.startswith("I;") or image.format in ("PNG", "PPM"):
        low = low or 0
        high = high or (1 << tags.get(_BITS_PER_SAMPLE, 16)) - 1
    if image.mode == "F" and image.format == "PPM":
        low = high = None
    if low is None or high is None:
        kind = "32-bit floating point"
        if image.mode != "F":
            kind = f"{tags.get(_BITS_PER_SAMPLE, 32)}-bit integers"
        raise ValueError(
            f"{kind} without the values of black and white (TIFF tags SMinSampleValue and"
            " SMaxSampleValue); convert it to 8 or 16 bits"
        )
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"its values range from {low:g} to {high:g}, as its tags say")
    return low, high


def _check_high_bytes(image: Image.Image) -> None:
    """Raise ValueError for a colour TIFF of 16 bits whose tags give a smaller range: Pillow has
    already dropped the lower 8 bits."""
    tags = _tiff_tags(image)
    bits, high = tags.get(_BITS_PER_SAMPLE, 8), tags.get(_MAX_SAMPLE_VALUE)
    is_narrow = image.mode.startswith(("I", "F")) or bits <= 8
    if not is_narrow and high is not None and high < (1 << bits) - 1:
        raise ValueError(
            f"{bits} bits per channel, but values only up to {high:g}, where the upper 8 bits alone"
            " would be read; convert it to 8 bits"
        )


def _tiff_tags(image: Image.Image) -> dict[int, Any]:
    """The first number of each tag in _VALUE_TAGS that a TIFF has."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return {}
    numbers = {}
    for tag in _VALUE_TAGS:
        value = image.tag_v2.get(tag)
        if isinstance(value, tuple) and value:
            value = value[0]
        if isinstance(value, (int, float)):
            numbers[tag] = value
    return numbers


class FoundImages(NamedTuple):
    """The images below a folder, sorted by folder and then by name."""

    decoded: list[str]  # paths with an ending in SUFFIXES
    left_out: list[str]  # paths with an ending in NOT_DECODED
    others: list[str]  # paths of other files


def is_skipped(name: str) -> bool:
    """Whether a file or folder is hidden, such as macOS's `._x.jpg` and `.ipynb_checkpoints`, or a
    system's own, such as Synology's `@eaDir` of thumbnails."""
    return name.startswith(".") or name.lower() in _SYSTEM_FOLDERS


def find_images(folder: str, apart: frozenset[str] = frozenset()) -> FoundImages:
    """Find the images in a folder and its subfolders. Names are skipped as in `is_skipped`.

    Links to folders are followed. Each real folder is visited once, under its own name if it lies
    below `folder`. Links to the folders above `folder` are not followed.

    Args:
        apart: real paths of further folders that are not visited.

    Raises:
        UserError: a folder cannot be read.
    """
    found = FoundImages([], [], [])
    for directory, names in sorted(_files_below(folder, apart)):
        for name in names:
            ending = os.path.splitext(name)[1].lower()
            if ending in SUFFIXES:
                found.decoded.append(os.path.join(directory, name))
            elif ending in NOT_DECODED:
                found.left_out.append(os.path.join(directory, name))
            else:
                found.others.append(os.path.join(directory, name))
    return found


def subfolders(folder: str) -> list[str]:
    """The names of the folders in a folder, without those that are skipped. They are sorted: by
    their `numbers_in`, otherwise as text.

    Raises:
        UserError: the folder cannot be read, or a link in it leads nowhere.
    """
    names = []
    for entry in _entries(folder):
        if entry.is_dir():
            names.append(entry.name)
        elif entry.is_symlink() and not os.path.exists(entry.path):
            raise UserError(f"{entry.path}: a link to nothing; remove it or repair it")
    numbers = numbers_in(names)
    if numbers is not None:
        names = [name for _, name in sorted(zip(numbers, names, strict=True))]
    return names


def whole_number(name: str) -> int | None:
    """The whole number that a class name is, such as `7`, `007` and `7.0`; None if it is none."""
    match = _WHOLE_NUMBER.fullmatch(name)
    return None if match is None else int(match[1])


def numbers_in(names: Sequence[str]) -> list[int] | None:
    """The whole numbers of class names that differ in nothing else, such as `class_7.x`; None for
    other names."""
    numbers = [number for number in map(whole_number, names) if number is not None]
    if len(numbers) == len(names):
        return numbers
    parts = [re.split(r"(\d+)", name) for name in names]  # every second one is a number
    if len(set(map(len, parts))) > 1:
        return None
    columns = [column for column in enumerate(zip(*parts, strict=True)) if len(set(column[1])) > 1]
    if len(columns) == 1 and columns[0][0] % 2:
        return list(map(int, columns[0][1]))
    return None


def normal_name(name: str) -> str:
    """A class name in the form in which they are compared: a whole number without zeros before it,
    other names in Unicode's composed form. macOS writes decomposed names into archives."""
    number = whole_number(name)
    return unicodedata.normalize("NFC", name) if number is None else str(number)


def repeated_name(names: Iterable[str]) -> str:
    """The first class name that comes twice, in both its forms if they differ; "" if there is
    none."""
    seen: dict[str, str] = {}
    for name in names:
        key = normal_name(name)
        if key in seen:
            return " and ".join(map(repr, dict.fromkeys((seen[key], name))))
        seen[key] = name
    return ""


def _files_below(folder: str, apart: frozenset[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder and the sorted names of its files."""
    real_path = os.path.realpath(folder)
    visited = set(apart) - {real_path}
    visited.update(map(str, Path(real_path).parents))
    folders = [folder]
    links: deque[str] = deque()
    while folders or links:
        if folders:  # folders before links, which may lead to them
            directory = folders.pop()
        else:
            directory = links.popleft()
        real_path = os.path.realpath(directory)
        if real_path in visited:
            continue
        visited.add(real_path)
        names = []
        for entry in _entries(directory):
            if not entry.is_dir():
                names.append(entry.name)
            elif entry.is_symlink():
                links.append(entry.path)
            else:
                folders.append(entry.path)
        yield directory, names


def _entries(folder: str) -> list[os.DirEntry]:
    """The entries of a folder, sorted by name, without those that are skipped."""
    try:
        with os.scandir(folder) as entries:
            kept = [entry for entry in entries if not is_skipped(entry.name)]
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from error
    return sorted(kept, key=lambda entry: entry.name)


def left_out_line(paths: Sequence[str]) -> str:
    """A message about images that are not decoded, with their number by ending."""
    counts = Counter(os.path.splitext(path)[1].lower() for path in paths)
    parts = [f"{count:,} {end} ({NOT_DECODED[end]})" for end, count in sorted(counts.items())]
    return f"images left out: {', '.join(parts)}; the first: {printable(paths[0])}"


def image_paths(names: Sequence[str | os.PathLike], option: str = "") -> list[Path]:
    """The named files, and the images in the named folders (`find_images`), sorted by name.

    Images that are not decoded are included, so that a message can name them.

    Args:
        option: beginning of messages, such as "--images ".

    Raises:
        UserError: no such file or directory, or a directory without images.
    """
    files: list[Path] = []
    for path in map(Path, names):
        if not path.exists():
            raise UserError(f"{option}{path}: no such file or directory")
        if not path.is_dir():
            files.append(path)
            continue
        found = find_images(str(path))
        inside = sorted(map(Path, found.decoded + found.left_out))
        if not inside:
            raise UserError(f"{option}{path}: holds no images ({' '.join(SUFFIXES)} count)")
        files += inside
    return files
