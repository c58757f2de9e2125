"""What tools/workflow.py says where a step's results are not as the step writes them."""

import json
import os
from pathlib import Path

import pytest
from tool_cases import command

SUMMARY = {"parameters": 5e6, "active_macs": 1e8, "images_per_second": None, "val_top1": 50.0}
FEW_SHOT = {"few_shot": {"5": {"mean": 1.0, "std": 0.5}}, "knn": {"top1": 2.0}}
STAGING = {"bytes": 5, "seconds": 1.0, "started": 0.0}
NAMES = ("8expert", "dense")


@pytest.fixture
def run(tmp_path: Path, monkeypatch, capsys):
    """The command on results that lie there, its steps left out."""
    files = {
        f"{kind}/{name}/summary.json": SUMMARY
        for kind in ("pretrained", "finetuned")
        for name in NAMES
    }
    files |= {f"few_shot_{name}.json": FEW_SHOT for name in NAMES} | {
        "staged/staging.json": STAGING
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    for name in ("run_tool", "run_training"):
        monkeypatch.setattr(f"swinv2_moe.commands.workflow.{name}", lambda *args: None)
    monkeypatch.setattr("swinv2_moe.data.prepare.folders.image_folder", lambda data, target: data)
    workflow = command("workflow", monkeypatch, capsys)
    return lambda: workflow("--pretrain", "a", "--transfer", "b", "--output", tmp_path)


def test_results_as_they_should_be(run) -> None:
    done = run()
    assert (done.status, done.err) == (0, "")
    assert "5.00M" in done.out


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "content", ["null", "[1]", "{", "[" * 100_000, "1" * 5000, "{}", "pipe", None]
)
@pytest.mark.parametrize(
    "name", ["pretrained/dense/summary.json", "few_shot_dense.json", "staged/staging.json"]
)
def test_results_that_are_none_give_one_line(
    run, tmp_path: Path, name: str, content: str | None
) -> None:
    (tmp_path / name).unlink()
    if content == "pipe":
        os.mkfifo(tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_text(content)
    done = run()
    assert done.status == 2
    assert done.err.startswith(f"error: {tmp_path}: the results are not as the steps wrote them (")
    assert done.err.count("\n") == 1
