"""The time of a run by phase, and the use of its machines, for the report."""

from collections.abc import Mapping
from typing import NamedTuple

from swinv2_moe.measure.run_entries import NUMBER, fits
from swinv2_moe.measure.run_record import RunRecord
from swinv2_moe.plots import COLOURS

_MEANS = ("cpu", "gpu", "disk_read", "disk_written", "net_received", "net_sent", "watts")
_LARGEST = ("memory", "gpu_memory")
_PHASES = ("staging", "start", "data", "training", "validation", "saving", "other")
_COLOUR = dict(zip(_PHASES, (*COLOURS, "#888888"), strict=True))


class Part(NamedTuple):
    """One phase of a bar: its share of the width in percent, and its row of the table."""

    name: str
    colour: str
    percent: float
    cells: list[str]


class TimeAccount(NamedTuple):
    """A bar and the table below it."""

    title: str
    note: str
    columns: list[str]
    parts: list[Part]


def time_account(run: RunRecord) -> TimeAccount | None:
    """The account of a run; None if the run recorded no phases (an earlier version)."""
    seconds = _seconds(run)
    total = sum(seconds.values())
    if not total:
        return None
    use = _use(run)
    columns = [name for name in _COLUMNS if any(name in values for values in use.values())]
    parts = []
    for name in _PHASES:
        if not seconds.get(name):
            continue
        percent = 100 * seconds[name] / total
        cells = [f"{seconds[name]:,.1f} s", f"{percent:.1f}%"]
        values = use.get(name, {})
        for column in columns:
            text = "-"
            if column in values:
                _, form = _COLUMNS[column]
                text = form(values[column])
            cells.append(text)
        parts.append(Part(name, _COLOUR[name], percent, cells))
    titles = ["time", "share"] + [_COLUMNS[name][0] for name in columns]
    accounted = 1 - seconds.get("other", 0) / total
    note = f"{total:,.1f} s in all parts of the run, {accounted:.1%} of it accounted for"
    return TimeAccount("Where the time went", note + _to_solution(run), titles, parts)


def _to_solution(run: RunRecord) -> str:
    summary = run.summary or {}
    if not fits(summary, {"time_to_solution": NUMBER, "target_top1": NUMBER}):
        return ""
    text = (
        f"; time to solution (top-1 {summary['target_top1']:g}%):"
        f" {summary['time_to_solution']:,.1f} s"
    )
    if fits(summary, {"joules_to_target": NUMBER}):
        text += f", {summary['joules_to_target'] / 1e3:,.1f} kJ"
    return text


def _seconds(run: RunRecord) -> dict[str, float]:
    """Seconds of each phase: from the summary or, before the run's end, from its epochs so far."""
    phases = (run.summary or {}).get("phases")
    if isinstance(phases, dict) and fits(phases, dict.fromkeys(phases, NUMBER)):
        return {name: phases[name] for name in _PHASES if name in phases}
    seconds = dict.fromkeys(_PHASES, 0.0)
    for entry in run.telemetry:
        for name, values in entry["telemetry"].items():
            if name in seconds:
                seconds[name] += values["seconds"]
    return seconds


def _use(run: RunRecord) -> dict[str, dict[str, float]]:
    """The use of the machines in each phase: means and maxima over the epochs."""
    by_phase: dict[str, list[Mapping[str, float]]] = {}
    for entry in run.telemetry:
        for name, values in entry["telemetry"].items():
            by_phase.setdefault(name, []).append(values)
    use = {}
    for name, rows in by_phase.items():
        use[name] = _averaged(rows)
    return use


def _averaged(rows: list[Mapping[str, float]]) -> dict[str, float]:
    averaged = {}
    for key in _MEANS:
        with_key = [row for row in rows if key in row]
        seconds = sum(row["seconds"] for row in with_key)
        if seconds:
            averaged[key] = sum(row[key] * row["seconds"] for row in with_key) / seconds
    for key in _LARGEST:
        values = [row[key] for row in rows if key in row]
        if values:
            averaged[key] = max(values)
    return averaged


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _gib(value: float) -> str:
    return f"{value / 2**30:,.1f} GiB"


def _rate(value: float) -> str:
    return f"{value / 1e6:,.1f} MB/s"


def _watts(value: float) -> str:
    return f"{value:,.0f} W"


# by key of the telemetry: title and format of a column
_COLUMNS = {
    "cpu": ("CPU", _percent),
    "memory": ("memory", _gib),
    "gpu": ("GPU", _percent),
    "gpu_memory": ("GPU memory", _gib),
    "disk_read": ("disk read", _rate),
    "disk_written": ("disk written", _rate),
    "net_received": ("received", _rate),
    "net_sent": ("sent", _rate),
    "watts": ("power", _watts),
}
