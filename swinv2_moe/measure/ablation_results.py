"""Results of an ablation: reads the records of its runs and makes a table with intervals.

Intervals are 95% intervals of Student's t over seeds. The difference to the control is paired by
seed; its interval is that of the paired differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from scipy import stats

from swinv2_moe.errors import UserError
from swinv2_moe.files import read_json
from swinv2_moe.measure.ablation_plan import Plan
from swinv2_moe.measure.run_record import NotBegunError, RunRecord, read_run
from swinv2_moe.output import printable

MEASURED = "measured.json"
FEW_SHOT = "few_shot.json"
_MAX_BYTES = 1 << 26
_MACS_TOLERANCE = 0.02
COLUMNS = (
    "variant",
    "seeds",
    "top-1, %",
    "to control",
    "at control's time",
    "5-shot, %",
    "parameters, M",
    "MACs, M",
    "images/s, training",
    "images/s, inference",
    "minutes",
    "class bits",
    "router / experts",
    "task share",
)


class Interval(NamedTuple):
    """A mean and half the width of its 95% interval; None for a single value."""

    mean: float
    half_width: float | None

    def __str__(self) -> str:
        if self.half_width is None:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ± {self.half_width:.2f}"


def interval(values: Sequence[float]) -> Interval:
    """Mean ± t(0.975, n - 1) * s / sqrt(n), with s the sample standard deviation of n values.

    Raises:
        ValueError: no values.
    """
    count = len(values)
    if count == 0:
        raise ValueError("an interval needs at least 1 value")
    if count == 1:
        return Interval(values[0], None)
    quantile = float(stats.t.ppf(0.975, count - 1))
    return Interval(mean(values), quantile * stdev(values) / sqrt(count))


@dataclass(frozen=True)
class Run:
    """A run of a variant and its measurements."""

    seed: int
    record: RunRecord
    measured: dict
    few_shot: dict

    @property
    def seconds(self) -> float:
        """Duration of all epochs and their validations, summed over the parts of a resumed run."""
        return sum(epoch["seconds"] for epoch in self.record.epochs)

    @property
    def top1(self) -> float:
        """Top-1 accuracy after the last epoch, in percent."""
        return self.record.epochs[-1]["val_top1"]

    def value(self, column: str) -> float | None:
        """The value in a column of the table that is a plain mean; None: not measured."""
        summary = self.record.summary or {}
        if column == "images/s, training":
            return summary.get("images_per_second")
        if column == "parameters, M":
            return summary["parameters"] / 1e6
        if column == "MACs, M":
            return summary["active_macs"] / 1e6
        if column == "minutes":
            return self.seconds / 60
        if column == "5-shot, %":
            return self.few_shot.get("few_shot", {}).get("5", {}).get("mean")
        keys = {
            "images/s, inference": "inference_images_per_second",
            "class bits": "class_bits",
            "router / experts": "router_to_experts",
            "task share": "router_task_share",
        }
        return self.measured.get(keys[column])

    def top1_after(self, seconds: float) -> float | None:
        """Top-1 of the last epoch that ended within `seconds`; None: no epoch did."""
        elapsed = 0.0
        top1 = None
        for epoch in self.record.epochs:
            elapsed += epoch["seconds"]
            if elapsed > seconds:
                break
            top1 = epoch["val_top1"]
        return top1


def run_directory(output: Path, variant: str, seed: int) -> Path:
    return output / f"{variant}-seed{seed}"


def read_results(output: Path, plan: Plan) -> tuple[dict[str, list[Run]], list[str]]:
    """The finished runs of each variant, and a line for each unfinished run."""
    runs: dict[str, list[Run]] = {}
    pending = []
    for name in plan.variants:
        runs[name] = []
        for seed in range(plan.seeds):
            directory = run_directory(output, name, seed)
            run = _read(directory, seed)
            if run is None:
                continue
            if run.record.summary is not None and run.record.epochs:
                runs[name].append(run)
            elif run.record.epochs:
                epoch = run.record.epochs[-1]["epoch"]
                total = run.record.config.TRAIN.EPOCHS
                pending.append(f"{directory.name}: epoch {epoch}/{total}, top-1 {run.top1:.2f}%")
    return runs, pending


def _read(directory: Path, seed: int) -> Run | None:
    """The run with this seed; None if it has not logged a step yet."""
    if not (directory / "metrics.jsonl").is_file():
        return None
    try:
        record = read_run(directory)
    except NotBegunError:
        return None
    return Run(
        seed, record, read_optional(directory / MEASURED), read_optional(directory / FEW_SHOT)
    )


def read_optional(file: Path) -> dict:
    """The measurements in a JSON file; empty if there is no such file.

    Raises:
        UserError: the file cannot be read, or does not hold measurements.
    """
    if not file.is_file():
        return {}
    try:
        content = read_json(file, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: is damaged, it does not hold results")
    return content


def summarize(runs: dict[str, list[Run]], plan: Plan) -> dict[str, dict]:
    """For each variant with a finished run: Interval or None by column, and "seeds"."""
    control = {run.seed: run for run in runs[plan.control]}
    results = {}
    for name, finished in runs.items():
        if not finished:
            continue
        columns: dict = {"seeds": len(finished), "top-1, %": interval([r.top1 for r in finished])}
        paired = [run for run in finished if run.seed in control]
        differences = [run.top1 - control[run.seed].top1 for run in paired]
        at_time = []
        for run in paired:
            top1 = run.top1_after(control[run.seed].seconds)
            if top1 is not None:
                at_time.append(top1 - control[run.seed].top1)
        if name == plan.control:
            differences, at_time = [], []
        columns["to control"] = _interval_or_none(differences)
        columns["at control's time"] = _interval_or_none(at_time)
        for column in COLUMNS[5:]:
            values = [run.value(column) for run in finished]
            measured = [value for value in values if value is not None]
            columns[column] = _interval_or_none(measured)
        results[name] = columns
    return results


def _interval_or_none(values: list[float]) -> Interval | None:
    if not values:
        return None
    return interval(values)


def warnings(results: dict[str, dict], control: str) -> list[str]:
    """A line for each variant whose active MACs differ from the control's by more than 2%."""
    if control not in results:
        return [f"the control ({control}) has no finished run yet"]
    expected = results[control]["MACs, M"].mean
    lines = []
    for name, columns in results.items():
        ratio = columns["MACs, M"].mean / expected - 1
        if abs(ratio) > _MACS_TOLERANCE:
            lines.append(f"warning: {name} has {ratio:+.1%} active MACs beside {control}")
    return lines


def markdown(results: dict[str, dict], plan: Plan, pending: Sequence[str] = ()) -> str:
    """The table with notes, as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    for name, columns in results.items():
        cells = [printable(name).replace("|", r"\|"), f"{columns['seeds']}/{plan.seeds}"]
        for column in COLUMNS[2:]:
            cells.append(_cell(column, columns[column]))
        lines.append(f"| {' | '.join(cells)} |")
    notes = warnings(results, plan.control) + [f"under way: {line}" for line in pending]
    if notes:
        lines.append("")
        lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _cell(column: str, value: Interval | None) -> str:
    if value is None:
        return "-"
    if column in COLUMNS[2:6]:
        return str(value)
    if "images/s" in column:
        return f"{value.mean:,.0f}"
    if column == "parameters, M":
        return f"{value.mean:.2f}"
    if column in ("MACs, M", "minutes"):
        return f"{value.mean:.1f}"
    return f"{value.mean:.3f}"


def as_json(results: dict[str, dict], plan: Plan) -> dict:
    """The results as JSON values: intervals as mean and half_width."""
    variants = {}
    for name, columns in results.items():
        variants[name] = {}
        for column, value in columns.items():
            if isinstance(value, Interval):
                value = value._asdict()
            variants[name][column] = value
    return {"control": plan.control, "seeds": plan.seeds, "variants": variants}
