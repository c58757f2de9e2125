"""A command of tools/ or data/, run in this process."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from swinv2_moe.command import run_command

ROOT = Path(__file__).parents[1]


class Finished(NamedTuple):
    status: int
    out: str
    err: str


def command(name: str, monkeypatch, capsys, directory: str = "tools") -> Callable[..., Finished]:
    """A function of the arguments of <directory>/<name>.py; it takes pytest's two fixtures for argv
    and output."""
    tool = import_module(f"swinv2_moe.commands.{name}")

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr(sys, "argv", [f"{directory}/{name}.py", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            run_command(tool.main)
        except SystemExit as stop:
            status = stop.code
        return Finished(status, *capsys.readouterr())

    return run
