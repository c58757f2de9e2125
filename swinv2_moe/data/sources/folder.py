"""folder, imagenet: `train/<class>/*` and `val/<class>/*`.

N images
"""

import glob
import hashlib
import os
import re
from collections import Counter
from dataclasses import replace

import numpy as np

from swinv2_moe.data.copies import copies_note, first_copies
from swinv2_moe.data.images import (
    SUFFIXES,
    find_images,
    left_out_line,
    normal_name,
    repeated_name,
    subfolders,
)
from swinv2_moe.data.section import DataConfig, register_dataset
from swinv2_moe.data.sources.base import (
    ImageFiles,
    Sources,
    check_directory,
    content_of,
    copies_of_files,
)
from swinv2_moe.errors import UserError, shortened
from swinv2_moe.output import printable

VALIDATION_FOLDERS = ("val", "validation", "valid", "test")
# Other names of train/ and of the validation folder, in small letters
_OTHER_NAMES = dict.fromkeys(("train", "training", "training_set", "train_set"), "train")
_OTHER_NAMES |= dict.fromkeys((*VALIDATION_FOLDERS, "validation_set", "val_set"), "val")
_OTHER_NAMES |= dict.fromkeys(("testing", "testing_set", "test_set"), "val")
# What often lies beside class folders, in small letters: images for other uses, and no images
_KIND = r"_?(\d|set|data|images?|imgs?|pictures|photos)"
_SPLIT_NAME = re.compile(
    rf"(tests?|testing|val|valid|validation|dev|eval|evaluation|holdout)({_KIND})?"
    rf"|train(ing)?{_KIND}"
)
_NO_CLASSES = {"label", "labels", "annotation", "annotations", "ground_truth", "groundtruth"}
_NO_CLASSES |= {"mask", "masks", "metadata", "unlabeled", "unlabelled", "predictions"}
# beside masks or annotations of another name
_NO_CLASSES |= {"images", "imgs", "jpegimages", "imagesets", "segmentation", "segmentations"}
_NO_CLASSES |= {"segmentationclass", "segmentationobject"}


@register_dataset("folder")
def folder(config: DataConfig) -> Sources:
    return _load(config)


@register_dataset("imagenet")
def imagenet(config: DataConfig) -> Sources:
    return _load(config, hint=" (data/README.md says how to unpack ImageNet)")


def _load(config: DataConfig, hint: str = "") -> Sources:
    """Load the images of a directory with train/ and val/. Without val/, a share of train/ can be
    used for validation. If that share is set, or if only validation images are needed, the class
    folders may also lie in the directory itself.

    Args:
        hint: the end of the message about a missing folder.
    """
    root = config.path
    train, val = _split_folders(config, hint)
    if val is None:
        classes = _classes(train, root)
        if not config.validation_only:
            _check_are_classes(train, classes)
        images, notes = _image_files(train, classes)
        first = first_copies(images)
        parts = _split(images, classes, config.val_split, first)
        held_out = f"{len(parts[1]):,} of the {len(images):,} images of {printable(train)}"
        note = f"DATA.VAL_SPLIT {config.val_split:g}: {held_out} are held out for validation"
        num_copies = len(images) - len(np.unique(first))
        if num_copies:
            note += f"; {num_copies:,} are copies (equal bytes), on the side of their original"
        notes.append(note)
        notes += copies_note(first, images.targets, len(images), images.name)
        return Sources(*parts, _printable_names(classes), tuple(notes))
    classes = _classes(val, root)
    name = os.path.basename(val)
    if config.validation_only:
        images, notes = ImageFiles(root, np.empty(0, "S1"), np.empty(0, np.int64)), []
    else:
        _check_same_classes(root, name, _classes(train), classes)
        _check_are_classes(train, classes)
        images, notes = _image_files(train, classes, val)
    val_images, val_notes = _image_files(val, classes, train)
    notes += copies_of_files(images, val_images)
    if val == root:
        notes.append(
            f"{printable(root)} has no val/ folder: all images of its class folders are used, also"
            " those that the run was trained on, if any"
        )
    elif name != "val":
        notes.append(
            f"{printable(root)} has no val/ folder: the images of {name}/ are used for validation"
        )
    return Sources(images, val_images, _printable_names(classes), tuple(notes + val_notes))


def _printable_names(classes: list[str]) -> list[str]:
    return [printable(label) for label in classes]


def _split_folders(config: DataConfig, hint: str) -> tuple[str, str | None]:
    """The folders of training and validation images; None if DATA.VAL_SPLIT splits the first.

    Raises:
        UserError: one of them is missing.
    """
    root = config.path
    train = os.path.join(root, "train")
    name = _validation_folder(root, config.val_split)
    has_train = os.path.isdir(train)
    if name is not None and (has_train or config.validation_only):
        return train, os.path.join(root, name)
    is_flat = name is None and not has_train and bool(subfolders(root))
    _check_names(root, has_train, name)
    if has_train and name is None and config.val_split:
        return train, None
    if is_flat and config.val_split:
        return root, None
    if is_flat and config.validation_only:
        return root, root
    missing = []
    if not has_train:
        missing.append("train/")
        is_flat = len(subfolders(root)) > 1
    if name is None and not config.val_split:
        missing.append("val/")
    names = " and no ".join(missing)
    raise UserError(
        f"DATA.PATH is {root!r}: it has no {names} folder; found:"
        f" {content_of(root)}{_next_step(root, has_train, is_flat, name)}{hint}"
    )


def _check_names(root: str, has_train: bool, validation: str | None) -> None:
    """Raise UserError if train/ or the folder of validation images is missing and is there under
    another name, such as Training/."""
    names: dict[str, str] = {}  # by the names that they should have
    for name in subfolders(root):
        meant = _OTHER_NAMES.get(_small(name))
        is_right = name in ("train", *VALIDATION_FOLDERS)
        if meant and not is_right and subfolders(os.path.join(root, name)):
            names.setdefault(meant, name)
    if has_train:
        names.pop("train", None)
    if validation is not None:
        names.pop("val", None)
    if names and (has_train or "train" in names):
        renamed = [f"{printable(name)}/ to {meant}/" for meant, name in names.items()]
        raise UserError(f"DATA.PATH is {root!r}: rename {' and '.join(renamed)}")
    if has_train or validation is not None:
        return
    for name in subfolders(root):
        if _SPLIT_NAME.fullmatch(_small(name)) and name != "test":
            raise UserError(
                f"DATA.PATH is {root!r}: {printable(name)}/ lies beside class folders; if its"
                " images are for validation, move the class folders into train/ and rename it to"
                f" val/, if it is a class, rename it, for example to {printable(name)}_class/"
            )


def _small(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


def _next_step(root: str, has_train: bool, is_flat: bool, validation: str | None) -> str:
    """What to do if train/ or the validation images are missing, for the end of a message."""
    parent, own_name = os.path.split(os.path.abspath(root))
    is_split = own_name in ("train", *VALIDATION_FOLDERS)
    if is_split and os.path.isdir(os.path.join(parent, "train")):
        return f"; DATA.PATH {parent} is the folder above, with train/ in it"
    if has_train:
        return "; DATA.VAL_SPLIT 0.1 would hold out a tenth of train/"
    if is_flat and validation is not None:
        step = "; move the class folders into train/"
        if validation == "test":
            step += ", or set DATA.VAL_SPLIT 0.2: it holds out a fifth of their images, test/ is"
            step += " left out"
        return step
    if is_flat:
        return (
            "; if these are the classes, DATA.VAL_SPLIT 0.1 would train on nine tenths of their"
            " images and hold out a tenth"
        )
    if not subfolders(root) and find_images(root).decoded:
        return (
            "; the images lie beside each other: move those of each class into a folder with its"
            " name, and DATA.VAL_SPLIT 0.1 would hold out a tenth of them"
        )
    return ""


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
            hint = ""
            if not os.path.isdir(os.path.join(root, "train")):
                hint = "; move the class folders into train/"
            raise UserError(
                f"DATA.VAL_SPLIT is {val_split:g}: it must be 0, since DATA.PATH {root!r} has"
                f" validation images in {name}/{hint}"
            )
    return None


def _split(
    images: ImageFiles, classes: list[str], share: float, first: np.ndarray | None = None
) -> tuple[ImageFiles, ImageFiles]:
    """Split off a share of each class, at least one image. Returns the remaining images and that
    share. Copies, also those in other classes, stay on the side of their original.

    The choice depends only on the images' names and on which are copies, not on SEED. So every run
    with the same share is validated on the same images. If a model is fine-tuned from another one,
    neither has been trained on them.

    Args:
        first: as of `first_copies` [N]; None: it is found now.

    Raises:
        UserError: a class cannot be split, since it has a single image.
    """
    if first is None:
        first = first_copies(images)
    groups = groups_of_copies(images.paths, first)
    labels = images.targets.tolist()
    counts = np.bincount(images.targets, minlength=len(classes))
    missing = np.rint(share * counts).astype(int).clip(1, counts - 1).tolist()
    remaining = counts.tolist()
    is_held_out = np.zeros(len(images), bool)

    def hold_out(group: list[int], needed: Counter) -> None:
        is_held_out[group] = True
        for label, count in needed.items():
            missing[label] -= count
            remaining[label] -= count

    for group in groups:
        needed = Counter(labels[row] for row in group)
        if all(count <= missing[label] for label, count in needed.items()):
            hold_out(group, needed)
    single = []
    for label in np.setdiff1d(images.targets, images.targets[is_held_out]).tolist():
        for group in sorted(groups, key=len):  # the smallest one is larger than the share
            needed = Counter(labels[row] for row in group)
            if needed[label] and all(needed[other] < remaining[other] for other in needed):
                hold_out(group, needed)
                break
        else:
            single.append(label)
    if single:
        hint = ""
        if counts[single].max() > 1:
            hint = " (copies do not count)"
        raise UserError(
            f"DATA.VAL_SPLIT is {share:g}: {len(single)} of {len(classes)} class folders of"
            f" {images.root} hold a single image{hint}:"
            f" {shortened([classes[label] for label in single])}"
        )
    parts = []
    for rows in (~is_held_out, is_held_out):
        parts.append(replace(images, paths=images.paths[rows], targets=images.targets[rows]))
    return parts[0], parts[1]


def groups_of_copies(paths: np.ndarray, first: np.ndarray) -> list[list[int]]:
    """Groups of copies, ordered by the least SHA-256 of a group's names."""
    digests = [hashlib.sha256(path).digest()[:8] for path in paths.tolist()]
    keys = np.frombuffer(b"".join(digests), ">u8")  # [N]
    least = np.full(len(keys), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(least, first, keys.astype(np.uint64))
    order = np.lexsort((first, least[first]))
    ends = np.flatnonzero(np.diff(first[order])) + 1
    starts = [0, *ends.tolist()]
    rows = order.tolist()
    return [rows[start:end] for start, end in zip(starts, [*ends.tolist(), len(rows)], strict=True)]


def _classes(split: str, root: str = "") -> list[str]:
    """The names of the class folders, in the order of `subfolders`.

    Args:
        root: DATA.PATH. If it holds the class folders itself, its folder test/ is none of them.
    """
    check_directory("DATA.PATH", split)
    classes = subfolders(split)
    if split == root and "test" in classes:
        classes.remove("test")
    repeated = repeated_name(classes)
    if repeated:
        raise UserError(
            f"{split}: the class folders {repeated} have the same name in two forms: merge them, or"
            " rename one"
        )
    if classes:
        return classes
    hint = ""
    if glob.glob(os.path.join(glob.escape(split), "*.tar")):
        hint = "; these are shards: DATA.DATASET shards"
    elif find_images(split).decoded:
        hint = "; move the images of each class into a folder with its name"
    raise UserError(f"{split} has no class folder in it, only: {content_of(split)}{hint}")


def _check_are_classes(split: str, classes: list[str]) -> None:
    for name in classes:
        if _small(name) in _NO_CLASSES:
            raise UserError(
                f"{split}: {printable(name)}/ lies where each folder is a class; move it elsewhere,"
                f" or rename it if it is a class, for example to {printable(name)}_class/"
            )


def _check_same_classes(root: str, name: str, train: list[str], val: list[str]) -> None:
    if train == val:
        return
    differences = []
    for split, classes, others in (("train", train, val), (name, val, train)):
        missing = sorted(set(classes) - set(others))
        if missing:
            differences.append(f"only in {split}/: {shortened(missing)}")
    if sorted(map(normal_name, train)) == sorted(map(normal_name, val)):
        differences.append(
            "these are equal, but with zeros before a number or accents in another Unicode form:"
            " rename one"
        )
    raise UserError(
        f"DATA.PATH is {root!r}: train/ has {len(train)} class folders and {name}/ {len(val)},"
        f" they must be the same ({'; '.join(differences)})"
    )


def _image_files(
    split: str, classes: list[str], other_split: str = ""
) -> tuple[ImageFiles, list[str]]:
    """The images in the class folders of a split, class by class, and messages for the log.

    Links to other class folders, of this split or of `other_split`, are not followed.
    """
    prefix = os.path.join(split, "")
    own_folders = _real_folders(split, classes)
    apart = frozenset(own_folders) | frozenset(_real_folders(other_split, classes))
    test = os.path.join(split, "test")
    not_a_class = os.path.isdir(test) and "test" not in classes
    if not_a_class:
        apart |= {os.path.realpath(test)}
    # One array for each class, because a list of millions of strings would take gigabytes.
    paths = []
    left_out = []
    others: list[str] = []  # files of folders that have more of them than images
    for folder in own_folders.values():
        found = find_images(folder, apart)
        if len(found.others) > len(found.decoded):
            others += found.others
        encoded = [os.fsencode(path.removeprefix(prefix)) for path in found.decoded]
        paths.append(np.array(encoded, bytes))
        left_out += found.left_out
    notes = []
    hint = ""
    if not_a_class:
        notes.append(
            f"warning: {printable(split)}/test is left out: beside class folders it is not taken"
            " for a class; if it is one, rename it, for example to test_class/"
        )
    if left_out:
        notes.append(f"warning: {left_out_line(left_out)}")
        hint = f"; {left_out_line(left_out)}"
    if others:
        line = f"{len(others):,} files without an image's ending; the first: {printable(others[0])}"
        notes.append(f"warning: files left out: {line}")
        hint += f"; {line}"
    loose = find_images(split, apart).decoded
    if loose:
        notes.append(
            f"warning: images left out: {len(loose):,} in no class folder; the first:"
            f" {printable(loose[0])}"
        )
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
    return ImageFiles(split, np.concatenate(paths), targets), notes


def _real_folders(split: str, classes: list[str]) -> dict[str, str]:
    """The class folders by their real paths.

    Raises:
        UserError: two classes have the same folder, by a link.
    """
    folders: dict[str, str] = {}
    for name in classes:
        path = os.path.join(split, name)
        other = folders.setdefault(os.path.realpath(path), path)
        if other != path:
            raise UserError(f"{path} and {other} are the same folder, by a link: remove one")
    return folders
