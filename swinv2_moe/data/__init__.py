"""Images from a configuration: sources, transforms, samplers and loaders. `build_data` is the
entry."""

from swinv2_moe.data.build import Data, build_data, evaluation_loader
from swinv2_moe.data.datasets import IGNORE, Batch, UnreadableImages
from swinv2_moe.data.transforms import build_transform

__all__ = [
    "IGNORE",
    "Batch",
    "Data",
    "UnreadableImages",
    "build_data",
    "build_transform",
    "evaluation_loader",
]
