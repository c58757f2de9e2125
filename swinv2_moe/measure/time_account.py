"""The time of a finished run by phase, for the report."""

from typing import NamedTuple

from swinv2_moe.forms import NUMBER, TEXT, fits, object_of, record
from swinv2_moe.measure.run_record import RunRecord
from swinv2_moe.plots import COLOURS

_PHASES = ("staging", "start", "data", "training", "validation", "saving", "other")
_COLOUR = dict(zip(_PHASES, (*COLOURS, "#888888"), strict=True))


class Phase(NamedTuple):
    """One phase of a bar: its share of the width in percent, and its row of the table."""

    name: str
    colour: str
    percent: float
    time: str


class TimeAccount(NamedTuple):
    """A bar and the table below it."""

    note: str
    parts: list[Phase]


def time_account(run: RunRecord) -> TimeAccount | None:
    """The account of a run; None if its summary has no phases (it has not ended, or is of an
    earlier version)."""
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
            parts.append(Phase(name, _COLOUR[name], 100 * phases[name] / total, seconds))
    accounted = 1 - phases.get("other", 0) / total
    note = f"{total:,.1f} s in all parts of the run, {accounted:.1%} of it accounted for"
    return TimeAccount(note + _to_solution(summary), parts)


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
