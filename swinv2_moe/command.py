"""Functions that the commands in tools/ share: arguments, files of results, and the exit status and
message of errors."""

# First, so that Ctrl-C during the slow imports below ends with one line.
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

from rich.console import Console
from yacs.config import CfgNode

from moe_core.parallel import CollectiveError
from swinv2_moe.config import choices, load_config
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.imports import add_import_argument, import_arguments
from swinv2_moe.train.stopping import StoppedElsewhere

_REGISTERED = (  # keys whose choices --import can extend
    "DATA.DATASET",
    "MODEL.MOE.ROUTER",
    "MODEL.MOE.AUX_LOSS",
    "MODEL.MOE.ACTIVATION",
    "MODEL.MOE.ALL_TO_ALL",
)
_REPOSITORY = Path(__file__).parents[1]
_CONFIG_HELP = "a YAML file below configs/, or your own"


class CommandParser(argparse.ArgumentParser):
    """Argument parser of a command or subcommand, with --import.

    Its help lists the registered routers, losses, activations and all-to-all algorithms. Those of
    --import files are listed if the files come before --help.
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        add_import_argument(self)

    def format_help(self) -> str:
        allowed = choices()
        lines = [f"{key}: {', '.join(allowed[key])}" for key in _REGISTERED]
        self.epilog = "\n".join(lines)
        return super().format_help()


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Add --cfg, which is required."""
    parser.add_argument("--cfg", required=True, metavar="FILE", help=_CONFIG_HELP)


def add_opts_argument(
    parser: argparse.ArgumentParser,
    help: str = "any configuration keys, in pairs",
    metavar: str = "KEY VALUE",
) -> None:
    """Add --opts, a list of words that is empty by default."""
    parser.add_argument("--opts", nargs="+", default=[], metavar=metavar, help=help)


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --cfg, --data, --output and --opts."""
    add_config_argument(parser)
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="the data set (DATA.PATH); a folder of images with train/ and val/",
    )
    parser.add_argument("--output", metavar="DIR", help="the run directory (OUTPUT)")
    add_opts_argument(parser)


def add_checkpoint_arguments(parser: argparse.ArgumentParser, **output) -> None:
    """Add --resume, --data, --dataset, --output and --opts.

    Args:
        output: arguments of `add_argument` for --output. By default it is a JSON file of results.
    """
    parser.add_argument(
        "--resume",
        required=True,
        metavar="DIR",
        help="a run (its newest checkpoint is used) or a checkpoint",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="the data set (DATA.PATH); default: that of the training"
    )
    parser.add_argument(
        "--dataset",
        metavar="KIND",
        help="DATA.DATASET; default: inferred from --data, else that of the training",
    )
    output_options = {"metavar": "JSON", "help": "file for the results"} | output
    parser.add_argument("--output", **output_options)
    add_opts_argument(parser)


def check_output_file(file: str | Path | None) -> None:
    """Check the path of --output before the work starts.

    Raises:
        UserError: `file` is given and cannot be a file.
    """
    if file and (not Path(file).parent.is_dir() or Path(file).is_dir()):
        raise UserError(f"--output {file}: must be a file in a directory that exists")


def write_results(file: str | Path | None, results: dict) -> None:
    """Write the results as JSON, if --output is given.

    Raises:
        UserError: the file cannot be written.
    """
    if file:
        write_text(file, json.dumps(results, indent=1) + "\n")


def write_text(file: str | Path, text: str) -> None:
    """Write the file that --output names.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise UserError(f"--output {file}: cannot be written ({error.strerror})") from error


def print_passed_over(console: Console, results: dict) -> None:
    """Print which damaged checkpoints were passed over."""
    for problem in results["passed_over"]:
        console.print(f"passed over: {problem}", markup=False)


def print_unreadable(console: Console, results: dict) -> None:
    """Print how many images could not be read, if any."""
    images = results["unreadable_images"]
    if images:
        message = f"{len(images)} images could not be read; the first: {images[0]}"
        console.print(message, markup=False)


def output_directory(name: str, option: str = "--output") -> Path:
    """`option`'s value as a directory, which is made if it does not exist.

    Raises:
        UserError: it cannot be made, or cannot be written to.
    """
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{option} {name}: cannot be made a directory ({error.strerror})"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{option} {name}: permission denied to write in it")
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
    bind: str = "auto",
) -> str:
    """The command line that continues a training, with this process's launcher and --import files.

    Args:
        script: path of tools/train.py.
        cfg, data, output, opts: its arguments, as in `add_training_arguments`.
        bind: its --bind.
    """
    words = _launcher() + [script] + import_arguments() + ["--cfg", cfg]
    if data:
        words += ["--data", data]
    if output:
        words += ["--output", output]
    words += ["--resume", "auto"]
    if bind != "auto":
        words += ["--bind", bind]
    if opts:
        words += ["--opts"] + list(opts)
    return shlex.join(words)


def _launcher() -> list[str]:
    """The command that starts a script on as many processes as now.

    "..." stands for the launcher's options of several nodes, which are not known here.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return [sys.orig_argv[0]]  # the Python interpreter as the user typed it
    if size == os.environ.get("LOCAL_WORLD_SIZE"):
        return ["torchrun", "--nproc_per_node", size]
    return ["torchrun", "..."]


def run_command(main: Callable[[], None]) -> None:
    """Run a command and map its errors to exit status and one line on stderr.

    UserError: 2, printed by the main rank. CollectiveError: 1, printed by every rank. Ctrl-C: 130.
    """
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    # Every rank prints: each knows a different part of the failure. NCCL's text is many lines.
    except CollectiveError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(1)
    except StoppedElsewhere:
        sys.exit(os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        end_interrupted()


def run_tool(*command: object) -> None:
    """Print and run another command of this repository, such as "tools/train.py" and its arguments.

    Commands of tools/ get this process's --import files. A failure, which the command has reported,
    ends this process with the same status. Ctrl-C reaches both processes: this one waits until the
    command has saved, then ends.
    """
    words = [str(word) for word in command]
    script, arguments = words[0], words[1:]
    if script.startswith("tools/"):
        arguments = import_arguments() + arguments
    print(f"\n$ python {shlex.join([script] + arguments)}", flush=True)
    process = subprocess.Popen([sys.executable, str(_REPOSITORY / script)] + arguments)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()
        status = INTERRUPTED
    if status:
        sys.exit(status)


def run_training(config: str, data: Path, output: Path, opts: list) -> None:
    """Start or continue a training with a configuration of this repository.

    A finished run stays as it is. If the training is told to stop, this process ends too.
    """
    arguments = ["--cfg", _REPOSITORY / config, "--data", data, "--output", output]
    arguments += ["--resume", "auto", "--opts"] + opts
    run_tool("tools/train.py", *arguments)
    if not (output / "summary.json").is_file():
        sys.exit()
