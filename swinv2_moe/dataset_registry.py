"""Registry of datasets: the allowed values of DATA.DATASET, and the keys that each dataset needs.

A new dataset is one file, `swinv2_moe/data/sources/NAME.py` or a file given by `--import FILE`:

    >>> from swinv2_moe.data import ImageArrays, Sources, register_dataset
    >>> @register_dataset("npz")
    ... def npz(config: DataConfig) -> Sources: ...
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

LoadFunction = TypeVar("LoadFunction", bound=Callable[[Any], Any])


@dataclass(frozen=True)
class RegisteredDataset:
    """A function that loads a dataset, and the configuration keys that it needs.

    Attributes:
        load: `swinv2_moe.config.DataConfig` -> `swinv2_moe.data.Sources`.
        needs_path: DATA.PATH must name a directory.
        needs_lists: DATA.TRAIN_LIST and DATA.VAL_LIST must name files; DATA.PATH is optional.
        use_workers: the loader may read images in DATA.NUM_WORKERS processes.
    """

    load: Callable[[Any], Any]
    needs_path: bool = True
    needs_lists: bool = False
    use_workers: bool = True

    @property
    def needs_files(self) -> bool:
        """Whether the configuration must name files. If so, `--data` names files of this dataset.
        Otherwise `--data` names a folder of images, which replaces this dataset."""
        return self.needs_path or self.needs_lists


_DATASETS: dict[str, RegisteredDataset] = {}


def register_dataset(
    name: str, *, needs_path: bool = True, needs_lists: bool = False, use_workers: bool = True
) -> Callable[[LoadFunction], LoadFunction]:
    """Decorator that registers a function as a value of DATA.DATASET.

    The function receives a `DataConfig` and returns `swinv2_moe.data.Sources`. In its `path`, "~"
    is expanded. If the dataset needs files, `path` is an existing directory or empty. For missing
    or broken data the function raises UserError, with a message of one line that names the file.

    Args:
        name: the value of DATA.DATASET.
        needs_path: DATA.PATH must name a directory.
        needs_lists: DATA.TRAIN_LIST and DATA.VAL_LIST must name files.
        use_workers: False for images that are fast to read. The training process then reads them,
            for any DATA.NUM_WORKERS.

    Raises:
        ValueError: the name is registered already, or is not a string.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a dataset is registered as {name!r}, which is not a name")
    if name in _DATASETS:
        load = _DATASETS[name].load
        place = f"{load.__module__}.{load.__qualname__}"
        raise ValueError(f"DATA.DATASET {name!r} is registered already: {place}")

    def register(load: LoadFunction) -> LoadFunction:
        _DATASETS[name] = RegisteredDataset(load, needs_path, needs_lists, use_workers)
        return load

    return register


def datasets() -> Mapping[str, RegisteredDataset]:
    """All registered datasets by name. This imports the package's datasets, which register
    themselves."""
    importlib.import_module("swinv2_moe.data.sources")
    return _DATASETS
