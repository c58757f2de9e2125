"""Epochs to a target accuracy for each batch size: results of the runs, table and figure."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.table import Table

from swinv2_moe.errors import UserError
from swinv2_moe.measure.ablation_results import interval
from swinv2_moe.measure.run_record import NotBegunError, read_run, read_summary
from swinv2_moe.output import csv_text
from swinv2_moe.plots import COLOURS, new_figure, save_png, tidy
from swinv2_moe.tables import number_table

_COLUMNS = [
    "optimiser",
    "batch",
    "reached",
    "epochs to target",
    "steps to target",
    "final top-1, %",
    "noise scale",
]


class Point(NamedTuple):
    """A run to train."""

    optimizer: str  # NAME or NAME=LR
    batch_size: int
    seed: int
    opts: tuple[str, ...]  # KEY VALUE ...

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return f"{self.optimizer.replace('=', '-')}-batch{self.batch_size}-seed{self.seed}"


class Result(NamedTuple):
    """A finished run."""

    optimizer: str
    batch_size: int
    seed: int
    target_epoch: int | None  # None: not reached
    target_step: int | None
    top1: float  # percent, after the last epoch
    # in images: the median until the target, or over the whole run if the target was not reached
    noise_scale: float | None
    images_per_second: float


def read(runs: Sequence[Point], output: Path) -> list[Result]:
    """The results of the finished runs, in the order of `runs`.

    Raises:
        UserError: a run that cannot be read.
    """
    results = []
    for point in runs:
        directory = output / point.name
        summary = read_summary(directory / "summary.json")
        if summary is None:
            continue
        noise = _noise_scales(directory, summary["target_step"] or summary["steps"])
        results.append(
            Result(
                point.optimizer,
                point.batch_size,
                point.seed,
                summary["target_epoch"],
                summary["target_step"],
                summary["val_top1"],
                median(noise) if noise else None,
                summary["images_per_second"],
            )
        )
    return results


def _noise_scales(directory: Path, last_step: int) -> list[float]:
    """The noise scales that the run logged until a step; none with fewer steps than PRINT_FREQ."""
    try:
        steps = read_run(directory).steps
    except NotBegunError:
        return []
    return [
        step["noise_scale"] for step in steps if "noise_scale" in step and step["step"] <= last_step
    ]


def write_csv(results: Sequence[Result], file: Path) -> None:
    """Write a line for each run.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        file.write_text(csv_text([Result._fields] + list(results)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {file}: cannot be written ({error.strerror})") from error


def table(results: Sequence[Result]) -> Table:
    """A table with a row for each optimiser and batch size: means over the seeds that reached the
    target, with 95% intervals of Student's t, and the median noise scale."""
    lines = []
    for (optimizer, batch_size), runs in _groups(results):
        reached = [run for run in runs if run.target_epoch is not None]
        epochs, steps = "-", "-"
        if reached:
            epochs = str(interval([float(run.target_epoch or 0) for run in reached]))
            steps = str(interval([float(run.target_step or 0) for run in reached]))
        noise = [run.noise_scale for run in runs if run.noise_scale is not None]
        lines.append(
            [
                optimizer,
                f"{batch_size:,}",
                f"{len(reached)} of {len(runs)}",
                epochs,
                steps,
                str(interval([run.top1 for run in runs])),
                f"{median(noise):,.0f}" if noise else "-",
            ]
        )
    return number_table(_COLUMNS, lines, markdown=True)


def draw(results: Sequence[Result], target: float, file: Path) -> None:
    """Write a PNG: epochs to the target against batch size, with a point for each run.

    A line joins the means of the batch sizes at which all runs reached the target. For the other
    batch sizes, the number of runs that did not reach it is shown at the top.

    Raises:
        UserError: the file cannot be written.
    """
    figure = new_figure(6.4, 4.2)
    axes = figure.subplots()
    optimizers = list(dict.fromkeys(run.optimizer for run in results))
    colours = itertools.cycle(COLOURS)
    for row, (optimizer, colour) in enumerate(zip(optimizers, colours, strict=False)):
        middles = []
        for (name, batch_size), runs in _groups(results):
            if name != optimizer:
                continue
            epochs = [run.target_epoch for run in runs if run.target_epoch is not None]
            axes.scatter([batch_size] * len(epochs), epochs, 14, colour, alpha=0.5)
            num_missed = len(runs) - len(epochs)
            if num_missed:
                axes.annotate(
                    f"not reached: {num_missed} of {len(runs)}",
                    (batch_size, 0.97 - 0.05 * row),
                    xycoords=("data", "axes fraction"),
                    color=colour,
                    ha="right",
                    va="top",
                    fontsize=9,
                )
            else:
                middles.append((batch_size, sum(epochs) / len(epochs)))
        batch_sizes = [batch_size for batch_size, _ in middles]
        axes.plot(batch_sizes, [mean for _, mean in middles], color=colour, label=optimizer)
    axes.set_xscale("log", base=2)
    sizes = sorted({run.batch_size for run in results})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.set_xlabel("images a step")
    axes.set_ylabel(f"epochs to {target:g}% top-1")
    axes.legend(frameon=False, loc="lower right")
    tidy(axes)
    save_png(figure, file)


def _groups(results: Sequence[Result]) -> list[tuple[tuple[str, int], list[Result]]]:
    """The results of all seeds, by optimiser and batch size, in the order of the runs."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for run in results:
        groups.setdefault((run.optimizer, run.batch_size), []).append(run)
    return list(groups.items())
