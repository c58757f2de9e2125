"""The arguments that commands share, and the files and folders that they name."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import argcomplete

from moe_core.files import atomic_write
from swinv2_moe.errors import UserError
from swinv2_moe.imports import add_import_argument, imported_files
from swinv2_moe.output import HelpFormatter, printable

if TYPE_CHECKING:
    from swinv2_moe.tables import Console

_REGISTERED = (  # keys whose allowed values --import can extend
    "DATA.DATASET",
    "MODEL.MOE.ROUTER",
    "MODEL.MOE.AUX_LOSS",
    "MODEL.MOE.ACTIVATION",
)
_CONFIG_HELP = "a configuration of this project, such as imagenette_96, or your own YAML file"


class CommandParser(argparse.ArgumentParser):
    """Argument parser of a command or subcommand, with --import.

    A value that begins with `~` is a path: bash does not expand it in `--output=~/run`.

    After --import files, its help lists the registered routers, losses, activations, all-to-all
    algorithms and datasets.

    Args:
        description: the help text.
    """

    def __init__(self, description: str | None = None, **kwargs) -> None:
        super().__init__(
            description=description,
            formatter_class=HelpFormatter,
            **kwargs,
        )
        add_import_argument(self)

    def parse_args(self, args=None, namespace=None):
        argcomplete.autocomplete(self)  # returns unless a shell asks for completions
        parsed = super().parse_args(args, namespace)
        for name, value in vars(parsed).items():
            if isinstance(value, str):
                setattr(parsed, name, os.path.expanduser(value))
            elif isinstance(value, Path):
                setattr(parsed, name, value.expanduser())
        return parsed

    def add_setting(
        self, option: str, default: object, help: str, metavar: str | None = None, **more
    ) -> None:
        """Add an option of the default's type, with the default at the end of its help.

        Args:
            more: arguments of `add_argument`; a `type` replaces the default's.
        """
        shown = f"{help} (default: %(default)s)".strip()
        more = {"type": type(default)} | more
        self.add_argument(option, default=default, help=shown, metavar=metavar, **more)

    def error(self, message: str) -> NoReturn:
        message += self._similar_option(message)
        super().error(printable(message))  # a word may be the name of a file, by *

    def _similar_option(self, message: str) -> str:
        """The end of a message about an unknown option: the nearest option, or the key that has
        this name."""
        head, _, words = message.partition(": ")
        unknown = [word for word in words.split() if word.startswith("--")]
        if head != "unrecognized arguments" or not unknown:
            return ""
        from swinv2_moe.config.everyday import everyday_name
        from swinv2_moe.config.load import similar_key

        option = unknown[0].partition("=")[0]
        own = [name for name in self._option_string_actions if name.startswith("--")]
        word = option.removeprefix("--").replace("-", "_").upper()
        key = similar_key(word) or ""
        nearest = everyday_name(key)
        if nearest not in own:
            nearest = next(iter(difflib.get_close_matches(option, own, n=1)), None)
            if key and "--opts" in own and (nearest is None or key.endswith(f".{word}")):
                nearest = f"--opts {key} ..."
        return f"; did you mean {nearest}?" if nearest else ""

    def format_help(self) -> str:
        self.epilog = "`swinv2-moe config` lists the configuration's keys and their values."
        if imported_files():
            from swinv2_moe.config import choices

            allowed = choices()
            lines = [f"{key}: {', '.join(allowed[key])}" for key in _REGISTERED]
            self.epilog = "\n".join(lines)
        return super().format_help()


def add_left(parser: argparse.ArgumentParser, option: str, answer: str) -> None:
    """Add an option or argument that has left, without help. Whoever gives it gets the error
    `answer`, which says what became of it."""

    class Left(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None) -> None:
            if option_string or values:  # an absent argument without -- has none
                raise UserError(f"{option} has left: {answer}")

    parser.add_argument(option, nargs="*", action=Left, help=argparse.SUPPRESS)


def add_config_argument(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add --cfg."""
    parser.add_argument("--cfg", required=required, metavar="FILE", help=_CONFIG_HELP)


def add_everyday_arguments(parser: CommandParser) -> None:
    """Add the short options of EVERYDAY."""
    from swinv2_moe.config import EVERYDAY

    for name, option in EVERYDAY.items():
        parser.add_argument(f"--{name}", metavar=option.metavar, help=option.help)


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


def add_checkpoint_arguments(
    parser: argparse.ArgumentParser, checkpoint: str = "best", **output
) -> None:
    """Add RUN, --checkpoint, --data, --dataset, --output and --opts.

    RUN may also be given as --resume, the older form; `args.resume` is its value.

    Args:
        output: arguments of `add_argument` for --output. By default it is a JSON file of results.
    """

    add_run_argument(parser, "--resume", "a run, a checkpoint or a single file")
    add_checkpoint_argument(parser, checkpoint)
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


def chosen_checkpoint(args: argparse.Namespace) -> tuple[str, str]:
    """Check --opts, RUN and --data of `add_checkpoint_arguments`, then select the checkpoint.

    Returns:
        As `select_checkpoint`.
    """
    from swinv2_moe.input_paths import check_data, check_run  # here, since it imports numpy

    check_opts(args.opts)
    check_run(args.resume)
    check_data(args.data)
    from swinv2_moe.checkpoints.checkpoint import select_checkpoint

    return select_checkpoint(args.resume, args.checkpoint)


def add_run_argument(parser: argparse._ActionsContainer, option: str, help: str) -> None:
    """Add RUN as the first argument, and `option`, its older form. One of the two must be given,
    unless `parser` is a group that allows other arguments instead.

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
        metavar="best|final|latest|STEP",
        help=f"which checkpoint of a run (default: {default}); best: by {measure}; final: trained"
        " on all pictures, or the best where there is none",
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
    """Write the file that --output names. A new file appears as a whole.

    Raises:
        UserError: the file cannot be written.
    """
    target = Path(file)
    try:
        if target.exists() or target.is_symlink():  # it keeps owner, permissions and links
            target.write_text(text, encoding="utf-8")
        else:
            with atomic_write(target) as content:
                content.write(text.encode())
    except OSError as error:
        raise UserError(f"--output {file}: cannot be written ({error.strerror})") from error


def print_selection(console: Console, results: dict) -> None:
    """Print which checkpoint of the run was used and why, and which damaged checkpoints were
    skipped."""
    if results["selected"]:
        console.print(results["selected"])
    for problem in results["passed_over"]:
        console.print(f"skipped: {problem}")


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
