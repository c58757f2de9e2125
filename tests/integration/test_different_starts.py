"""Ranks that are not started alike: each ends with a line that names what differs, and nothing is
written."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from gloo_processes import Outcome, Processes, run_script

from swinv2_moe.config import load_config
from swinv2_moe.train import train

CFG = ["--cfg", "configs/quickstart_digits.yaml"]


def run_own_script(script: str, arguments: list[list[str]]) -> None:
    run_script(script, arguments[int(os.environ["RANK"])])


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """`start(script, arguments of rank 0, arguments of rank 1, ...)`: how each rank ended."""

    def run(script: str, *arguments: list) -> list[Outcome]:
        words = [list(map(str, own)) for own in arguments]
        logs = tmp_path_factory.mktemp("printed")
        return Processes(len(words), logs, partial(run_own_script, script, words)).wait()

    return run


@pytest.fixture(scope="module")
def photographs(make_photographs):
    return make_photographs()


@pytest.fixture(scope="module")
def run(tmp_path_factory, photographs, small) -> Path:
    """A run of one step."""
    root = tmp_path_factory.mktemp("run")
    opts = [*small, "DATA.DATASET", "folder", "TRAIN.MAX_STEPS", "1"]
    train(load_config(None, opts, data=str(photographs), output=str(root)))
    return root


def refused(ended: list[Outcome], text: str) -> None:
    assert [(outcome.status, outcome.out) for outcome in ended] == [(2, "")] * len(ended)
    error = f"error: the ranks were started differently: {text}"
    assert [outcome.err for outcome in ended] == [f"{error}\n", f"{error} (rank 1)\n"]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            ["TRAIN.BASE_LR", "1e-2"],
            ["TRAIN.BASE_LR", "1e-1"],
            "TRAIN.BASE_LR is 0.01 on rank 0, 0.1 on rank 1",
        ),
        (
            ["MODEL.MOE.TOP_K", "1"],
            ["MODEL.MOE.TOP_K", "2"],
            "MODEL.MOE.TOP_K is 1 on rank 0, 2 on rank 1",
        ),
        (
            ["DATA.GLOBAL_BATCH_SIZE", "32"],
            ["DATA.GLOBAL_BATCH_SIZE", "33"],  # which would not divide
            "DATA.GLOBAL_BATCH_SIZE is 32 on rank 0, 33 on rank 1",
        ),
    ],
)
def test_training_with_different_keys(first, second, text, start, small, tmp_path):
    common = [*CFG, "--output", tmp_path / "run", "--opts", *small]
    refused(start("tools/train.py", [*common, *first], [*common, *second]), text)
    assert list(tmp_path.iterdir()) == []


def test_training_with_different_options(start, small, tmp_path):
    opts = ["--opts", *small]
    ended = start(
        "tools/train.py",
        [*CFG, "--output", tmp_path / "a", *opts],
        [*CFG, "--output", tmp_path / "b", "--resume", "auto", *opts],
    )
    places = f"OUTPUT is '{tmp_path / 'a'}' on rank 0, '{tmp_path / 'b'}' on rank 1"
    refused(ended, f"{places}; --resume is None on rank 0, 'auto' on rank 1")
    assert list(tmp_path.iterdir()) == []


def test_data_may_lie_elsewhere_on_each_machine(start, small, photographs, tmp_path):
    """But they must be the same."""
    shutil.copytree(photographs, tmp_path / "local")
    common = ["--cfg", "configs/imagenette_96.yaml", "--output", tmp_path / "run"]
    opts = ["--opts", *small, "DATA.BATCH_SIZE", "8", "TRAIN.MAX_STEPS", "1"]
    places = [[*common, "--data", data, *opts] for data in (photographs, tmp_path / "local")]
    assert [(outcome.status, outcome.err) for outcome in start("tools/train.py", *places)] == [
        (0, "")
    ] * 2
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "local" / "train" / "red" / "00.jpg").rename(
        tmp_path / "local" / "train" / "blue" / "99.jpg"
    )
    ended = start("tools/train.py", *places)
    assert [outcome.status for outcome in ended] == [2, 2]
    assert ended[0].err.startswith(
        f"error: DATA.PATH is '{photographs}': the ranks find different data there: training image"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("script", "first", "second", "text"),
    [
        (
            "evaluate",
            ["--sweep", "1"],
            ["--sweep", "1", "0"],
            "sweep is (1.0,) on rank 0, (1.0, 0.0) on rank 1",
        ),
        ("few_shot", ["--draws", "2"], ["--draws", "3"], "draws is 2 on rank 0, 3 on rank 1"),
        (
            "evaluate",
            ["--opts", "TEST.CROP", "true"],
            ["--opts", "TEST.CROP", "false"],
            "TEST.CROP is 'true' on rank 0, 'false' on rank 1",
        ),
    ],
)
def test_what_uses_a_checkpoint(script, first, second, text, start, run):
    common = ["--resume", run]
    refused(start(f"tools/{script}.py", [*common, *first], [*common, *second]), text)


@pytest.mark.parametrize("script", ["throughput", "roofline"])
def test_what_is_timed(script, start, small, tmp_path):
    opts = [
        word
        for pair in zip(small[::2], small[1::2], strict=True)
        if pair[0] != "DATA.BATCH_SIZE"
        for word in pair
    ]
    arguments = [
        [*CFG, "--output", tmp_path, "--rounds", rounds, "--opts", *opts] for rounds in (2, 3)
    ]
    refused(start(f"tools/{script}.py", *arguments), "--rounds is 2 on rank 0, 3 on rank 1")
    assert list(tmp_path.iterdir()) == []
