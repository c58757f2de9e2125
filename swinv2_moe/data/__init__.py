"""Images from a configuration: sources, transforms, samplers and loaders.

`build_data` makes the loaders of a run. `register_dataset` adds a dataset.
"""

from swinv2_moe.data.build import Data, build_data, evaluation_loader
from swinv2_moe.data.datasets import IGNORE, Batch, UnreadableImages
from swinv2_moe.data.sources import ImageArrays, ImageFiles, Source, Sources, load_sources
from swinv2_moe.data.transforms import build_transform
from swinv2_moe.dataset_registry import register_dataset

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
