"""What a folder of pictures holds: classes, counts and sizes. Imports no torch."""

import os
from collections.abc import Mapping
from statistics import median_low
from typing import NamedTuple

from swinv2_moe.config import as_opts, load_config
from swinv2_moe.config.tree import data_config
from swinv2_moe.data.images import read_header
from swinv2_moe.data.sources import ImageFiles, Sources, load_sources
from swinv2_moe.data.sources.folder import VALIDATION_FOLDERS
from swinv2_moe.errors import UserError, one_line

FROM_SCRATCH = "imagenette_96"  # the configuration of a model without pretrained weights
_SAMPLE = 100  # pictures whose headers are read
_LEAST_PER_CLASS = 2  # training pictures


class Pictures(NamedTuple):
    """What a folder holds."""

    path: str
    num_train: int
    num_val: int
    class_names: list[str]
    width: int  # medians of a sample, pixels
    height: int
    val_split: float  # DATA.VAL_SPLIT

    def __str__(self) -> str:
        where = "in a folder of their own"
        if self.val_split:
            where = f"held out, {self.val_split:.0%} of each class"
        return (
            f"{self.path}: {len(self.class_names)} classes, {self.num_train:,} pictures to train on"
            f" and {self.num_val:,} to validate ({where}), most of about {self.width} x"
            f" {self.height} pixels"
        )


def look(data: str, given: Mapping[str, object]) -> Pictures:
    """What the folder `data` holds. The headers of a sample of the pictures are read.

    Raises:
        UserError: it is no data set of at least two classes, or pictures cannot be read.
    """
    if given.get("DATA.DATASET", "folder") != "folder":
        raise UserError(
            f"DATA.DATASET is {given['DATA.DATASET']!r}: only a folder of pictures is trained on"
            " without --cfg"
        )
    path = os.path.expanduser(data)
    split = given.get("DATA.VAL_SPLIT", _val_split(path))
    settings = {"DATA.DATASET": "folder", "DATA.VAL_SPLIT": split}
    config = load_config(FROM_SCRATCH, as_opts(settings), data=path)
    sources = load_sources(data_config(config))
    num_train, names = len(sources.train), sources.class_names
    if len(names) < 2:
        raise UserError(
            f"--data {data}: has pictures of one class ({names[0]}), a classifier"
            " needs at least two: a folder for each class"
        )
    if num_train < _LEAST_PER_CLASS * len(names):
        raise UserError(
            f"--data {data}: has {num_train} pictures to train {len(names)} classes on, at least"
            f" {_LEAST_PER_CLASS} a class are needed (10 or more are recommended)"
        )
    bad_share = given.get("DATA.MAX_BAD_SHARE", config.DATA.MAX_BAD_SHARE)
    assert isinstance(bad_share, float)
    width, height = _sizes(data, sources, bad_share)
    return Pictures(data, num_train, len(sources.val), names, width, height, config.DATA.VAL_SPLIT)


def _val_split(path: str) -> float:
    """The share that is held out for validation: none where there is a folder for it."""
    has_folder = any(os.path.isdir(os.path.join(path, name)) for name in VALIDATION_FOLDERS)
    return 0.0 if has_folder else 0.2


def _sizes(data: str, sources: Sources, bad_share: float) -> tuple[int, int]:
    """Median width and height of a sample of the training pictures, in pixels.

    Raises:
        UserError: more than `bad_share` of the sample cannot be read.
    """
    source = sources.train
    assert isinstance(source, ImageFiles)
    count = min(_SAMPLE, len(source))
    widths, heights, unreadable = [], [], []
    for i in range(count):
        path = source.path(i * len(source) // count)
        try:
            width, height, _ = read_header(path)
        except ValueError as error:
            unreadable.append(f"{path} ({error})")
            continue
        widths.append(width)
        heights.append(height)
    if len(unreadable) > bad_share * count or not widths:
        raise UserError(
            f"--data {data}: {len(unreadable)} of {count} pictures that were looked at cannot be"
            f" read, the first: {one_line(unreadable[0])}; remove them, or raise DATA.MAX_BAD_SHARE"
        )
    return median_low(widths), median_low(heights)
