"""examples/sweep.py: intervals, pairs and equal time in its table, plans and grids, and two runs
side by side that are not repeated."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tool_cases import ROOT, script

sweep = script("examples/sweep")


def run(*top1: float, seconds: float = 10.0, **summary) -> tuple[list[dict], dict]:
    return [{"val_top1": value, "seconds": seconds} for value in top1], {
        "active_macs": 1e6
    } | summary


def rows(runs: dict) -> dict[str, dict[str, str]]:
    """The cells of the table by variant and title."""
    lines = [line.strip("| ").split(" | ") for line in sweep.table(runs, "dense").splitlines()]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_the_interval_of_three_values():
    """t(0.975, 2) = 4.303; the standard deviation of 1, 2 and 3 is 1."""
    assert sweep.interval([1.0, 2.0, 3.0]) == f"2.00 ± {4.3027 / 3**0.5:.2f}"
    assert sweep.interval([4.0]) == "4.00"


def test_differences_are_paired_by_seed():
    runs = {"dense": {0: run(10), 1: run(20)}, "moe": {1: run(22), 0: run(12), 2: run(90)}}
    found = rows(runs)["moe"]
    assert (found["to control"], found["at its time"]) == ("2.00 ± 0.00", "2.00 ± 0.00")
    assert (found["seeds"], rows(runs)["dense"]["to control"]) == ("3", "-")


def test_at_equal_time_a_slower_run_has_fewer_epochs():
    runs = {"dense": {0: run(1, 2)}, "moe": {0: run(1.5, 4, seconds=15)}}
    assert rows(runs)["moe"]["to control"] == "2.00"
    assert rows(runs)["moe"]["at its time"] == "-0.50"
    runs["moe"] = {0: run(1.5, 4)}  # an epoch that ends with the control's time counts
    assert rows(runs)["moe"]["at its time"] == "2.00"


def test_epochs_until_the_target_and_variants_without_runs():
    runs = {"dense": {0: run(1, target_epoch=4), 1: run(1, target_epoch=None)}, "moe": {}}
    assert rows(runs)["dense"]["epochs to target"] == "4.00"
    assert set(rows(runs)["moe"].values()) == {"moe", "0", "-"}
    assert set(rows({"dense": {}, "moe": {0: run(1)}})["moe"].values()) > {"-", "1.00"}


@pytest.fixture
def plan(tmp_path, small):
    """`plan(**changes)`: a plan file of a dense and a 4-expert variant of one epoch."""
    opts = {key: yaml.safe_load(value) for key, value in zip(small[::2], small[1::2], strict=True)}
    opts |= {"TRAIN.EPOCHS": 1, "TRAIN.WARMUP_EPOCHS": 0, "TRAIN.MAX_STEPS": 3}
    base = {"base": str(ROOT / "configs" / "quickstart_digits.yaml")}
    dense = base | {"opts": {"MODEL.MOE.NUM_EXPERTS": 0}}
    content = {"control": "dense", "seeds": 1, "opts": opts}
    content["variants"] = {"dense": dense, "top1": base}

    def write(**changes) -> str:
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(content | changes))
        return str(tmp_path / "plan.yaml")

    return write


def test_a_grid_and_a_stage(plan):
    stages = {"final": {"seeds": 3, "variants": ["dense"], "opts": {"TRAIN.EPOCHS": 9}}}
    grid = {"DATA.BATCH_SIZE": [1, 2], "TRAIN.BASE_LR": [0.5]}
    file = plan(control="dense-1-0.5", grid=grid, stages=stages)
    assert list(sweep.read_plan(file)[2]) == [
        *("dense-1-0.5", "dense-2-0.5"),
        *("top1-1-0.5", "top1-2-0.5"),
    ]
    control, seeds, variants = sweep.read_plan(file, "final")
    assert (control, seeds, list(variants)) == ("dense-1-0.5", 3, ["dense-1-0.5", "dense-2-0.5"])
    keys = {name: variants["dense-2-0.5"][1][name] for name in [*grid, "TRAIN.EPOCHS"]}
    assert keys == {"DATA.BATCH_SIZE": 2, "TRAIN.BASE_LR": 0.5, "TRAIN.EPOCHS": 9}
    with pytest.raises(SystemExit, match="control is 'dense', allowed: dense-1-"):
        sweep.read_plan(plan(grid=grid))


@pytest.mark.timeout(300)
def test_two_runs_side_by_side(plan, tmp_path):
    output = tmp_path / "out"

    def start(file: str, *words: str) -> subprocess.CompletedProcess:
        words = [sys.executable, "examples/sweep.py", file, "--output", output, *words]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)

    assert "| top1 | 0 | - |" in start(plan(), "--table").stdout
    done = start(plan(), "--jobs", "2")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("dense-seed0: done\ntop1-seed0: done\n| variant |")
    assert "| top1 | 1 | " in done.stdout
    metrics = output / "top1-seed0" / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    assert start(plan()).stdout == done.stdout
    opts = yaml.safe_load(Path(plan()).read_text())["opts"]
    refused = start(plan(opts=opts | {"TRAIN.WEIGHT_DECAY": 0.3}))
    assert refused.returncode == 1
    assert "top1-seed0: the plan has changed since this run" in refused.stdout
    assert metrics.stat().st_mtime_ns == before
    output = tmp_path / "other"
    failed = start(plan(opts=opts | {"TRAIN.OPTIMIZER.NAME": "adma"}))
    log = output / "dense-seed0" / "train.log"
    assert f"dense-seed0: stopped with status 2, see {log}" in failed.stdout
    assert "TRAIN.OPTIMIZER.NAME is 'adma'" in log.read_text()
