"""Compiled libraries: made once, loaded only as they were written, by the user who wrote them, and
done without where there is no compiler."""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from moe_core.files import exclusive_lock
from moe_core.ops.backend import language
from moe_core.ops.native import build_cache, instruction_sets
from moe_core.ops.native import library as native_library
from moe_core.ops.native.build_cache import cache_directory, compiled_library
from moe_core.ops.native.instruction_sets import sets_of_cpu

NAME = "x86-test.so"
CONTENT = os.urandom(10_000)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moe_core"


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def compiled() -> int:
    """How often the library had to be compiled; afterwards it is as it should be."""
    calls = []

    def compile_to(path: Path) -> None:
        calls.append(path)
        path.write_bytes(CONTENT)

    assert compiled_library(NAME, compile_to, Path.read_bytes) == CONTENT
    return len(calls)


def test_a_library_is_compiled_once(home):
    assert [compiled(), compiled()] == [1, 0]
    assert home.stat().st_mode & 0o077 == 0
    assert {path.name for path in home.iterdir()} == {".lock", NAME, f"{NAME}.sha256"}


def test_a_compiled_library_needs_no_lock_and_no_writable_cache(home, monkeypatch):
    compiled()
    (home / ".lock").unlink()
    monkeypatch.setattr(build_cache, "exclusive_lock", Mock(side_effect=AssertionError))
    monkeypatch.setattr(build_cache, "cache_directory", Mock(side_effect=AssertionError))
    assert compiled() == 0
    assert not (home / ".lock").exists()


def test_without_locks_it_is_compiled_with_a_warning(home, monkeypatch, caplog):
    refuse = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert [compiled(), compiled()] == [1, 0]
    assert caplog.messages == [f"{home}/.lock: the file system has no locks (No locks available)"]
    assert {path.name for path in home.iterdir()} == {".lock", NAME, f"{NAME}.sha256"}


def test_a_wait_names_the_process_that_is_waited_for(tmp_path, caplog):
    released = []

    class Release(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            released.append(holder.communicate())

    code = "import sys; from moe_core.files import exclusive_lock as lock\n"
    code += "with lock(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout.readline() == "held\n"
    handler = Release()
    logging.getLogger("moe_core").addHandler(handler)
    with exclusive_lock(tmp_path / ".lock") as is_locked:
        assert is_locked
    logging.getLogger("moe_core").removeHandler(handler)
    assert released
    assert f"waiting for 'process {holder.pid} on {socket.gethostname()}'" in caplog.messages[0]
    assert str(os.getpid()) in (tmp_path / ".lock").read_text()


DAMAGES = {
    "truncated": lambda library, checksum: os.truncate(library, 4096),
    "a bit": lambda library, checksum: library.write_bytes(bytes([CONTENT[0] ^ 1]) + CONTENT[1:]),
    "no checksum": lambda library, checksum: checksum.unlink(),
    "no library": lambda library, checksum: library.unlink(),
    "a link": lambda library, checksum: (
        library.rename(library.with_suffix(".x")) and library.symlink_to("x86-test.x")
    ),
    "others can write": lambda library, checksum: library.chmod(0o777),
    "a pipe": lambda library, checksum: library.unlink() or os.mkfifo(library),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_is_not_as_written_is_compiled_again(damage, home):
    compiled()
    DAMAGES[damage](home / NAME, home / f"{NAME}.sha256")
    assert [compiled(), compiled()] == [1, 0]


def test_a_compiler_that_was_killed_leaves_nothing_to_load(home):
    def killed(path: Path) -> None:
        path.write_bytes(CONTENT[:100])
        raise subprocess.CalledProcessError(-9, "compiler")

    with pytest.raises(subprocess.CalledProcessError):
        compiled_library(NAME, killed, Path.read_bytes)
    assert not (home / NAME).exists()
    assert compiled() == 1


# Directories that are not used; those of the temporary files serve in their place.


def own_temporary(temporary: Path) -> Path:
    return temporary / f"moe_core-{os.getuid()}"


def test_a_directory_that_others_can_write_in(home, temporary):
    home.mkdir(mode=0o700)
    home.chmod(0o777)
    (home / NAME).write_bytes(b"a stranger's")
    assert compiled() == 1
    assert (own_temporary(temporary) / NAME).exists()
    assert (home / NAME).read_bytes() == b"a stranger's"


def test_the_directory_of_another_user(home, temporary, monkeypatch):
    home.mkdir(mode=0o700)
    owner = Mock(st_mode=os.lstat(home).st_mode, st_uid=os.getuid() + 1)
    lstat = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: owner if path == home else lstat(path))
    assert cache_directory().parent == temporary


def test_a_link_in_the_place_of_the_temporary_directory_is_not_followed(
    temporary, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own_temporary(temporary).symlink_to(tmp_path / "elsewhere")
    assert stat.S_ISDIR(cache_directory().lstat().st_mode)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_cache_that_cannot_be_written_and_a_user_without_a_home(home, temporary, monkeypatch):
    """Processes share a temporary directory."""
    home.write_text("a file, where a directory should be")
    first, second = cache_directory(), cache_directory()
    assert first == second
    assert first.parent == temporary
    assert first.stat().st_mode & 0o077 == 0
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    assert cache_directory() == first


def test_a_temporary_directory_of_another_user(temporary, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    other = os.getuid() + 1
    (temporary / f"moe_core-{other}").mkdir()
    monkeypatch.setattr(os, "getuid", Mock(return_value=other))
    assert cache_directory().name != f"moe_core-{other}"


def refuse_execution(monkeypatch, *directories: Path) -> None:
    """As on file systems that are mounted with noexec."""

    def refused(file: str) -> bool:
        return any(Path(file).is_relative_to(directory) for directory in directories)

    def map_file(descriptor: int, *arguments):
        if refused(os.readlink(f"/proc/self/fd/{descriptor}")):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return original_map(descriptor, *arguments)

    def open_library(path: str):
        if refused(path):
            raise OSError(f"{path}: failed to map segment from shared object")
        return original_open(path)

    original_map, original_open = mmap.mmap, ctypes.CDLL
    monkeypatch.setattr(mmap, "mmap", map_file)
    monkeypatch.setattr(ctypes, "CDLL", open_library)


def test_a_directory_that_allows_no_execution(home, temporary, monkeypatch):
    home.mkdir(mode=0o700)
    refuse_execution(monkeypatch, home)
    assert [compiled(), compiled()] == [1, 0]
    assert not (home / NAME).exists()
    assert (own_temporary(temporary) / NAME).exists()


def test_a_library_in_a_directory_that_allows_no_execution_any_more(home, temporary):
    def load(path: Path) -> Path:
        if path.parent == home:
            raise OSError("failed to map segment from shared object")
        return path

    assert compiled() == 1
    shutil.copytree(home, own_temporary(temporary))
    compile_to = Mock(side_effect=AssertionError)
    path = compiled_library(NAME, compile_to, load)
    assert path == own_temporary(temporary) / NAME


# Whatever fails, torch's kernels run, and one line in the log has the reason.


def reason_for_torch(caplog) -> str:
    caplog.clear()
    caplog.set_level(logging.INFO, "moe_core")
    assert native_library.chosen.__wrapped__() is None
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    prefix = "moe_core kernels: torch on this CPU, since C++ cannot be used: "
    assert warning.getMessage().startswith(prefix)
    return warning.getMessage().removeprefix(prefix)


def times_compiled(caplog) -> int:
    return sum("compiling" in message for message in caplog.messages)


@pytest.fixture
def cpu(monkeypatch) -> None:
    """A CPU with two instruction sets, and a package without compiled libraries."""
    monkeypatch.setattr(native_library, "sets_of_cpu", lambda: instruction_sets.SETS[:2])
    monkeypatch.setattr(native_library, "PREBUILT", Path("/nowhere"))


def test_no_directory_allows_execution(home, temporary, cpu, monkeypatch, caplog):
    refuse_execution(monkeypatch, home, temporary)
    for _ in range(2):
        assert "does not allow execution" in reason_for_torch(caplog)
        assert times_compiled(caplog) == 0
    assert list(temporary.glob("moe_core-*")) == [own_temporary(temporary)]


def program(path: Path, lines: bytes) -> str:
    """A program in place of a compiler, which has a version."""
    path.write_bytes(b'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\n' + lines)
    path.chmod(0o755)
    return str(path)


def test_a_library_that_does_not_load_is_not_compiled_by_each_process(
    home, cpu, monkeypatch, caplog, tmp_path
):
    writes = b'while [ "$1" != -o ]; do shift; done; echo no library >"$2"\n'
    monkeypatch.setenv("CXX", program(tmp_path / "compiler", writes))
    counts = []
    for _ in range(2):
        assert "does not load: " in reason_for_torch(caplog)
        counts.append(times_compiled(caplog))
    assert counts == [1, 0]


@pytest.mark.parametrize(
    ("command", "lines", "reason"),
    [
        ("g++ '", None, '$CXX ("g++ \'") is not a command: No closing quotation'),
        (" ", b"", "No such file or directory: 'g++'"),
        (None, b"printf '\\n\\n an error\\n' >&2; exit 1", "C++ does not compile: an error"),
        (None, b"printf 'f\\374r' >&2; exit 1", "C++ does not compile: f\ufffdr"),
        (None, b"kill -9 $$", "C++ does not compile: Command "),
        (None, b"exit 0", ".unfinished"),
    ],
)
def test_a_compiler_that_fails(command, lines, reason, home, cpu, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler = program(tmp_path / "compiler", lines or b"")
    monkeypatch.setenv("CXX", compiler if command is None else command)
    assert reason in reason_for_torch(caplog)
    assert not list(home.glob("*.so"))


def test_a_failure_that_nobody_foresaw(cpu, monkeypatch, caplog):
    monkeypatch.setattr(native_library, "_load", Mock(side_effect=RuntimeError))
    assert reason_for_torch(caplog) == "RuntimeError"


def test_instructions_that_the_system_does_not_allow_are_left_out(cpu, monkeypatch, caplog):
    first, second = (Mock(request_tiles=Mock(return_value=code)) for code in (1, 0))
    monkeypatch.setattr(native_library, "_load", Mock(side_effect=[first, second]))
    assert native_library.chosen.__wrapped__() == (instruction_sets.SETS[1], second)
    assert caplog.messages == []


needs_cpp = pytest.mark.skipif(native_library.chosen() is None, reason="no C++ kernels here")
# Its name is in ISO 8859-1, not in UTF-8.
COMPILER = r"""#!/bin/sh
[ "$1" = --version ] && exec printf 'f\374r\n'
while [ "$1" != -o ]; do shift; done
sleep 1  # half a minute in earnest
cp {library} "$2"
"""
COMPUTE = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from moe_core.ops import ExpertWeights, expert_ffn
w, rows = torch.ones(2, 8, 4), torch.ones(6, 4)
offsets = torch.tensor([3, 6], dtype=torch.int32)
weights = ExpertWeights(w, None, w, None)
print("out", float(expert_ffn(rows, weights, offsets, "relu").sum()))
"""
# Loading what is left of the library would be a bus error.
TRUNCATE_AND_LOAD = """
import os, sys
from moe_core.ops.native import library
for size in (0, 5000):
    os.environ["XDG_CACHE_HOME"] = os.path.join(sys.argv[1], str(size))
    path = library._compiled(library.sets_of_cpu()[0], lambda path: path)
    os.truncate(path, size)
    assert library.chosen.__wrapped__() is not None
    assert path.stat().st_size > 5000
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Of a process with an empty cache, whose compiler copies a library."""
    compiler = tmp_path / "compiler"
    library = native_library._compiled(native_library.chosen()[0], lambda path: path)
    compiler.write_text(COMPILER.format(library=library))
    compiler.chmod(0o755)
    return {
        "XDG_CACHE_HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "CXX": f"env {compiler}",  # a compiler may have arguments
    }


@needs_cpp
def test_processes_compile_it_once_among_them(environment, tmp_path, monkeypatch, caplog):
    command = [sys.executable, "-c", COMPUTE]
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all("out 768.0" in text for text in printed)
    assert sum("compiling" in text for text in printed) == 1
    assert len(list((tmp_path / "moe_core").glob("*.so"))) == 1
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.INFO, "moe_core")
    assert native_library.chosen.__wrapped__() is not None
    assert caplog.messages == []  # compiled by a process before


@needs_cpp
def test_a_truncated_library_ends_no_process(environment, tmp_path):
    command = [sys.executable, "-c", TRUNCATE_AND_LOAD, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_cpp
@pytest.mark.parametrize("damaged", [False, True])
def test_a_wheels_libraries_need_no_compiler(damaged, tmp_path, monkeypatch, caplog, choose_again):
    """Without either, experts run in torch, and one line says so."""
    first = sets_of_cpu()[0]
    prebuilt = tmp_path / native_library.file_name(first)
    shutil.copy(native_library._compiled(first, lambda path: path), prebuilt)
    if damaged:
        prebuilt.write_bytes(b"not a library")
    monkeypatch.setattr(native_library, "PREBUILT", tmp_path)
    monkeypatch.setattr(native_library, "sets_of_cpu", lambda: [first])
    monkeypatch.setenv("CXX", "no-such-compiler")
    choose_again()
    languages = [language("auto", "cpu") for _ in range(2)]
    assert languages == ["torch" if damaged else "cpp"] * 2
    assert caplog.text.count("since C++ cannot be used") == damaged
    assert ("no-such-compiler" in caplog.text) == damaged
