"""Train the variants of a plan with several seeds, and compare them in one table.

    swinv2-moe sweep --plan configs/ablations/tiny_imagenet.yaml --data DIR \\
        --output output/ablation --transfer OTHER --jobs 2
    swinv2-moe sweep --plan configs/ablations/tiny_imagenet.yaml --output output/ablation \\
        --table

Started again, it continues where it stopped; finished runs are not repeated. --table prints the
table so far at any time. Results: results.md and results.json in the output directory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from swinv2_moe.commands.options import CommandParser, output_directory
from swinv2_moe.errors import UserError
from swinv2_moe.files import is_same_path
from swinv2_moe.imports import import_arguments
from swinv2_moe.output import print_lines

if TYPE_CHECKING:
    from swinv2_moe.measure.sweep import SweepPlan, Variant

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--plan", required=True, metavar="FILE", help="a YAML file of variants and seeds"
    )
    parser.add_argument("--stage", metavar="NAME", help="a stage of the plan")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="variants to train")
    parser.add_argument("--seeds", type=int, metavar="N", help="in place of the plan's")
    parser.add_argument("--data", metavar="DIR", help="the data set to train on (DATA.PATH)")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory of all runs")
    parser.add_setting("--jobs", 1, "runs side by side", "N")
    parser.add_argument("--table", action="store_true", help="only print the table so far")
    parser.add_argument("--transfer", metavar="DIR", help="data set of the 5-shot accuracy")
    parser.add_setting("--images", 2000, "validation images for the class bits", "N")
    args = parser.parse_args()
    for option in ("jobs", "images"):
        value = getattr(args, option)
        if value < 1:
            raise UserError(f"--{option} is {value}, it must be at least 1")
    return args


def run_variant(
    variant: Variant, seed: int, output: Path, args: argparse.Namespace, jobs: Jobs
) -> None:
    """Train or continue a run, then measure it. Existing results are not computed again.

    Raises:
        UserError: a command failed, or a signal ended the training before its last epoch.
    """
    from swinv2_moe.measure.sweep import FEW_SHOT, ROUTING, run_directory

    directory = run_directory(output, variant.name, seed)
    directory.mkdir(exist_ok=True)
    log = directory / "sweep.log"
    if not (directory / "summary.json").is_file():
        words = ["--cfg", variant.base, "--output", directory, "--resume", "auto"]
        if args.data:
            words += ["--data", args.data]
        words += ["--opts", "SEED", seed] + list(variant.opts)
        jobs.run(log, "train", *words)
        if not (directory / "summary.json").is_file():
            raise UserError(f"{directory}: the training was told to stop")
    # of the last epoch, as top-1 is
    words = ["--resume", directory, "--checkpoint", "latest"]
    if args.transfer and needs_few_shot(directory / FEW_SHOT, args.transfer):
        file = directory / FEW_SHOT
        jobs.run(log, "few-shot", *words, "--data", args.transfer, "--shots", 5, "--output", file)
    if needs_routing(directory, args.images):
        folder = (directory / ROUTING).parent
        jobs.run(log, "show-routing", *words, "--limit", args.images, "--output", folder)


def needs_few_shot(file: Path, data: str) -> bool:
    """Whether the 5-shot accuracy is not measured yet.

    Raises:
        UserError: it has been measured on other data.
    """
    from swinv2_moe.measure.sweep import read_optional

    measured = read_optional(file)
    if not measured:
        return True
    measured_on = measured.get("data", data)
    if not is_same_path(measured_on, data):
        raise UserError(
            f"{file}: measured on {measured_on}, --transfer is {data}; another --output measures"
            " anew"
        )
    return False


def needs_routing(directory: Path, images: int) -> bool:
    """Whether a run has experts whose class bits are not measured yet on this number of images."""
    from swinv2_moe.measure.run_record import read_run
    from swinv2_moe.measure.sweep import ROUTING, read_optional

    if read_optional(directory / ROUTING).get("limit") == images:
        return False
    steps = read_run(directory, needs_steps=False).steps
    return bool(steps and steps[-1].get("moe_layers"))


def check_runs(
    variants: list[Variant], seeds: int, output: Path, data: str | None
) -> list[tuple[Variant, int]]:
    """The runs. All variants of one seed are before the next seed, so that all variants have early
    results.

    Raises:
        UserError: a configuration cannot be used, or differs from that of an existing run.
    """
    from swinv2_moe.measure.sweep import check_unchanged, run_directory

    runs = [(variant, seed) for seed in range(seeds) for variant in variants]
    for variant, seed in runs:
        directory = run_directory(output, variant.name, seed)
        check_unchanged(directory, f"variant {variant.name}", variant.config(seed, data))
    return runs


def run_all(
    plan: SweepPlan, runs: list[tuple[Variant, int]], output: Path, args: argparse.Namespace
) -> None:
    """Train and measure the runs. A run that fails does not stop the others.

    Raises:
        UserError: runs failed; the message is the first one's.
    """
    signal.signal(signal.SIGTERM, end_by_signal)
    jobs = Jobs(args.jobs)
    tasks = {}
    for variant, seed in runs:
        name = f"{variant.name}, seed {seed}"
        tasks[name] = partial(run_variant, variant, seed, output, args, jobs)
    jobs.run_all(tasks, partial(show, plan, output, quiet=True))


def show(plan: SweepPlan, output: Path, quiet: bool = False) -> None:
    """Write the results so far, and print the table."""
    from swinv2_moe.measure.sweep import as_json, markdown, read_results, summarize

    runs, pending = read_results(output, plan)
    results = summarize(runs, plan)
    table = markdown(results, plan, pending)
    write(output / "results.md", table)
    write(output / "results.json", json.dumps(as_json(results, plan), indent=1) + "\n")
    if not quiet:
        print_lines(*table.splitlines())


def write(file: Path, text: str) -> None:
    from moe_core.files import atomic_write

    try:
        with atomic_write(file) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror})") from error


def main() -> None:
    args = parse()
    from swinv2_moe.measure.sweep import read_plan

    plan = read_plan(args.plan, args.stage, args.seeds)
    variants = plan.select(args.only)
    output = Path(args.output)
    if args.stage:
        output = output / args.stage
    output = output_directory(str(output))
    if not args.table:
        run_all(plan, check_runs(variants, plan.seeds, output, args.data), output, args)
    show(plan, output)


class Jobs:
    """Commands in separate processes, several of which can run at the same time."""

    def __init__(self, num_jobs: int) -> None:
        self.num_jobs = num_jobs
        self.environment = dict(os.environ)
        if num_jobs > 1:
            for variable in _THREAD_VARIABLES:
                self.environment[variable] = "1"
        self.processes: set[subprocess.Popen] = set()
        self.lock = Lock()
        self.stopping = False

    def run(self, log: Path, command: str, *arguments: object) -> None:
        """Run a command and append its output to the file `log`.

        Raises:
            UserError: the command failed, or `stop` was called.
        """
        words = import_arguments() + [str(argument) for argument in arguments]
        with log.open("a") as file:
            with self.lock:
                if self.stopping:
                    raise UserError("stopped")
                process = subprocess.Popen(
                    [sys.executable, "-m", "swinv2_moe", command] + words,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                )
                self.processes.add(process)
            status = process.wait()
        with self.lock:
            self.processes.discard(process)
        if status:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise UserError(f"{log}: {command} ended with status {status} ({lines[-1]})")

    def run_all(
        self,
        tasks: Mapping[str, Callable[[], None]],
        after_each: Callable[[], None] = lambda: None,
    ) -> None:
        """Call all tasks, which use `run`, `num_jobs` at the same time. Print how each one ended.

        A task that fails does not stop the others. A signal stops all of them.

        Args:
            tasks: by the names to print, in the order in which they start.
            after_each: called after each task, in this thread.

        Raises:
            UserError: tasks failed; the message is the first one's.
        """
        errors = []
        with ThreadPoolExecutor(self.num_jobs) as pool:
            futures = [pool.submit(task) for task in tasks.values()]
            try:
                for name, future in zip(tasks, futures, strict=True):
                    error = future.exception()
                    if isinstance(error, UserError):
                        errors.append(error)
                    elif error is not None:
                        raise error
                    print_lines(f"{name}: {error or 'done'}", flush=True)
                    after_each()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()
                raise
        if errors:
            raise UserError(f"{len(errors)} of {len(tasks)} runs failed; the first: {errors[0]}")

    def stop(self) -> None:
        """Tell all commands to end, and wait until they have ended. Trainings save a checkpoint
        first."""
        with self.lock:
            self.stopping = True
            processes = list(self.processes)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()


def end_by_signal(number: int, frame: object) -> None:
    raise KeyboardInterrupt
