"""Train with several batch sizes and optimisers until a target, and count the epochs.

For one release: `sweep` with a plan replaces it.

    swinv2-moe scaling --cfg quickstart_digits --target 97 --seeds 3 --jobs 2 \\
        --batch-sizes 32 128 512 --optimizers adamw lamb=0.1 --output output/scaling
    swinv2-moe scaling --cfg quickstart_digits --target 97 --seeds 3 \\
        --batch-sizes 32 128 512 --optimizers adamw lamb=0.1 --output output/scaling --table

Started again, it continues where it stopped; finished runs are not repeated. --table prints the
table so far at any time. Results: results.md and results.json in the output directory. An optimiser
may have a TRAIN.BASE_LR of its own. Each run also measures the gradient's noise scale, the batch
size up to which larger batches save steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.commands.options import (
    CommandParser,
    add_config_argument,
    add_opts_argument,
    output_directory,
)
from swinv2_moe.commands.sweep import add_run_arguments, check_runs, run_all, show
from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines

if TYPE_CHECKING:
    from swinv2_moe.measure.sweep import SweepPlan

_NOISE_SCALE_FREQ = 5  # steps


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_config_argument(parser)
    parser.add_argument(
        "--target", required=True, type=float, metavar="PERCENT", help="validation top-1 to reach"
    )
    parser.add_argument(
        "--batch-sizes", required=True, nargs="+", type=int, metavar="N", help="images a step"
    )
    parser.add_argument(
        "--optimizers",
        nargs="+",
        default=["adamw"],
        metavar="NAME[=LR]",
        help="adamw, sgd, lamb, lars; LR: TRAIN.BASE_LR (default: adamw)",
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="default: 1")
    add_run_arguments(parser)
    add_opts_argument(parser)
    args = parser.parse_args()
    for option, values in (
        ("--batch-sizes", args.batch_sizes),
        ("--seeds", [args.seeds]),
        ("--jobs", [args.jobs]),
    ):
        if min(values) < 1:
            raise UserError(f"{option} is {min(values)}, it must be at least 1")
    if not 0 < args.target <= 100:
        raise UserError(f"--target is {args.target:g}, it must be a percentage above 0")
    return args


def read_plan(args: argparse.Namespace) -> SweepPlan:
    """A variant for each optimiser and batch size, which trains until the target."""
    from swinv2_moe.measure.sweep import SweepPlan, Variant

    variants = {}
    for word in args.optimizers:
        optimizer, separator, rate = word.partition("=")
        for batch_size in args.batch_sizes:
            name = f"{word.replace('=', '-')}-batch{batch_size}"
            opts = [
                *("PRINT_FREQ", str(_NOISE_SCALE_FREQ)),
                *args.opts,
                *("TRAIN.OPTIMIZER.NAME", optimizer),
                *("DATA.GLOBAL_BATCH_SIZE", str(batch_size)),
                *("TRAIN.TARGET_TOP1", str(args.target)),
                *("TRAIN.NOISE_SCALE_FREQ", str(_NOISE_SCALE_FREQ)),
            ]
            if separator:
                opts += ["TRAIN.BASE_LR", rate]
            variants[name] = Variant(name, Path(args.cfg), tuple(opts))
    return SweepPlan(next(iter(variants)), args.seeds, variants)


def main() -> None:
    args = parse()
    print_lines(
        "scaling leaves in the next release: `sweep` with a plan replaces it", file=sys.stderr
    )
    args.transfer, args.images = None, 0
    plan = read_plan(args)
    output = Path(args.output)
    runs = check_runs(list(plan.variants.values()), plan.seeds, output, args.data)
    output_directory(args.output)
    if not args.table:
        run_all(plan, runs, output, args)
    show(plan, output)
