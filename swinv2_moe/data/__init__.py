"""Images from a configuration: sources, transforms, samplers and loaders.

`build_data` makes the loaders of a run. `register_dataset` adds a dataset. Names whose modules
import torch are imported at their first use. So the datasets' names are available without importing
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from swinv2_moe.data.sources import ImageArrays, ImageFiles, Source, Sources, load_sources
from swinv2_moe.dataset_registry import register_dataset

_MODULES = {
    "build": ("Data", "build_data", "evaluation_loader"),
    "datasets": ("IGNORE", "Batch", "UnreadableImages"),
    "transforms": ("build_transform",),
}

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from swinv2_moe.data.build import Data, build_data, evaluation_loader
    from swinv2_moe.data.datasets import IGNORE, Batch, UnreadableImages
    from swinv2_moe.data.transforms import build_transform
else:

    def __getattr__(name: str) -> object:
        for module, names in _MODULES.items():
            if name in names:
                globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
                return globals()[name]
        try:
            return import_module(f"{__name__}.{name}")  # such as swinv2_moe.data.transforms
        except ModuleNotFoundError as error:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error

    def __dir__() -> list[str]:
        return sorted(set(globals()) | set(__all__))


__all__ = [
    "IGNORE",
    "Batch",
    "Data",
    "ImageArrays",
    "ImageFiles",
    "Source",
    "Sources",
    "UnreadableImages",
    "build_data",
    "build_transform",
    "evaluation_loader",
    "load_sources",
    "register_dataset",
]
