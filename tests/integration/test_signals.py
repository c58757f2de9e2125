"""A run that is told to stop saves the step at which it stops, ends with status 0 and goes on as if it never had."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from gloo_processes import Outcome
from kill_and_resume import ROOT, SMALL, Ranks, saves_under_way, slow_disk, steps, uninterrupted, write_digits

from swinv2_moe.engine import evaluation
from swinv2_moe.engine.checkpoint import checkpoints_below, open_checkpoint

STEPS = 16  # of the runs that are compared; six an epoch
PROMPTLY = 20  # seconds
SAYS = re.compile(r"(SIGTERM|SIGUSR1): stopped after step (\d+); --resume auto goes on from there")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """`whole(ranks)`: a run that nothing stopped."""
    found = {}

    def make(size: int) -> Path:
        if size not in found:
            found[size] = uninterrupted(size, data, tmp_path_factory.mktemp("whole") / "run", STEPS)
        return found[size]

    return make


def stopped_at(ended: list[Outcome], run: Path) -> tuple[str, int]:
    """The signal and the step of a run that stopped as it should; rank 0 alone says so, in one line."""
    assert [(outcome.status, outcome.err) for outcome in ended] == [(0, "")] * len(ended)
    assert not any(outcome.out for outcome in ended[1:])
    (said,) = [line for line in ended[0].out.splitlines() if "stopped" in line]
    name, step = SAYS.fullmatch(said).groups()
    newest = open_checkpoint(checkpoints_below(run / "checkpoints")[0])
    assert newest.meta["step"] == int(step) == steps(run)[-1][0]
    assert (run / "checkpoints" / "latest").resolve() == newest.directory
    assert not saves_under_way(run)
    return name, int(step)


def epochs(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines if "train_loss" in line]


def goes_on(size: int, data: Path, run: Path, whole: Path) -> None:
    """The rest of the run, and with it every loss and accuracy, is that of the `whole` run to the bit."""
    ended = Ranks(size, data, run, f"TRAIN.MAX_STEPS {STEPS}").wait()
    assert [(outcome.status, outcome.err) for outcome in ended] == [(0, "")] * size
    assert steps(run) == steps(whole)
    assert epochs(run) == epochs(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_in_an_epoch(number, data, whole, tmp_path):
    ranks = Ranks(1, data, tmp_path / "run", "SAVE_FREQ 100")
    ranks.wait_for(lambda: ranks.done() >= 3)
    ranks.signal(number)
    name, step = stopped_at(ranks.wait(PROMPTLY), tmp_path / "run")
    assert name == number.name
    assert step >= 3
    goes_on(1, data, tmp_path / "run", whole(1))


def test_a_signal_to_one_of_two_ranks_stops_both(data, whole, tmp_path):
    ranks = Ranks(2, data, tmp_path / "run", "SAVE_FREQ 100")
    ranks.wait_for(lambda: ranks.done() >= 3)
    ranks.signal(signal.SIGUSR1, [1])
    name, _ = stopped_at(ranks.wait(PROMPTLY), tmp_path / "run")
    assert name == "SIGUSR1"
    goes_on(2, data, tmp_path / "run", whole(2))


def slow_validation(mark: Path) -> None:
    count = evaluation._count

    def slowly(*args):
        mark.touch()
        time.sleep(0.2)
        return count(*args)

    evaluation._count = slowly


def test_a_signal_during_validation(data, whole, tmp_path):
    mark = tmp_path / "validates"
    ranks = Ranks(2, data, tmp_path / "run", "SAVE_FREQ 100", prepare=partial(slow_validation, mark))
    ranks.wait_for(mark.exists)
    ranks.signal(signal.SIGTERM, [1])
    assert stopped_at(ranks.wait(PROMPTLY), tmp_path / "run") == ("SIGTERM", 6)
    assert epochs(tmp_path / "run") == []
    goes_on(2, data, tmp_path / "run", whole(2))


def test_a_signal_in_the_last_validation(data, tmp_path):
    """All steps are done, but not all of the run: nothing has been validated yet."""
    run, mark, keys = tmp_path / "run", tmp_path / "validates", "TRAIN.MAX_STEPS 3"
    ranks = Ranks(1, data, run, keys, prepare=partial(slow_validation, mark))
    ranks.wait_for(mark.exists)
    ranks.signal(signal.SIGTERM)
    assert stopped_at(ranks.wait(PROMPTLY), run) == ("SIGTERM", 3)
    assert not (run / "summary.json").exists()
    (ended,) = Ranks(1, data, run, keys).wait()
    assert (ended.status, ended.err) == (0, "")
    assert [line["step"] for line in epochs(run)] == [3]
    assert json.loads((run / "summary.json").read_text())["val_top1"] == epochs(run)[0]["val_top1"]


def test_signals_while_saves_are_under_way(data, whole, tmp_path):
    """One during a save, another at once, one more during the save that the first brought about."""
    run = tmp_path / "run"
    ranks = Ranks(1, data, run, "CHECKPOINT.STEPS 2", prepare=partial(slow_disk, 0.01))
    ranks.wait_for(lambda: saves_under_way(run))
    ranks.signal(signal.SIGTERM)
    ranks.signal(signal.SIGUSR1)
    first = saves_under_way(run)
    ranks.wait_for(lambda: saves_under_way(run) - first)
    ranks.signal(signal.SIGTERM)
    stopped_at(ranks.wait(PROMPTLY), run)
    goes_on(1, data, run, whole(1))


def start_command(*launcher: str, data: Path, run: Path) -> subprocess.Popen:
    command = [
        sys.executable,
        *launcher,
        "tools/train.py",
        "--cfg",
        "configs/quickstart_digits.yaml",
        "--resume",
        "auto",
    ]
    return subprocess.Popen(
        [*command, "--data", str(data), "--output", str(run), "--opts", *SMALL.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop_command(process: subprocess.Popen, run: Path) -> Outcome:
    """SIGTERM after three steps."""
    try:
        deadline = time.monotonic() + 60
        while len(steps(run)) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        return Outcome(*(process.wait(PROMPTLY), *process.communicate()))
    finally:
        process.kill()


def test_the_command_line(data, tmp_path):
    done = stop_command(start_command(data=data, run=tmp_path / "run"), tmp_path / "run")
    assert stopped_at([done], tmp_path / "run")[0] == "SIGTERM"


def test_the_launcher(data, tmp_path):
    """torchrun passes SIGTERM on and waits for its workers; it then ends with a traceback of its own and status 1,
    though each of them has saved and ended well."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = stop_command(start_command(*launcher, data=data, run=tmp_path / "run"), tmp_path / "run")
    assert "SignalException: Process" in done.err
    assert not [line for line in done.err.splitlines() if line.startswith(("error: ", "[rank"))]
    assert done.status == 1
    assert stopped_at([Outcome(0, done.out, "")], tmp_path / "run")[0] == "SIGTERM"
