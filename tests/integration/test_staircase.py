"""The staircase benchmark on tiny shapes, and the cells of its tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import netns
import staircase

ROOT = Path(__file__).parents[2]


def run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "benchmarks/staircase.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_all_parts_run_and_the_steps_have_equal_results(tmp_path):
    reason = netns.unavailable()
    if reason is not None:
        pytest.skip(reason)
    output = tmp_path / "found.json"
    done = run("--quick", "--json", str(output))
    assert done.returncode == 0, done.stderr
    records = json.loads(output.read_text())
    (steps,) = records["layer"].values()
    assert list(steps) == ["einsum", "kernels", "2dh", "flexible", "adaptive r", "pipelining"]
    for step in steps.values():
        assert step["difference"] <= staircase.CLOSE
        assert step["predicted"] > 0
        assert min(step["measured"]) > 0
    (exchanges,) = records["exchange"].values()
    assert list(exchanges) == ["16384 linear", "16384 2dh"]
    (times,) = records["overlap"].values()
    assert {"work", "d=1", "d=2", "d=4", "d=8"} <= times.keys()


def test_nccl_without_gpus_is_not_measured(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["staircase.py", "--device", "cuda"])
    staircase.main()
    assert capsys.readouterr().out.startswith("NCCL: not measured")


def test_the_hidden_share_of_the_shorter_part():
    # Exchange and work take 40 and 60 of 100 ms; of the 40, d chunks hide 40, 20 and none.
    times = {"d=1": [100.0], "work": [60.0], "d=2": [60.0], "d=4": [80.0], "d=8": [100.0]}
    expected = "100 (100 - 100) | 40% | 100% (100 - 100) | 50% (50 - 50) | 0% (0 - 0) |"
    assert staircase.overlap_cells(times) == expected


def test_a_prediction_has_its_error():
    step = {"predicted": 8.0, "measured": [10.0, 10.0, 10.0]}
    assert staircase.predicted_and_measured(step) == "8.0 | 10.0 (10.0 - 10.0) | -20%"
