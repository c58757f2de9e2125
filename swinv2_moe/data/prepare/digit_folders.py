"""Two folders of images made from the digits of scikit-learn: one for pretraining, one for
transfer."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from swinv2_moe.files import make_directory

_SIDE = 64  # pixels
_MAX_VALUE = 16  # largest grey value of the digits
_PRETRAIN = range(5)  # the digits of the first folder; the others go to the second


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
        image = Image.fromarray(pixels.astype(np.uint8)).resize((_SIDE, _SIDE), Image.BICUBIC)
        class_folder = folder / split / str(digit)
        make_directory(class_folder)
        image.save(class_folder / f"{index:04d}.png")
    complete.touch()
    return folders
