"""Images from a configuration: sources, transforms, samplers and loaders.

Importing this package registers its datasets; it does not import torch. `build_data` of
`swinv2_moe.data.build` makes the loaders of a run.
"""

from swinv2_moe.data.section import register_dataset
from swinv2_moe.data.sources import ImageArrays, ImageFiles, Source, Sources, load_sources

__all__ = ["ImageArrays", "ImageFiles", "Source", "Sources", "load_sources", "register_dataset"]
