"""Small runs through the command line: tools/train.py in this process, or on ranks of their own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gloo_processes import Outcome, Processes, run_script
from PIL import Image
from tool_cases import Finished, command

# Three blocks at 16 px; no workers, since starting them costs more than the run.
SMALL = (
    "MODEL.SWINV2.PATCH_SIZE 2 MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.DEPTHS [1,1,1]"
    " MODEL.SWINV2.NUM_HEADS [2,2,4]"
)
SMALL += (
    " MODEL.SWINV2.WINDOW_SIZE 4 MODEL.SWINV2.PRETRAINED_WINDOW_SIZES [0,0,0] MODEL.MOE.BLOCKS"
    " [[],[0],[0]]"
)
SMALL += (
    " MODEL.MOE.NUM_EXPERTS 4 DATA.IMG_SIZE 16 DATA.BATCH_SIZE 16 DATA.NUM_WORKERS 0 DEVICE cpu"
)
SMALL += " TRAIN.EPOCHS 2 TRAIN.WARMUP_EPOCHS 1 PRINT_FREQ 1"


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
        words = list(map(str, arguments))
        return Processes(
            size, tmp_path_factory.mktemp("printed"), partial(run_script, script, words)
        ).wait(280)

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
