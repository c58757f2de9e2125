"""Report of a campaign as JSON and Markdown, with the goals that the results meet."""

# T tokens, E experts, M model dim

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from campaign_sections import SECTIONS
from results_file import Table, replace_file

from swinv2_moe.measure.spread import quartiles

TOKENS_OF_AN_IMAGE = 144  # SwinV2-B's stage 3 at 192 px
GOAL_EXPERTS = (8, 32)


class Goal(NamedTuple):
    """A goal and the tables that measure it, which may be of several sections."""

    name: str
    table: str
    bound: float
    is_upper: bool  # True: the value must not exceed the bound; False: it must reach the bound
    # function that returns each case and its value in each round
    values: Callable[[list[dict]], Iterable[tuple[str, list[float]]]]


def layer_speed(
    images: int, timing: str = "graph replay"
) -> Callable[[list[dict]], Iterator[tuple[str, list[float]]]]:
    """Speed relative to the dense network, forward and backward, for each number of experts."""
    tokens = images * TOKENS_OF_AN_IMAGE

    def values(data: list[dict]) -> Iterator[tuple[str, list[float]]]:
        for entry in data:
            token_count, model_dim, experts = entry["shape"][:3]
            is_goal = token_count == tokens and model_dim == 512 and experts in GOAL_EXPERTS
            is_goal = is_goal and len(entry["shape"]) == 3 and entry["timing"] == timing
            if is_goal and is_training(entry):
                yield f"E = {experts}, {timing}", [1 / ratio for ratio in entry["ratio"]]

    return values


def is_training(entry: dict) -> bool:
    """Whether an entry is of this project's layer, forward and backward in bf16."""
    return entry["layer"] and entry["pass"] == "training" and entry["dtype"] == "bfloat16"


def share_of_peak(data: list[dict]) -> Iterator[tuple[str, list[float]]]:
    """The layer's FLOP/s relative to a large matrix product's, at M = 768, forward and backward."""
    for entry in data:
        if entry["shape"][1] == 768 and is_training(entry) and entry.get("share_of_peak"):
            shape = "x".join(str(size) for size in entry["shape"])
            yield f"{shape}, {entry['timing']}", entry["share_of_peak"]


def network_speed(mode: str) -> Callable[[list[dict]], Iterator[tuple[str, list[float]]]]:
    """Images/s relative to the dense twin, with the largest batch."""

    def values(data: list[dict]) -> Iterator[tuple[str, list[float]]]:
        entries = [e for e in data if e["mode"] == mode and e["dtype"] == "bfloat16"]
        largest = max((e["batch_size"] for e in entries), default=0)
        for entry in entries:
            if entry["batch_size"] == largest:
                pairs = zip(entry["dense_ms"], entry["moe_ms"], strict=True)
                yield f"batch {largest}", [dense / moe for dense, moe in pairs]

    return values


def activations(data: list[dict]) -> Iterator[tuple[str, list[float]]]:
    """Bytes that the layer keeps for its backward pass, relative to Tutel's layer. Both have
    dropout, and the largest number of tokens is used."""
    entries = [e for e in data if e["dropout"] > 0 and "saved" in e and e["dtype"] == "bfloat16"]
    most = max((e["tokens"] for e in entries), default=0)
    for entry in entries:
        if entry["tokens"] == most:
            yield f"{most:,} tokens", [entry["saved"] / entry["counted, Tutel"]]


LAYER, NETWORK = "One MoE layer", "The whole network"
GOALS = (
    Goal("layer to dense speed, 128 images", LAYER, 0.80, False, layer_speed(128)),
    Goal("layer to dense speed, 512 images", LAYER, 0.90, False, layer_speed(512)),
    Goal("layer to dense speed, eager", LAYER, 0.70, False, layer_speed(128, "many calls")),
    Goal("network to dense speed, training", NETWORK, 0.95, False, network_speed("training")),
    Goal("network to dense speed, inference", NETWORK, 0.95, False, network_speed("inference")),
    Goal("activations of Tutel's, dropout", "Memory of one MoE layer", 0.5, True, activations),
    Goal("share of peak at d = 768 (SonicMoE: 0.41)", LAYER, 0.41, False, share_of_peak),
)


def write_report(state: dict, folder: Path) -> None:
    """Write campaign.json and campaign.md, each atomically."""
    state["goals"] = [judged for goal in GOALS for judged in judge(goal, state)]
    replace_file(folder / "campaign.json", json.dumps(state, indent=1) + "\n")
    replace_file(folder / "campaign.md", markdown(state))


def judge(goal: Goal, state: dict) -> Iterator[dict]:
    """Yield a row for each case of a goal; "not measured" if there is no case, and in a dry run."""
    cases = []
    if not state["dry_run"]:
        cases = list(goal.values(entries(state, goal.table)))
    head = {"goal": goal.name, "bound": goal.bound, "is_upper": goal.is_upper}
    if not cases:
        yield head | {"case": "", "quartiles": None, "verdict": "not measured"}
    for case, values in cases:
        spread = quartiles(values)
        yield head | {"case": case, "quartiles": spread, "verdict": verdict(goal, spread[1])}


def entries(state: dict, title: str) -> list[dict]:
    """The data of all tables of this title."""
    tables = [record["tables"].get(title) for record in state["sections"].values()]
    return [entry for table in tables if table for entry in table["data"]]


def verdict(goal: Goal, median: float) -> str:
    missed_by = goal.bound - median
    is_met = missed_by <= 0
    if goal.is_upper:
        is_met = missed_by >= 0
    if is_met:
        return "reached"
    return f"missed by {abs(missed_by):.3f}"


def markdown(state: dict) -> str:
    """The whole report: device, goals, how each section ended, and every table."""
    lines = ["# GPU campaign", ""]
    if state["dry_run"]:
        lines += ["A dry run: tiny shapes on a CPU. No figure here is a measurement.", ""]
    lines += [f"- {key}: {value}" for key, value in state["environment"].items()]
    lines += ["", "## Goals", "", *goal_lines(state["goals"])]
    lines += ["", "## Sections", "", *outcome_lines(state["sections"])]
    for section in SECTIONS:
        record = state["sections"].get(section.name)
        lines += ["", f"## {section.title}", ""]
        if record is None:
            lines += ["Not measured."]
        else:
            lines += section_lines(record)
    return "\n".join(lines) + "\n"


def goal_lines(goals: list[dict]) -> Iterator[str]:
    yield "| goal | bound | case | median (quartiles) | |"
    yield "|" + " --- |" * 5
    for goal in goals:
        sign = ">="
        if goal["is_upper"]:
            sign = "<="
        value = "not measured"
        if goal["quartiles"]:
            low, median, high = goal["quartiles"]
            value = f"{median:.3f} ({low:.3f} - {high:.3f})"
        bound = f"{sign} {goal['bound']:g}"
        yield f"| {goal['goal']} | {bound} | {goal['case']} | {value} | {goal['verdict']} |"


def outcome_lines(records: dict[str, dict]) -> Iterator[str]:
    yield "| section | outcome | seconds | limit |"
    yield "|" + " --- |" * 4
    for section in SECTIONS:
        record = records.get(section.name)
        if record is None:
            yield f"| {section.name} | not run | | |"
            continue
        times = f"{record['seconds']:.0f} | {record['limit']:.0f}"
        yield f"| {section.name} | {record['status']} | {times} |"


def section_lines(record: dict) -> Iterator[str]:
    """The lines of a section: outcomes of tests, the published tables, and the output of a failed
    section."""
    tests = record.get("tests")
    if tests:
        passed = tests["tests"] - tests["failures"] - tests["errors"] - tests["skipped"]
        counts = {"passed": passed} | {key: tests[key] for key in ("failures", "errors", "skipped")}
        yield ", ".join(f"{count} {name}" for name, count in counts.items())
        yield ""
    for table in record["tables"].values():
        fields = {name: table[name] for name in ("title", "command", "columns", "rows", "notes")}
        yield "#" + Table(**fields).markdown()
    for line in record["printed"].splitlines():
        if "Please report this line" in line:  # a kernel that the engine has disabled
            yield f"- {line.strip()}"
    has_results = tests or record["tables"]
    if record["printed"] and (record["status"] != "done" or not has_results):
        yield f"{record['status']}; printed last:"
        yield ""
        yield "```"
        yield record["printed"]
        yield "```"
