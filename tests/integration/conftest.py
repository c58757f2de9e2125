"""Small runs through the command line: tools/train.py in this process, or on ranks of their own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gloo_processes import Outcome, Processes, run_script
from PIL import Image
from tool_cases import Finished, command, models_counted_once, words

from swinv2_moe.checkpoints.meta import read_meta
from swinv2_moe.config import load_config
from swinv2_moe.train.run import train

# Three blocks at 16 px; no workers, since starting them costs more than the run.
SMALL = (
    "MODEL.SWINV2.PATCH_SIZE 2 MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.DEPTHS [1,1,1]"
    " MODEL.SWINV2.NUM_HEADS [2,2,4] MODEL.SWINV2.WINDOW_SIZE 4"
    " MODEL.SWINV2.PRETRAINED_WINDOW_SIZES [0,0,0] MODEL.MOE.BLOCKS [[],[0],[0]]"
    " MODEL.MOE.NUM_EXPERTS 4 DATA.IMG_SIZE 16 DATA.BATCH_SIZE 16 DATA.NUM_WORKERS 0 DEVICE cpu"
    " TRAIN.EPOCHS 2 TRAIN.WARMUP_EPOCHS 1 PRINT_FREQ 1"
)
# Six experts, which three ranks can share. The losses of the two checkpoints differ.
RUN = (
    "DATA.DATASET folder AUG.MIXUP 0 AUG.CUTMIX 0 TRAIN.BASE_LR 3e-2 MODEL.MOE.NUM_EXPERTS 6"
    " MODEL.MOE.EVAL_CAPACITY_FACTOR 1.25 DATA.INTERPOLATION bilinear"
)


@pytest.fixture(autouse=True, scope="session")
def quick_counting():
    with models_counted_once():
        yield


@pytest.fixture(scope="session")
def small() -> list[str]:
    return SMALL.split()


@pytest.fixture
def train_command(monkeypatch, capsys) -> Callable[..., Finished]:
    """`train_command(*arguments)`: tools/train.py in this process."""
    return command("train", monkeypatch, capsys)


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory) -> Callable[..., list[Outcome]]:
    """`start_ranks(size, "tools/train.py", *arguments)`: a script on so many ranks, and how each of
    them ended.

    Without data workers: processes that die with their parent can have no children.
    """

    def run(size: int, script: str, *arguments: object) -> list[Outcome]:
        function = partial(run_script, script, words(*arguments))
        return Processes(size, tmp_path_factory.mktemp("printed"), function).wait(280)

    return run


@pytest.fixture(scope="session")
def make_photographs(tmp_path_factory) -> Callable[..., Path]:
    """`make_photographs(broken=0)`: train/ and val/ with 24 and 8 JPEGs of each of two classes, red
    and blue."""

    def make(broken: int = 0) -> Path:
        root, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
        for split, count in (("train", 24), ("val", 8)):
            for channel, label in ((0, "red"), (2, "blue")):
                (root / split / label).mkdir(parents=True)
                for i in range(count):
                    pixels = rng.integers(0, 80, (40, 50, 3), dtype=np.uint8)
                    pixels[..., channel] += 150
                    Image.fromarray(pixels).save(root / split / label / f"{i:02d}.jpg")
        for i in range(broken):
            (root / "train" / "red" / f"{i:02d}.jpg").write_bytes(b"\xff\xd8 not a picture")
        return root

    return make


@pytest.fixture(scope="session")
def photographs(make_photographs) -> Path:
    """To be read only. 48 training images and 13 for validation, which neither 2 nor 3 ranks
    divide: 8 blue ones and 5 red ones."""
    root = make_photographs()
    for number in range(3):
        (root / "val" / "red" / f"{number:02d}.jpg").unlink()
    return root


@pytest.fixture(scope="session")
def runs(tmp_path_factory, photographs, small) -> Path:
    """To be read only: "experts" and "dense", runs of two epochs (six steps) on the photographs."""
    root = tmp_path_factory.mktemp("runs")
    for name, keys in (("experts", []), ("dense", ["MODEL.MOE.NUM_EXPERTS", "0"])):
        opts = [*small, *RUN.split(), *keys]
        train(load_config(None, opts, data=str(photographs), output=str(root / name)))
    return root


@pytest.fixture(scope="session")
def best_step(runs) -> int:
    """Of the run "experts"."""
    return read_meta(runs / "experts" / "checkpoints" / "best")["step"]
