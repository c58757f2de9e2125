"""The datasets for DATA.DATASET. Each file here registers one or more datasets.

Importing this package imports every file in it.
"""

import dataclasses
import importlib
import os
import pkgutil

import numpy as np

from swinv2_moe.config import DataConfig
from swinv2_moe.data.sources.base import (
    ImageArrays,
    ImageFiles,
    Source,
    Sources,
    check_directory,
)
from swinv2_moe.dataset_registry import datasets
from swinv2_moe.errors import UserError

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ImageArrays", "ImageFiles", "Source", "Sources", "check_directory", "load_sources"]


def load_sources(config: DataConfig) -> Sources:
    """Load the sources of the dataset DATA.DATASET. Nothing is downloaded.

    Raises:
        UserError: a path, folder, list line or label cannot be used, or train and val have
            different classes.
    """
    dataset = datasets()[config.dataset]
    path = os.path.expanduser(config.path)
    if dataset.needs_files and (path or dataset.needs_path):
        check_directory("DATA.PATH", path)
    sources = dataset.load(dataclasses.replace(config, path=path))
    _check(config.dataset, sources)
    return sources


def _check(name: str, sources: object) -> None:
    """Raise UserError unless the sources have a target for each image and a name for each class."""
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
        if len(source) == 0:
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
