"""Runs of a second: 160 + 40 digits, a model of three blocks (two with experts), five steps of 32
images an epoch."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import sklearn.datasets
import torch
from run_cases import saver_of
from tool_cases import models_counted_once
from yacs.config import CfgNode

from swinv2_moe.config import all_sections, load_config
from swinv2_moe.data.build import build_data
from swinv2_moe.models import build_model
from swinv2_moe.ranks.world import World, seed_everything
from swinv2_moe.train.loop import Trainer

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart_digits.yaml"
SMALL = {
    "MODEL.SWINV2.EMBED_DIM": 16,
    "MODEL.SWINV2.DEPTHS": [1, 1, 1],
    "MODEL.MOE.BLOCKS": [[], [0], [0]],
    "MODEL.MOE.NUM_EXPERTS": 4,
    "DATA.BATCH_SIZE": 32,
    "TRAIN.EPOCHS": 2,
    "TRAIN.WARMUP_EPOCHS": 1,
    "PRINT_FREQ": 1,
    "DEVICE": "cpu",
}


@pytest.fixture(autouse=True, scope="session")
def quick_counting():
    with models_counted_once():
        yield


@pytest.fixture(autouse=True, scope="module")
def few_digits():
    """The first 200 digits in place of all 1,797."""
    pixels, targets = sklearn.datasets.load_digits(return_X_y=True)
    few = Mock(return_value=(pixels[:200], targets[:200]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sklearn.datasets, "load_digits", few)
        yield


def _config(output: Path, keys: dict[str, object] | None = None) -> CfgNode:
    opts = [str(part) for pair in (SMALL | (keys or {})).items() for part in pair]
    return load_config(QUICKSTART, opts, output=str(output))


@pytest.fixture(scope="session")
def make_config() -> Callable[..., CfgNode]:
    """`make_config(output, {"KEY": value})`."""
    return _config


@pytest.fixture
def make_trainer(tmp_path) -> Callable[..., Trainer]:
    """`make_trainer({"KEY": value})`: a trainer in this process that has not begun."""

    def make(keys: dict[str, object] | None = None) -> Trainer:
        config = all_sections(_config(tmp_path, keys))
        data = build_data(config.data)
        seed_everything(config.run.seed)
        model = build_model(config.model, data.num_classes)
        return Trainer(config, World(0, 1, torch.device("cpu")), data, model)

    return make


@pytest.fixture
def save() -> Callable[..., Path]:
    """`save(trainer, root, is_best=...)`: its state as a checkpoint in `root`; that checkpoint."""

    def run(trainer: Trainer, root: Path, **how) -> Path:
        saver = saver_of(trainer, root)
        trainer.save(saver, **how)
        saver.close()
        return root / f"step-{trainer.progress.step:08d}"

    return run


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB: room for three checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    mount = subprocess.run(command, capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small file system needs the right to mount: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="session")
def read_metrics() -> Callable[[Path], tuple[list[dict], list[dict]]]:
    """`read_metrics(run)`: its step lines and its epoch lines."""

    def read(run: Path) -> tuple[list[dict], list[dict]]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "loss" in line], [
            line for line in lines if "train_loss" in line
        ]

    return read


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Time that passes when the test says so: `clock.append(seconds)`."""
    passed: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: sum(passed, 100.0))
    return passed
