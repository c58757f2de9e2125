"""A run that is told to stop saves the step at which it stops, ends with status 0 and goes on as if
it never had."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from gloo_processes import DEADLINE, Outcome, Processes, run_script
from kill_and_resume import (
    ROOT,
    SMALL,
    Gate,
    Ranks,
    saves_under_way,
    steps,
    uninterrupted,
    write_digits,
)

from swinv2_moe.checkpoints import saver
from swinv2_moe.checkpoints.checkpoint import checkpoints_below, open_checkpoint
from swinv2_moe.commands.call import resume_command
from swinv2_moe.train import arrival, evaluation

STEPS = 8  # of the runs that are compared; six an epoch
HELD = 4  # the step in which a run waits for its signal
SLOW = pytest.mark.slow
SAYS = re.compile(r"(SIGTERM|SIGUSR1|SIGINT): stopped after step (\d+); to continue: (.+)")


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


def environment() -> dict[str, str]:
    """Without torch's warning of more data workers than cores."""
    ignored = "ignore:This DataLoader will create:UserWarning"
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ignored}


def stopped_at(ended: list[Outcome], run: Path) -> tuple[str, int]:
    """The signal and the step of a run that stopped as it should; rank 0 alone says so, in one
    line."""
    assert [(outcome.status, outcome.err) for outcome in ended] == [(0, "")] * len(ended)
    assert not any(outcome.out for outcome in ended[1:])
    (said,) = [line for line in ended[0].out.splitlines() if "stopped" in line]
    name, step, _ = SAYS.fullmatch(said).groups()
    newest = open_checkpoint(checkpoints_below(run / "checkpoints")[0])
    assert newest.meta["step"] == int(step) == steps(run)[-1][0]
    assert (run / "checkpoints" / "latest").resolve() == newest.directory
    assert not saves_under_way(run)
    return name, int(step)


def epochs(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k != "seconds"} for line in lines if "train_loss" in line
    ]


def goes_on(size: int, data: Path, run: Path, whole: Path) -> None:
    """The rest of the run, and with it every loss and accuracy, is that of the `whole` run to the
    bit."""
    ended = Ranks(size, data, run, f"TRAIN.MAX_STEPS {STEPS}").wait()
    assert [(outcome.status, outcome.err) for outcome in ended] == [(0, "")] * size
    assert steps(run) == steps(whole)
    assert epochs(run) == epochs(whole)


def signalled_at(
    gate: Gate, ranks: Ranks, number: int, victims: list[int] | None = None
) -> list[Outcome]:
    """How the ranks ended after a signal that came while they waited at the gate."""
    ranks.wait_for(gate.reached.exists)
    ranks.signal(number, victims)
    gate.opened.touch()
    return ranks.wait()


def test_a_signal_in_an_epoch(data, whole, tmp_path):
    gate, run = Gate(tmp_path), tmp_path / "run"
    ranks = Ranks(1, data, run, "SAVE_FREQ 100", prepare=partial(gate.hold_step, HELD))
    assert stopped_at(signalled_at(gate, ranks, signal.SIGTERM), run) == ("SIGTERM", HELD)
    goes_on(1, data, run, whole(1))


def test_a_signal_to_one_of_two_ranks_stops_both(data, whole, tmp_path):
    gate, run = Gate(tmp_path), tmp_path / "run"
    ranks = Ranks(2, data, run, "SAVE_FREQ 100", prepare=partial(gate.hold_step, HELD))
    assert stopped_at(signalled_at(gate, ranks, signal.SIGUSR1, [1]), run) == ("SIGUSR1", HELD)
    goes_on(2, data, run, whole(2))


def test_a_second_interrupt_ends_the_run_at_once(data, tmp_path):
    """It waits at a gate that stays shut: it cannot save."""
    gate = Gate(tmp_path)
    ranks = Ranks(1, data, tmp_path / "run", "", prepare=partial(gate.hold_step, HELD))
    ranks.wait_for(gate.reached.exists)
    while ranks.processes[0].exitcode is None:  # two that come at once count as one
        ranks.signal(signal.SIGINT)
        time.sleep(0.1)
    (ended,) = ranks.wait(0)
    assert (ended.status, ended.err) == (-signal.SIGINT, "")
    assert steps(tmp_path / "run")[-1][0] == HELD - 1
    assert not checkpoints_below(tmp_path / "run" / "checkpoints")


def hold_loading(gate: Gate) -> None:
    build_data = arrival.build_data
    arrival.build_data = lambda *args: (gate.wait_here(), build_data(*args))[1]


def test_an_interrupt_before_training(data, tmp_path):
    """One line, and nothing is left behind."""
    gate = Gate(tmp_path)
    ranks = Ranks(2, data, tmp_path / "run", "", prepare=partial(hold_loading, gate))
    ranks.wait_for(lambda: (tmp_path / "run").exists() and gate.reached.exists())
    ended = signalled_at(gate, ranks, signal.SIGINT)
    assert [(outcome.status, outcome.out) for outcome in ended] == [(130, "")] * 2
    assert [outcome.err for outcome in ended] == ["interrupted\n", ""]
    assert not (tmp_path / "run").exists()


def hold_validation(gate: Gate) -> None:
    count = evaluation._count

    def wait_and_count(*args):
        gate.wait_here()
        return count(*args)

    evaluation._count = wait_and_count


def test_a_signal_during_validation(data, whole, tmp_path):
    gate, run = Gate(tmp_path), tmp_path / "run"
    ranks = Ranks(2, data, run, "SAVE_FREQ 100", prepare=partial(hold_validation, gate))
    assert stopped_at(signalled_at(gate, ranks, signal.SIGINT, [1]), run) == ("SIGINT", 6)
    assert epochs(run) == []
    goes_on(2, data, run, whole(2))


def test_a_signal_in_the_last_validation(data, tmp_path):
    """All steps are done, but not all of the run: nothing has been validated yet."""
    run, gate, keys = tmp_path / "run", Gate(tmp_path), "TRAIN.MAX_STEPS 3"
    ranks = Ranks(1, data, run, keys, prepare=partial(hold_validation, gate))
    assert stopped_at(signalled_at(gate, ranks, signal.SIGTERM), run) == ("SIGTERM", 3)
    assert not (run / "summary.json").exists()
    (ended,) = Ranks(1, data, run, keys).wait()
    assert (ended.status, ended.err) == (0, "")
    assert [line["step"] for line in epochs(run)] == [3]
    assert json.loads((run / "summary.json").read_text())["val_top1"] == epochs(run)[0]["val_top1"]


def hold_saves(first: Gate, second: Gate) -> None:
    gates, write_meta = [first, second], saver.write_meta

    def wait_and_write(*args):
        if gates:
            gates.pop(0).wait_here()
        return write_meta(*args)

    saver.write_meta = wait_and_write


def test_signals_while_saves_are_under_way(data, whole, tmp_path):
    """Two during a save, one more during the save that the first brought about."""
    run, gates = tmp_path / "run", [Gate(tmp_path / "first"), Gate(tmp_path / "second")]
    for gate in gates:
        gate.directory.mkdir()
    ranks = Ranks(1, data, run, "CHECKPOINT.STEPS 2", prepare=partial(hold_saves, *gates))
    for gate, numbers in zip(
        gates, ([signal.SIGTERM, signal.SIGUSR1], [signal.SIGTERM]), strict=True
    ):
        ranks.wait_for(gate.reached.exists)
        for number in numbers:
            ranks.signal(number)
        gate.opened.touch()
    stopped_at(ranks.wait(), run)
    goes_on(1, data, run, whole(1))


def start_command(*launcher: str, data: Path, run: Path, keys: str = "") -> subprocess.Popen:
    """In the foreground of a session of its own, as a shell starts it in a terminal."""
    command = [sys.executable, *launcher, "tools/train.py", "--cfg", "quickstart_digits"]
    command += ["--resume", "auto", "--data", str(data), "--output", str(run), "--opts"]
    return subprocess.Popen(
        [*command, *SMALL.split(), *keys.split()],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def stop_command(process: subprocess.Popen, run: Path, number: int) -> Outcome:
    """The signal after three steps: SIGINT to all in the foreground, as Ctrl-C does it, others to
    one process."""
    try:
        while len(steps(run)) < 3:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=DEADLINE)
        return Outcome(process.returncode, out, err)
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW)])
def test_the_command_line(number, data, tmp_path):
    """With a data worker. The command that it prints goes on from the step at which it stopped."""
    run = tmp_path / "run"
    done = stop_command(start_command(data=data, run=run, keys="DATA.NUM_WORKERS 1"), run, number)
    name, step = stopped_at([done], run)
    assert name == number.name
    program, verb, *words = shlex.split(SAYS.search(done.out)[3])
    assert (Path(program).name, verb) == ("swinv2-moe", "train")
    words += ["DATA.NUM_WORKERS", "0", "TRAIN.MAX_STEPS", str(step + 1)]
    (again,) = Processes(1, tmp_path, partial(run_script, "tools/train.py", words)).wait()
    assert (again.status, again.err) == (0, "")
    assert f"resuming from {run}/checkpoints/step-{step:08d}, step {step} " in again.out
    assert [number for number, _ in steps(run)] == list(range(1, step + 2))


def test_the_command_to_go_on_has_the_launcher(monkeypatch):
    monkeypatch.setattr("swinv2_moe.commands.call.program", lambda name: name)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for local, options in (("4", "--nproc_per_node 4"), ("2", "...")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        words = resume_command("a.yaml", None, "run", ["SEED", "3"])
        expected = f"torchrun {options} -m swinv2_moe train --cfg a.yaml --output run --resume auto"
        assert words == f"{expected} --opts SEED 3"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_launcher(number, data, tmp_path):
    """torchrun passes the signal on and waits for its workers; it then ends with a traceback of its
    own and status 1, though each of them has saved and ended well."""
    run = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = stop_command(start_command(*launcher, data=data, run=run), run, number)
    assert "SignalException: Process" in done.err
    assert not [line for line in done.err.splitlines() if line.startswith(("error: ", "[rank"))]
    assert done.status == 1
    assert stopped_at([Outcome(0, done.out, "")], run)[0] == number.name
    assert "torchrun --nproc_per_node 2 -m swinv2_moe train --cfg " in done.out
