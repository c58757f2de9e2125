"""mmcv's wheel: compiled once a machine, never half, never twice at a time."""

import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
from tool_cases import script

install = script("tools/install_detection")
InstallError, compiled_wheel = install.InstallError, install.compiled_wheel
pinned, wheel_directory = install.pinned, install.wheel_directory

WHEEL = "onedl_mmcv-{}-cp311-cp311-linux_x86_64.whl".format(pinned("onedl-mmcv").split("==")[1])


class Pip:
    """In place of pip: remembers what it was asked, and "compiles" in a moment."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[list[str]] = []
        self.environment: dict[str, str] = {}
        self.constraints: list[str] = []  # of the last installation
        self.fails = fails

    def __call__(self, log: Path, arguments: list[str], environment: dict | None = None) -> None:
        self.calls.append(arguments)
        options = dict(pairwise(arguments))
        if "--constraint" in options:
            self.constraints = Path(options["--constraint"]).read_text().splitlines()
        if arguments[0] != "wheel":
            return
        self.environment = environment
        if self.fails:
            raise InstallError("pip wheel failed")
        time.sleep(0.05)
        (Path(options["--wheel-dir"]) / WHEEL).write_text("a wheel")

    @property
    def compilations(self) -> int:
        return sum(call[0] == "wheel" for call in self.calls)


@pytest.fixture
def pip(monkeypatch, tmp_path) -> Pip:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pip = Pip()
    monkeypatch.setattr(install, "_pip", pip)
    return pip


def test_compiled_once_against_this_environment(pip, tmp_path):
    name = wheel_directory().relative_to(tmp_path / "cache/swinv2-moe/wheels").name
    assert re.fullmatch(r"torch\d+\.\d+\.\d+(\+\w+)?-cp3\d+(-sm\d+)?", name)
    wheel = compiled_wheel(tmp_path / "log")
    assert (wheel.parent, wheel.name) == (wheel_directory(), WHEEL)
    assert compiled_wheel(tmp_path / "log") == wheel
    assert pip.compilations == 1
    compilation = next(call for call in pip.calls if call[0] == "wheel")
    assert {"--no-build-isolation", "--no-cache-dir", "--no-deps"} <= set(compilation)
    assert compilation[-1] == pinned("onedl-mmcv")
    assert pip.environment["CFLAGS"] == "-O1 -g0"
    assert int(pip.environment["MAX_JOBS"]) >= 1
    # with the pinned versions and the torch that is here: another could not load the wheel
    assert pinned("ninja") in pip.constraints
    for package in ("torch", "torchvision"):
        pins = [pin for pin in pip.constraints if re.match(rf"{package}\b", pin)]
        assert pins == [f"{package}=={version(package)}"]


def test_compilers_take_cxx20(tmp_path):
    """The headers of torch 2.15 need it, and mmcv's setup asks for C++17 alone."""
    compiler = install._for_cxx20("printf '<%s>'", tmp_path / "c++")
    command = [compiler, "-O1", "-std=c++17", "-DX=a b", "x.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "<-O1><-std=c++20><-DX=a b><x.cpp>"


def test_the_compiler_of_the_environment_is_used(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")
    written = []

    def for_cxx20(command, file):
        written.append(command)
        return str(file)

    monkeypatch.setattr(install, "_for_cxx20", for_cxx20)
    compiled_wheel(tmp_path / "log")
    assert written[0] == "ccache g++"
    assert pip.environment["CXX"].endswith("/c++")


def test_what_a_killed_compilation_left_is_no_wheel(pip, tmp_path):
    leftover = wheel_directory() / "unfinished-killed"
    leftover.mkdir(parents=True)
    (leftover / WHEEL).write_text("half a whe")
    assert compiled_wheel(tmp_path / "log").read_text() == "a wheel"
    assert not leftover.exists()


def test_another_version_is_compiled_anew(pip, tmp_path):
    wheel_directory().mkdir(parents=True)
    (wheel_directory() / "onedl_mmcv-0.0.1-cp311-cp311-linux_x86_64.whl").write_text("an old one")
    assert compiled_wheel(tmp_path / "log").name == WHEEL


def test_two_at_once_compile_once(pip, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(compiled_wheel, [tmp_path / "log"] * 2))
    assert found == [wheel_directory() / WHEEL] * 2
    assert pip.compilations == 1


def test_a_failure_leaves_nothing_and_names_the_log(pip, tmp_path, monkeypatch):
    pip.fails = True
    monkeypatch.setattr(install.sys, "argv", ["install", str(tmp_path / "log")])
    with pytest.raises(SystemExit) as raised:
        install.main()
    line = f"Detection was not installed: pip wheel failed. The log: {tmp_path / 'log'}"
    assert str(raised.value) == line
    assert [path.name for path in wheel_directory().iterdir()] == [".lock"]


def test_a_wheel_that_does_not_work_is_named(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "_CHECK", "raise ImportError(\"No module named 'mmcv._ext'\")")
    words = r"No module named 'mmcv._ext' \(remove .*\.whl to compile it anew\)"
    with pytest.raises(InstallError, match=words):
        install.install(tmp_path / "log")
    check = 'raise ImportError("libGL.so.1: cannot open shared object file")'
    monkeypatch.setattr(install, "_CHECK", check)
    with pytest.raises(InstallError, match=r"libGL\.so\.1.*apt install libgl1 libglib2\.0-0"):
        install.install(tmp_path / "log")
    assert "libGL.so.1" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), ([], 2)])
def test_nothing_is_installed_for_help_or_without_a_log(words, status, monkeypatch, capsys):
    monkeypatch.setattr(install, "install", lambda log: pytest.fail(str(log)))
    monkeypatch.setattr(install.sys, "argv", ["install_detection.py", *words])
    with pytest.raises(SystemExit) as ended:
        install.main()
    assert ended.value.code == status
    assert "usage: install_detection.py" in "".join(capsys.readouterr())
