"""A command of tools/ or data/, run in this process; how calls are refused; what files hold."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from swinv2_moe.commands.call import run_command
from swinv2_moe.errors import UserError

ROOT = Path(__file__).parents[1]


class Finished(NamedTuple):
    status: int
    out: str
    err: str


def words(*arguments: object, **places: Path) -> list[str]:
    """A command's arguments. Strings are split at spaces, and {name} in them is one of `places`;
    all else, such as a path, is one word."""
    found = []
    for argument in arguments:
        parts = argument.split() if isinstance(argument, str) else [str(argument)]
        found += [part.format(**places) if places else part for part in parts]
    return found


def command(name: str, monkeypatch, capsys, directory: str = "tools") -> Callable[..., Finished]:
    """A function of the arguments of <directory>/<name>.py, as `words` takes them. It uses pytest's
    two fixtures for argv and output."""
    tool = import_module(f"swinv2_moe.commands.{name}")
    return in_this_process(f"{directory}/{name}.py", tool.main, monkeypatch, capsys)


def in_this_process(
    name: str, main: Callable[[], None], monkeypatch, capsys
) -> Callable[..., Finished]:
    """As `command`, of a script's `main`."""

    def run(*arguments: object, **places: Path) -> Finished:
        monkeypatch.setattr(sys, "argv", [name, *words(*arguments, **places)])
        capsys.readouterr()
        status = 0
        try:
            run_command(main)
        except SystemExit as stop:
            status = stop.code
        return Finished(status, *capsys.readouterr())

    return run


def script(name: str) -> ModuleType:
    """The module of a script, such as "examples/sweep"."""
    spec = spec_from_file_location(Path(name).name, ROOT / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def models_counted_once() -> Iterator[None]:
    """Within it trainings in this process count the parameters and MACs of equal models once: of a
    training of a second that is half."""
    from swinv2_moe.train import run  # the engine's tests do without it

    measure, counted = run.measure_model, {}

    def measure_once(config, num_classes: int):
        key = (repr(config), num_classes)
        if key not in counted:
            counted[key] = measure(config, num_classes)
        return counted[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "measure_model", measure_once)
        yield


def assert_one_line(finished: Finished, says: str) -> None:
    """The command printed one line of error and nothing else; it has every part of `says`, which
    " ... " separates."""
    assert (finished.status, finished.out) == (2, ""), finished
    (line,) = finished.err.splitlines()
    assert line.startswith("error: ")
    assert [part for part in says.split(" ... ") if part not in line] == [], line


def refusal(function: Callable, *args, **keys) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(UserError) as caught:
        function(*args, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def snapshot(root: Path) -> dict[str, bytes]:
    """The content of every file below a directory."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
