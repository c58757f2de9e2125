"""tools/watch.py: one picture, a picture that follows the run, and what cannot be watched."""

import json
import subprocess
import sys

import pytest
from tool_cases import ROOT, assert_one_line, command


@pytest.fixture(scope="module")
def finished(runs):
    return runs / "experts"


@pytest.fixture
def watch(monkeypatch, capsys):
    return command("watch", monkeypatch, capsys)


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 100 x 30 characters."""
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "100", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TERM", "xterm")


def test_a_picture_of_a_run(finished, watch):
    result = watch(finished, "--once")
    assert (result.status, result.err) == (0, "")
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    lines = result.out.splitlines()
    assert len(lines) == 24
    assert {len(line) for line in lines} == {80}
    assert "experts: finished" in lines[0]
    assert "epoch 2/2" in lines[1]
    assert "step 6/6" in lines[2]
    assert f"top-1 {last['val_top1']:.2f}%" in lines[2]
    assert result.out.count("stage") == 2
    assert "\x1b" not in result.out
    assert watch(finished).out == result.out  # stdout is no terminal


def test_following_a_run(finished, watch, terminal, tmp_path, monkeypatch):
    """From before its first step to its end; the last picture stays."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text((finished / "config.yaml").read_text())
    (run / "metrics.jsonl").touch()
    (run / ".lock").touch()  # of a run that has not ended
    lines = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(lines[:3])
        del lines[:3]
        if not lines:
            (run / "summary.json").write_text("{}")

    monkeypatch.setattr("swinv2_moe.commands.watch.time.sleep", sleep)
    result = watch(run, "--every", "2.5")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith(f"waiting: {run} has not logged a step yet\n")
    assert set(waits) == {2.5}
    assert result.out.count("run: running") == len(waits) - 1
    assert result.out.count("run: finished") == 2  # in place, then for good
    assert "\x1b[?1049l" in result.out  # the terminal is as before


def test_ctrl_c_leaves_a_picture(finished, watch, terminal, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (run / name).write_text((finished / name).read_text())
    (run / ".lock").touch()

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("swinv2_moe.commands.watch.time.sleep", interrupt)
    result = watch(run)
    assert (result.status, result.err) == (0, "")
    assert result.out.count("run: running") == 2
    (run / "metrics.jsonl").write_text("")
    result = watch(run)
    assert (result.status, result.err) == (0, "")
    assert result.out == f"waiting: {run} has not logged a step yet\n"


def test_a_run_that_ended_before_its_first_step(watch, terminal, tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr("swinv2_moe.commands.watch.time.time", lambda: 2e9 + 1e9)
    result = watch(tmp_path)
    assert result.status == 2
    assert result.err == f"error: {tmp_path}: has logged no step, and is not running\n"


def test_a_resumed_run_that_stopped_before_its_first_step(
    finished, watch, terminal, tmp_path, monkeypatch
):
    """Its lines have gone, because it was to repeat all steps."""
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_text((finished / name).read_text())
    (tmp_path / ".lock").touch()

    def stop(seconds):
        (tmp_path / "metrics.jsonl").write_text("")
        monkeypatch.setattr("swinv2_moe.commands.watch.time.time", lambda: 2e9 + 1e9)

    monkeypatch.setattr("swinv2_moe.commands.watch.time.sleep", stop)
    result = watch(tmp_path)
    assert result.status == 2
    assert result.err == f"error: {tmp_path}: has not logged a step yet\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("{tmp}/nowhere", "nowhere ... not a run directory"),
        ("{tmp}", "holds no run ... metrics.jsonl"),
        ("{run} --every 0", "--every ... 0"),
        ("{run} --every nan", "--every ... nan"),
    ],
)
def test_what_cannot_be_watched(words, says, watch, finished, tmp_path):
    assert_one_line(watch(words, tmp=tmp_path, run=finished), says)


def test_one_picture_of_a_run_without_steps(watch, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    assert_one_line(watch(tmp_path), f"error: {tmp_path}: has not logged a step yet")


def test_neither_torch_nor_numpy_is_imported(finished):
    """A picture takes 0.2 s; importing torch takes seconds."""
    program = (
        "import sys; sys.argv = ['swinv2-moe', 'watch', sys.argv[1], '--once']\n"
        "from swinv2_moe.commands import main; main()\n"
        "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program, finished], cwd=ROOT, check=True)
