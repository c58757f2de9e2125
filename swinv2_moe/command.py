"""Functions that the commands share: arguments, files of results, calls of other commands, and exit
status and messages of errors."""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import argcomplete

from swinv2_moe.errors import StoppedElsewhere, UserError, one_line
from swinv2_moe.faults import explain_fault, own_message
from swinv2_moe.imports import add_import_argument, import_arguments, imported_files
from swinv2_moe.interrupt import INTERRUPTED, end_interrupted
from swinv2_moe.output import printable, say

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swinv2_moe.tables import Console

_REGISTERED = (  # keys whose allowed values --import can extend
    "DATA.DATASET",
    "MODEL.MOE.ROUTER",
    "MODEL.MOE.AUX_LOSS",
    "MODEL.MOE.ACTIVATION",
)
_FOLDERS = ("tools", "data")  # of the commands' scripts
_SCRIPT = re.compile(r"(?:tools|data)/(\w+)\.py")
_CONFIG_HELP = "a name that `swinv2-moe configs` lists, or your own YAML file"


class CommandParser(argparse.ArgumentParser):
    """Argument parser of a command or subcommand, with --import.

    After --import files, its help lists the registered routers, losses, activations, all-to-all
    algorithms and datasets.

    Args:
        description: the help text. Its examples name scripts of tools/ and data/. If `swinv2-moe`
            was started, they are replaced by its commands.
    """

    def __init__(self, description: str | None = None, **kwargs) -> None:
        super().__init__(
            description=as_started(description or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,
        )
        add_import_argument(self)

    def parse_args(self, args=None, namespace=None):
        argcomplete.autocomplete(self)  # returns unless a shell asks for completions
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))  # a word may be the name of a file, by *

    def format_help(self) -> str:
        self.epilog = "`swinv2-moe config` lists the configuration's keys and their values."
        if imported_files():
            from swinv2_moe.config import choices

            allowed = choices()
            lines = [f"{key}: {', '.join(allowed[key])}" for key in _REGISTERED]
            self.epilog = "\n".join(lines)
        return super().format_help()


def started_by_script() -> bool:
    """True for `python tools/NAME.py`, False for `swinv2-moe NAME` and `python -m swinv2_moe`."""
    script = Path(sys.argv[0])
    return script.suffix == ".py" and script.parent.name in _FOLDERS


def as_started(text: str) -> str:
    """Convert the command lines in a text to the way in which this process was started.

    `python tools/NAME.py` becomes `swinv2-moe NAME`, and `torchrun ... tools/NAME.py` becomes
    `torchrun ... -m swinv2_moe NAME`, unless this process runs a script.
    """
    if started_by_script():
        return text

    def installed(match: re.Match) -> str:
        return match[1].replace("_", "-")

    lines = []
    for line in text.splitlines(keepends=True):
        if "torchrun" in line:
            line = _SCRIPT.sub(lambda match: f"-m swinv2_moe {installed(match)}", line)
        line = re.sub(rf"\S*python {_SCRIPT.pattern}", lambda m: f"swinv2-moe {installed(m)}", line)
        lines.append(_SCRIPT.sub(lambda match: f"swinv2-moe {installed(match)}", line))
    return "".join(lines)


def add_config_argument(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add --cfg."""
    parser.add_argument("--cfg", required=required, metavar="FILE", help=_CONFIG_HELP)


def add_opts_argument(
    parser: argparse.ArgumentParser, help: str = "any configuration keys", joined: bool = False
) -> None:
    """Add --opts, which takes `KEY VALUE` and `KEY=VALUE`, mixed.

    Args:
        help: a description of the keys.
        joined: the result is a list of `KEY=VALUE` words; by default, of alternating keys and
            values.
    """

    class Pairs(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None) -> None:
            words = split_pairs(values)
            if joined:
                words = ["=".join(words[i : i + 2]) for i in range(0, len(words), 2)]
            setattr(namespace, self.dest, words)

    parser.add_argument(
        "--opts",
        nargs="+",
        action=Pairs,
        default=[],
        metavar="KEY VALUE",
        help=f"{help}, as KEY VALUE or KEY=VALUE",
    )


def split_pairs(words: Sequence[str]) -> list[str]:
    """Alternating keys and values, from `KEY VALUE` and `KEY=VALUE` words. If a key has no value,
    it is the last word."""
    split: list[str] = []
    for word in words:
        is_key = len(split) % 2 == 0
        if is_key and "=" in word:
            split += word.split("=", 1)
        else:
            split.append(word)
    return split


def check_opts(opts: Sequence[str]) -> None:
    """Check the keys of --opts and the types of their values, before slow imports or slow work.

    For commands that read the rest of the configuration later, for example from a checkpoint.

    Raises:
        UserError: an unknown key, or a value of the wrong type.
    """
    from swinv2_moe.config import default_config, merge_opts

    merge_opts(default_config(), opts)


def add_training_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add --cfg, --data, --output and --opts. `required`: of --cfg."""
    add_config_argument(parser, required)
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="the data set (DATA.PATH); a folder of images with train/ and val/",
    )
    parser.add_argument("--output", metavar="DIR", help="the run directory (OUTPUT)")
    add_opts_argument(parser)


def add_checkpoint_arguments(parser: argparse.ArgumentParser, **output) -> None:
    """Add RUN, --checkpoint, --data, --dataset, --output and --opts.

    RUN may also be given as --resume, the older form; `args.resume` is its value.

    Args:
        output: arguments of `add_argument` for --output. By default it is a JSON file of results.
    """

    add_run_argument(parser, "--resume", "a run or a checkpoint")
    add_checkpoint_argument(parser)
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


def add_run_argument(parser: argparse._ActionsContainer, option: str, help: str) -> None:
    """Add RUN as the first argument, and as an option, its older form. One of them is required
    unless `parser` is a group with other members.

    Args:
        option: such as "--resume"; the value is in the attribute of its name.
    """
    name = option.removeprefix("--")

    class Run(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None) -> None:
            if values is not None:  # None: RUN is absent
                setattr(namespace, name, values)

    if isinstance(parser, argparse.ArgumentParser):
        parser = parser.add_mutually_exclusive_group(required=True)
    parser.add_argument(name, nargs="?", action=Run, metavar="RUN", help=help)
    parser.add_argument(option, action=Run, metavar="RUN", help="the same, in its older form")


def add_checkpoint_argument(
    parser: argparse.ArgumentParser,
    default: str = "best",
    measure: str = "validation accuracy",
) -> None:
    """Add --checkpoint, for `select_checkpoint`. `measure`: the measure of the best checkpoint, for
    the help."""
    parser.add_argument(
        "--checkpoint",
        default=default,
        metavar="best|latest|STEP",
        help=f"which checkpoint of a run (default: {default}); best: by {measure}",
    )


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
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {file}: cannot be written ({error.strerror})") from error


def print_selection(console: Console, results: dict) -> None:
    """Print which checkpoint of the run was used and why, and which damaged checkpoints were
    skipped."""
    if results["selected"]:
        console.print(results["selected"])
    for problem in results["passed_over"]:
        console.print(f"passed over: {problem}")


def print_unreadable(console: Console, results: dict) -> None:
    """Print how many images could not be read, if any."""
    images = results["unreadable_images"]
    if images:
        message = f"{len(images)} images could not be read; the first: {images[0]}"
        console.print(message)


def output_directory(name: str, option: str = "--output") -> Path:
    """The directory `name`, the value of `option`. It is made if it does not exist.

    Raises:
        UserError: the directory cannot be made, or cannot be written to.
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
    """The checked configuration from the arguments."""
    from swinv2_moe.config import load_config

    if args.output == "":
        raise UserError("--output is empty, it must be a directory")
    return load_config(args.cfg, args.opts, data=args.data, output=args.output)


def command_line(name: str, launcher: Sequence[str] = ()) -> list[str]:
    """The words that start a command in the way this process was started, without the command's
    arguments.

    Args:
        name: name of the command, such as "few-shot".
        launcher: torchrun and its options; empty for one process.
    """
    if started_by_script():
        repository = Path(sys.argv[0]).parent.parent
        file = f"{name.replace('-', '_')}.py"
        scripts = [repository / folder / file for folder in _FOLDERS]
        script = next((script for script in scripts if script.exists()), scripts[0])
        # The Python interpreter as the user typed it
        return (list(launcher) or [sys.orig_argv[0]]) + [str(script)]
    if launcher:
        return list(launcher) + ["-m", "swinv2_moe", name]
    if sys.orig_argv[1:3] == ["-m", "swinv2_moe"]:
        return sys.orig_argv[:3] + [name]
    return [program("swinv2-moe"), name]


def program(name: str) -> str:
    """How to start a program of this Python environment: its name if the shell finds it, otherwise
    its path."""
    file = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not file.exists() or (found and os.path.samefile(found, file)):
        return name
    if file.is_relative_to(Path.cwd()):
        return str(file.relative_to(Path.cwd()))
    return str(file)


def next_line(name: str, *words: object) -> str:
    """A command line for the terminal that this process was started in."""
    return shlex.join(command_line(name) + [str(word) for word in words])


def resume_command(
    cfg: str,
    data: str | None = None,
    output: str | None = None,
    opts: Sequence[str] = (),
    bind: str = "auto",
) -> str:
    """The command line that continues a training, with this process's launcher and --import files.

    Args:
        cfg, data, output, opts: arguments of the training, as in `add_training_arguments`.
        bind: value of --bind.
    """
    words = command_line("train", _launcher()) + import_arguments() + ["--cfg", cfg]
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
    """torchrun and its options for the current number of processes; empty for one process.

    With several nodes, "..." stands for their options, which are not known here.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return []
    if size == os.environ.get("LOCAL_WORLD_SIZE"):
        return ["torchrun", "--nproc_per_node", size]
    return ["torchrun", "..."]


def run_command(main: Callable[[], None]) -> None:
    """Run a command and map its errors to exit status and one line on stderr.

    UserError: 2, printed by the main rank, or by the only rank that raised it. CollectiveError and
    faults of a machine (`explain_fault`): 1, printed by every rank. Ctrl-C: 130.
    """
    threading.excepthook = _report_thread
    try:
        main()
    except UserError as error:
        _print_once(one_line(own_message(error)))
        sys.exit(2)
    except StoppedElsewhere:
        sys.exit(os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        end_interrupted()
    except Exception as error:
        _end_workers()
        message = _fault_of_machine(error)
        if message is None:
            raise
        # Every rank prints, because each knows a different part of the failure.
        say(f"error: {message}", file=sys.stderr, flush=True)
        # What threads, destructors and exit functions print from now on is a consequence.
        sys.stderr = io.StringIO()
        sys.exit(1)


def _end_workers() -> None:
    """Kill the data workers, which ignore SIGTERM: at exit Python would wait for them without end.

    A loader ends its own workers, unless it has failed while it was starting them.
    """
    for worker in multiprocessing.active_children():
        worker.kill()


def _report_thread(report: threading.ExceptHookArgs) -> None:
    """Print one line for a thread that a fault of the machine has ended, such as TensorBoard's."""
    line = None
    if report.exc_value is not None:
        line = explain_fault(report.exc_value)
    if line is None:
        threading.__excepthook__(report)
    else:
        say(f"warning: {line}", file=sys.stderr, flush=True)


def _fault_of_machine(error: Exception) -> str | None:
    """The line for a fault of a machine or of another rank; None for any other error."""
    message = explain_fault(error)
    if message is None and isinstance(error, RuntimeError):
        # Not imported at the top, because it imports torch.
        from moe_core.parallel import CollectiveError

        if isinstance(error, CollectiveError):
            message = one_line(str(error))  # NCCL's text is many lines
    return message


def _print_once(message: str) -> None:
    """Print an error once, whether all ranks or only this rank raised it.

    torchrun and srun end all ranks of a node as soon as one of them exits. So rank 0 prints at
    once, and the other ranks first wait to be ended. A rank that is not ended is the only one with
    the error, and prints it. Without such a launcher each rank prints at once.
    """
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        say(f"error: {message}", file=sys.stderr, flush=True)
        return
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_PROCID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        first_of_node = os.environ.get("LOCAL_RANK") == "0"
        time.sleep(5 if first_of_node else 10)
    say(f"error: {message} (rank {rank})", file=sys.stderr, flush=True)


def run_tool(name: str, *arguments: object) -> None:
    """Print and run another command, such as "few-shot", with this process's --import files. Ends
    like `run_process`."""
    words = import_arguments() + [str(argument) for argument in arguments]
    say("", f"$ {shlex.join(command_line(name) + words)}", flush=True)
    run_process([sys.executable, "-m", "swinv2_moe", name] + words)


def run_process(words: Sequence[str]) -> None:
    """Run a process to its end.

    If the process fails, it has reported the error, and this process exits with the same status.
    Ctrl-C reaches both processes: this process waits until the other one has saved, then ends.
    """
    process = subprocess.Popen(words)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()
        status = INTERRUPTED
    if status:
        sys.exit(status)


def run_training(config: str, data: Path, output: Path, opts: list) -> None:
    """Start or continue a training with a configuration of this project.

    A finished run is not changed. If the training is told to stop, this process ends too.
    """
    arguments = ["--cfg", config, "--data", data, "--output", output]
    arguments += ["--resume", "auto", "--opts"] + opts
    run_tool("train", *arguments)
    if not (output / "summary.json").is_file():
        sys.exit()
