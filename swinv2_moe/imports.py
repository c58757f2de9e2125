"""Python files of the user, run before the configuration is read: `--import FILE`.

Such a file registers datasets (`swinv2_moe.data.register_dataset`), or routers, losses, activations
and all-to-all algorithms (`moe_core.register_router` and its siblings). Only the command line names
such files; a configuration or a checkpoint cannot.
"""

import argparse
import sys
import traceback
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from swinv2_moe.errors import UserError, one_line

# The list of imported files belongs to the process, as the registries do.
_imported: list[Path] = []


def imported_files() -> tuple[Path, ...]:
    """The files that this process has imported, in order."""
    return tuple(_imported)


def import_arguments() -> list[str]:
    """The imported files as arguments of another command."""
    words = []
    for file in _imported:
        words += ["--import", str(file)]
    return words


def import_file(name: str) -> None:
    """Run a Python file as a separate module. A file that has been imported is not run again.

    Raises:
        UserError: the file does not exist, or it raises an exception. The message names the file.
    """
    file = Path(name).resolve()
    if file in _imported:
        return
    if not file.is_file():
        problem = "does not exist"
        if file.exists():
            problem = "is not a file"
        raise UserError(f"--import {name}: {problem}")
    module_name = f"imported_{file.stem}"
    loader = SourceFileLoader(module_name, str(file))
    spec = spec_from_loader(module_name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        message = one_line(str(error))
        raise UserError(
            f"--import {name}: {_line_in(file, error)}{type(error).__name__}: {message}"
        ) from error
    _imported.append(file)


class ImportedFiles:
    """Imports the files of this process in the process that unpickles this object.

    An object whose classes may be defined in such a file has this as its first attribute.
    """

    def __reduce__(self):
        return _import_files, (imported_files(),)


def _import_files(files: tuple[Path, ...]) -> ImportedFiles:
    for file in files:
        import_file(str(file))
    return ImportedFiles()


def _line_in(file: Path, error: BaseException) -> str:
    """The prefix "line 12, " for a message, if the file's own code raised the error. Messages of
    syntax errors already have the line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    if lines:
        return f"line {lines[-1]}, "
    return ""


class _Import(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:
        import_file(values)


def add_import_argument(parser: argparse.ArgumentParser) -> None:
    """Add --import FILE, which runs the file when the arguments are parsed. It can be repeated."""
    parser.add_argument(
        "--import",
        action=_Import,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="a Python file to run first, which registers a dataset, a router, a loss, an"
        " activation or an all-to-all algorithm; repeatable",
    )
