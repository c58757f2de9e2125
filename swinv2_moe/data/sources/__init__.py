"""The datasets for DATA.DATASET. Each file here registers one or more datasets.

Importing this package imports every file in it.
"""

import dataclasses
import importlib
import os
import pkgutil

import numpy as np

from swinv2_moe.data.section import DATASETS, DataConfig
from swinv2_moe.data.sources.base import (
    ImageArrays,
    ImageFiles,
    Source,
    Sources,
    Subset,
    check_directory,
    sample_notes,
)
from swinv2_moe.errors import UserError

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "ImageArrays",
    "ImageFiles",
    "Source",
    "Sources",
    "Subset",
    "check_directory",
    "load_sources",
]


def load_sources(config: DataConfig, validation_only: bool = False) -> Sources:
    """Load the sources of the dataset DATA.DATASET. Nothing is downloaded.

    Args:
        validation_only: the training source may be empty.

    Raises:
        UserError: a path, folder, list line or label cannot be used, or train and val have
            different classes.
    """
    dataset = DATASETS[config.dataset]
    path = os.path.expanduser(config.path)
    if dataset.needs_files and (path or dataset.needs_path):
        check_directory("DATA.PATH", path)
    config = dataclasses.replace(config, path=path, validation_only=validation_only)
    sources = dataset.load(config)
    _check(config.dataset, sources, validation_only)
    seen = sources.val if validation_only else sources.train
    return sources._replace(notes=(*sources.notes, *sample_notes(seen, config.test.crop_ratio)))


def _check(name: str, sources: object, validation_only: bool) -> None:
    """Raise UserError unless the sources have images, a target for each of them, and a name for
    each class."""
    if not isinstance(sources, Sources):
        raise UserError(
            f"DATA.DATASET is {name!r}: its function returned {type(sources).__name__}, not"
            " swinv2_moe.data.Sources"
        )
    num_classes = len(sources.class_names)
    for class_name in sources.class_names:
        if not isinstance(class_name, str):
            raise UserError(
                f"DATA.DATASET is {name!r}: its class name {class_name!r} is"
                f" {type(class_name).__name__}, not text"
            )
    for split, source in (("train", sources.train), ("val", sources.val)):
        targets = np.asarray(source.targets)
        is_needed = split == "val" or not validation_only
        if len(source) == 0 and is_needed:
            raise UserError(f"DATA.DATASET is {name!r}: its {split} source has no images")
        if len(targets) != len(source):
            raise UserError(
                f"DATA.DATASET is {name!r}: its {split} source has {len(source):,} images and"
                f" {len(targets):,} targets"
            )
        for label in (targets.min(initial=0), targets.max(initial=0)):
            if not 0 <= label < num_classes:
                raise UserError(
                    f"DATA.DATASET is {name!r}: its {split} source has label {label}, with"
                    f" {num_classes} classes"
                )
