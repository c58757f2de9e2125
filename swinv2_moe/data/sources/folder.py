"""folder, imagenet: `train/<class>/*` and `val/<class>/*`.

N images
"""

import glob
import hashlib
import os
from dataclasses import replace

import numpy as np

from swinv2_moe.config import DataConfig
from swinv2_moe.data.images import NOT_DECODED, SUFFIXES
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

VALIDATION_FOLDERS = ("val", "validation", "valid", "test")


@register_dataset("folder")
def folder(config: DataConfig) -> Sources:
    return _load(config)


@register_dataset("imagenet")
def imagenet(config: DataConfig) -> Sources:
    return _load(config, hint=" (data/README.md says how to unpack ImageNet)")


def _load(config: DataConfig, hint: str = "") -> Sources:
    """Load the images of a directory with train/ and val/. Without val/, a share of train/ can be
    used for validation.

    Args:
        hint: the end of the message about a missing folder.
    """
    root = config.path
    train = os.path.join(root, "train")
    name = _validation_folder(root, config.val_split)
    _check_folders(root, train, name, config.val_split, hint)
    classes = _classes(train)
    class_names = [printable(label) for label in classes]
    if name is not None:
        val = os.path.join(root, name)
        _check_same_classes(root, name, classes, _classes(val))
    images, notes = _image_files(train, classes, config.max_pixels)
    if name is None:
        parts = _split(images, classes, config.val_split)
        notes.append(
            f"DATA.VAL_SPLIT {config.val_split:g}: {len(parts[1]):,} of the {len(images):,} images"
            f" of {printable(train)} are held out for validation"
        )
        return Sources(*parts, class_names, tuple(notes))
    val_images, val_notes = _image_files(val, classes, config.max_pixels)
    if name != "val":
        notes.append(
            f"{printable(root)} has no val/ folder: the images of {name}/ are used for validation"
        )
    return Sources(images, val_images, class_names, tuple(notes + val_notes))


def _validation_folder(root: str, val_split: float) -> str | None:
    """The name of the folder of validation images: the first of VALIDATION_FOLDERS that exists.

    None if there is none. With DATA.VAL_SPLIT, test/ does not count.

    Raises:
        UserError: DATA.VAL_SPLIT is above 0, but there are validation images.
    """
    for name in VALIDATION_FOLDERS:
        if not os.path.isdir(os.path.join(root, name)):
            continue
        if not val_split:
            return name
        if name != "test":
            raise UserError(
                f"DATA.VAL_SPLIT is {val_split:g}: DATA.PATH {root!r} has validation images in"
                f" {name}/, for which DATA.VAL_SPLIT is 0"
            )
    return None


def _check_folders(root: str, train: str, name: str | None, val_split: float, hint: str) -> None:
    """Raise UserError if train/ or the validation images are missing."""
    missing = []
    if not os.path.isdir(train):
        missing.append("train/")
    if name is None and not val_split:
        missing.append("val/")
        if not missing[1:]:
            hint = "; DATA.VAL_SPLIT 0.1 would hold out a tenth of train/"
    if missing:
        names = " and no ".join(missing)
        raise UserError(
            f"DATA.PATH is {root!r}: it has no {names} folder; found: {content_of(root)}{hint}"
        )


def _split(images: ImageFiles, classes: list[str], share: float) -> tuple[ImageFiles, ImageFiles]:
    """Split off a share of each class, at least one image. Returns the remaining images and that
    share.

    The choice depends only on the images' names, not on SEED. So every run with the same share is
    validated on the same images. If a model is fine-tuned from another one, neither has been
    trained on them.

    Raises:
        UserError: a class has a single image.
    """
    counts = np.bincount(images.targets)
    if counts.min() < 2:
        single = [classes[label] for label in np.flatnonzero(counts < 2)]
        raise UserError(
            f"DATA.VAL_SPLIT is {share:g}: {len(single)} of {len(classes)} class folders of"
            f" {images.root} hold a single image: {shortened(single)}"
        )
    is_held_out = np.zeros(len(images), bool)
    start = 0
    for count in counts.tolist():
        paths = images.paths[start : start + count].tolist()
        digests = [hashlib.sha256(path).digest() for path in paths]
        order = sorted(range(count), key=digests.__getitem__)
        num_held_out = min(max(1, round(share * count)), count - 1)
        is_held_out[start : start + count][order[:num_held_out]] = True
        start += count
    parts = []
    for rows in (~is_held_out, is_held_out):
        parts.append(replace(images, paths=images.paths[rows], targets=images.targets[rows]))
    return parts[0], parts[1]


def _classes(split: str) -> list[str]:
    """The names of the class folders, sorted."""
    from torchvision.datasets.folder import find_classes

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


def _check_same_classes(root: str, name: str, train: list[str], val: list[str]) -> None:
    if train == val:
        return
    differences = []
    for split, classes, others in (("train", train, val), (name, val, train)):
        missing = sorted(set(classes) - set(others))
        if missing:
            differences.append(f"only in {split}/: {shortened(missing)}")
    raise UserError(
        f"DATA.PATH is {root!r}: train/ has {len(train)} class folders and {name}/ {len(val)},"
        f" they must be the same ({'; '.join(differences)})"
    )


def _image_files(split: str, classes: list[str], max_pixels: int) -> tuple[ImageFiles, list[str]]:
    """The images in the class folders of a split, class by class, and messages for the log."""
    from torchvision.datasets.folder import make_dataset

    prefix = os.path.join(split, "")
    endings = SUFFIXES + tuple(NOT_DECODED)
    # One array for each class, because a list of millions of strings would take gigabytes.
    paths = []
    left_out = []
    for name in classes:
        encoded = []
        for path, _ in make_dataset(split, {name: 0}, endings, allow_empty=True):
            if path.lower().endswith(SUFFIXES):
                encoded.append(os.fsencode(path.removeprefix(prefix)))
            else:
                left_out.append(path)
        paths.append(np.array(encoded, bytes))
    notes = []
    hint = ""
    if left_out:
        notes.append(f"warning: {_left_out_line(left_out)}")
        hint = f"; {_left_out_line(left_out)}"
    counts = np.array([len(part) for part in paths])
    if not counts.any():
        raise UserError(
            f"{split}: no images in its {len(classes)} class folders ({' '.join(SUFFIXES)}"
            f" count){hint}"
        )
    if not counts.all():
        empty = [name for name, count in zip(classes, counts, strict=True) if not count]
        raise UserError(
            f"{split}: {len(empty)} of {len(classes)} class folders hold no image:"
            f" {shortened(empty)}{hint}"
        )
    targets = np.repeat(np.arange(len(classes)), counts)  # [N]
    return ImageFiles(split, np.concatenate(paths), targets, max_pixels), notes


def _left_out_line(paths: list[str]) -> str:
    """A message about images that are omitted because no installed package decodes them."""
    endings = sorted({os.path.splitext(path)[1].lower() for path in paths})
    needs = " and ".join(f"{ending} needs {NOT_DECODED[ending]}" for ending in endings)
    return f"images left out: {len(paths):,} ({needs}); the first: {printable(paths[0])}"
