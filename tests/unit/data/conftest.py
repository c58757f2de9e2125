"""Configurations and image folders for the data tests."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from yacs.config import CfgNode

from swinv2_moe.config import default_config

# RandAugment draws from numpy and random, erasing from torch and random, the flip from torch.
FULL_AUGMENTATION = {"AUG.REPROB": 0.5, "AUG.AUTO_AUGMENT": "rand-m9-mstd0.5-inc1"}
NO_AUGMENTATION = {"AUG.SCALE": [1.0, 1.0], "AUG.HFLIP": 0.0, "AUG.COLOR_JITTER": 0.0} | {
    "AUG.AUTO_AUGMENT": "",
    "AUG.REPROB": 0.0,
}


def set_keys(config: CfgNode, keys: dict[str, object]) -> CfgNode:
    for name, value in keys.items():
        *groups, leaf = name.split(".")
        node = config
        for group in groups:
            node = node[group]
        assert leaf in node, name
        node[leaf] = value
    return config


@pytest.fixture
def make_config() -> Callable[..., CfgNode]:
    """`make_config({"DATA.IMG_SIZE": 32}, ...)`: the defaults at 16 px, batches of 4 and no
    workers, then these."""

    def make(*keys: dict[str, object]) -> CfgNode:
        config = set_keys(
            default_config(), {"DATA.IMG_SIZE": 16, "DATA.BATCH_SIZE": 4, "DATA.NUM_WORKERS": 0}
        )
        for group in keys:
            set_keys(config, group)
        return config

    return make


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """`make_folder(classes, per_class)`: train/ and val/ with small noise images, each
    different."""

    def make(
        classes: tuple[str, ...] = ("cat", "dog"), per_class: int = 4, name: str = "images"
    ) -> Path:
        rng = np.random.default_rng(0)
        for split in ("train", "val"):
            for label in classes:
                (tmp_path / name / split / label).mkdir(parents=True)
                for number in range(per_class):
                    pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(tmp_path / name / split / label / f"{number}.png")
        return tmp_path / name

    return make


@pytest.fixture
def full_augmentation() -> dict[str, object]:
    return FULL_AUGMENTATION


@pytest.fixture
def no_augmentation() -> dict[str, object]:
    return NO_AUGMENTATION
