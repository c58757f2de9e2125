"""A run directory read back, whole, half-written or not one; its curves thinned."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swinv2_moe.config import default_config
from swinv2_moe.errors import UserError
from swinv2_moe.measure.run_record import read_run, read_runs
from swinv2_moe.plots import thin
from swinv2_moe.tables import block_place

STEP = {"step": 10, "epoch": 1, "loss": 2.0, "images_per_second": 9.0}
STEP |= {"moe/dropped_share": 0.0, "moe/load_max": 1.0}
STEP |= {"moe_layers": {"layers.1.blocks.0.mlp.moe": {"load": [1.0, 1.0]}}}
EPOCH = {"step": 20, "epoch": 1, "val_top1": 50.0, "val_top5": 90, "seconds": 5.0}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.yaml").write_text(default_config().dump())
    no_loss = STEP | {"step": 30, "loss": None}
    lines = [{"step": 0, "environment": {"torch": "2"}}, STEP, EPOCH, no_loss]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_what_a_run_has_left(directory):
    run = read_run(directory)
    assert (run.summary, run.damaged_lines, run.environments) == (None, 0, [{"torch": "2"}])
    assert run.layers == ["layers.1.blocks.0.mlp.moe"]
    # a loss that is not finite is left out
    assert run.curve(lambda step: step["loss"]) == ([10], [2.0])
    assert run.epoch_curve("val_top1") == ([20], [50.0])
    assert run.load(run.layers[0]) == ([10, 30], [[1.0, 1.0]] * 2)


DAMAGED_LINES = [
    '{"step": 40, "lo',
    b'{"step": 40, "loss\xff\x00',
    {"step": 40, "loss": 1.0},
    {"step": 40, "environment": 3},
    STEP | {"step": "x"},
    STEP | {"loss": "a"},
    STEP | {"moe_layers": {"layers.1.blocks.0.mlp.moe": [1.0, 1.0]}},
    EPOCH | {"val_top5": None},
    3,
    "[" * 100_000,
    '{"step": ' + "1" * 5000 + "}",
    STEP | {"loss": 10**400},
    STEP | {"loss": float("inf")},
    STEP | {"moe_layers": {"layers.1.blocks.0.mlp.moe": {"load": ["a", None]}}},
    EPOCH | {"seconds": float("nan")},
]


def test_lines_that_are_not_as_they_were_written(directory):
    file = directory / "metrics.jsonl"
    whole = file.read_bytes()
    for line in DAMAGED_LINES:
        text = line if isinstance(line, (str, bytes)) else json.dumps(line)
        file.write_bytes(whole + (text if isinstance(text, bytes) else text.encode()))
        run = read_run(directory)
        assert run.damaged_lines == 1, text[:100]
        assert (len(run.steps), len(run.epochs), len(run.environments)) == (2, 1, 1), text[:100]


ENDLESS = {"parameters": 10**400, "active_macs": 1, "world_size": 1, "device": "cpu"}


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("metrics.jsonl", None, ["holds no run", "metrics.jsonl"]),
        ("metrics.jsonl", "", ["no logged step", "0 lines"]),
        ("metrics.jsonl", json.dumps(EPOCH), ["no logged step", "1 lines"]),
        ("config.yaml", None, ["holds no config.yaml"]),
        ("config.yaml", "\n", ["config.yaml: is empty"]),
        ("config.yaml", "DATA: 3", ["config.yaml", "cannot be used"]),
        ("summary.json", '{"val', ["summary.json", "damaged"]),
        ("summary.json", '{"val_top1": 3}', ["summary.json", "damaged"]),
        ("summary.json", json.dumps(ENDLESS), ["summary.json", "damaged"]),
    ],
)
def test_half_written_runs_are_refused(directory, file, content, words):
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        read_run(directory)
    assert all(word in str(error.value) for word in [str(directory), *words])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/x/run"], ["run"]),
        (["a/x/run", "b/_old"], ["run", "_old"]),
        (["a/x/run", "b/x/run"], ["a/x/run", "b/x/run"]),
        (["b/_old", "b/_old"], ["_old", "_old"]),
    ],
)
def test_runs_of_one_name_are_told_apart(directory, paths, names):
    for path in set(paths):
        shutil.copytree(directory, directory / path, ignore=shutil.ignore_patterns("a", "b"))
    assert [run.name for run in read_runs([directory / path for path in paths])] == names


def test_top5_of_five_classes_says_nothing(directory):
    run = read_run(directory)
    for shares, says in (([100, 100], False), ([100, 99.9], True), ([], False)):
        epochs = [EPOCH | {"val_top5": share} for share in shares]
        assert replace(run, epochs=epochs).has_top5 == says


@pytest.mark.timeout(120)
@pytest.mark.parametrize("file", ["metrics.jsonl", "config.yaml", "summary.json"])
def test_a_pipe_or_a_device_in_the_place_of_a_file(directory, file):
    (directory / file).unlink(missing_ok=True)
    os.mkfifo(directory / file)
    with pytest.raises(UserError, match="not a regular file"):
        read_run(directory)
    (directory / file).unlink()
    (directory / file).symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a regular file"):
        read_run(directory)


def test_a_file_is_not_a_run(directory):
    with pytest.raises(UserError, match=r"config\.yaml: is not a run directory"):
        read_run(directory / "config.yaml")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000))
def test_a_thinned_curve_keeps_its_mean_and_order(values):
    x, y = thin(range(len(values)), values)
    assert len(x) == len(y) == min(len(values), 400)
    assert np.all(np.diff(x) > 0)
    if len(values) % 400 == 0 or len(values) < 400:  # as many in each group
        assert np.isclose(y.mean(), np.mean(values), atol=1e-6)


def test_layers_are_counted_from_one():
    assert block_place("layers.2.blocks.3.mlp.moe") == "stage 2, block 3"
    assert block_place("other") == "other"
