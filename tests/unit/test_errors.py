"""How messages show what files hold: one line, of a sensible length, whatever it is."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from swinv2_moe.commands.call import run_command
from swinv2_moe.errors import UserError, one_line, short


def nested(depth: int) -> list:
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_values_are_shown_as_they_are_written_and_cut():
    assert short("a\nb") == "'a\\nb'"
    assert short([1, None]) == "[1, None]"
    assert short("x" * 100, 10) == "'xxxxxxxxx..."


def test_values_that_cannot_be_printed():
    assert short(1 << 20_000) == "int that is too large to print"
    assert short(nested(100_000)) == "list that is too large to print"


def test_a_line_has_no_line_ends_and_no_control_characters():
    assert one_line("a\nb\r\n\x1b[31mc\udc80\0 é") == "a b \\x1b[31mc\\x80\\x00 é"


def test_a_command_prints_one_line_whatever_a_name_has_in_it(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")

    def main() -> None:
        raise UserError("a\nb\x1b[2J.tar: is damaged")

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: a b\\x1b[2J.tar: is damaged\n"


def dies(index: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)


def runs_out_of_files(index: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a.png")


class Failing(torch.utils.data.Dataset):
    def __init__(self, act):
        self.act = act

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.act(index)


def loader_error(act) -> Exception:
    with pytest.raises((OSError, RuntimeError), match="worker") as caught:
        next(iter(torch.utils.data.DataLoader(Failing(act), num_workers=1)))
    return caught.value


def from_a_worker(act) -> Exception:
    """The error of torch's loader when its worker calls `act`.

    In a process of its own: torch raises the error of a dead worker again wherever this process
    is when another child ends, until the loader is freed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(loader_error, act).result()


def no_semaphore() -> Exception:
    """What Docker's /dev/shm of 64 KB says to the first queue of a loader."""
    namespace = {"error": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}
    code = compile("raise error", "/lib/multiprocessing/synchronize.py", "exec")
    with pytest.raises(OSError, match="No space") as caught:
        exec(code, namespace)
    return caught.value


FAULTS = {
    "worker killed": (lambda: from_a_worker(dies), "a data worker was killed; .*memory.*BATCH"),
    "files of a worker": (
        lambda: from_a_worker(runs_out_of_files),
        r"too many open files .*ulimit -n.*a\.png",
    ),
    "bus error": (
        lambda: RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is"),
        "/dev/shm: .*--shm-size.*DATA.NUM_WORKERS 0",
    ),
    "shared memory": (
        lambda: RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_0>: Suc"),
        "/dev/shm: .*--shm-size",
    ),
    "semaphore": (no_semaphore, "/dev/shm: .*--shm-size"),
    "crash": (
        lambda: RuntimeError("DataLoader worker (pid 7) is killed by signal: Segmentation fault."),
        "a data worker crashed; .*--check-files",
    ),
    "disk": (
        lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/metrics.jsonl"),
        "the disk is full; .*--resume auto.*run/metrics.jsonl",
    ),
    "quota": (lambda: OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "the disk is full"),
    "memory": (MemoryError, "memory has run out; .*DATA.BATCH_SIZE"),
    "torch's memory": (
        lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
        "memory has run out; .*you tried 8 bytes",
    ),
    "library": (
        lambda: ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        "memory has run out",
    ),
    "GPU memory": (
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        "memory of the GPU is full; .*USE_CHECKPOINT.*2 GiB",
    ),
    "threads": (lambda: RuntimeError("can't start new thread"), "no more processes.*pids-limit"),
    "fork": (
        lambda: BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        "no more processes or threads",
    ),
    "disk failed": (lambda: OSError(errno.EIO, os.strerror(errno.EIO)), "file system has failed"),
    "GPU failed": (
        lambda: RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors"),
        "the GPU or its driver has failed.*illegal memory access",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_machine_is_one_line(name, capsys, monkeypatch):
    """It names rank, cause and remedy, also of what another error was raised from."""
    make, expected = FAULTS[name]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def main() -> None:
        raise RuntimeError("a step failed") from make()

    stderr = sys.stderr
    with pytest.raises(SystemExit) as stop:
        run_command(main)
    print("a consequence", file=sys.stderr)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert stop.value.code == 1
    line = capsys.readouterr().err
    assert re.fullmatch(rf"error: rank 1 of 2 on .*{expected}.*\n", line), line


def test_a_thread_that_a_full_disk_ends_is_one_line(capsys, monkeypatch):
    """TensorBoard's writer, for example; the program goes on."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)

    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "events")

    def main() -> None:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()

    run_command(main)
    assert re.fullmatch("warning: the disk is full; .*'events'.*\n", capsys.readouterr().err)


def test_an_error_of_the_program_keeps_its_traceback():
    def main() -> None:
        raise ValueError("a mistake here")

    with pytest.raises(ValueError, match="a mistake here"):
        run_command(main)


RANK_1_FIRST = """
import os, pathlib, sys, time
from swinv2_moe.commands.call import run_command
from swinv2_moe.errors import UserError

rank_1_fails = pathlib.Path(sys.argv[2])

def main():
    if os.environ["RANK"] == "1":
        rank_1_fails.touch()
    else:
        while sys.argv[1] == "stays" or not rank_1_fails.exists():
            time.sleep(0.05)
    raise UserError("KEY is 1, it must be 2")

run_command(main)
"""


@pytest.mark.parametrize(
    ("rank_0", "line"),
    [
        ("follows", "error: KEY is 1, it must be 2\n"),  # though torchrun ends all after rank 1
        ("stays", "error: KEY is 1, it must be 2 (rank 1)\n"),
    ],
)
def test_one_rank_of_torchrun_prints(rank_0, line, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RANK_1_FIRST)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", "2"]
    words += [str(program), rank_0, str(tmp_path / "rank_1_fails")]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error: KEY") == 1, done.stderr
    assert line in done.stderr
