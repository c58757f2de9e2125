"""DATA.VAL_SPLIT in a run and in the evaluation of its checkpoint."""

import shutil

import pytest
from tool_cases import command


@pytest.fixture
def evaluate(monkeypatch, capsys):
    """`evaluate(*arguments)`: tools/evaluate.py in this process."""
    return command("evaluate", monkeypatch, capsys)


def test_a_run_that_holds_out_images(
    train_command, evaluate, make_photographs, small, tmp_path, monkeypatch, request
):
    """Its evaluation uses the same images; other data is evaluated as it is."""
    monkeypatch.chdir(request.config.rootpath)
    data = make_photographs()
    others = make_photographs()
    shutil.rmtree(data / "val")
    words = ["--cfg", "configs/quickstart_digits.yaml", "--data", data]
    words += ["--output", tmp_path / "run"]
    keys = [*small, "DATA.DATASET", "folder", "DATA.VAL_SPLIT", "0.25", "TRAIN.MAX_STEPS", "1"]
    finished = train_command(*words, "--opts", *keys)
    assert (finished.status, finished.err) == (0, "")
    line = f"DATA.VAL_SPLIT 0.25: 12 of the 48 images of {data}/train are held out for validation"
    assert line in finished.out.splitlines()
    assert "36 + 12 images" in finished.out
    finished = evaluate("--resume", tmp_path / "run")
    assert finished.status == 0
    assert line in finished.out.splitlines()
    finished = evaluate("--resume", tmp_path / "run", "--data", others)
    assert finished.status == 0
    assert "DATA.VAL_SPLIT" not in finished.out
    finished = evaluate("--resume", tmp_path / "run", "--data", data)
    assert finished.status == 2
    assert "it has no val/ folder; found: train; DATA.VAL_SPLIT 0.1 would" in finished.err
