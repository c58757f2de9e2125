"""Training survives ranks that are killed, and says which operation waited where one is stuck."""

import os
import signal
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
from gloo_processes import DEADLINE
from kill_and_resume import ROOT, Gate, Ranks, saves_under_way, steps, uninterrupted, write_digits

from swinv2_moe.checkpoints.checkpoint import find_checkpoint, read_meta

KEYS, LAST = "CHECKPOINT.STEPS 2 CHECKPOINT.KEEP_LAST 2", 6
SAVE_JOB, SAVER = "swinv2_moe.checkpoints.saver", "swinv2_moe.checkpoints.saver"
TIMEOUT = 10  # seconds


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """`whole(ranks)`: a run that nothing interrupts."""

    @cache
    def make(size: int) -> Path:
        return uninterrupted(size, data, tmp_path_factory.mktemp("whole") / "run", LAST, KEYS)

    return make


@pytest.mark.parametrize(
    ("size", "module", "function", "newest"),
    [
        (1, SAVE_JOB, "write_tensors", 2),
        (1, SAVER, "publish_directory", 2),
        (1, SAVER, "replace_link", 4),
        (2, SAVE_JOB, "fsync_and_hash", 2),
    ],
)
def test_killed_in_a_save(size, module, function, newest, data, whole, tmp_path):
    """All ranks, or one of two, while the checkpoint of step 4 is written: the run goes on from the
    newest one that is whole, as if nothing had happened."""
    run, gate = tmp_path / "run", Gate(tmp_path)
    hold = partial(gate.hold_save, module, function, 4)
    ranks = Ranks(size, data, run, f"{KEYS} TIMEOUT {TIMEOUT}", prepare=hold)
    ranks.wait_for(gate.reached.exists)
    ranks.signal(signal.SIGKILL, [size - 1])
    ranks.processes[size - 1].join()
    gate.opened.touch()
    *survivors, killed = ranks.wait()
    assert killed.status == -signal.SIGKILL
    for outcome in survivors:
        assert outcome.status == 1
        assert len([line for line in outcome.err.splitlines() if line.startswith("error: ")]) == 1
        assert "Traceback" not in outcome.err
    assert find_checkpoint("auto", run / "checkpoints").meta["step"] == newest

    ended = Ranks(size, data, run, f"{KEYS} TRAIN.MAX_STEPS {LAST}").wait()
    assert [(outcome.status, outcome.err) for outcome in ended] == [(0, "")] * size
    assert steps(run) == steps(whole(size))
    last = Path("checkpoints", f"step-{LAST:08d}")
    assert read_meta(run / last)["files"] == read_meta(whole(size) / last)["files"]  # to the byte
    assert not saves_under_way(run)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_fifty_times():
    command = [sys.executable, "tests/integration/kill_and_resume.py", "--runs", "50"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_that_is_stuck_is_noticed(data, tmp_path):
    ranks = Ranks(2, data, tmp_path / "run", f"TIMEOUT {TIMEOUT}")
    ranks.wait_for(lambda: ranks.done() >= 2)
    ranks.signal(signal.SIGSTOP, [1])
    ranks.processes[0].join(DEADLINE)
    ended = ranks.wait(0)[0]
    assert ended.status == 1
    (line,) = ended.err.splitlines()
    assert line.startswith("error: ")
    assert " failed on rank 0 of " in line


def test_a_second_run_in_the_same_directory_is_refused(data, tmp_path):
    gate, run = Gate(tmp_path), tmp_path / "run"
    first = Ranks(1, data, run, "", prepare=partial(gate.hold_step, 2))
    first.wait_for(gate.reached.exists)
    second = Ranks(2, data, run, "").wait()
    assert [outcome.status for outcome in second] == [2, 2]
    assert second[0].err == f"error: --output {run}: another process is writing there\n"
    first.signal(signal.SIGKILL)
    first.wait()
    (third,) = Ranks(1, data, run, f"TRAIN.MAX_STEPS {first.done() + 1}").wait()
    assert (third.status, third.err) == (0, "")
