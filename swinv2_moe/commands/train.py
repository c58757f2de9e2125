"""Fine-tune a model on a folder of pictures, continue a run, or train the model of a configuration.

    swinv2-moe train photos          # photos/CLASS/ with pictures
    swinv2-moe train photos --epochs 20 --lr 1e-4
    swinv2-moe train output/photos   # continues this run
    swinv2-moe train --cfg quickstart_digits --output output/digits

A folder holds a folder of pictures for each class, or train/ and val/ with such folders. Every
setting that follows from the pictures is printed; the options below, or --opts, override it.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from yacs.config import CfgNode

from swinv2_moe.commands.call import next_line, resume_command
from swinv2_moe.commands.options import (
    CommandParser,
    add_config_argument,
    add_everyday_arguments,
    add_left,
    add_opts_argument,
)
from swinv2_moe.errors import UserError
from swinv2_moe.files import is_same_path
from swinv2_moe.input_paths import check_training
from swinv2_moe.output import print_lines

if TYPE_CHECKING:
    from swinv2_moe.start.defaults import Choice


def config_from(args: argparse.Namespace) -> CfgNode:
    """The checked configuration from the arguments."""
    from swinv2_moe.config import load_config

    if args.output == "":
        raise UserError("--output is empty, it must be a directory")
    return load_config(args.cfg, args.opts, data=args.data, output=args.output)


def choice_for(args: argparse.Namespace) -> "Choice | None":
    """What is chosen for the folder --data; None if --output has a run, which then continues."""
    from swinv2_moe.start.defaults import choose, output_for

    if args.output == "":
        raise UserError("--output is empty, it must be a directory")
    output = args.output or output_for(args.data)
    if args.resume == "auto" and Path(output, "config.yaml").is_file():
        if not args.output:
            _check_same_pictures(args.data, Path(output, "config.yaml"))
        args.run, args.output, args.resume = output, None, None
        continue_run(args)
        return None
    if args.resume not in (None, "auto"):
        raise UserError(f"--resume {args.resume}: needs the --cfg that its run was trained with")
    return choose(args.data, args.opts, output)


def _check_same_pictures(data: str, config: Path) -> None:
    """Raise UserError if the run whose directory has the folder's name is of other pictures."""
    from swinv2_moe.config import load_config

    trained_on = load_config(str(config)).DATA.PATH
    if not is_same_path(data, trained_on):
        raise UserError(
            f"--data {data}: {config.parent} holds a run on other pictures ({trained_on}); --output"
            " names another directory"
        )


def continue_run(args: argparse.Namespace) -> None:
    """Replace RUN by the arguments that continue it.

    Raises:
        UserError: RUN is no run, or other arguments name another one.
    """
    config = Path(args.run, "config.yaml")
    if not config.is_file() and Path(args.run).is_dir() and args.cfg is None:
        _take_as_data(args)
        return
    for option in ("cfg", "output", "resume"):
        if getattr(args, option) is not None:
            raise UserError(
                f"--{option} {getattr(args, option)}: RUN ({args.run}) gives it; leave it out"
            )
    if not config.is_file():
        raise UserError(
            f"{args.run}: neither a folder of pictures nor a run to continue (no config.yaml);"
            " --cfg begins one"
        )
    args.cfg, args.output, args.resume = str(config), args.run, "auto"


def _take_as_data(args: argparse.Namespace) -> None:
    """Take the folder FOLDER, which holds no run, for --data."""
    if args.data is not None:
        raise UserError(f"{args.run} and --data {args.data}: give one folder of pictures")
    if Path(args.run, "checkpoints").is_dir() or Path(args.run, "meta.json").is_file():
        raise UserError(f"{args.run}: holds no run to continue (no config.yaml)")
    args.data, args.run = args.run, None


def main() -> None:
    from swinv2_moe.config import EVERYDAY, everyday_opts

    parser = CommandParser(__doc__, usage="swinv2-moe train FOLDER|RUN [options]")
    parser.add_argument(
        "run",
        nargs="?",
        metavar="FOLDER|RUN",
        help="a folder of pictures to train on, or a run to continue",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="the run directory (OUTPUT); default for FOLDER: output/NAME",
    )
    add_everyday_arguments(parser)
    add_config_argument(parser, required=False)
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="the data set (DATA.PATH) of --cfg; without --cfg the same as FOLDER",
    )
    add_opts_argument(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|DIR",
        help="continue from a checkpoint or run; auto: from the newest checkpoint of --output",
    )
    parser.add_argument(
        "--keep-held-out", action="store_true", help="no last training on all (TRAIN.ON_ALL False)"
    )
    add_left(parser, "--bind", "`torchrun --numa-binding node` binds ranks to NUMA nodes")
    parser.add_argument(
        "--check-files",
        action="store_true",
        help="before the first step, read every image and list those that cannot be read, and"
        " copies with another label or in both splits; takes as long as reading the images of an"
        " epoch, twice",
    )
    args = parser.parse_args()
    args.opts = everyday_opts({name: getattr(args, name) for name in EVERYDAY}, args.opts)
    args.opts += ["TRAIN.ON_ALL", "False"] * args.keep_held_out
    choice = None
    if args.run:
        continue_run(args)
    elif args.cfg is None and args.data is None:
        parser.error(
            "FOLDER fine-tunes a model on a folder of pictures, RUN continues a run, --cfg FILE"
            " trains the model of a configuration; one of them is required"
        )
    if args.cfg is None:
        choice = choice_for(args)
    is_main = os.environ.get("RANK", "0") == "0"
    if choice is None:
        config = config_from(args)
        continuation = resume_command(args.cfg, args.data, args.output, args.opts)
    else:
        config = choice.config
        continuation = resume_command(None, output=config.OUTPUT)
        if is_main:
            print_lines(*choice.lines, flush=True)
    check_training(config, args.resume)
    if is_main and sys.stdout.isatty():
        print_lines(f"run directory {config.OUTPUT}; importing torch", flush=True)
    import psutil

    from swinv2_moe.train.run import train

    began = psutil.Process().create_time()
    summary = train(config, args.resume, continuation, began, args.check_files, choice)
    if is_main and summary:
        output = Path(config.OUTPUT)
        print_lines(
            f"next: {next_line('report', output)}",
            f"      {next_line('predict', output)} PICTURES",
            f"      {next_line('export', output)} --output {output / 'exported'}",
        )
