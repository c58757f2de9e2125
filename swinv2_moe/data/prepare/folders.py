"""Folders of images for the workflow: unpacked from a tar, or made from the digits of scikit-learn,
one folder for pretraining and one for transfer."""

import lzma
import shutil
import tarfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from swinv2_moe.data.section import AugmentConfig, CropConfig, DataConfig
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import make_directory

_DAMAGE: tuple[type[Exception], ...] = (
    # raised by tarfile and the decompressors for damaged content,
    *(tarfile.TarError, zlib.error, lzma.LZMAError, OSError, EOFError),
    # and by tarfile for names and numbers that cannot be parsed
    *(ArithmeticError, LookupError, RecursionError, ValueError),
)
_SIDE = 64  # pixels
_MAX_VALUE = 16  # largest grey value of the digits
_PRETRAIN = range(5)  # the digits of the first folder; the others go to the second


def image_folder(data: Path, target: Path) -> Path:
    """The directory `data`. If `data` is a tar, it is unpacked to `target`, unless it has been
    unpacked before, and `target` is returned.

    Raises:
        UserError: the tar cannot be unpacked, or the directory has no train/ and val/ with class
            folders of images.
    """
    if data.is_file() and not target.exists():
        temporary = target.with_name(f".{target.name}.tmp")
        # left by an interrupted unpacking, perhaps of another tar
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with tarfile.open(data) as tar:
                tar.extractall(temporary, filter=_checked)
        except _DAMAGE as error:
            raise UserError(f"{data}: cannot be unpacked ({one_line(str(error))})") from error
        temporary.rename(target)
    folder = data
    if data.is_file():
        folder = target
    load_sources(_config_of(folder))
    return folder.resolve()


def _config_of(folder: Path) -> DataConfig:
    return DataConfig(
        dataset="folder",
        path=str(folder),
        augment=AugmentConfig(),
        test=CropConfig(),
        num_classes=0,
        seed=0,
        device="cpu",
        validation_only=False,
    )


def _checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """tarfile's filter, which keeps files below `path`, with two more checks.

    Symbolic links may lead out of `path` or in circles. After a member of negative size, tarfile
    finds the same member again.
    """
    if member.size < 0:
        raise tarfile.TarError(f"{member.name!r} has {member.size:,} bytes")
    if member.issym():
        raise tarfile.TarError(f"{member.name!r} is a symbolic link")
    return tarfile.data_filter(member, path)


def write_digit_folders(directory: Path) -> tuple[Path, Path]:
    """Write the digits 0 to 4 to `pretrain` and 5 to 9 to `transfer`, both with train/ and val/.

    Each digit has its own colour, on a dark background of another colour. Every fifth image is for
    validation. Complete folders are kept.

    Raises:
        UserError: the folders cannot be written.
    """
    folders = directory / "pretrain", directory / "transfer"
    complete = directory / "complete"
    if complete.exists():
        return folders
    digits = load_digits()
    rng = np.random.default_rng(0)
    colours = rng.integers(100, 256, (len(digits.images), 3))
    grounds = rng.integers(0, 80, (len(digits.images), 3))
    for index, (grey, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = folders[0] if digit in _PRETRAIN else folders[1]
        split = "train"
        if index % 5 == 0:
            split = "val"
        ink = (grey / _MAX_VALUE)[:, :, None]  # [8, 8, 1]
        pixels = ink * colours[index] + (1 - ink) * grounds[index]
        image = Image.fromarray(pixels.astype(np.uint8)).resize(
            (_SIDE, _SIDE), Image.Resampling.BICUBIC
        )
        class_folder = folder / split / str(digit)
        make_directory(class_folder)
        image.save(class_folder / f"{index:04d}.png")
    complete.touch()
    return folders
