"""Configurations, image folders and shards for the data tests."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shard_cases import OPTIONS, SOURCES
from yacs.config import CfgNode

from swinv2_moe import tables
from swinv2_moe.config import data_config, default_config
from swinv2_moe.data.prepare.make_shards import make_shards
from swinv2_moe.data.section import DataConfig
from swinv2_moe.data.sources import load_sources

# RandAugment draws from numpy and random, erasing from torch and random, the flip from torch.
FULL_AUGMENTATION = {"AUG.REPROB": 0.5, "AUG.AUTO_AUGMENT": "rand-m9-mstd0.5-inc1"}
NO_AUGMENTATION = {"AUG.SCALE": [1.0, 1.0], "AUG.HFLIP": 0.0, "AUG.COLOR_JITTER": 0.0}
NO_AUGMENTATION |= {"AUG.AUTO_AUGMENT": "", "AUG.REPROB": 0.0}
SMALL = {"DATA.IMG_SIZE": 16, "DATA.BATCH_SIZE": 4, "DATA.NUM_WORKERS": 0}


@pytest.fixture(autouse=True)
def no_bar_of_transfers(monkeypatch) -> None:
    monkeypatch.setattr(tables.TransferBar, "start", lambda self: None)


@pytest.fixture(scope="session")
def make_config() -> Callable[..., CfgNode]:
    """`make_config({"DATA.IMG_SIZE": 32}, ...)`: the defaults at 16 px, batches of 4 and no
    workers, then these."""

    def make(*keys: dict[str, object]) -> CfgNode:
        config = default_config()
        for group in (SMALL, *keys):
            for name, value in group.items():
                *sections, leaf = name.split(".")
                node = config
                for section in sections:
                    node = node[section]
                assert leaf in node, name
                node[leaf] = value
        return config

    return make


@pytest.fixture(scope="session")
def make_data(make_config) -> Callable[..., DataConfig]:
    """`make_data({"DATA.IMG_SIZE": 32}, ...)`: the data section of such a configuration."""
    return lambda *keys: data_config(make_config(*keys))


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
def root(make_folder):
    """train/ and val/ with 20 images of each of two classes."""
    return make_folder(("cat", "dog"), per_class=20)


@pytest.fixture
def load(make_data, root):
    """`load({"DATA.VAL_SPLIT": 0.1}, ...)`: the sources of `root`."""
    dataset = {"DATA.DATASET": "folder", "DATA.PATH": str(root)}
    return lambda *keys: load_sources(make_data(dataset, *keys))


@pytest.fixture(scope="session")
def noise_shards(tmp_path_factory) -> Path:
    """Finished shards of `shard_cases.SOURCES`, not to be changed."""
    directory = tmp_path_factory.mktemp("noise") / "shards"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables.TransferBar, "start", lambda self: None)
        make_shards(SOURCES, str(directory), OPTIONS, 1)
    return directory


@pytest.fixture
def made(noise_shards: Path, tmp_path: Path) -> Path:
    """A copy of them, two folders down."""
    return Path(shutil.copytree(noise_shards, tmp_path / "downloads" / "shards"))


@pytest.fixture
def full_augmentation() -> dict[str, object]:
    return FULL_AUGMENTATION


@pytest.fixture
def no_augmentation() -> dict[str, object]:
    return NO_AUGMENTATION
