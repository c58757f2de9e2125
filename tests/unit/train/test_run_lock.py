"""One run at a time in a directory, which is looked at only by the run that has its lock."""

import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress

import pytest
from run_cases import ALONE
from tool_cases import refusal

from swinv2_moe import locks
from swinv2_moe.errors import UserError
from swinv2_moe.locks import lock as lock_directory
from swinv2_moe.ranks.run_lock import only_run
from swinv2_moe.start import initial
from swinv2_moe.train import arrival
from swinv2_moe.train import run as run_module
from swinv2_moe.train.run import train

HOLD = (
    "import fcntl, sys; lock = open(sys.argv[1], 'a'); fcntl.lockf(lock, fcntl.LOCK_EX);"
    " print('held', flush=True)"
)


@pytest.fixture
def another_run():
    """`another_run(directory)`: another process holds the lock of `directory` until the end of the
    test."""
    holders = []

    def hold(directory):
        command = [sys.executable, "-c", f"{HOLD}; sys.stdin.read()", str(directory / ".lock")]
        holders.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert holders[-1].stdout.readline() == "held\n"
        return holders[-1]

    yield hold
    for holder in holders:
        holder.communicate()


def snapshot(directory):
    paths = [directory, *directory.rglob("*")]
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths}


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_second_run_looks_at_nothing(resume, another_run, make_config, tmp_path, monkeypatch):
    config = make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 1})
    train(config)
    another_run(tmp_path / "run")
    looked = []
    monkeypatch.setattr(initial, "find_checkpoint", lambda *args, **kwargs: looked.append(args))
    monkeypatch.setattr(arrival, "build_data", lambda *args: looked.append(args))
    before = snapshot(tmp_path)
    message = refusal(train, config, resume)
    assert message == f"--output {tmp_path / 'run'}: another process is writing there"
    assert (looked, snapshot(tmp_path)) == ([], before)


def test_a_run_goes_on_from_what_the_one_before_wrote_last(
    make_config, tmp_path, monkeypatch, capsys
):
    """A checkpoint that appears just before the lock is free is the starting point, and is not set
    aside."""
    config = make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 2, "CHECKPOINT.STEPS": 1})
    train(config)
    newest, kept = tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path / "kept"
    shutil.move(newest, kept)
    (tmp_path / "run" / "checkpoints" / "latest").unlink()

    @contextmanager
    def wait_for_the_other_run(*args):
        shutil.move(kept, newest)
        with only_run(*args):
            yield

    monkeypatch.setattr(run_module, "only_run", wait_for_the_other_run)
    assert train(make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 3}), "auto")["steps"] == 3
    assert f"resuming from {newest}, step 2" in capsys.readouterr().out
    assert not list((tmp_path / "run" / "checkpoints").glob("set-aside-*"))


def test_the_lock_is_free_again(another_run, tmp_path):
    (tmp_path / "run").mkdir()
    holder = another_run(tmp_path / "run")
    lock = only_run(tmp_path / "run", ALONE)
    assert "another process is writing there" in refusal(lock.__enter__)
    holder.communicate()
    with only_run(tmp_path / "run", ALONE):
        assert os.listdir(tmp_path / "run") == [".lock"]


def test_what_is_left_empty_is_removed(tmp_path):
    """Directories that it made, whatever ends the block, but none that were there and none with
    files in them."""
    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyboardInterrupt), only_run(tmp_path / "mine" / "a" / "b", ALONE):
        raise KeyboardInterrupt
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with only_run(tmp_path / "mine", ALONE):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with only_run(tmp_path / "mine" / "a", ALONE):
        (tmp_path / "mine" / "a" / "metrics.jsonl").touch()
    assert os.listdir(tmp_path / "mine" / "a") == ["metrics.jsonl"]


def test_a_lock_file_that_is_removed_while_it_is_locked(tmp_path, monkeypatch):
    """As by a run that ends: the lock is taken on the file that the next run will find."""
    try_lock, removed = locks.try_lock, []

    def remove_and_lock(descriptor, inherited):
        if not removed:
            removed.append((tmp_path / "run" / ".lock").unlink())
            (tmp_path / "run").rmdir()
        return try_lock(descriptor, inherited)

    monkeypatch.setattr(locks, "try_lock", remove_and_lock)
    with only_run(tmp_path / "run", ALONE):
        assert removed
        assert (tmp_path / "run" / ".lock").exists()


@pytest.fixture
def no_locks(monkeypatch):
    """As NFS without lockd, or Lustre mounted without flock."""

    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)


OTHER_HOST = {"host": "node-7", "pid": 1, "started": 1.0}


@pytest.mark.parametrize("lock", [lambda path: only_run(path, ALONE), lock_directory])
def test_without_locks_an_owner_file_keeps_others_out(lock, no_locks, tmp_path, capsys):
    directory, owner = tmp_path / "run", tmp_path / "run" / ".owner"
    directory.mkdir()
    with lock(directory):
        assert "has no locks (No locks available)" in capsys.readouterr().err
        refused = rf"another process is writing there \(process {os.getpid()} on .*heard of 0 s ago"
        with pytest.raises(UserError, match=refused), lock(directory):
            pass
        assert owner.exists()
    assert not owner.exists()
    # of a process of this host that has ended, and of one with the same number
    for pid in (2**22 + 1, os.getpid()):
        values = {"host": socket.gethostname(), "pid": pid, "started": 1.0}
        owner.write_text(json.dumps(values))
        with lock(directory):
            assert str(os.getpid()) in owner.read_text()
    # of another host: as long as it is renewed; a damaged one counts as such
    for content in (json.dumps(OTHER_HOST), "", "[]", '{"host": "a", "pid": 1e999}'):
        owner.write_text(content)
        with pytest.raises(UserError, match=rf"wait 60 s or remove {owner}"), lock(directory):
            pass
        assert owner.read_text() == content
        os.utime(owner, (1, 1))
        with lock(directory):
            pass


@pytest.mark.parametrize("moment", [1, 2])
def test_one_of_two_takes_over_a_directory(moment, no_locks, tmp_path, monkeypatch):
    """A second process starts and goes on at the `moment`-th time that the first one has looked at
    the file of a process that has ended."""
    directory = tmp_path / "run"
    directory.mkdir()
    ended = {"host": socket.gethostname(), "pid": 2**22 + 1, "started": 1.0}
    (directory / ".owner").write_text(json.dumps(ended))
    look, looks, taken = locks.owner, [], []

    def take(lock):
        with suppress(UserError):
            taken.append(lock.enter_context(lock_directory(directory)))

    def look_and_wait(path):
        seen = look(path)
        looks.append(seen)
        if len(looks) == moment:
            take(second)
        return seen

    monkeypatch.setattr(locks, "owner", look_and_wait)
    with ExitStack() as first, ExitStack() as second:
        take(first)
        assert len(taken) == 1
        assert sorted(os.listdir(directory)) == [".lock", ".owner"]
    assert os.listdir(directory) == []


def test_a_full_disk_does_not_take_over(no_locks, tmp_path, monkeypatch):
    """The clock of a full file system cannot be read."""

    def fail(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".owner").write_text(json.dumps(OTHER_HOST))
    monkeypatch.setattr(locks, "_now", fail)
    with pytest.raises(UserError, match="No space left"), only_run(tmp_path / "run", ALONE):
        pass
    assert (tmp_path / "run" / ".owner").exists()


def test_the_owner_renews_its_file_and_leaves_that_of_another(no_locks, tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_BEAT_SECONDS", 0.001)
    (tmp_path / "run").mkdir()
    with only_run(tmp_path / "run", ALONE):
        file = tmp_path / "run" / ".owner"
        os.utime(file, (1, 1))
        while file.stat().st_mtime == 1:
            pass
        file.write_text("another's")
    assert file.read_text() == "another's"


def test_directories_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/run"):
        message = refusal(only_run(tmp_path / name, ALONE).__enter__)
        assert message.startswith(f"--output {tmp_path}/file")
        assert message.endswith(f"{tmp_path}/file is a file, a run needs a directory")
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    message = refusal(only_run(tmp_path / "run", ALONE).__enter__)
    assert message == f"--output {tmp_path}/run: cannot be written (Is a directory)"
