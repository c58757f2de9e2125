"""What the commands in tools/ share: arguments, results as JSON, one line for a user's mistake and
for Ctrl-C."""

# first: the imports below take seconds
from swinv2_moe.interrupt import INTERRUPTED, end_interrupted

# isort: split

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from yacs.config import CfgNode

from moe_core.parallel import CollectiveError
from swinv2_moe.config import choices, load_config
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.imports import add_import_argument, import_arguments
from swinv2_moe.train.stopping import StoppedElsewhere

_REGISTERED = (
    "DATA.DATASET",
    "MODEL.MOE.ROUTER",
    "MODEL.MOE.AUX_LOSS",
    "MODEL.MOE.ACTIVATION",
    "MODEL.MOE.ALL_TO_ALL",
)
_ROOT = Path(__file__).parents[1]  # of the repository, which holds the commands


class CommandParser(argparse.ArgumentParser):
    """The arguments of a command, and of its subcommands. Each has --import, and its help lists
    what the files that come before --help have registered."""

    def __init__(self, **kwargs) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        add_import_argument(self)

    def format_help(self) -> str:
        allowed = choices()
        lines = [f"{key}: {', '.join(allowed[key])}" for key in _REGISTERED]
        self.epilog = "\n".join(lines)
        return super().format_help()


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """--cfg, --data, --output and --opts."""
    parser.add_argument(
        "--cfg", required=True, metavar="FILE", help="a YAML file below configs/, or your own"
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="the data set (DATA.PATH); a folder of images with train/ and val/",
    )
    parser.add_argument("--output", metavar="DIR", help="the run directory (OUTPUT)")
    parser.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="any configuration keys, in pairs",
    )


def add_checkpoint_arguments(parser: argparse.ArgumentParser, **output) -> None:
    """--resume, --data, --dataset, --output and --opts of what uses a checkpoint; `output`: what
    `add_argument` takes for an --output that is not a file for the results."""
    parser.add_argument(
        "--resume",
        required=True,
        metavar="DIR",
        help="a run (its newest checkpoint) or a checkpoint",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="the data set (DATA.PATH); default: the one of the training"
    )
    parser.add_argument(
        "--dataset",
        metavar="KIND",
        help="DATA.DATASET; default: as --data looks, or the training's",
    )
    parser.add_argument(
        "--output", **{"metavar": "JSON", "help": "a file for the results"} | output
    )
    parser.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="any configuration keys, in pairs",
    )


def check_output_file(file: str | Path | None) -> None:
    """Before the work: raise UserError where --output is given and cannot be a file."""
    if file and (not Path(file).parent.is_dir() or Path(file).is_dir()):
        raise UserError(f"--output {file}: must be a file in a directory that exists")


def write_results(file: str | None, found: dict) -> None:
    """The results as JSON, where --output is given.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        if file:
            Path(file).write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--output {file}: cannot be written ({error.strerror})") from error


def output_directory(name: str) -> Path:
    """--output as a directory, made where there is none.

    Raises:
        UserError: it cannot be made or written in.
    """
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output {name}: cannot be made a directory ({error.strerror})"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"--output {name}: permission denied to write in it")
    return path


def config_from(args: argparse.Namespace) -> CfgNode:
    """The checked configuration that the arguments describe."""
    return load_config(args.cfg, args.opts, data=args.data, output=args.output)


def resume_command(
    script: str,
    cfg: str,
    data: str | None = None,
    output: str | None = None,
    opts: Sequence[str] = (),
) -> str:
    """The command line that goes on with a training, started as this process was and with the same
    --import files.

    Args:
        script: tools/train.py, by the path that is to be typed.
        cfg, data, output, opts: its arguments, as in `add_config_arguments`.
    """
    words = [*_launcher(), script, *import_arguments(), "--cfg", cfg]
    words += ["--data", data] if data else []
    words += ["--output", output] if output else []
    words += ["--resume", "auto"]
    words += ["--opts", *opts] if opts else []
    return shlex.join(words)


def _launcher() -> list[str]:
    """What starts a script on as many processes; "..." for options of a launcher that are not known
    here."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return [sys.orig_argv[0]]  # python, by the path that was typed
    if size == os.environ.get("LOCAL_WORLD_SIZE"):
        return ["torchrun", "--nproc_per_node", size]
    return ["torchrun", "..."]


def run_command(main: Callable[[], None]) -> None:
    """Run a command; a UserError becomes one line on the main rank's stderr and exit status 2,
    Ctrl-C one and 130."""
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    # each rank knows its own part of it; NCCL's own words are many lines
    except CollectiveError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(1)
    except StoppedElsewhere:
        sys.exit(os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        end_interrupted()


def run_tool(*command: object) -> None:
    """Run another command of this repository ("tools/train.py", ...), printed first. One of tools/
    gets this process's --import files.

    A failure, which the command has named, ends this process too. Ctrl-C reaches both: the other
    one saves and says so, and this one ends after it.
    """
    script, *arguments = [str(word) for word in command]
    imports = import_arguments() if script.startswith("tools/") else []
    words = [script, *imports, *arguments]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    process = subprocess.Popen([sys.executable, str(_ROOT / words[0]), *words[1:]])
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()
        status = INTERRUPTED
    if status:
        sys.exit(status)


def run_training(config: str, data: Path, output: Path, opts: list) -> None:
    """Train, or go on with it, by a configuration of this repository; a run that has finished stays
    as it is. One that is told to stop ends this process too."""
    places = ["--data", data, "--output", output]
    run_tool(
        "tools/train.py", "--cfg", _ROOT / config, *places, "--resume", "auto", "--opts", *opts
    )
    if not (output / "summary.json").is_file():
        sys.exit()
