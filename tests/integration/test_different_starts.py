"""Ranks that are not started alike: each ends with a line that names what differs, and nothing is
written."""

import os
import shutil
from functools import partial

import pytest
from gloo_processes import Outcome, Processes, run_script
from tool_cases import words

CFG = ["--cfg", "configs/quickstart_digits.yaml"]


def run_own_script(script: str, arguments: list[list[str]]) -> None:
    run_script(script, arguments[int(os.environ["RANK"])])


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """`start(script, arguments of rank 0, arguments of rank 1, ...)`: how each rank ended."""

    def run(script: str, *arguments: list) -> list[Outcome]:
        own_words = [words(*own) for own in arguments]
        logs = tmp_path_factory.mktemp("printed")
        return Processes(len(own_words), logs, partial(run_own_script, script, own_words)).wait()

    return run


def refused(ended: list[Outcome], text: str) -> None:
    assert [(outcome.status, outcome.out) for outcome in ended] == [(2, "")] * len(ended)
    error = f"error: the ranks were started differently: {text}"
    assert [outcome.err for outcome in ended] == [f"{error}\n", f"{error} (rank 1)\n"]


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("TRAIN.BASE_LR", 0.01, 0.1),
        ("MODEL.MOE.TOP_K", 1, 2),
        ("DATA.GLOBAL_BATCH_SIZE", 32, 33),  # 33 would not divide
    ],
)
def test_training_with_different_keys(key, first, second, start, small, tmp_path):
    words = [*CFG, "--output", tmp_path / "run", "--opts", *small, key]
    ended = start("tools/train.py", [*words, first], [*words, second])
    refused(ended, f"{key} is {first} on rank 0, {second} on rank 1")
    assert list(tmp_path.iterdir()) == []


def test_training_with_different_options(start, small, tmp_path):
    opts = ["--opts", *small]
    first = [*CFG, "--output", tmp_path / "a", *opts]
    second = [*CFG, "--output", tmp_path / "b", "--resume", "auto", *opts]
    ended = start("tools/train.py", first, second)
    places = f"OUTPUT is '{tmp_path / 'a'}' on rank 0, '{tmp_path / 'b'}' on rank 1"
    refused(ended, f"{places}; --resume is None on rank 0, 'auto' on rank 1")
    assert list(tmp_path.iterdir()) == []


def test_data_may_lie_elsewhere_on_each_machine(start, small, photographs, tmp_path):
    """But they must be the same."""
    shutil.copytree(photographs, tmp_path / "local")
    common = ["--cfg", "configs/imagenette_96.yaml", "--output", tmp_path / "run"]
    opts = ["--opts", *small, "DATA.BATCH_SIZE", "8", "TRAIN.MAX_STEPS", "1"]
    places = [[*common, "--data", data, *opts] for data in (photographs, tmp_path / "local")]
    ended = start("tools/train.py", *places)
    assert [(outcome.status, outcome.err) for outcome in ended] == [(0, "")] * 2
    shutil.rmtree(tmp_path / "run")
    train = tmp_path / "local" / "train"
    (train / "red" / "00.jpg").rename(train / "blue" / "99.jpg")
    ended = start("tools/train.py", *places)
    assert [outcome.status for outcome in ended] == [2, 2]
    says = f"DATA.PATH is '{photographs}': the ranks find different data there: training image"
    assert ended[0].err.startswith(f"error: {says}")
    assert not (tmp_path / "run").exists()


CROP = "TEST.CROP_RATIO is '0.9' on rank 0, '0' on rank 1"


@pytest.mark.parametrize(
    ("script", "first", "second", "text"),
    [
        ("few_shot", "--draws 2", "--draws 3", "draws is 2 on rank 0, 3 on rank 1"),
        ("evaluate", "--opts TEST.CROP_RATIO 0.9", "--opts TEST.CROP_RATIO 0", CROP),
    ],
)
def test_what_uses_a_checkpoint(script, first, second, text, start, runs):
    common = ["--resume", runs / "experts"]
    refused(start(f"tools/{script}.py", [*common, first], [*common, second]), text)


def test_what_is_timed(start, small, tmp_path):
    keys = zip(small[::2], small[1::2], strict=True)
    opts = [f"{key} {value}" for key, value in keys if key != "DATA.BATCH_SIZE"]
    words = [*CFG, "--output", tmp_path, "--opts", *opts, "--rounds"]
    arguments = [[*words, rounds] for rounds in (2, 3)]
    refused(start("tools/throughput.py", *arguments), "--rounds is 2 on rank 0, 3 on rank 1")
    assert list(tmp_path.iterdir()) == []
