"""Ctrl-C ends every command with one line and exit status 130, whatever it is doing."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gloo_processes import DEADLINE, ROOT

from swinv2_moe.commands import call, quickstart
from swinv2_moe.train import run as run_module

COMMANDS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("tools", "data")
    for path in (ROOT / folder).glob("*.py")
    if path.name not in ("install_detection.py", "train_on_gpu.py")  # they run by themselves
)
# Ctrl-C when the command imports the module that is named
WHILE_IMPORTING = """
import runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == module:
            signal.raise_signal(signal.SIGINT)

_, module, *sys.argv = sys.argv
sys.meta_path.insert(0, Interrupts())
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# A worker that has begun a shard stays there, and says so at the moment that is named: when the
# worker is there itself, or only when its parent waits for it
WHILE_MAKING_SHARDS = """
import runpy, sys, time
from pathlib import Path
from swinv2_moe.data.prepare import make_shards, shard_jobs
_, reached, moment, *sys.argv = sys.argv
reached, begun, wait = Path(reached), Path(reached + "-worker"), shard_jobs.wait

def begin(*args):
    (reached if moment == "forking" else begun).touch()
    time.sleep(600)

def wait_for_worker(*args, **kwargs):
    if begun.exists():
        reached.touch()
    return wait(*args, **kwargs)

make_shards._Writer._add, shard_jobs.wait = begin, wait_for_worker
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def in_foreground():
    """`in_foreground(arguments of python)`: a process in a session of its own, as a shell starts it
    in a terminal."""
    started = []

    def start(*words: object) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=ROOT,
                env=environment,
                start_new_session=True,
                **pipes,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def press_ctrl_c(process: subprocess.Popen, reached: Path) -> tuple[int, str, str]:
    """SIGINT to the process and its children, once the file `reached` is there; status, output and
    errors."""
    while not reached.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out, err


def test_while_a_command_is_imported(in_foreground):
    cases = [("swinv2_moe.commands.call", [script]) for script in COMMANDS]
    cases += [
        ("torch", ["tools/throughput.py", "--cfg", "quickstart_digits", "--output", "x"]),
        ("numpy", ["data/stage.py", "x", "y"]),
    ]
    for module, words in cases:
        process = in_foreground("-c", WHILE_IMPORTING, module, *words)
        out, err = process.communicate(timeout=DEADLINE)
        assert (process.returncode, out, err) == (130, "", "interrupted\n"), words


@pytest.mark.parametrize("moment", ["forking", "waiting"])
def test_while_shards_are_made(moment, make_photographs, in_foreground, tmp_path):
    reached = tmp_path / "reached"
    words = ["data/make_shards.py", "--data", make_photographs(), "--output", tmp_path / "shards"]
    words += ["--workers", "2", "--shard-mb", "0.01"]
    process = in_foreground("-c", WHILE_MAKING_SHARDS, reached, moment, *words)
    status, _, err = press_ctrl_c(process, reached)
    assert (status, err) == (130, "interrupted\n")


def test_a_worker_that_ctrl_c_has_ended_first(make_photographs, in_foreground, tmp_path):
    code = """
import runpy, signal, sys
from swinv2_moe.data.prepare import make_shards
make_shards._Writer._add = lambda *args: signal.raise_signal(signal.SIGINT)
sys.argv[:1] = []
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    words = ["data/make_shards.py", "--data", make_photographs(), "--output", tmp_path / "shards"]
    process = in_foreground("-c", code, *words, "--workers", "2")
    _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_in_a_destructor_where_python_ignores_it(in_foreground):
    code = """
import signal, time
import swinv2_moe.commands.interrupt

class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

Interrupted()
time.sleep(600)
"""
    process = in_foreground("-c", code)
    _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.fixture
def sigint():
    """What SIGINT does is what it did before, after the test."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("rank", "line"), [("0", "interrupted\n"), ("1", "")])
def test_the_main_rank_says_it(rank, line, sigint, monkeypatch, capsys):
    def main() -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        call.run_command(main)
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", line)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # a second one ends the process


def test_the_quickstart_stops_with_its_first_training(monkeypatch, tmp_path):
    trained, new = [], str(tmp_path / "new")
    monkeypatch.setattr(
        run_module, "train", lambda config, resume_command: trained.append(resume_command)
    )
    words = ["tools/quickstart.py", "--output", new, "--opts", "SEED", "3"]
    monkeypatch.setattr(sys, "argv", words)
    quickstart.main()
    (going_on,) = trained
    words = shlex.split(going_on)
    words = words[words.index("train") + 1 :]
    assert words[:2] == ["--cfg", quickstart.CONFIG]
    assert words[2:] == ["--output", f"{new}/moe", "--resume", "auto", "--opts", "SEED", "3"]
