"""All GPU measurements within a time limit: one command, one Markdown file and one JSON file.

    python benchmarks/campaign.py --minutes 25                 (a GPU)
    python benchmarks/campaign.py --minutes 9 --resume         (again and again, until all is done)
    python benchmarks/campaign.py --dry-run                    (tiny shapes on a CPU, 3 minutes)
    python benchmarks/campaign.py --wheels [FOLDER]            (what to carry; FOLDER: download)

The GPU tests run first, then layer, fine experts, tiles, parts, memory, network, shares of time and
trunk. Each section is a process with a time limit, its share of the time that is left. A section
that exceeds it is killed with the processes that it started, and its partial results are kept. The
results are written after each section. --resume runs the sections that are missing, those that
exceeded their limit if they now have at least a quarter more time, and last those that failed. Exit
code: 0 if every section ended well, 1 if not, 2 for wrong arguments. Needs no network: packages
that are missing come from the folder --packages.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from pathlib import Path

from campaign_sections import ROOT, SECTIONS, Section
from wheels import CARRIED, WheelError, collect, missing, unpack_missing

OUTPUT = ROOT / "output" / "campaign"
PACKAGES = ROOT / "output" / "wheels"
MOST_MINUTES = 1440  # a day
RESERVED = 3.0  # seconds reserved for the last report and the end of the last section
LEAST = 2.0  # seconds; with less time left, no section begins
MORE_TIME = 1.25  # a section that was killed runs again with its earlier limit times this factor
KEPT_OUTPUT = 6000  # characters that are kept of a section's output, from its end


class CampaignError(Exception):
    """An error with a message of one line for the user. The exit code is 2."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="of this call, default 25")
    parser.add_argument("--resume", action="store_true", help="continue what --output holds")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument(
        "--sections", nargs="+", choices=[s.name for s in SECTIONS], help="only these"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FOLDER")
    parser.add_argument(
        "--packages", type=Path, default=PACKAGES, metavar="FOLDER", help="wheels that were carried"
    )
    parser.add_argument("--commit", help="for the record, where there is no git")
    parser.add_argument(
        "--wheels", nargs="?", const="", metavar="FOLDER", help="list or download, then end"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    # `timeout` and a closing terminal also end the section, through the `finally` of its run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.wheels is not None:
            return carry(args.wheels)
        return campaign(args)
    except (CampaignError, WheelError) as error:
        print(f"campaign.py: {error}", file=sys.stderr)
        return 2


def carry(folder: str) -> int:
    """List the packages to carry. If a folder is given, download them to it."""
    if folder:
        collect(Path(folder))
    else:
        print("\n".join(CARRIED))
    return 0


def campaign(args: argparse.Namespace) -> int:
    """Run the remaining sections within the time limit."""
    deadline = time.monotonic() + 60 * args.minutes - RESERVED
    if not 0 < args.minutes <= MOST_MINUTES:
        raise CampaignError(
            f"--minutes is {args.minutes:g}, it must be above 0 and at most {MOST_MINUTES}"
        )
    prepare_output(args.output)
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        environment_variables = prepare_packages(args.packages, Path(scratch))
        device = describe_device(args.dry_run, args.commit, environment_variables)
        state = open_state(args, device)
        run_sections(state, args, deadline, Path(scratch), environment_variables)
    chosen = chosen_sections(args)
    unfinished = []
    for section in chosen:
        record = state["sections"].get(section.name, {"status": "not run"})
        if record["status"] != "done":
            unfinished.append(f"{section.name} ({record['status']})")
    print(f"{args.output / 'campaign.md'}; {len(chosen) - len(unfinished)} of {len(chosen)} done")
    if unfinished:
        print(f"not done: {', '.join(unfinished)}; --resume continues")
    return int(bool(unfinished))


def prepare_output(folder: Path) -> None:
    """Make the folder, and check that a file can be written to it.

    Raises:
        CampaignError: the folder cannot be made, or cannot be written to.
    """
    probe = folder / ".campaign"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise CampaignError(f"--output {folder}: cannot be written ({error.strerror})") from error


def prepare_packages(folder: Path, scratch: Path) -> dict[str, str]:
    """Unpack the carried wheels of missing packages. Returns the environment in which sections find
    them.

    Raises:
        CampaignError: a package is neither installed nor carried.
    """
    target = scratch / "packages"
    unpack_missing(folder, target)
    sys.path.insert(0, str(target))
    sys.path.insert(1, str(ROOT))
    lacking = missing()
    if lacking:
        raise CampaignError(
            f"{', '.join(lacking)}: not installed and not in {folder}; on a machine with a network:"
            " campaign.py --wheels FOLDER"
        )
    paths = [str(ROOT), str(target)]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        paths.append(inherited)
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def describe_device(
    is_dry_run: bool, commit: str | None, environment: dict[str, str]
) -> dict[str, str]:
    """Device, driver, versions and commit, read by a process that then frees the device.

    Raises:
        CampaignError: there is no CUDA device.
    """
    device = "cuda"
    if is_dry_run:
        device = "cpu"
    code = (
        "import json, sys, torch, results_file as r; d = sys.argv[1]; "
        "print(json.dumps(r.environment(d) if d == 'cpu' or torch.cuda.is_available() else None))"
    )
    command = [sys.executable, "-c", code, device]
    folder = str(ROOT / "benchmarks")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        raise CampaignError(f"the device cannot be read ({' '.join(last)})")
    described = json.loads(done.stdout)
    if described is None:
        raise CampaignError("no CUDA device; --dry-run runs all of it at tiny shapes on a CPU")
    if commit:
        described["commit"] = commit
    return described


def open_state(args: argparse.Namespace, device: dict[str, str]) -> dict:
    """With --resume, the results so far, if any; otherwise empty results.

    Raises:
        CampaignError: the results cannot be read, or are of another commit, device or format.
    """
    file = args.output / "campaign.json"
    if args.resume and not file.exists():
        print(f"{file} is not there yet: all sections are run", flush=True)
    if not args.resume or not file.exists():
        return {"dry_run": args.dry_run, "environment": device, "sections": {}}
    try:
        state = json.loads(file.read_text())
        earlier = state["environment"]
        known = {key: earlier[key] for key in ("commit", "device")}
        is_dry_run, sections = state["dry_run"], state["sections"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CampaignError(f"--resume: {file} cannot be read ({error})") from error
    for key, value in known.items():
        if value != device[key]:
            raise CampaignError(f"--resume: {file} is of {key} {value}, this is {device[key]}")
    if is_dry_run != args.dry_run or not isinstance(sections, dict):
        raise CampaignError(f"--resume: {file} has dry_run {is_dry_run}, this call not")
    return state


def run_sections(
    state: dict,
    args: argparse.Namespace,
    deadline: float,
    scratch: Path,
    environment: dict[str, str],
) -> None:
    """Run each remaining section, and write the results after each section."""
    # Imported here: it imports torch and yacs, which may be among the packages just unpacked.
    from campaign_report import write_report

    write_report(state, args.output)
    waiting = waiting_sections(chosen_sections(args), state["sections"])
    for i, section in enumerate(waiting):
        left = deadline - time.monotonic()
        limit = left * section.weight / sum(later.weight for later in waiting[i:])
        earlier = state["sections"].get(section.name)
        if limit < LEAST:
            continue
        if was_killed(earlier) and limit < MORE_TIME * earlier["limit"]:
            continue
        print(f"{section.name}: at most {limit:.0f} s", flush=True)
        state["sections"][section.name] = run_section(
            section, args.dry_run, limit, scratch, environment
        )
        outcome = state["sections"][section.name]
        print(f"{section.name}: {outcome['status']}, {outcome['seconds']:.0f} s", flush=True)
        write_report(state, args.output)


def chosen_sections(args: argparse.Namespace) -> list[Section]:
    return [s for s in SECTIONS if not args.sections or s.name in args.sections]


def waiting_sections(chosen: list[Section], records: dict[str, dict]) -> list[Section]:
    """The sections that are not done. Sections that failed before come last."""
    waiting = []
    failed = []
    for section in chosen:
        record = records.get(section.name)
        if record is None or was_killed(record):
            waiting.append(section)
        elif record["status"] != "done":
            failed.append(section)
    return waiting + failed


def was_killed(record: dict | None) -> bool:
    """Whether a section exceeded its time limit. With more time it may succeed."""
    return record is not None and record["status"] == "time limit"


def run_section(
    section: Section, is_dry_run: bool, limit: float, scratch: Path, environment: dict[str, str]
) -> dict:
    """Run one section and collect its results, also if it was killed."""
    tables, junit = scratch / f"{section.name}.json", scratch / f"{section.name}.xml"
    command = section.command(is_dry_run, tables, junit)
    started = time.monotonic()
    code, printed = run_limited(command, limit, scratch / f"{section.name}.log", environment)
    status = "done"
    if code is None:
        status = "time limit"
    elif code != 0:
        status = f"failed, exit code {code}"
    record = {"status": status, "seconds": time.monotonic() - started, "limit": limit}
    record |= {"command": command[1:], "printed": printed}
    record["tables"] = read_tables(tables)
    if section.name == "tests":
        record["tests"] = read_tests(junit)
    return record


def run_limited(
    command: Sequence[str], limit: float, log: Path, environment: dict[str, str]
) -> tuple[int | None, str]:
    """Run a command in a separate process group, which is killed after `limit` seconds.

    Returns:
        The exit code (None if the command was killed), and the end of its output.
    """
    code = None
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_group(process)
    return code, log.read_text(errors="replace")[-KEPT_OUTPUT:]


def end_group(process: subprocess.Popen) -> None:
    """Kill the remaining processes of the group, including children of a process that has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_tables(file: Path) -> dict[str, dict]:
    """The tables that the section has published. There are none if it was killed while writing
    them."""
    try:
        return json.loads(file.read_text())["tables"]
    except (OSError, ValueError, KeyError):
        return {}


def read_tests(file: Path) -> dict[str, int] | None:
    """Numbers of tests by outcome; None if pytest did not end."""
    try:
        suites = xml.etree.ElementTree.parse(file).getroot().iter("testsuite")
    except (OSError, xml.etree.ElementTree.ParseError):
        return None
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for key in counts:
            counts[key] += int(suite.get(key, 0))
    return counts


if __name__ == "__main__":
    sys.exit(main())
