"""The run of a command: its exit status, the line of its error, and how it was started."""

import io
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from swinv2_moe.commands.faults import explain_fault, own_message
from swinv2_moe.commands.interrupt import end_interrupted
from swinv2_moe.errors import StoppedElsewhere, UserError, one_line
from swinv2_moe.imports import import_arguments
from swinv2_moe.output import print_lines


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
        print_lines(f"error: {message}", file=sys.stderr, flush=True)
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
        print_lines(f"warning: {line}", file=sys.stderr, flush=True)


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
        print_lines(f"error: {message}", file=sys.stderr, flush=True)
        return
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_PROCID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        first_of_node = os.environ.get("LOCAL_RANK") == "0"
        time.sleep(5 if first_of_node else 10)
    print_lines(f"error: {message} (rank {rank})", file=sys.stderr, flush=True)


def command_line(name: str, launcher: Sequence[str] = ()) -> list[str]:
    """The words that start a command in this terminal, without the command's arguments.

    Args:
        name: name of the command, such as "few-shot".
        launcher: torchrun and its options; empty for one process.
    """
    if launcher:
        return list(launcher) + ["-m", "swinv2_moe", name]
    if sys.orig_argv[1:3] == ["-m", "swinv2_moe"]:
        return sys.orig_argv[:3] + [name]
    found = program("swinv2-moe")
    if shutil.which(found) is None:  # not installed here
        return [sys.orig_argv[0], "-m", "swinv2_moe", name]
    return [found, name]


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
    cfg: str | None,
    data: str | None = None,
    output: str | None = None,
    opts: Sequence[str] = (),
) -> str:
    """The command line that continues a training, with this process's launcher and --import files.

    Args:
        cfg, data, output, opts: arguments of the training; `cfg` None: the run directory `output`
            holds all of them.
    """
    words = command_line("train", _launcher()) + import_arguments()
    if cfg is None:
        words += [str(output)]
    else:
        words += ["--cfg", cfg]
        if data:
            words += ["--data", data]
        if output:
            words += ["--output", output]
        words += ["--resume", "auto"]
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
        return [program("torchrun"), "--nproc_per_node", size]
    return ["torchrun", "..."]
