"""A command of tools/, run in this process."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from swinv2_moe.command import run_command

TOOLS = Path(__file__).parents[1] / "tools"


class Finished(NamedTuple):
    status: int
    out: str
    err: str


def command(name: str, monkeypatch, capsys) -> Callable[..., Finished]:
    """A function of the arguments of tools/<name>.py; it takes pytest's two fixtures for argv and output."""
    spec = importlib.util.spec_from_file_location(f"{name}_tool", TOOLS / f"{name}.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr(sys, "argv", [f"tools/{name}.py", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            run_command(tool.main)
        except SystemExit as stop:
            status = stop.code
        return Finished(status, *capsys.readouterr())

    return run
