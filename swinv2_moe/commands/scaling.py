"""Train with several batch sizes and optimisers until a target, and count the epochs.

    python tools/scaling.py --cfg configs/quickstart_digits.yaml --target 97 --seeds 3 --jobs 2 \\
        --batch-sizes 32 128 512 --optimizers adamw lamb=0.1 --output output/scaling
    python tools/scaling.py --cfg configs/quickstart_digits.yaml --target 97 --seeds 3 \\
        --batch-sizes 32 128 512 --optimizers adamw lamb=0.1 --output output/scaling --table

Started again, it continues where it stopped; finished runs are not repeated. --table prints the
table so far at any time. Results: scaling.csv and scaling.png in the output directory. An optimiser
may have a TRAIN.BASE_LR of its own. Each run also measures the gradient's noise scale, the batch
size up to which larger batches save steps.
"""

from __future__ import annotations

import argparse
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.command import (
    CommandParser,
    add_config_argument,
    add_opts_argument,
    output_directory,
)
from swinv2_moe.errors import UserError
from swinv2_moe.jobs import Jobs, end_by_signal
from swinv2_moe.tables import Console

if TYPE_CHECKING:
    from swinv2_moe.measure.scaling_results import Point

_NOISE_SCALE_FREQ = 5  # steps


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_config_argument(parser)
    parser.add_argument("--data", metavar="DIR", help="the data set (DATA.PATH)")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory of all runs")
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
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs side by side (default: 1)"
    )
    parser.add_argument("--table", action="store_true", help="only print the table so far")
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


def points(args: argparse.Namespace) -> list[Point]:
    """The runs in order of their seeds.

    Raises:
        UserError: an option cannot be read, or a configuration cannot be used or differs from that
            of an existing run.
    """
    from swinv2_moe.config import load_config, resolve_batch_size
    from swinv2_moe.measure.ablation_plan import check_unchanged
    from swinv2_moe.measure.scaling_results import Point

    all_points = []
    for seed in range(args.seeds):
        for word in dict.fromkeys(args.optimizers):
            name, separator, rate = word.partition("=")
            for batch_size in dict.fromkeys(args.batch_sizes):
                opts = [
                    *("PRINT_FREQ", str(_NOISE_SCALE_FREQ)),
                    *args.opts,
                    *("TRAIN.OPTIMIZER.NAME", name),
                    *("DATA.GLOBAL_BATCH_SIZE", str(batch_size)),
                    *("TRAIN.TARGET_TOP1", str(args.target)),
                    *("TRAIN.NOISE_SCALE_FREQ", str(_NOISE_SCALE_FREQ)),
                    *("SEED", str(seed)),
                ]
                if separator:
                    opts += ["TRAIN.BASE_LR", rate]
                config = resolve_batch_size(load_config(args.cfg, opts, args.data), 1)
                point = Point(word, batch_size, seed, tuple(opts))
                check_unchanged(Path(args.output) / point.name, "this command", config)
                all_points.append(point)
    return all_points


def train(point: Point, output: Path, args: argparse.Namespace, jobs: Jobs) -> None:
    """Train or continue a run. A finished run is not repeated.

    Raises:
        UserError: the run failed, or a signal ended it before its last epoch.
    """
    directory = output / point.name
    directory.mkdir(exist_ok=True)
    if (directory / "summary.json").is_file():
        return
    words = ["--cfg", args.cfg, "--output", directory, "--resume", "auto"]
    if args.data:
        words += ["--data", args.data]
    jobs.run(directory / "scaling.log", "train", *words, "--opts", *point.opts)
    if not (directory / "summary.json").is_file():
        raise UserError(f"{directory}: the training was told to stop")


def show(runs: list[Point], output: Path, target: float) -> None:
    from swinv2_moe.measure import scaling_results

    results = scaling_results.read(runs, output)
    if not results:
        raise UserError(f"{output}: no run has ended yet")
    scaling_results.write_csv(results, output / "scaling.csv")
    scaling_results.draw(results, target, output / "scaling.png")
    console = Console(width=200)
    console.print(scaling_results.table(results))
    console.print(f"{output}/scaling.csv, scaling.png")


def main() -> None:
    args = parse()
    runs = points(args)
    output = output_directory(args.output)
    if not args.table:
        signal.signal(signal.SIGTERM, end_by_signal)
        jobs = Jobs(args.jobs)
        jobs.run_all({point.name: partial(train, point, output, args, jobs) for point in runs})
    show(runs, output, args.target)
