"""Files that appear complete or not at all, their records and locks."""

import errno
import hashlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe_core.files import (
    atomic_write,
    damage,
    exclusive_lock,
    fsync_and_hash,
    publish_directory,
    read_chunks,
    remove_leftovers,
    sha256,
    temporary_name,
    try_lock,
)
from swinv2_moe.errors import UserError
from swinv2_moe.files import HashedFile, new_file, replace_link

FLOCK = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_a_file_is_replaced_when_its_block_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
        assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_block_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def write_half() -> None:
        with atomic_write(tmp_path / "file") as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_of_two_writers_the_last_one_wins(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "file") as first:
        first.write(b"a longer text")
        with atomic_write(tmp_path / "file") as second:
            second.write(b"short")
        assert (tmp_path / "file").read_text() == "short"
    assert (tmp_path / "file").read_text() == "a longer text"
    assert os.listdir(tmp_path) == ["file"]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    leftover = temporary_name(tmp_path / "000000.tar")
    for name in (leftover.name, ".000000.tar.tmp", "000000.tar", leftover.name[1:]):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(
        [".000000.tar.tmp", "000000.tar", leftover.name[1:]]
    )


def test_a_relative_name_and_permissions(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with atomic_write("file", mode=0o600) as file:
        file.write(b"secret")
    assert Path("file").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_an_error_of_the_user(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match=r"file: cannot be written \(No space left")
    with refused, new_file(tmp_path / "file"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


def test_checksums_agree_however_a_file_is_read_or_written(tmp_path: Path) -> None:
    content = os.urandom(3_000_001)
    with new_file(tmp_path / "file") as file:
        file.write(content[:1000])
        file.write(memoryview(content)[1000:])
    checksum = hashlib.sha256(content).hexdigest()
    assert (file.bytes, file.sha256) == (len(content), checksum)
    record = fsync_and_hash(tmp_path / "file")
    assert record == {"bytes": len(content), "sha256": checksum}
    with (tmp_path / "file").open("rb") as opened:
        assert sha256(read_chunks(opened, 999)) == checksum
    with (tmp_path / "file").open("rb") as opened:
        reader = HashedFile(opened)
        while reader.read(1 << 20):
            pass
        assert reader.sha256 == checksum


def test_damage_names_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    record = fsync_and_hash(path)
    assert damage(path, record) is None
    path.write_bytes(b"12346")
    assert damage(path, record) == "is damaged (its checksum differs)"
    path.write_bytes(b"1234")
    assert damage(path, record) == "has 4 bytes, 5 were written"
    path.unlink()
    assert damage(path, record) == "is missing"
    path.mkdir()
    assert damage(path, record) == "cannot be read (not a regular file)"


def test_an_exclusive_lock_waits(tmp_path: Path, caplog) -> None:
    order = []

    def second() -> None:
        with exclusive_lock(tmp_path / "lock"):
            order.append("second")

    waits = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: waits.set()
    logging.getLogger("moe_core").addHandler(handler)
    with exclusive_lock(tmp_path / "lock"):
        os.truncate(tmp_path / "lock", 0)  # as before the holder has written its name
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(60)
        order.append("first")
    thread.join()
    logging.getLogger("moe_core").removeHandler(handler)
    assert order == ["first", "second"]
    assert caplog.messages[0].startswith("waiting for another process, which holds ")


def test_another_process_cannot_take_a_lock(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        assert try_lock(file.fileno(), inherited=True)
        command = [sys.executable, "-c", FLOCK, str(tmp_path / "lock")]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert try_lock(first.fileno(), inherited=True)
        assert not try_lock(second.fileno(), inherited=True)


def test_a_file_system_without_locks_is_no_lock_of_another(tmp_path: Path, monkeypatch) -> None:
    def refuse(*args) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with (tmp_path / "lock").open("w") as file, pytest.raises(OSError, match="no locks"):
        try_lock(file.fileno(), inherited=True)


def test_a_directory_and_a_link_get_their_names(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / ".tmp" / "inner").mkdir(parents=True)
        publish_directory(tmp_path / ".tmp", tmp_path / name)
        replace_link(tmp_path / "latest", name)
        assert os.readlink(tmp_path / "latest") == name
    assert sorted(os.listdir(tmp_path)) == ["first", "latest", "second"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    calls = []

    def recorded(name: str):
        function = getattr(os, name)
        return lambda *arguments: calls.append(name) or function(*arguments)

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, recorded(name))
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the folder
