"""folder, imagenet: `train/<class>/*` and `val/<class>/*`.

N images
"""

import glob
import os

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from swinv2_moe.config import DataConfig
from swinv2_moe.data.sources.base import (
    ImageFiles,
    Sources,
    check_directory,
    content_of,
    printable,
    shortened,
)
from swinv2_moe.dataset_registry import register_dataset
from swinv2_moe.errors import UserError


@register_dataset("folder")
def folder(config: DataConfig) -> Sources:
    return _load(config)


@register_dataset("imagenet")
def imagenet(config: DataConfig) -> Sources:
    return _load(config, hint=" (data/README.md says how to unpack ImageNet)")


def _load(config: DataConfig, hint: str = "") -> Sources:
    """The images of a directory with train/ and val/.

    Args:
        hint: the end of the message where one of them is missing.
    """
    root = config.path
    train, val = os.path.join(root, "train"), os.path.join(root, "val")
    missing = []
    for split, path in (("train/", train), ("val/", val)):
        if not os.path.isdir(path):
            missing.append(split)
    if missing:
        names = " and no ".join(missing)
        raise UserError(
            f"DATA.PATH is {root!r}: it has no {names} folder; found: {content_of(root)}{hint}"
        )
    classes = _classes(train)
    _check_same_classes(root, classes, _classes(val))
    return Sources(
        _image_files(train, classes, config.max_pixels),
        _image_files(val, classes, config.max_pixels),
        [printable(name) for name in classes],
    )


def _classes(split: str) -> list[str]:
    """The names of the class folders, sorted."""
    check_directory("DATA.PATH", split)
    try:
        return find_classes(split)[0]
    except FileNotFoundError as error:
        hint = ""
        if glob.glob(os.path.join(glob.escape(split), "*.tar")):
            hint = "; these are shards: DATA.DATASET shards"
        raise UserError(
            f"{split} has no class folder in it, only: {content_of(split)}{hint}"
        ) from error


def _check_same_classes(root: str, train: list[str], val: list[str]) -> None:
    if train == val:
        return
    differences = []
    for split, classes, others in (("train", train, val), ("val", val, train)):
        missing = sorted(set(classes) - set(others))
        if missing:
            differences.append(f"only in {split}/: {shortened(missing)}")
    raise UserError(
        f"DATA.PATH is {root!r}: train/ has {len(train)} class folders and val/ {len(val)}, they"
        f" must be the same ({'; '.join(differences)})"
    )


def _image_files(split: str, classes: list[str], max_pixels: int) -> ImageFiles:
    """The images in the class folders of a split, class by class."""
    prefix = os.path.join(split, "")
    # One array for each class: a list of millions of strings would take gigabytes.
    paths = []
    for name in classes:
        images = make_dataset(split, {name: 0}, IMG_EXTENSIONS, allow_empty=True)
        encoded = [os.fsencode(path.removeprefix(prefix)) for path, _ in images]
        paths.append(np.array(encoded, bytes))
    counts = np.array([len(part) for part in paths])
    if not counts.any():
        raise UserError(
            f"{split}: no images in its {len(classes)} class folders ({' '.join(IMG_EXTENSIONS)}"
            " count)"
        )
    if not counts.all():
        empty = [name for name, count in zip(classes, counts, strict=True) if not count]
        raise UserError(
            f"{split}: {len(empty)} of {len(classes)} class folders hold no image:"
            f" {shortened(empty)}"
        )
    targets = np.repeat(np.arange(len(classes)), counts)  # [N]
    return ImageFiles(split, np.concatenate(paths), targets, max_pixels)
