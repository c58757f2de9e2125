"""Report of a campaign as JSON and Markdown."""

import json
from collections.abc import Iterator
from pathlib import Path

from campaign_sections import SECTIONS, Section
from results_file import Table, replace_file

MOST_ROWS = 40  # of a table that is printed at the end; the report has all


def write_report(state: dict, folder: Path) -> None:
    """Write campaign.json and campaign.md, each atomically."""
    replace_file(folder / "campaign.json", json.dumps(state, indent=1) + "\n")
    replace_file(folder / "campaign.md", markdown(state))


def markdown(state: dict) -> str:
    """The whole report: device, how each section ended, and every table."""
    lines = ["# GPU campaign", ""]
    if state["dry_run"]:
        lines += ["A dry run: tiny shapes on a CPU. No figure here is a measurement.", ""]
    lines += [f"- {key}: {value}" for key, value in state["environment"].items()]
    lines += ["", "## Sections", "", *outcome_lines(state["sections"])]
    for section in SECTIONS:
        record = state["sections"].get(section.name)
        lines += ["", f"## {section.title}", ""]
        if record is None:
            lines += ["Not measured."]
        else:
            lines += section_lines(record)
    return "\n".join(lines) + "\n"


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
    """The lines of a section: the published tables, and what a section without a table or with an
    error has printed."""
    for table in record["tables"].values():
        fields = {name: table[name] for name in ("title", "command", "columns", "rows", "notes")}
        yield "#" + Table(**fields).markdown()
    for line in record["printed"].splitlines():
        if "Please report this line" in line:  # a kernel that the engine has disabled
            yield f"- {line.strip()}"
    if record["printed"] and (record["status"] != "done" or not record["tables"]):
        yield f"{record['status']}; printed last:"
        yield ""
        yield "```"
        yield record["printed"]
        yield "```"


def last_table(state: dict, chosen: list[Section]) -> Iterator[str]:
    """What a call prints last: each section with its time and its rows."""
    for section in chosen:
        record = state["sections"].get(section.name, {"status": "not begun"})
        seconds = f"{record.get('seconds', 0):.0f} of {section.seconds:.0f} s"
        yield f"{section.name}: {section.title}: {record['status']}, {seconds}"
        for table in record.get("tables", {}).values():
            rows = [table["columns"], *table["rows"]]
            for row in rows[: MOST_ROWS + 1]:
                yield f"  {' | '.join(row)}"
            if len(rows) > MOST_ROWS + 1:
                yield f"  {len(rows) - MOST_ROWS - 1} more rows in campaign.md"
