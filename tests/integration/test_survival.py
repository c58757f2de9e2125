"""Training survives ranks that are killed, and says which operation waited where one is stuck."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from kill_and_resume import ROOT, Gate, KillTest, Ranks, write_digits

TIMEOUT = 10  # seconds


def test_killed_at_any_moment(tmp_path):
    test = KillTest(tmp_path, ranks=2)
    for number in range(3):
        test.run(number)
    print(test.summary())
    assert test.failures() == {}
    assert test.counts["kills during a save"] >= 1
    assert test.counts["losses compared"] >= 3 * 4


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


def test_a_rank_that_is_stuck_is_noticed(tmp_path):
    ranks = Ranks(2, write_digits(tmp_path / "data"), tmp_path / "run", f"TIMEOUT {TIMEOUT}")
    ranks.wait_for(lambda: ranks.done() >= 2)
    ranks.signal(signal.SIGSTOP, [1])
    stopped = time.monotonic()
    ranks.processes[0].join(TIMEOUT + 10)
    assert time.monotonic() - stopped > TIMEOUT - 1
    ended = ranks.wait(0)[0]
    assert ended.status == 1
    (line,) = ended.err.splitlines()
    assert line.startswith("error: ")
    assert " failed on rank 0 of " in line


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    data = write_digits(tmp_path / "data")
    gate = Gate(tmp_path)
    first = Ranks(1, data, tmp_path / "run", "", prepare=partial(gate.hold_step, 2))
    first.wait_for(gate.reached.exists)
    second = Ranks(2, data, tmp_path / "run", "").wait()
    assert [outcome.status for outcome in second] == [2, 2]
    assert second[0].err == f"error: --output {tmp_path / 'run'}: another run is writing there\n"
    first.signal(signal.SIGKILL)
    first.wait()
    (third,) = Ranks(1, data, tmp_path / "run", f"TRAIN.MAX_STEPS {first.done() + 1}").wait()
    assert (third.status, third.err) == (0, "")
