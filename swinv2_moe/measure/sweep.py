"""A sweep: a plan of variants and seeds, and the table of its runs with intervals.

    control: dense
    seeds: 3
    opts: {TRAIN.EPOCHS: 14}
    variants:
      dense: {base: configs/tiny_imagenet/dense.yaml}
      soft: {base: configs/tiny_imagenet/8expert.yaml, opts: {MODEL.MOE.ROUTER: soft}}
    stages:
      final: {seeds: 3, variants: [dense, soft], opts: {TRAIN.EPOCHS: 30}}

`opts` of a variant override those of the stage, and these override those of the plan. With
`grid: {TRAIN.BASE_LR: [0.001, 0.002]}` there is a variant for each value (of several keys: for each
combination), named soft-0.001 and so on; a value that cannot be in a name, such as a list, is named
by its number.

Intervals are 95% intervals of Student's t over seeds. The difference to the control is paired by
seed; its interval is that of the paired differences.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from yacs.config import CfgNode

from swinv2_moe.config import (
    as_opts,
    config_from_text,
    default_config,
    flatten,
    load_config,
    resolve_batch_size,
)
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import MAX_YAML_CHARS, parse_yaml, read_bounded, read_json
from swinv2_moe.measure.run_record import NotBegunError, RunRecord, read_run
from swinv2_moe.output import printable

FEW_SHOT = "few_shot.json"
ROUTING = Path("routing", "routing.json")
_NAME = re.compile(r"[A-Za-z0-9_.+-]+")
_PLAN_KEYS = ("control", "seeds", "opts", "variants", "grid", "stages")
_STAGE_KEYS = ("seeds", "opts", "variants")
_VARIANT_KEYS = ("base", "opts")
_MAX_BYTES = 1 << 26
_MACS_TOLERANCE = 0.02


@dataclass(frozen=True)
class Variant:
    """A configuration to train: a configuration file and keys that override it."""

    name: str
    base: Path
    opts: tuple[str, ...]  # KEY VALUE ...

    def config(self, seed: int, data: str | None) -> CfgNode:
        """The configuration of a run on one process.

        Raises:
            UserError: the base or the keys cannot be used; the message names the variant.
        """
        opts = list(self.opts) + ["SEED", str(seed)]
        try:
            return resolve_batch_size(load_config(self.base, opts, data), 1)
        except UserError as error:
            raise UserError(f"variant {self.name}: {error}") from error


@dataclass(frozen=True)
class SweepPlan:
    """The runs of one stage: each variant with the seeds from 0 to `seeds` - 1."""

    control: str
    seeds: int
    variants: dict[str, Variant]

    def select(self, names: Sequence[str]) -> list[Variant]:
        """The variants with these names, in the plan's order; all of them if there are no names.

        Raises:
            UserError: a name that the plan does not have.
        """
        for name in names:
            if name not in self.variants:
                raise UserError(
                    f"--only {name}: no such variant, allowed: {', '.join(self.variants)}"
                )
        return [v for v in self.variants.values() if not names or v.name in names]


def read_plan(file: str | Path, stage: str | None = None, seeds: int | None = None) -> SweepPlan:
    """The plan in a YAML file, or one of its stages.

    Args:
        seeds: number of seeds in place of the file's.

    Raises:
        UserError: a file that is not a plan; the message names the key.
    """
    try:
        content = parse_yaml(read_bounded(file, 4 * MAX_YAML_CHARS).decode())
    except OSError as error:
        raise UserError(f"--plan {file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"--plan {file}: not a plan ({one_line(str(error))})") from error
    try:
        return _plan(content, stage, seeds)
    except ValueError as error:
        raise UserError(f"--plan {file}: {error}") from error


def _plan(content: object, stage: str | None, seeds: int | None) -> SweepPlan:
    plan = _mapping(content, "the file", _PLAN_KEYS)
    opts = _opts(plan.get("opts", {}), "opts")
    definitions = _by_name(plan.get("variants"), "variants")
    definitions = _with_grid(definitions, plan.get("grid", {}))
    names = list(definitions)
    num_seeds = plan.get("seeds")
    if stage is not None:
        stages = _by_name(plan.get("stages", {}), "stages")
        if stage not in stages:
            raise ValueError(f"no stage {stage!r}, allowed: {', '.join(stages) or 'none'}")
        settings = _mapping(stages[stage], f"stages.{stage}", _STAGE_KEYS)
        num_seeds = settings.get("seeds", num_seeds)
        names = settings.get("variants", names)
        opts |= _opts(settings.get("opts", {}), f"stages.{stage}.opts")
    if seeds is not None:
        num_seeds = seeds
    if type(num_seeds) is not int or num_seeds < 1:
        raise ValueError(f"seeds is {num_seeds!r}, it must be a number of at least 1")
    if not isinstance(names, list):
        raise ValueError(f"stages.{stage}.variants is {names!r}, it must be a list of names")
    variants = {}
    for name in map(str, names):
        if name not in definitions:
            raise ValueError(f"stages.{stage}.variants: no such variant {name!r}")
        variants[name] = _variant(name, definitions[name], opts)
    control = str(plan.get("control"))
    if control not in variants:
        raise ValueError(f"control is {control!r}, allowed: {', '.join(variants) or 'none'}")
    return SweepPlan(control, num_seeds, variants)


def _with_grid(variants: dict[str, object], content: object) -> dict[str, object]:
    """Each variant with each combination of the grid's values."""
    grid = _opts(content, "grid")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"grid.{key} is {values!r}, it must be a list of values")
    if not grid:
        return variants
    combined: dict[str, object] = {}
    for name, content in variants.items():
        variant = _mapping(content, f"variants.{name}", _VARIANT_KEYS)
        opts = _opts(variant.get("opts", {}), f"variants.{name}.opts")
        for choice in itertools.product(*map(_named, grid.values())):
            full_name = "-".join([name, *(value_name for value_name, _ in choice)])
            if full_name in combined:
                raise ValueError(f"grid: two variants have the name {full_name!r}")
            values = [value for _, value in choice]
            chosen = dict(zip(grid, values, strict=True))
            combined[full_name] = variant | {"opts": opts | chosen}
    return combined


def _named(values: list) -> list[tuple[str, object]]:
    """The values with their names: the value itself, or its number where that is no name."""
    named = []
    for number, value in enumerate(values, start=1):
        name = str(value)
        if not _NAME.fullmatch(name):
            name = str(number)
        named.append((name, value))
    return named


def _variant(name: str, content: object, common: dict[str, object]) -> Variant:
    if not _NAME.fullmatch(name):
        raise ValueError(f"variants: {name!r} is no name of a directory")
    definition = _mapping(content, f"variants.{name}", _VARIANT_KEYS)
    base = definition.get("base")
    if not isinstance(base, str):
        raise ValueError(f"variants.{name}.base is {base!r}, it must be a configuration file")
    if not Path(base).is_file():
        raise ValueError(f"variants.{name}.base {base}: no such file")
    opts = common | _opts(definition.get("opts", {}), f"variants.{name}.opts")
    if "SEED" in opts:
        raise ValueError(
            f"variants.{name}: SEED is in its opts, in the plan's or in a grid; the sweep sets it"
        )
    return Variant(name, Path(base), tuple(as_opts(opts)))


def _opts(content: object, where: str) -> dict[str, Any]:
    opts = _mapping(content, where)
    known = flatten(default_config())
    for key in opts:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key}")
    return opts


def _mapping(content: object, where: str, allowed: Sequence[str] = ()) -> dict:
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {content!r}, it must have KEY: VALUE lines")
    for key in content:
        if allowed and key not in allowed:
            raise ValueError(f"{where}: unknown key {key!r}, allowed: {', '.join(allowed)}")
    return content


def _by_name(content: object, where: str) -> dict[str, object]:
    """A mapping with its names as strings, because YAML reads some names as numbers."""
    return {str(name): value for name, value in _mapping(content, where).items()}


def check_unchanged(directory: Path, source: str, config: CfgNode) -> None:
    """Check that a run in `directory`, if there is one, has the configuration `config`.

    Args:
        source: what says so, for the message.

    Raises:
        UserError: the configurations differ; the message names the first key that differs.
    """
    file = directory / "config.yaml"
    if not file.is_file():
        return
    recorded = flatten(config_from_text(file.read_text(), str(file)))
    for key, value in flatten(config).items():
        if key != "OUTPUT" and recorded[key] != value:
            raise UserError(
                f"{directory}: its run has {key} {recorded[key]!r}, {source} now has"
                f" {value!r}; another --output starts anew"
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
    from scipy.special import stdtrit  # here: commands answer without scipy

    quantile = float(stdtrit(count - 1, 0.975))
    return Interval(mean(values), quantile * stdev(values) / sqrt(count))


@dataclass(frozen=True)
class Run:
    """A finished run of a variant and its measurements."""

    seed: int
    record: RunRecord
    few_shot: dict
    routing: dict  # of ROUTING

    @property
    def summary(self) -> dict:
        return self.record.summary or {}

    @property
    def seconds(self) -> float:
        """Duration of all epochs and their validations, summed over the parts of a resumed run."""
        return sum(epoch["seconds"] for epoch in self.record.epochs)

    @property
    def top1(self) -> float:
        """Top-1 accuracy after the last epoch, in percent."""
        return self.record.epochs[-1]["val_top1"]

    @property
    def few_shot_top1(self) -> float | None:
        return self.few_shot.get("few_shot", {}).get("5", {}).get("mean")

    @property
    def class_bits(self) -> float | None:
        """Mutual information in bits of expert and class above chance, the mean over the layers."""
        if "layers" not in self.routing:
            return None
        bits = []
        for layer in self.routing["layers"].values():
            bits.append(layer["bits"]["class"] - layer["bits"]["class_by_chance"])
        return mean(bits) if bits else None

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


class _Column(NamedTuple):
    """The mean of a value over the seeds; `form` is None for a mean with its interval."""

    value: Callable[[Run], float | None]
    form: str | None = None


_MEASURED = {
    "5-shot, %": _Column(lambda run: run.few_shot_top1),
    "parameters, M": _Column(lambda run: run.summary["parameters"] / 1e6, ".2f"),
    "MACs, M": _Column(lambda run: run.summary["active_macs"] / 1e6, ".1f"),
    "images/s, training": _Column(lambda run: run.summary.get("images_per_second"), ",.0f"),
    "minutes": _Column(lambda run: run.seconds / 60, ".1f"),
    "class bits": _Column(lambda run: run.class_bits, ".3f"),
    "epochs to target": _Column(lambda run: run.summary.get("target_epoch")),
    "steps to target": _Column(lambda run: run.summary.get("target_step")),
}


def run_directory(output: Path, variant: str, seed: int) -> Path:
    return output / f"{variant}-seed{seed}"


def read_results(output: Path, plan: SweepPlan) -> tuple[dict[str, list[Run]], list[str]]:
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
    """The run with this seed; None if it has logged nothing yet."""
    if not (directory / "metrics.jsonl").is_file():
        return None
    try:
        record = read_run(directory, needs_steps=False)
    except NotBegunError:
        return None
    few_shot = read_optional(directory / FEW_SHOT)
    routing = read_optional(directory / ROUTING)
    return Run(seed, record, few_shot, routing)


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


def summarize(runs: dict[str, list[Run]], plan: SweepPlan) -> dict[str, dict]:
    """For each variant with a finished run: Interval or None by column; the numbers of "seeds" and
    of those that "reached" the target, which is None without a target."""
    control = {run.seed: run for run in runs[plan.control]}
    results = {}
    for name, finished in runs.items():
        if not finished:
            continue
        columns: dict = {"seeds": len(finished), "top-1, %": interval([r.top1 for r in finished])}
        paired = [run for run in finished if run.seed in control and name != plan.control]
        differences = [run.top1 - control[run.seed].top1 for run in paired]
        at_time = []
        for run in paired:
            top1 = run.top1_after(control[run.seed].seconds)
            if top1 is not None:
                at_time.append(top1 - control[run.seed].top1)
        columns["to control"] = _interval_or_none(differences)
        columns["at control's time"] = _interval_or_none(at_time)
        for column, (value, _) in _MEASURED.items():
            values = [value(run) for run in finished]
            columns[column] = _interval_or_none([v for v in values if v is not None])
        columns["reached"] = None
        if finished[0].record.config.TRAIN.TARGET_TOP1:
            reached = [run for run in finished if run.summary.get("target_epoch")]
            columns["reached"] = len(reached)
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


def markdown(results: dict[str, dict], plan: SweepPlan, pending: Sequence[str] = ()) -> str:
    """The table with notes, as Markdown. Columns without any value are omitted."""
    names = ["seeds", "top-1, %"]
    for name in next(iter(results.values()), {}):
        if name not in names and any(columns[name] is not None for columns in results.values()):
            names.append(name)
    lines = [f"| {' | '.join(['variant', *names])} |", "| --- |" + " ---: |" * len(names)]
    for variant, columns in results.items():
        cells = [printable(variant).replace("|", r"\|")]
        for name in names:
            cells.append(_cell(name, columns, plan.seeds))
        lines.append(f"| {' | '.join(cells)} |")
    notes = warnings(results, plan.control) + [f"under way: {line}" for line in pending]
    if notes:
        lines.append("")
        lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _cell(name: str, columns: dict, seeds: int) -> str:
    value = columns[name]
    if value is None:
        return "-"
    if name == "seeds":
        return f"{value}/{seeds}"
    if name == "reached":
        return f"{value} of {columns['seeds']}"
    form = _MEASURED[name].form if name in _MEASURED else None
    return format(value.mean, form) if form else str(value)


def as_json(results: dict[str, dict], plan: SweepPlan) -> dict:
    """The results as JSON values: intervals as mean and half_width."""
    variants: dict[str, dict] = {}
    for name, columns in results.items():
        variants[name] = {}
        for column, value in columns.items():
            if isinstance(value, Interval):
                value = value._asdict()
            variants[name][column] = value
    return {"control": plan.control, "seeds": plan.seeds, "variants": variants}
