"""tools/scaling.py on the digits: batch sizes and optimisers, resumed, and what it refuses."""

import csv
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from tool_cases import ROOT, assert_one_line, command

from swinv2_moe.commands.scaling import points, train
from swinv2_moe.config import load_config, resolve_batch_size
from swinv2_moe.errors import UserError
from swinv2_moe.measure.scaling_results import Point, Result, read

CFG = ("--cfg", ROOT / "configs" / "quickstart_digits.yaml")
SMALL = (
    "--opts TRAIN.EPOCHS 1 TRAIN.WARMUP_EPOCHS 0 MODEL.SWINV2.EMBED_DIM 16"
    " MODEL.SWINV2.DEPTHS [1,1,1] MODEL.MOE.BLOCKS [[],[],[0]] DATA.NUM_WORKERS 0"
    " TRAIN.WARMUP_LR 0 TRAIN.MIN_LR 0"
)
SIZES = "--batch-sizes 256 --optimizers adamw lamb=0.1"


@pytest.fixture
def scaling(monkeypatch, capsys):
    return command("scaling", monkeypatch, capsys)


@pytest.mark.parametrize("key", ["DATA.GLOBAL_BATCH_SIZE", "TRAIN.ACCUMULATION_STEPS"])
def test_a_batch_size_counts_the_images_of_a_step(key):
    """Whatever the configuration says of the batch."""
    args = SimpleNamespace(cfg=CFG[1], data=None, opts=[key, "4"], target=5.0)
    args.seeds, args.batch_sizes, args.optimizers = 1, [32, 32], ["adamw", "adamw"]
    args.output = "new"
    (point,) = points(args)
    config = resolve_batch_size(load_config(args.cfg, list(point.opts), None), 1)
    assert config.DATA.BATCH_SIZE * config.TRAIN.ACCUMULATION_STEPS == 32


def test_a_run_of_fewer_steps_than_are_logged_has_no_noise_scale(tmp_path: Path):
    point = Point("adamw", 512, 0, ())
    run = tmp_path / point.name
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    summary = {"parameters": 1, "active_macs": 1, "world_size": 1, "device": "cpu", "steps": 3}
    summary |= {"target_step": 2, "target_epoch": 1, "val_top1": 50.0, "images_per_second": 9.0}
    (run / "summary.json").write_text(json.dumps(summary))
    assert read([point], tmp_path) == [Result("adamw", 512, 0, 1, 2, 50.0, None, 9.0)]


def test_a_training_that_was_told_to_stop_is_not_done(tmp_path: Path):
    args = SimpleNamespace(cfg=CFG[1], data=None)
    jobs = SimpleNamespace(run=lambda *words: None)  # it ended with status 0
    with pytest.raises(UserError, match="adamw-batch8-seed0: the training was told to stop"):
        train(Point("adamw", 8, 0, ()), tmp_path, args, jobs)


def test_runs_are_trained_once_and_compared(scaling, quick_jobs, tmp_path: Path):
    words = [*CFG, "--target 5", SIZES, "--output", tmp_path]
    done = scaling(*words, SMALL)
    assert done.status == 0, done.err
    with (tmp_path / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    runs = [(row["optimizer"], row["batch_size"]) for row in rows]
    assert runs == [("adamw", "256"), ("lamb=0.1", "256")]
    for row, name in zip(rows, ("adamw", "lamb-0.1"), strict=True):
        assert row["target_epoch"] == "1"  # five percent is less than chance
        summary = json.loads((tmp_path / f"{name}-batch256-seed0" / "summary.json").read_text())
        assert float(row["top1"]) == summary["val_top1"]
    assert float(rows[0]["noise_scale"]) >= 0
    assert (tmp_path / "scaling.png").stat().st_size > 5_000
    assert done.out.count(" 1 of 1 |") == 2

    stamps = {file: os.stat(file).st_mtime_ns for file in tmp_path.glob("*/summary.json")}
    assert scaling(*words, SMALL).status == 0
    assert stamps == {file: os.stat(file).st_mtime_ns for file in stamps}
    more = scaling(*words, "--seeds 2 --table", SMALL)
    assert (more.status, more.out.count(" 1 of 1 |")) == (0, 2)
    # what the runs recorded is of their own target
    other = scaling(*CFG, "--target 99", SIZES, "--output", tmp_path, "--table", SMALL)
    assert_one_line(other, "its run has TRAIN.TARGET_TOP1 5.0, this command now has 99.0")


BAD_INPUT = {
    "--target 0 --batch-sizes 8": "--target is 0, it must be a percentage",
    "--target 9 --batch-sizes 0": "--batch-sizes is 0, it must be at least 1",
    "--target 9 --batch-sizes 8 --optimizers adma": "TRAIN.OPTIMIZER.NAME is 'adma'",
    "--target 9 --batch-sizes 8 --optimizers lamb=fast": "TRAIN.BASE_LR",
    "--target 9 --batch-sizes 8 --table": "no run has ended yet",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_what_cannot_be_used_is_one_line(scaling, tmp_path, words):
    done = scaling(*CFG, words, "--output", tmp_path / "new")
    assert_one_line(done, BAD_INPUT[words])
