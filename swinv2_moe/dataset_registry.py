"""Registry of datasets: what DATA.DATASET may name, and which keys each of them needs.

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
    """A function that loads a dataset, and what the configuration must give it.

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
        """Whether the configuration must name files. `--data` then names files of this dataset,
        otherwise a folder of images that replaces it."""
        return self.needs_path or self.needs_lists


_DATASETS: dict[str, RegisteredDataset] = {}


def register_dataset(
    name: str, *, needs_path: bool = True, needs_lists: bool = False, use_workers: bool = True
) -> Callable[[LoadFunction], LoadFunction]:
    """A decorator that makes a function selectable by DATA.DATASET.

    The function receives a `DataConfig` and returns `swinv2_moe.data.Sources`. In its `path` "~" is
    expanded; where the dataset needs files, `path` is an existing directory or empty. The function
    raises UserError, in one line that names the file, for missing or broken data.

    Args:
        name: the value of DATA.DATASET.
        needs_path: DATA.PATH must name a directory.
        needs_lists: DATA.TRAIN_LIST and DATA.VAL_LIST must name files.
        use_workers: False for images that take no time to read: the training process reads them,
            whatever DATA.NUM_WORKERS says.

    Raises:
        ValueError: the name is taken, or not a text.
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
    """Every registered dataset by name. Imports those of the package, which register themselves."""
    importlib.import_module("swinv2_moe.data.sources")
    return _DATASETS
