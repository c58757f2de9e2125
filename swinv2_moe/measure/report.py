"""Report of one run, or two runs side by side, as one self-contained HTML page without scripts."""

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from swinv2_moe.config import default_config, flatten, model_config
from swinv2_moe.forms import NUMBER, TEXT, fits, object_of, record
from swinv2_moe.measure.curves import draw_curves
from swinv2_moe.measure.report_validation import ReportValidation
from swinv2_moe.measure.run_record import RunRecord
from swinv2_moe.models.section import count_moe_layers
from swinv2_moe.output import printable
from swinv2_moe.plots import COLOURS
from swinv2_moe.tables import in_words

_PHASES = ("staging", "start", "data", "training", "validation", "saving", "other")
_COLOUR = dict(zip(_PHASES, (*COLOURS, "#888888"), strict=True))


def render(
    runs: Sequence[RunRecord], validations: Sequence[ReportValidation], refresh: int = 0
) -> str:
    """The page of one or two runs.

    Args:
        validations: the result of `validate` for each run.
        refresh: seconds after which a browser loads the page again; 0: never.
    """
    template = page_template("report.html.j2")
    sections = []
    for run, validation in zip(runs, validations, strict=True):
        sections.append(_section(run, validation))
    labels: dict[str, None] = {}  # the facts of all runs, in order (an ordered set)
    for section in sections:
        labels |= dict.fromkeys(section["facts"])
    return template.render(
        title=" beside ".join(run.name for run in runs),
        subtitle="; ".join(_status(run) for run in runs),
        refresh=refresh,
        labels=list(labels),
        runs=sections,
        panels=draw_curves(runs),
        differences=_differences(runs),
        footer=f"Made by swinv2-moe report on {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC.",
    )


def page_template(name: str) -> Template:
    """A template of this folder. What it is given is escaped, and printable."""
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, finalize=_shown).get_template(name)


def _shown(value: object) -> object:
    """A value of the page as text. What this package has made as HTML stays."""
    if isinstance(value, Markup):
        return value
    return printable(value, keep="\n")


def _section(run: RunRecord, validation: ReportValidation) -> dict:
    """The page's values for one run."""
    return {
        "name": run.name,
        "facts": _facts(run),
        "time": _time_account(run),
        "strategies": _strategies(run),
        "validation": validation,
        "config": run.config.dump(),
        "environments": [_environment(run, i) for i in range(len(run.environments))],
    }


def _differences(runs: Sequence[RunRecord]) -> list[tuple[str, object, list]]:
    """Configuration keys with a value other than the default: key, default, value of each run."""
    configs = [flatten(run.config) for run in runs]
    differences = []
    for key, default in flatten(default_config()).items():
        values = [config[key] for config in configs]
        if any(value != default for value in values):
            differences.append((key, default, values))
    return differences


def _status(run: RunRecord) -> str:
    state, last = "finished", run.steps[-1]
    if "compressed" in last:
        state = "compressed from another run, not trained"
    elif not run.summary:
        epochs = f"epoch {last['epoch']} of {run.config.TRAIN.EPOCHS}"
        state = f"not finished, last logged at step {last['step']:,} of {epochs}"
    damaged = ""
    if run.damaged_lines:
        damaged = f"; {run.damaged_lines} damaged lines of metrics.jsonl left out"
    return f"{run.config.MODEL.NAME or run.config.MODEL.TYPE}, {_experts(run)}; {state}{damaged}"


def _experts(run: RunRecord) -> str:
    experts = model_config(run.config).experts
    # a compressed run has logged no layers
    num_layers = len(run.layers) or count_moe_layers(experts.blocks)
    if experts.layer is None or not num_layers:
        return "dense"
    return f"{experts.layer.num_experts} experts in {num_layers} layers, top {experts.layer.top_k}"


def _facts(run: RunRecord) -> dict[str, str]:
    """The key figures by label."""
    summary, last = run.summary or {}, run.steps[-1]
    facts = {}
    if run.epochs:
        facts["top-1, last"] = f"{run.epochs[-1]['val_top1']:.2f}%"
        best = max(epoch["val_top1"] for epoch in run.epochs)
        if fits(record({"best_val_top1": NUMBER}), summary):  # TRAIN.BEST_BY may be another measure
            best = summary["best_val_top1"]
        facts["top-1, best"] = f"{best:.2f}%"
        if run.has_top5:
            facts["top-5, last"] = f"{run.epochs[-1]['val_top5']:.2f}%"
    facts["loss, last logged"] = "not finite"
    if last["loss"] is not None:
        facts["loss, last logged"] = f"{last['loss']:.3f}"
    if summary:
        facts["parameters"] = f"{summary['parameters'] / 1e6:.2f}M"
        facts["MACs an image"] = f"{summary['active_macs'] / 1e6:,.1f}M"
    if run.config.TRAIN.DISTILL.TEACHER:
        facts["teacher"] = run.config.TRAIN.DISTILL.TEACHER
    if fits(record({"teacher_hit_rate": NUMBER, "teacher_cache_bytes": NUMBER}), summary):
        size = f"{summary['teacher_cache_bytes'] / 1e6:,.1f} MB"
        facts["teacher's outputs"] = f"{size}, {summary['teacher_hit_rate']:.0%} from the cache"
    num_steps = max(entry["step"] for entry in run.steps[-1:] + run.epochs[-1:])
    num_epochs = run.epochs[-1]["epoch"] if run.epochs else 0
    facts["epochs, steps"] = f"{num_epochs:,}, {num_steps:,}"
    if "compressed" not in last:
        rates = [step["images_per_second"] for step in run.steps]
        facts["images/s, median"] = f"{median(rates):,.0f}"  # with the pauses at an epoch's start
    if run.layers:
        facts["dropped tokens"] = f"{last['moe/dropped_share']:.2%}"
        facts["largest expert load"] = f"{last['moe/load_max']:.2f} × even"
    # The summary has only the time since the run was last resumed.
    seconds = sum(epoch["seconds"] for epoch in run.epochs)
    if run.epochs:
        facts["training and validation"] = in_words(seconds)
    if summary:
        facts["processes, device"] = f"{summary['world_size']}, {summary['device']}"
        facts["time × processes"] = in_words(seconds * summary["world_size"])
    return facts


def _strategies(run: RunRecord) -> list[tuple[str, str, str, str]]:
    """The decisions of the tuner: step, layers, strategy, milliseconds."""
    rows = []
    for entry in run.strategies:
        event = entry["strategy"]
        if event["event"] != "decided":  # earlier versions also recorded times
            continue
        milliseconds = "-" if event["ms"] is None else f"{event['ms']:.2f}"
        rows.append((f"{entry['step']:,}", event["layers"], event["to"], milliseconds))
    return rows


def _environment(run: RunRecord, index: int) -> dict:
    facts = dict(run.environments[index])
    part = ""
    if len(run.environments) > 1:
        part = f", part {index + 1}"
    return {
        "title": f"{run.name}{part}",
        "facts": {key: value for key, value in facts.items() if value is not None},
    }


def _time_account(run: RunRecord) -> dict | None:
    """The time of a run by phase: a note, and for each phase its name, colour, percent of the width
    of a bar, and time. None if its summary has no phases (it has not ended, or is of an earlier
    version)."""
    summary = run.summary or {}
    phases = summary.get("phases")
    if phases is None or not fits(object_of(TEXT, NUMBER), phases):
        return None
    total = sum(phases.get(name, 0) for name in _PHASES)
    if not total:
        return None
    parts = []
    for name in _PHASES:
        if phases.get(name):
            seconds = f"{phases[name]:,.1f} s"
            share = {"colour": _COLOUR[name], "percent": 100 * phases[name] / total}
            parts.append({"name": name, "time": seconds} | share)
    accounted = 1 - phases.get("other", 0) / total
    note = f"{total:,.1f} s in all parts of the run, {accounted:.1%} of it accounted for"
    return {"note": note + _to_solution(summary), "parts": parts}


def _to_solution(summary: dict) -> str:
    if not fits(record({"time_to_solution": NUMBER, "target_top1": NUMBER}), summary):
        return ""
    text = (
        f"; time to solution (top-1 {summary['target_top1']:g}%):"
        f" {summary['time_to_solution']:,.1f} s"
    )
    if fits(record({"joules_to_target": NUMBER}), summary):
        text += f", {summary['joules_to_target'] / 1e3:,.1f} kJ"
    return text
