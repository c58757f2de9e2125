"""tools/sweep.py: tiny runs, what is not repeated, and refusals in one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tool_cases import ROOT, assert_one_line, command

from swinv2_moe.commands.sweep import Jobs, needs_few_shot, needs_routing, run_variant
from swinv2_moe.errors import UserError
from swinv2_moe.measure.sweep import ROUTING, Variant

UNTIL_TARGET = {
    "TRAIN.TARGET_TOP1": 5,
    "TRAIN.EPOCHS": 1,
    "TRAIN.WARMUP_EPOCHS": 0,
    "TRAIN.WARMUP_LR": 0,
    "TRAIN.MIN_LR": 0,
    "MODEL.SWINV2.EMBED_DIM": 16,
    "MODEL.SWINV2.DEPTHS": [1, 1, 1],
    "MODEL.MOE.BLOCKS": [[], [], [0]],
    "DATA.NUM_WORKERS": 0,
}


@pytest.fixture
def sweep(monkeypatch, capsys):
    return command("sweep", monkeypatch, capsys)


@pytest.fixture
def plan(tmp_path, small):
    """`plan(**changes)`: a plan file of a dense and an 8-expert variant of one epoch."""
    opts = {key: yaml.safe_load(value) for key, value in zip(small[::2], small[1::2], strict=True)}
    opts |= {"TRAIN.EPOCHS": 1, "TRAIN.WARMUP_EPOCHS": 0}
    base = tmp_path / "base.yaml"
    base.write_text("PRINT_FREQ: 1\n")
    content = {
        "control": "dense",
        "seeds": 1,
        "opts": opts,
        "variants": {
            "dense": {"base": str(base), "opts": {"MODEL.MOE.NUM_EXPERTS": 0}},
            "top1": {"base": str(base)},
        },
    }

    def write(**changes):
        file = tmp_path / "plan.yaml"
        file.write_text(yaml.safe_dump(content | changes))
        return file

    return write


def test_results_of_other_options_are_not_kept(tmp_path, runs):
    few_shot = tmp_path / "few_shot.json"
    assert needs_few_shot(few_shot, "a")
    few_shot.write_text(json.dumps({"data": str(tmp_path / "a")}))
    assert not needs_few_shot(few_shot, f"{tmp_path}/b/../a")
    with pytest.raises(UserError, match=r"few_shot\.json: measured on .*/a, --transfer is b"):
        needs_few_shot(few_shot, "b")
    assert not needs_routing(runs / "dense", 10)
    run = tmp_path / "run"
    shutil.copytree(runs / "experts", run)
    assert needs_routing(run, 10)
    (run / ROUTING).parent.mkdir()
    (run / ROUTING).write_text(json.dumps({"limit": 10}))
    assert not needs_routing(run, 10)
    assert needs_routing(run, 2000)


def test_a_training_that_was_told_to_stop_is_not_done(tmp_path):
    args = SimpleNamespace(data=None, transfer=None)
    jobs = SimpleNamespace(run=lambda *words: None)  # it ended with status 0
    with pytest.raises(UserError, match="adamw-batch8-seed0: the training was told to stop"):
        run_variant(Variant("adamw-batch8", Path("a.yaml"), ()), 0, tmp_path, args, jobs)


def test_commands_in_processes_of_their_own(tmp_path):
    jobs, log = Jobs(2), tmp_path / "log"
    jobs.run(log, "configs", "quickstart_digits")
    assert "swinv2-moe train --cfg quickstart_digits " in log.read_text()
    with pytest.raises(UserError, match=r"log: configs ended with status 2 \(error: .*nowhere"):
        jobs.run(log, "configs", "nowhere")
    assert not jobs.processes
    jobs.stop()
    with pytest.raises(UserError, match=r"^stopped$"):
        jobs.run(log, "configs")


def test_two_runs_side_by_side(sweep, quick_jobs, plan, make_photographs, tmp_path):
    data, output = make_photographs(), tmp_path / "out"
    arguments = ["--data", data, "--output", output, "--jobs", 2]
    finished = sweep("--plan", plan(), *arguments)
    assert finished.status == 0, finished.err
    results = json.loads((output / "results.json").read_text())["variants"]
    assert results["dense"]["class bits"] is None
    assert -1 < results["top1"]["class bits"]["mean"] <= 1  # of two classes
    assert "| top1 | 1/1 |" in (output / "results.md").read_text()

    before = (output / "top1-seed0" / "metrics.jsonl").stat().st_mtime_ns
    again = sweep("--plan", plan(), *arguments)
    assert again.status == 0, again.err
    assert (output / "top1-seed0" / "metrics.jsonl").stat().st_mtime_ns == before

    opts = yaml.safe_load(plan().read_text())["opts"] | {"TRAIN.WEIGHT_DECAY": 0.3}
    changed = sweep("--plan", plan(opts=opts), *arguments)
    assert_one_line(changed, "TRAIN.WEIGHT_DECAY 0.1, variant dense now has 0.3")


def processes_of(directory: Path) -> list[int]:
    """The processes whose command line names the directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command_line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in command_line:
            found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_sweep_goes_on(sweep, plan, make_photographs, tmp_path):
    data, output = make_photographs(), tmp_path / "out"
    opts = yaml.safe_load(plan().read_text())["opts"] | {"TRAIN.EPOCHS": 60}
    file = plan(opts=opts)
    arguments = ["--plan", file, "--data", data, "--output", output, "--jobs", 2]
    words = [sys.executable, ROOT / "tools" / "sweep.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = list(map(str, words))
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE)
    metrics = output / "top1-seed0" / "metrics.jsonl"
    while not metrics.exists() or "val_top1" not in metrics.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert processes_of(output) == []
    steps_before = len(metrics.read_text().splitlines())
    finished = sweep(*arguments)
    assert finished.status == 0, finished.err
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    epochs = [line["epoch"] for line in lines if "val_top1" in line]
    assert epochs == list(range(1, 61))  # none is repeated, none is missing
    assert len(lines) > steps_before
    assert "| top1 | 1/1 |" in (output / "results.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_routers_are_measured(sweep, quick_jobs, plan, make_photographs, tmp_path):
    """Soft MoE and expert choice; their class bits are of the expert with the largest weight."""
    data, output = make_photographs(), tmp_path / "out"
    base = str(tmp_path / "base.yaml")
    variants = {"dense": {"base": base, "opts": {"MODEL.MOE.NUM_EXPERTS": 0}}}
    variants["soft"] = {"base": base, "opts": {"MODEL.MOE.ROUTER": "soft"}}
    experts_choose = {"MODEL.MOE.ROUTER": "expert_choice", "MODEL.MOE.CAPACITY_FACTOR": 1.0}
    experts_choose["MODEL.MOE.EVAL_CAPACITY_FACTOR"] = 1.0
    variants["expert_choice"] = {"base": base, "opts": experts_choose}
    file = plan(variants=variants)
    finished = sweep("--plan", file, "--data", data, "--output", output, "--transfer", data)
    assert finished.status == 0, finished.err
    results = json.loads((output / "results.json").read_text())["variants"]
    for name in ("soft", "expert_choice"):
        assert results[name]["5-shot, %"]["mean"] > 0
        assert results[name]["class bits"] is not None


BAD_PLANS = {
    "no seeds": ({"seeds": 0}, [], "seeds is 0"),
    "no control": ({"control": "other"}, [], "control is 'other'"),
    "unknown variant": ({}, ["--only", "other"], "--only other: no such variant"),
    "unknown stage": ({}, ["--stage", "last"], "no stage 'last'"),
    "missing base": ({"variants": {"dense": {"base": "no.yaml"}}}, [], "base no.yaml: no such"),
    "unknown key": ({"opts": {"TRAIN.EPOCH": 1}}, [], "opts: unknown key TRAIN.EPOCH"),
    "invalid value": (
        {"opts": {"TRAIN.OPTIMIZER.NAME": "adma"}},
        [],
        "variant dense: TRAIN.OPTIMIZER.NAME is 'adma'",
    ),
    "unknown setting": ({"variant": {}}, [], "unknown key 'variant'"),
    "no jobs": ({}, ["--jobs", 0], "--jobs is 0"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_bad_input_is_one_line(case, sweep, plan, tmp_path):
    changes, arguments, text = BAD_PLANS[case]
    finished = sweep("--plan", plan(**changes), "--output", tmp_path / "out", *arguments)
    assert_one_line(finished, text)


def test_a_file_that_is_no_yaml(sweep, tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("variants: [")
    finished = sweep("--plan", file, "--table", "--output", tmp_path / "out")
    assert_one_line(finished, "not a plan")


def test_the_table_before_any_run(sweep, plan, tmp_path):
    finished = sweep("--plan", plan(), "--table", "--output", tmp_path / "out")
    assert finished.status == 0, finished.err
    assert "the control (dense) has no finished run yet" in finished.out


def test_batch_sizes_and_optimisers_until_a_target(sweep, quick_jobs, plan, tmp_path):
    base, output = str(ROOT / "configs" / "quickstart_digits.yaml"), tmp_path / "out"
    sgd = {"TRAIN.OPTIMIZER.NAME": "sgd", "TRAIN.BASE_LR": 0.1}
    content = {
        "control": "adamw-256",
        "opts": UNTIL_TARGET,
        "variants": {"adamw": {"base": base}, "sgd": {"base": base, "opts": sgd}},
        "grid": {"DATA.GLOBAL_BATCH_SIZE": [256]},
    }
    arguments = ["--plan", plan(**content), "--output", output, "--images", 8]
    done = sweep(*arguments)
    assert done.status == 0, done.err
    results = json.loads((output / "results.json").read_text())["variants"]
    assert list(results) == ["adamw-256", "sgd-256"]
    for name, columns in results.items():
        assert columns["epochs to target"]["mean"] == 1  # five percent is less than chance
        summary = json.loads((output / f"{name}-seed0" / "summary.json").read_text())
        assert columns["top-1, %"]["mean"] == summary["val_top1"]
    assert done.out.count(" 1 of 1 |") == 2

    stamps = {file: os.stat(file).st_mtime_ns for file in output.glob("*/summary.json")}
    assert sweep(*arguments).status == 0
    assert stamps == {file: os.stat(file).st_mtime_ns for file in stamps}
    more = sweep(*arguments, "--seeds", 2, "--table")
    assert (more.status, more.out.count(" 1 of 1 |")) == (0, 2)
    # what the runs recorded is of their own target
    plan(**content | {"opts": UNTIL_TARGET | {"TRAIN.TARGET_TOP1": 99}})
    assert_one_line(
        sweep(*arguments), "run has TRAIN.TARGET_TOP1 5.0, variant adamw-256 now has 99.0"
    )
