"""Train the model of a configuration.

    python tools/train.py --cfg configs/quickstart_digits.yaml --output output/digits
    torchrun --nproc_per_node 2 tools/train.py --cfg configs/quickstart_digits.yaml \\
        --output output/digits2
"""

import os
import shlex
import sys

from swinv2_moe.command import (
    CommandParser,
    add_training_arguments,
    config_from,
    resume_command,
)
from swinv2_moe.output import say


def main() -> None:
    parser = CommandParser(description=__doc__)
    add_training_arguments(parser)
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
    args = parser.parse_args()
    config = config_from(args)
    continuation = resume_command(args.cfg, args.data, args.output, args.opts, args.bind)
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main and sys.stdout.isatty():
        say(f"run directory {config.OUTPUT}; importing torch", flush=True)
    import psutil

    from swinv2_moe.train import train

    began = psutil.Process().create_time()
    summary = train(config, args.resume, continuation, args.bind, began)
    if is_main and summary:
        run = shlex.quote(config.OUTPUT)
        say(f"next: swinv2-moe report {run}, swinv2-moe predict {run} PICTURES")
