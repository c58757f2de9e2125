"""Train the model of a configuration.

    swinv2-moe train --cfg quickstart_digits --output output/digits
    torchrun --nproc_per_node 2 -m swinv2_moe train --cfg quickstart_digits \\
        --output output/digits2
    swinv2-moe train output/digits   # continues it
"""

import argparse
import os
import sys
from pathlib import Path

from yacs.config import CfgNode

from swinv2_moe.commands.call import next_line, resume_command
from swinv2_moe.commands.options import (
    CommandParser,
    add_config_argument,
    add_opts_argument,
)
from swinv2_moe.errors import UserError
from swinv2_moe.input_paths import check_training
from swinv2_moe.output import say


def config_from(args: argparse.Namespace) -> CfgNode:
    """The checked configuration from the arguments."""
    from swinv2_moe.config import load_config

    if args.output == "":
        raise UserError("--output is empty, it must be a directory")
    return load_config(args.cfg, args.opts, data=args.data, output=args.output)


def continue_run(args: argparse.Namespace) -> None:
    """Replace RUN by the arguments that continue it.

    Raises:
        UserError: RUN is no run, or other arguments name another one.
    """
    config = Path(args.run, "config.yaml")
    for option in ("cfg", "output", "resume"):
        if getattr(args, option) is not None:
            raise UserError(f"--{option} {getattr(args, option)}: RUN ({args.run}) stands for it")
    if not config.is_file():
        raise UserError(f"{args.run}: holds no run to continue (no config.yaml); --cfg begins one")
    args.cfg, args.output, args.resume = str(config), args.run, "auto"


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="a run to continue, with its configuration; without it, --cfg begins one",
    )
    add_config_argument(parser, required=False)
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="the data set (DATA.PATH); a folder of images with train/ and val/",
    )
    parser.add_argument("--output", metavar="DIR", help="the run directory (OUTPUT)")
    add_opts_argument(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|DIR",
        help="continue from a checkpoint or run; auto: from the newest checkpoint of --output",
    )
    parser.add_argument(
        "--bind",
        default="auto",
        metavar="auto|none",
        help="auto: bind each rank and its data workers to the NUMA node of its GPU (default)",
    )
    parser.add_argument(
        "--check-files",
        action="store_true",
        help="before the first step, read every image and list those that cannot be read; takes as"
        " long as reading the images of an epoch",
    )
    args = parser.parse_args()
    if args.run:
        continue_run(args)
    elif args.cfg is None:
        parser.error("--cfg FILE is required, or RUN to continue a run")
    config = config_from(args)
    check_training(config, args.resume)
    continuation = resume_command(args.cfg, args.data, args.output, args.opts, args.bind)
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main and sys.stdout.isatty():
        say(f"run directory {config.OUTPUT}; importing torch", flush=True)
    import psutil

    from swinv2_moe.train.run import train

    began = psutil.Process().create_time()
    summary = train(config, args.resume, continuation, args.bind, began, args.check_files)
    if is_main and summary:
        say(
            f"next: {next_line('report', config.OUTPUT)}",
            f"      {next_line('predict', config.OUTPUT)} PICTURES",
        )
