"""tools/ablate.py: tiny runs, what is not repeated, and refusals in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tool_cases import ROOT, assert_one_line, command

from swinv2_moe.commands.ablate import needs_few_shot, needs_measurement
from swinv2_moe.errors import UserError
from swinv2_moe.jobs import Jobs


@pytest.fixture
def ablate(monkeypatch, capsys):
    return command("ablate", monkeypatch, capsys)


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


def test_results_of_other_options_are_not_kept(tmp_path):
    few_shot, measured = tmp_path / "few_shot.json", tmp_path / "measured.json"
    assert needs_few_shot(few_shot, "a")
    assert needs_measurement(measured, 2000, False)
    few_shot.write_text(json.dumps({"data": str(tmp_path / "a")}))
    assert not needs_few_shot(few_shot, f"{tmp_path}/b/../a")
    with pytest.raises(UserError, match=r"few_shot\.json: measured on .*/a, --transfer is b"):
        needs_few_shot(few_shot, "b")
    measured.write_text(json.dumps({"images": 10}))
    assert needs_measurement(measured, 2000, False)
    assert not needs_measurement(measured, 10, False)
    assert needs_measurement(measured, 10, True)


def test_commands_in_processes_of_their_own(tmp_path):
    jobs, log = Jobs(2), tmp_path / "log"
    jobs.run(log, "configs", "quickstart_digits")
    assert "swinv2-moe train --cfg configs/quickstart_digits.yaml" in log.read_text()
    with pytest.raises(UserError, match=r"log: configs ended with status 2 \(error: .*nowhere"):
        jobs.run(log, "configs", "nowhere")
    assert not jobs.processes
    jobs.stop()
    with pytest.raises(UserError, match=r"^stopped$"):
        jobs.run(log, "configs")


def test_two_runs_side_by_side(ablate, quick_jobs, plan, make_photographs, tmp_path):
    data, output = make_photographs(), tmp_path / "out"
    arguments = ["--data", data, "--output", output, "--jobs", 2, "--speed"]
    finished = ablate("--plan", plan(), *arguments)
    assert finished.status == 0, finished.err
    results = json.loads((output / "results.json").read_text())["variants"]
    assert results["dense"]["class bits"] is None
    assert results["top1"]["router / experts"]["mean"] > 0
    assert 0 < results["top1"]["task share"]["mean"] <= 1
    assert results["top1"]["images/s, inference"]["mean"] > 0
    assert "| top1 | 1/1 |" in (output / "results.md").read_text()

    before = (output / "top1-seed0" / "metrics.jsonl").stat().st_mtime_ns
    again = ablate("--plan", plan(), *arguments)
    assert again.status == 0, again.err
    assert (output / "top1-seed0" / "metrics.jsonl").stat().st_mtime_ns == before

    opts = yaml.safe_load(plan().read_text())["opts"] | {"TRAIN.WEIGHT_DECAY": 0.3}
    changed = ablate("--plan", plan(opts=opts), *arguments)
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
def test_a_stopped_ablation_goes_on(ablate, plan, make_photographs, tmp_path):
    data, output = make_photographs(), tmp_path / "out"
    opts = yaml.safe_load(plan().read_text())["opts"] | {"TRAIN.EPOCHS": 60}
    file = plan(opts=opts)
    arguments = ["--plan", file, "--data", data, "--output", output, "--jobs", 2]
    words = [sys.executable, ROOT / "tools" / "ablate.py", *arguments]
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
    finished = ablate(*arguments)
    assert finished.status == 0, finished.err
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    epochs = [line["epoch"] for line in lines if "val_top1" in line]
    assert epochs == list(range(1, 61))  # none is repeated, none is missing
    assert len(lines) > steps_before
    assert "| top1 | 1/1 |" in (output / "results.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_routers_are_measured(ablate, quick_jobs, plan, make_photographs, tmp_path):
    """Soft MoE and expert choice; their class bits are of the expert with the largest weight."""
    data, output = make_photographs(), tmp_path / "out"
    base = str(tmp_path / "base.yaml")
    variants = {"dense": {"base": base, "opts": {"MODEL.MOE.NUM_EXPERTS": 0}}}
    variants["soft"] = {"base": base, "opts": {"MODEL.MOE.ROUTER": "soft"}}
    experts_choose = {"MODEL.MOE.ROUTER": "expert_choice", "MODEL.MOE.CAPACITY_FACTOR": 1.0}
    experts_choose["MODEL.MOE.EVAL_CAPACITY_FACTOR"] = 1.0
    variants["expert_choice"] = {"base": base, "opts": experts_choose}
    file = plan(variants=variants)
    finished = ablate("--plan", file, "--data", data, "--output", output, "--transfer", data)
    assert finished.status == 0, finished.err
    results = json.loads((output / "results.json").read_text())["variants"]
    for name in ("soft", "expert_choice"):
        assert results[name]["router / experts"]["mean"] > 0
        assert results[name]["task share"]["mean"] == 1  # no auxiliary loss
        assert results[name]["5-shot, %"]["mean"] > 0
        assert results[name]["class bits"] is not None


BAD_PLANS = {
    "no seeds": ({"seeds": 0}, [], "seeds is 0"),
    "no control": ({"control": "other"}, [], "control is 'other'"),
    "unknown variant": ({}, ["--only", "other"], "--only other: no such variant"),
    "unknown stage": ({}, ["--stage", "last"], "no stage 'last'"),
    "missing base": ({"variants": {"dense": {"base": "no.yaml"}}}, [], "base no.yaml: no such"),
    "unknown key": ({"opts": {"TRAIN.EPOCH": 1}}, [], "opts: unknown key TRAIN.EPOCH"),
    "unknown setting": ({"variant": {}}, [], "unknown key 'variant'"),
    "no jobs": ({}, ["--jobs", 0], "--jobs is 0"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_bad_input_is_one_line(case, ablate, plan, tmp_path):
    changes, arguments, text = BAD_PLANS[case]
    finished = ablate("--plan", plan(**changes), "--output", tmp_path / "out", *arguments)
    assert_one_line(finished, text)


def test_a_file_that_is_no_yaml(ablate, tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("variants: [")
    finished = ablate("--plan", file, "--table", "--output", tmp_path / "out")
    assert_one_line(finished, "not a plan")


def test_the_table_before_any_run(ablate, plan, tmp_path):
    finished = ablate("--plan", plan(), "--table", "--output", tmp_path / "out")
    assert finished.status == 0, finished.err
    assert "the control (dense) has no finished run yet" in finished.out
