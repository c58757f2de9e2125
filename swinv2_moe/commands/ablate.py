"""Train the variants of a plan with several seeds, and compare them in one table.

    python tools/ablate.py --plan configs/ablations/tiny_imagenet.yaml --data DIR \\
        --output output/ablation --transfer OTHER --jobs 2
    python tools/ablate.py --plan configs/ablations/tiny_imagenet.yaml --output output/ablation \\
        --table

Started again, it continues where it stopped; finished runs are not repeated. --table prints the
table so far at any time. Results: results.md and results.json in the output directory.
"""

from __future__ import annotations

import argparse
import json
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.command import CommandParser, output_directory
from swinv2_moe.errors import UserError
from swinv2_moe.jobs import Jobs, end_by_signal
from swinv2_moe.output import say

if TYPE_CHECKING:
    from swinv2_moe.measure.ablation_plan import Plan, Variant


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--plan", metavar="FILE", help="a YAML file of variants and seeds")
    parser.add_argument("--data", metavar="DIR", help="the data set to train on (DATA.PATH)")
    parser.add_argument(
        "--output",
        default="output/ablation",
        metavar="DIR",
        help="directory of all runs (default: output/ablation)",
    )
    parser.add_argument("--transfer", metavar="DIR", help="data set of the 5-shot accuracy")
    parser.add_argument("--stage", metavar="NAME", help="a stage of the plan")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="variants to train")
    parser.add_argument("--seeds", type=int, metavar="N", help="in place of the plan's")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs side by side (default: 1)"
    )
    parser.add_argument("--speed", action="store_true", help="measure images/s in inference, too")
    parser.add_argument(
        "--images",
        type=int,
        default=2000,
        metavar="N",
        help="validation images for the class bits (default: 2000)",
    )
    parser.add_argument("--table", action="store_true", help="only print the table so far")
    parser.add_argument("--measure", metavar="RUN", help="only measure a run, as --plan does")
    args = parser.parse_args()
    if not args.plan and not args.measure:
        parser.error("--plan or --measure is required")
    for option in ("jobs", "images"):
        value = getattr(args, option)
        if value < 1:
            raise UserError(f"--{option} is {value}, it must be at least 1")
    return args


def run_variant(
    variant: Variant, seed: int, output: Path, args: argparse.Namespace, jobs: Jobs
) -> None:
    """Train or continue a run, then measure it. Existing results are not computed again."""
    from swinv2_moe.measure.ablation_results import FEW_SHOT, MEASURED, run_directory

    directory = run_directory(output, variant.name, seed)
    directory.mkdir(exist_ok=True)
    log = directory / "ablate.log"
    if not (directory / "summary.json").is_file():
        words = ["--cfg", variant.base, "--output", directory, "--resume", "auto"]
        if args.data:
            words += ["--data", args.data]
        words += ["--opts", "SEED", seed] + list(variant.opts)
        jobs.run(log, "train", *words)
        if not (directory / "summary.json").is_file():
            raise UserError(f"{directory}: the training was told to stop")
    if args.transfer and needs_few_shot(directory / FEW_SHOT, args.transfer):
        # of the last epoch, as top-1 is
        words = ["--resume", directory, "--checkpoint", "latest", "--data", args.transfer]
        jobs.run(log, "few-shot", *words, "--shots", 5, "--output", directory / FEW_SHOT)
    if needs_measurement(directory / MEASURED, args.images, args.speed):
        words = ["--measure", directory, "--images", args.images]
        if args.speed:
            words.append("--speed")
        jobs.run(log, "ablate", *words)


def needs_few_shot(file: Path, data: str) -> bool:
    """Whether the 5-shot accuracy is not measured yet.

    Raises:
        UserError: it has been measured on other data.
    """
    from swinv2_moe.measure.ablation_results import read_optional

    measured = read_optional(file)
    if not measured:
        return True
    measured_on = measured.get("data", data)
    if Path(measured_on).expanduser().resolve() != Path(data).expanduser().resolve():
        raise UserError(
            f"{file}: measured on {measured_on}, --transfer is {data}; another --output measures"
            " anew"
        )
    return False


def needs_measurement(file: Path, images: int, speed: bool) -> bool:
    """Whether the file of measurements is missing, or lacks what the options ask for."""
    from swinv2_moe.measure.ablation_results import read_optional

    measured = read_optional(file)
    if not measured:
        return True
    if measured.get("images", images) != images:  # earlier versions did not record it
        return True
    return speed and measured.get("inference_images_per_second") is None


def run_all(plan: Plan, variants: list[Variant], output: Path, args: argparse.Namespace) -> None:
    """Train every variant with every seed. All variants of one seed are trained before the next
    seed, so that all variants have early results.

    A run that fails does not stop the others.

    Raises:
        UserError: runs failed; the message is the first one's.
    """
    from swinv2_moe.measure.ablation_plan import check_unchanged
    from swinv2_moe.measure.ablation_results import run_directory

    runs = [(variant, seed) for seed in range(plan.seeds) for variant in variants]
    for variant, seed in runs:
        config = variant.config(seed, args.data)
        directory = run_directory(output, variant.name, seed)
        check_unchanged(directory, f"variant {variant.name}", config)
    jobs = Jobs(args.jobs)
    tasks = {}
    for variant, seed in runs:
        name = f"{variant.name}, seed {seed}"
        tasks[name] = partial(run_variant, variant, seed, output, args, jobs)
    jobs.run_all(tasks, partial(show, plan, output, quiet=True))


def show(plan: Plan, output: Path, quiet: bool = False) -> None:
    """Write the results so far, and print the table."""
    from swinv2_moe.measure.ablation_results import as_json, markdown, read_results, summarize

    runs, pending = read_results(output, plan)
    results = summarize(runs, plan)
    table = markdown(results, plan, pending)
    write(output / "results.md", table)
    write(output / "results.json", json.dumps(as_json(results, plan), indent=1) + "\n")
    if not quiet:
        say(*table.splitlines())


def write(file: Path, text: str) -> None:
    from moe_core.files import atomic_write

    try:
        with atomic_write(file) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror})") from error


def main() -> None:
    args = parse()
    from swinv2_moe.measure.ablation_plan import read_plan

    if args.measure:
        from swinv2_moe.measure.ablation_measure import measure_run
        from swinv2_moe.measure.ablation_results import MEASURED

        results = measure_run(Path(args.measure), args.images, args.speed)
        write(Path(args.measure) / MEASURED, json.dumps(results, indent=1) + "\n")
        return
    plan = read_plan(args.plan, args.stage, args.seeds)
    variants = plan.select(args.only)
    output = Path(args.output)
    if args.stage:
        output = output / args.stage
    output = output_directory(str(output))
    if not args.table:
        signal.signal(signal.SIGTERM, end_by_signal)
        run_all(plan, variants, output, args)
    show(plan, output)
