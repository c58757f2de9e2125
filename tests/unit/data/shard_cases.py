"""Shards of 40 noise images, and what the tests of shards share."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from swinv2_moe.data.prepare.make_shards import ShardOptions
from swinv2_moe.data.sources import ImageArrays, Sources

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
SOURCE = ImageArrays("noise", PIXELS, np.arange(40) % 4)
SOURCES = Sources(SOURCE, SOURCE, list("abcd"))
OPTIONS = ShardOptions(shard_mb=0.02)


def edit_index(made: Path, edit: Callable[[dict], object]) -> None:
    index = json.loads((made / "index.json").read_text())
    edit(index)
    (made / "index.json").write_text(json.dumps(index))
