"""Where images come from: DATA.DATASET -> the training and the validation images, their targets and
class names.

Everything that can be wrong with a data set as a whole is found here. N images
"""

import glob
import io
import os
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from swinv2_moe.config import DataConfig
from swinv2_moe.data.images import MAX_PIXELS, decode, read_file
from swinv2_moe.data.lists import read_list
from swinv2_moe.data.shards import load_shards
from swinv2_moe.errors import UserError, one_line

_SPLITS = ("train", "val")


class Source(Protocol):
    """N images that are opened one by one."""

    targets: np.ndarray  # integers [N]

    def __len__(self) -> int: ...

    def open(self, index: int) -> Image.Image:
        """The image in whatever mode it has; raises if it cannot be read, or is larger than the
        source allows."""

    def read(self, index: int) -> bytes:
        """The image as a file holds it."""

    def name(self, index: int) -> str:
        """What a message calls the image: its path."""


@dataclass(frozen=True)
class ImageFiles:
    root: str
    # [N] bytes, relative to root. An array: a list would be copied, page by page, into each worker
    paths: np.ndarray
    targets: np.ndarray
    max_pixels: int = MAX_PIXELS  # of an image

    def __len__(self) -> int:
        return len(self.targets)

    def open(self, index: int) -> Image.Image:
        return decode(self.read(index), self.max_pixels)

    def read(self, index: int) -> bytes:
        return read_file(self._path(index))

    def name(self, index: int) -> str:
        return _printable(self._path(index))

    def _path(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.paths[index]))


@dataclass(frozen=True)
class ImageArrays:
    label: str
    images: np.ndarray  # uint8 [N, H, W] or [N, H, W, 3]
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    def open(self, index: int) -> Image.Image:
        return Image.fromarray(self.images[index])

    def read(self, index: int) -> bytes:
        file = io.BytesIO()
        self.open(index).save(file, "PNG")
        return file.getvalue()

    def name(self, index: int) -> str:
        return f"{self.label}[{index}]"


class Sources(NamedTuple):
    train: Source
    val: Source
    class_names: list[str]


def load_sources(config: DataConfig) -> Sources:
    """The two sources that DATA.DATASET names; nothing is downloaded.

    Raises:
        UserError: a path, folder, list line or label that cannot be used; train and val with
            different classes.
    """
    name = config.dataset
    if name == "digits":
        return _digits()
    root = os.path.expanduser(config.path)
    if root or name != "list":
        check_directory("DATA.PATH", root)
    if name == "list":
        return _lists(config, root)
    if name == "shards":
        return Sources(*load_shards(root, config.max_pixels))
    if name in ("cifar10", "cifar100"):
        return _cifar(CIFAR10 if name == "cifar10" else CIFAR100, root)
    hint = ""
    if name == "imagenet":
        hint = " (data/README.md says how to unpack ImageNet)"
    return _folders(root, hint, config.max_pixels)


def check_directory(key: str, path: str) -> None:
    """Raise UserError unless `path` is a directory that can be listed."""
    if not os.path.exists(path):
        raise UserError(f"{key} is {path!r}: no such directory")
    if not os.path.isdir(path):
        raise UserError(f"{key} is {path!r}: a file, it must be a directory")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"{key} is {path!r}: permission denied")


def _digits() -> Sources:
    from sklearn.datasets import load_digits  # a second to import, for this data set alone
    from sklearn.model_selection import train_test_split

    pixels, targets = load_digits(return_X_y=True)  # [1797, 64], 0 to 16
    images = np.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    # random_state is fixed and not SEED: every run is measured on the same fifth
    train, val = train_test_split(
        np.arange(len(targets)), test_size=0.2, stratify=targets, random_state=0
    )
    sources = [
        ImageArrays("digits", images[part], targets[part].astype(np.int64)) for part in (train, val)
    ]
    return Sources(*sources, [str(digit) for digit in range(10)])


def _cifar(dataset: type[CIFAR10], root: str) -> Sources:
    try:
        train, val = (dataset(root, train=is_train, download=False) for is_train in (True, False))
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"DATA.PATH is {root!r}: it holds no intact {dataset.base_folder}/ (nothing is"
            " downloaded, data/README.md"
            f" says where {dataset.__name__} comes from); found: {_found(root)}"
        ) from error
    sources = [
        ImageArrays(dataset.__name__, part.data, np.asarray(part.targets, np.int64))
        for part in (train, val)
    ]
    return Sources(*sources, list(train.classes))


def _folders(root: str, hint: str, max_pixels: int) -> Sources:
    missing = [split for split in _SPLITS if not os.path.isdir(os.path.join(root, split))]
    if missing:
        names = " and no ".join(f"{split}/" for split in missing)
        raise UserError(
            f"DATA.PATH is {root!r}: it has no {names} folder; found: {_found(root)}{hint}"
        )
    folders = [os.path.join(root, split) for split in _SPLITS]
    classes, val_classes = (_classes(folder) for folder in folders)
    if classes != val_classes:
        only = [
            sorted(set(a) - set(b)) for a, b in ((classes, val_classes), (val_classes, classes))
        ]
        parts = [
            f"only in {split}/: {_some(names)}"
            for split, names in zip(_SPLITS, only, strict=True)
            if names
        ]
        raise UserError(
            f"DATA.PATH is {root!r}: train/ has {len(classes)} class folders and val/"
            f" {len(val_classes)}, they must be"
            f" the same ({'; '.join(parts)})"
        )
    return Sources(
        *(_scan(folder, classes, max_pixels) for folder in folders),
        [_printable(name) for name in classes],
    )


def _classes(folder: str) -> list[str]:
    check_directory("DATA.PATH", folder)
    try:
        return find_classes(folder)[0]
    except FileNotFoundError as error:
        hint = (
            "; these are shards: DATA.DATASET shards"
            if glob.glob(os.path.join(glob.escape(folder), "*.tar"))
            else ""
        )
        raise UserError(
            f"{folder} has no class folder in it, only: {_found(folder)}{hint}"
        ) from error


def _scan(folder: str, classes: list[str], max_pixels: int) -> ImageFiles:
    start = len(os.path.join(folder, ""))
    paths = []  # an array for each class: millions of strings in a list would take gigabytes
    for name in classes:
        images = make_dataset(folder, {name: 0}, IMG_EXTENSIONS, allow_empty=True)
        paths.append(np.array([os.fsencode(path[start:]) for path, _ in images], bytes))
    counts = np.array([len(part) for part in paths])
    if not counts.any():
        raise UserError(
            f"{folder}: no images in its {len(classes)} class folders ({' '.join(IMG_EXTENSIONS)}"
            " count)"
        )
    if not counts.all():
        empty = [name for name, count in zip(classes, counts, strict=True) if not count]
        raise UserError(
            f"{folder}: {len(empty)} of {len(classes)} class folders hold no image: {_some(empty)}"
        )
    return ImageFiles(
        folder, np.concatenate(paths), np.repeat(np.arange(len(classes)), counts), max_pixels
    )


def _lists(config: DataConfig, root: str) -> Sources:
    limit, max_pixels = config.num_classes, config.max_pixels
    train = ImageFiles(*read_list("DATA.TRAIN_LIST", config.train_list, root, limit), max_pixels)
    if not limit:
        labels = np.unique(train.targets)
        limit = int(labels[-1]) + 1
        if len(labels) != limit:
            # enough of them to name a few
            gap = np.setdiff1d(np.arange(min(limit, len(labels) + 3)), labels)
            raise UserError(
                f"DATA.TRAIN_LIST is {config.train_list!r}: its labels reach {limit - 1} but"
                f" {limit - len(labels)} below"
                f" have no image ({_some(gap.tolist())}); labels count from 0, MODEL.NUM_CLASSES"
                " (0) would allow gaps"
            )
    val = ImageFiles(*read_list("DATA.VAL_LIST", config.val_list, root, limit), max_pixels)
    return Sources(train, val, [str(label) for label in range(limit)])


def _printable(path: str) -> str:
    """Bytes that are not UTF-8 as \\xff: names that differ still do."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _some(names: list, count: int = 3) -> str:
    return ", ".join(one_line(str(name)) for name in names[:count]) + (
        f", ... ({len(names)} in all)" if len(names) > count else ""
    )


def _found(folder: str) -> str:
    return _some(sorted(os.listdir(folder))) or "nothing"
