"""The commands: `swinv2-moe NAME`, `python -m swinv2_moe NAME`, or a script of tools/ or data/.

A command is a module of this package with a function `main`, which reads `sys.argv`. Inside its
functions it imports torch and whatever imports torch, after it has read the arguments and the
configuration, so that --help, wrong arguments and wrong configurations answer at once.
"""

# Imported first, so that Ctrl-C during slow imports ends with one line.
from swinv2_moe.commands import interrupt  # noqa: F401

# isort: split

import argparse
import difflib
import os
import runpy
import sys
from collections.abc import Iterable
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

import argcomplete

from swinv2_moe import __version__
from swinv2_moe.output import print_lines
from swinv2_moe.threads import choose_threads, limit_spinning

COMMANDS = {  # the help of each command
    "train": "train on a folder of pictures, or continue a run",
    "evaluate": "accuracy, classes and calibration of a checkpoint",
    "predict": "the classes of pictures, in a table or a file",
    "few-shot": "few-shot and nearest-neighbour accuracy of its features",
    "show-routing": "pictures of what its experts have specialised in",
    "watch": "curves, experts and time left of a run, in the terminal",
    "report": "one HTML file about a run",
    "compress": "fewer experts, from a run with experts",
    "export": "ONNX or torch.export program of a checkpoint",
    "convert-checkpoint": "inspect, import or export weights",
    "detect": "objects: train on labelled pictures, predict, test, report",
    "throughput": "images/s of a configuration, beside the dense model",
    "plan-cluster": "predicted step time and memory on 1 to 4,096 GPUs",
    "quickstart": "digits, with experts and dense, in 3 minutes",
    "config": "every setting, with its default and allowed values",
    "make-shards": "shards of a dataset, and their index",
    "stage": "copy shards to a local disk",
    "make-class-map": "which pretrained classes are classes of another dataset",
    "prepare-coco": "lay out and check COCO",
    "prepare-imagenet": "unpack and check ImageNet",
}
# Commands that are scripts of a clone.
SCRIPTS = {"make-shapes": "data/make_shapes.py"}
# Commands that left, and what does their work.
LEFT = {
    "configs": "docs/reference/models.md lists the configurations",
    "sweep": "examples/sweep.py takes its plans: docs/how-to/evaluate.md",
    "workflow": "it only called other commands: docs/tutorial/first-model.md",
    "roofline": "torch.profiler and torch.utils.flop_counter do it: docs/how-to/evaluate.md",
}
# What the overview shows; `swinv2-moe more` has the other commands.
GROUPS = {
    "train": ("train", "quickstart", "detect", "config"),
    "look": ("predict", "evaluate", "report", "watch"),
    "ship": ("export", "convert-checkpoint"),
    "data": ("make-shards",),
    "cluster": ("plan-cluster",),
}
# Commands whose number of threads is set by `choose_threads`. Measurements use all cores. Commands
# that start other commands leave the choice to them.
CHOOSE_THREADS = {
    "train",
    "evaluate",
    "predict",
    "few-shot",
    "show-routing",
    "report",
    "compress",
    "export",
    "quickstart",
}


def run(name: str) -> None:
    """Run a command with the arguments in `sys.argv`. Errors are handled as in `run_command`."""
    # torch's C++ code logs a backtrace for each failed attempt to reach another rank; run_command
    # prints what failed in one line
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    only_asks = {"-h", "--help"} & set(sys.argv) or "_ARGCOMPLETE" in os.environ
    if name in CHOOSE_THREADS and not only_asks:
        choose_threads()
    limit_spinning()
    for stream in (sys.stdout, sys.stderr):  # their encoding may lack characters
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    from swinv2_moe.commands.call import run_command  # here, since --version does not need it

    run_command(lambda: import_module(f"swinv2_moe.commands.{name.replace('-', '_')}").main())


def main() -> None:
    """The console script `swinv2-moe`."""
    if "_ARGCOMPLETE" in os.environ:
        complete(os.environ["COMP_LINE"])
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print_lines(*overview().split("\n"))
        return
    if words[0] == "--version":
        print_lines(f"swinv2-moe {__version__}")
        return
    if words == ["more"]:
        print_lines(*more().split("\n"))
        return
    name = words[0].replace("_", "-")
    if name in SCRIPTS and (script := Path(__file__).parents[2] / SCRIPTS[name]).is_file():
        sys.argv = [str(script), *words[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        problem = "is not a command; `swinv2-moe --help` lists them"
        if name in LEFT:
            problem = f"has left: {LEFT[name]}"
        elif nearest:
            problem = f"is not a command; did you mean {nearest[0]!r}?"
        print_lines(f"error: {words[0]!r} {problem}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"swinv2-moe {name}"] + words[1:]
    run(name)


def complete(line: str) -> None:
    """Answer a shell that asks for completions of a command line, then exit.

    A command's parser completes its own options, which follow two words: `swinv2-moe` and NAME.
    """
    words = line.split()
    name = words[1] if len(words) > 1 else ""
    if name in COMMANDS and not line.endswith(name):
        os.environ["_ARGCOMPLETE"] = "2"  # the number of words before the options
        run(name)
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=COMMANDS)
    argcomplete.autocomplete(parser)


def overview() -> str:
    """The help of `swinv2-moe`: the commands of GROUPS."""
    lines = ["usage: swinv2-moe COMMAND ..."]
    for group, names in GROUPS.items():
        lines += ["", f"{group}:", *_help_of(names)]
    return "\n".join(
        [
            *lines,
            "",
            "`swinv2-moe train FOLDER` trains on your pictures: a folder for each class.",
            "`swinv2-moe COMMAND --help` lists the options of a command.",
            "`swinv2-moe more` lists the other commands.",
        ]
    )


def more() -> str:
    """The commands that the overview does not show."""
    shown = {name for names in GROUPS.values() for name in names}
    lines = ["more commands:", *_help_of(name for name in COMMANDS if name not in shown)]
    lines += ["", "Completion in bash and zsh:"]
    lines += ['  eval "$(register-python-argcomplete swinv2-moe)"']
    return "\n".join(lines)


def _help_of(names: Iterable[str]) -> list[str]:
    width = max(map(len, COMMANDS))
    return [f"  {name:{width}}  {COMMANDS[name]}" for name in names]
