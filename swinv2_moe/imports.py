"""Python files of the user, run before the configuration is read: `--import FILE`.

Such a file registers datasets (`swinv2_moe.data.register_dataset`), or routers, losses,
activations and all-to-all algorithms (`moe_core.register_router` and its siblings).
Files are named on the command line alone, never by a configuration or a checkpoint.
"""

import argparse
import sys
import traceback
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from swinv2_moe.errors import UserError, one_line

# Registration is for the whole process, and so is the list of what has been imported.
_imported: list[Path] = []


def imported_files() -> tuple[Path, ...]:
    """The files that this process has imported, in order."""
    return tuple(_imported)


def import_arguments() -> list[str]:
    """These files as arguments of another command."""
    words = []
    for file in _imported:
        words += ["--import", str(file)]
    return words


def import_file(name: str) -> None:
    """Run a Python file as a module of its own; one that has been imported is not run again.

    Raises:
        UserError: there is no such file, or it raises; the line names the file.
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
    spec = spec_from_loader(module_name, SourceFileLoader(module_name, str(file)))
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        message = one_line(str(error))
        raise UserError(
            f"--import {name}: {_line_in(file, error)}{type(error).__name__}: {message}"
        ) from error
    _imported.append(file)


class ImportedFiles:
    """Imports the files of this process in the process that unpickles it.

    A pickled object whose classes may be in such a file holds this as its first attribute.
    """

    def __reduce__(self):
        return _import_files, (imported_files(),)


def _import_files(files: tuple[Path, ...]) -> ImportedFiles:
    for file in files:
        import_file(str(file))
    return ImportedFiles()


def _line_in(file: Path, error: BaseException) -> str:
    """ "line 12, " where the file's own code raised; syntax errors name their line themselves."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    if lines:
        return f"line {lines[-1]}, "
    return ""


class _Import(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:
        import_file(values)


def add_import_argument(parser: argparse.ArgumentParser) -> None:
    """--import FILE, which runs the file as the arguments are parsed; it can be repeated."""
    parser.add_argument(
        "--import",
        action=_Import,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="a Python file to run first, which registers a dataset, a router, a loss, an"
        " activation or an all-to-all algorithm; repeatable",
    )
