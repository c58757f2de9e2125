"""The kit for nine minutes on a GPU, and the other measurements and tests on one.

    python benchmarks/campaign.py                  (a GPU: the seven parts of the kit, 516 s)
    python benchmarks/campaign.py --sections tests memcheck    (others; "all": every one)
    python benchmarks/campaign.py --dry-run        (tiny shapes on a CPU, and what is to be copied)
    python benchmarks/campaign.py --wheels [FOLDER]    (what to carry; FOLDER: download)
    python benchmarks/campaign.py --precompile     (kernels to carry, without a GPU)

Each call goes on where the earlier ones of the same commit and device stopped, in the order of
importance, and begins no section for which too little time is left. A section is a process with a
time limit. The results are written after each row: a call that is killed loses the current row.
They lie in --output: $OUT if that is set, else output/campaign. If $OUT is still empty, the call
goes on from what lies in output/campaign, which was carried there. A section that exceeded its
limit runs again with more time, at most that of a whole call, and one that failed runs again, both
after all others. The table of all rows is printed last.

Exit code: 0 if every section ended well, 1 if not, 2 for wrong arguments. Needs no network: the
packages that are missing or too old come from the folder --packages, the sources of peers from
output/peers.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from campaign_sections import KIT, PRECOMPILED, ROOT, SECTIONS, Section
from carried_kernels import ARCHITECTURES, KERNELS, pack, unpack, versions_here, versions_of
from wheels import CARRIED, PEERS, WheelError, collect, missing, sizes_to_copy, unpack_missing

CARRIED_RESULTS = ROOT / "output" / "campaign"
PACKAGES = ROOT / "output" / "wheels"
MOST_MINUTES = 1440  # a day
MINUTES = 8.6
MOST_TO_COPY = 64  # MiB
RESERVED = 5.0  # seconds reserved for the last report and the end of the last section
DRY_SECONDS = 45.0  # that a section of a dry run may need
MORE_TIME = 1.5  # a section that was killed runs again with its earlier limit times this factor
SHORT = 5.0  # seconds by which the time left may fall short of a whole call
KEPT_OUTPUT = 12000  # characters that are kept of a section's output, from its end


class CampaignError(Exception):
    """An error with a message of one line for the user. The exit code is 2."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="of this call, default %(default)s"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument(
        "--sections",
        nargs="+",
        choices=["all", *(s.name for s in SECTIONS)],
        help="in place of the kit's",
    )
    output = Path(os.environ.get("OUT") or CARRIED_RESULTS)
    parser.add_argument("--output", type=Path, default=output, metavar="FOLDER")
    parser.add_argument(
        "--packages", type=Path, default=PACKAGES, metavar="FOLDER", help="wheels that were carried"
    )
    parser.add_argument("--commit", help="for the record, where there is no git")
    parser.add_argument(
        "--wheels", nargs="?", const="", metavar="FOLDER", help="list or download, then end"
    )
    parser.add_argument(
        "--precompile", action="store_true", help="write --output/kernels.tar.gz, then end"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    # `timeout` and a closing terminal also end the section, through the `finally` of its run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.wheels is not None:
            return carry(args.wheels)
        if args.precompile:
            return precompile(args)
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


def precompile(args: argparse.Namespace) -> int:
    """Compile the kernels of the layers, and of the check before their first use, without a GPU."""
    args.output = args.output.resolve()
    prepare_output(args.output)
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        kernels = Path(scratch, "kernels")
        environment = prepare_packages(args.packages, Path(scratch))
        environment["TRITON_CACHE_DIR"] = str(kernels)
        for architecture in ARCHITECTURES:
            words = ["benchmarks/kernels.py", "layer", "--compile"]
            words += ["--architecture", f"{architecture}", "--shapes", *PRECOMPILED.split()]
            done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment)
            if done.returncode != 0 or not kernels.exists():
                raise CampaignError(f"kernels do not compile for sm_{architecture}")
        count = len(list(kernels.rglob("*.cubin")))
        print(f"{pack(args.output, kernels, versions_here())}: {count} kernels")
    return 0


def campaign(args: argparse.Namespace) -> int:
    """Run what is not done, within the time limit."""
    deadline = time.monotonic() + 60 * args.minutes - RESERVED
    if not 0 < args.minutes <= MOST_MINUTES:
        raise CampaignError(
            f"--minutes is {args.minutes:g}, it must be above 0 and at most {MOST_MINUTES}"
        )
    args.output = args.output.resolve()  # sections run in another folder
    prepare_output(args.output)
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        environment = prepare_packages(args.packages, Path(scratch))
        device = describe_device(args.dry_run, args.commit, environment)
        state = open_state(args.output, args.dry_run, device)
        if args.dry_run:
            print_sizes()
            run_sections(state, args, deadline, environment)
        else:
            use_carried_kernels(args.output, versions_of(state["environment"]))
            with tutel_being_built(environment):
                run_sections(state, args, deadline, environment)
            if KERNELS.exists():
                pack(args.output, KERNELS, versions_of(state["environment"]))
    return finish(state, chosen_sections(args), args.output)


def finish(state: dict, chosen: list[Section], folder: Path) -> int:
    """Print what is not done, and the table. Returns the exit code."""
    from campaign_report import last_table

    records = state["sections"]
    unfinished = [section for section in chosen if not is_finished(records.get(section.name))]
    print(*last_table(state, chosen), sep="\n")
    print(f"{folder / 'campaign.md'}; {len(chosen) - len(unfinished)} of {len(chosen)} done")
    for section in unfinished:
        record = records.get(section.name, {"status": "postponed"})
        print(f"not done: {section.name} ({record['status']})")
    return int(bool(unfinished))


def print_sizes() -> None:
    """Print what is to be copied to a machine with a GPU.

    Raises:
        CampaignError: it is too much.
    """
    sizes = sizes_to_copy()
    total = sum(sizes.values()) / 2**20
    parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
    print(f"to copy: {total:.1f} of {MOST_TO_COPY} MiB ({parts})", flush=True)
    if total > MOST_TO_COPY:
        raise CampaignError(f"{total:.1f} MiB are to be copied, at most {MOST_TO_COPY} can be")


@contextlib.contextmanager
def tutel_being_built(environment: dict[str, str]) -> Iterator[None]:
    """Compile the extension of a Tutel that was carried as sources, beside the sections before the
    last one, which needs it."""
    folder = PEERS / "Tutel"
    if not folder.exists() or any(folder.glob("tutel_custom_kernel*.so")):
        yield
        return
    with (folder / "build.log").open("wb") as log:
        build = subprocess.Popen(
            [sys.executable, "setup.py", "build_ext", "--inplace"], cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_lead_a_group,
        )  # fmt: skip
        try:
            yield
        finally:
            end_group(build)


def use_carried_kernels(folder: Path, versions: dict) -> None:
    """Unpack them, if they fit. Otherwise a section compiles them."""
    for place in dict.fromkeys((folder, CARRIED_RESULTS)):
        unpack(place, versions)


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
    """Unpack the carried wheels of packages that are missing or too old. Returns the environment in
    which sections find them.

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
            f"{', '.join(lacking)}: not installed or too old, and not in {folder}; on a machine"
            " with a network: campaign.py --wheels FOLDER"
        )
    paths = [str(ROOT), str(target), *map(str, PEERS.glob("*"))]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        paths.append(inherited)
    added = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    added |= {"TRITON_CACHE_DIR": str(KERNELS), "TRITON_STORE_BINARY_ONLY": "1"}
    return os.environ | added


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


# The results so far


def open_state(folder: Path, is_dry_run: bool, device: dict[str, str]) -> dict:
    """The results of earlier calls, if they are of this commit and device; otherwise none, and the
    file of the earlier ones is kept as campaign-earlier.json.

    Raises:
        CampaignError: the results cannot be read.
    """
    new = {"dry_run": is_dry_run, "environment": device, "sections": {}}
    for place in dict.fromkeys((folder, CARRIED_RESULTS)):
        file = place / "campaign.json"
        if not file.exists():
            continue
        state = read_state(file)
        difference = difference_of(state, new)
        if not difference:
            print(f"goes on from {file}", flush=True)
            collect_interrupted(state, place)
            return state
        print(f"{file} is {difference}: not used", flush=True)
        if place == folder:
            file.replace(folder / "campaign-earlier.json")
    return new


def read_state(file: Path) -> dict:
    try:
        state = json.loads(file.read_text())
        state["environment"]["commit"], state["environment"]["device"], state["dry_run"]
        if not isinstance(state["sections"], dict):
            raise TypeError("sections")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CampaignError(f"{file} cannot be read ({error}): remove it") from error
    return state


def difference_of(state: dict, new: dict) -> str:
    """Why results cannot be continued; "" if they can."""
    for key in ("commit", "device"):
        before, now = state["environment"][key], new["environment"][key]
        if before != now:
            return f"of {key} {before}, this is {now}"
    if state["dry_run"] != new["dry_run"]:
        return f"with dry_run {state['dry_run']}, this call not"
    return ""


def collect_interrupted(state: dict, folder: Path) -> None:
    """Keep what a section had written whose call was killed."""
    for section in SECTIONS:
        record = state["sections"].get(section.name)
        if record and record["status"] == "running":
            record["status"] = "interrupted"
            add_results(record, folder)


def add_results(record: dict, folder: Path) -> None:
    """Add the output and tables that lie in `folder` to a section's record. Tables of an earlier
    run remain where there are no new ones."""
    log = folder / "running.log"
    printed = ""
    if log.exists():
        printed = log.read_text(errors="replace")
    record["printed"] = printed[-KEPT_OUTPUT:]
    with contextlib.suppress(OSError, ValueError, KeyError):
        record["tables"] |= json.loads((folder / "running.json").read_text())["tables"]


def is_finished(record: dict | None) -> bool:
    return record is not None and record["status"].startswith(("done", "skipped"))


# Running


def run_sections(
    state: dict, args: argparse.Namespace, deadline: float, environment: dict[str, str]
) -> None:
    """Run each section for which enough time is left, and write the results after each one."""
    # Imported here: it imports torch and yacs, which may be among the packages just unpacked.
    from campaign_report import write_report

    folder, records = args.output, state["sections"]
    write_report(state, folder)
    whole = deadline - time.monotonic() - SHORT
    waiting = waiting_sections(chosen_sections(args), records)
    for section in waiting:
        earlier = records.get(section.name, {})
        left = deadline - time.monotonic()
        needed = seconds_needed(section, earlier, args.dry_run, whole)
        reason = obstacle(section, args.dry_run)
        if reason:
            records[section.name] = new_record(f"skipped: {reason}", 0, earlier)
            continue
        if needed > left:
            print(f"{section.name}: postponed, needs {needed:.0f} of {left:.0f} s", flush=True)
            continue
        limit = min(left, 2 * needed + 30)
        if section in KIT:  # each part of the kit leaves the later ones their time
            later = [s for s in waiting if s in KIT and KIT.index(s) > KIT.index(section)]
            times = (seconds_needed(part, {}, args.dry_run, whole) for part in later)
            limit = min(limit, max(needed, left - sum(times)))
        print(f"{section.name}: at most {limit:.0f} s", flush=True)
        record = records[section.name] = new_record("running", limit, earlier)
        clear(folder)
        write_report(state, folder)
        run_section(section, record, folder, args.dry_run, environment)
        print(f"{section.name}: {record['status']}, {record['seconds']:.0f} s", flush=True)
        write_report(state, folder)
        clear(folder)
    write_report(state, folder)


def chosen_sections(args: argparse.Namespace) -> list[Section]:
    if not args.sections:
        return list(KIT)
    return [s for s in SECTIONS if "all" in args.sections or s.name in args.sections]


def waiting_sections(chosen: list[Section], records: dict[str, dict]) -> list[Section]:
    """The sections that are not finished: those that never ended, those that exceeded their limit,
    and those that failed. Of the last two, one that ran more often comes later, so that none keeps
    the others from running again."""
    ranks = {"time limit": 1, "failed": 2}

    def rank(section: Section) -> tuple[int, int]:
        record = records.get(section.name, {"status": ""})
        place = ranks.get(record["status"].partition(",")[0], 0)
        if place == 0:
            return 0, 0
        return record["runs"], place

    return sorted([s for s in chosen if not is_finished(records.get(s.name))], key=rank)


def seconds_needed(section: Section, earlier: dict, is_dry_run: bool, whole: float) -> float:
    """With less time left, the section does not begin. One that was killed does not wait for more
    than a whole call has."""
    needed = section.seconds
    if is_dry_run:
        needed = DRY_SECONDS
    if earlier.get("status") == "time limit":
        needed = max(needed, min(MORE_TIME * earlier["limit"], whole))
    return needed


def obstacle(section: Section, is_dry_run: bool) -> str:
    """Why a section cannot run here; "" if it can."""
    if is_dry_run:
        return "" if section.tiny is not None else "needs a GPU"
    if section.tool and not shutil.which(section.tool):
        return f"{section.tool} is not installed"
    return ""


def new_record(status: str, limit: float, earlier: dict) -> dict:
    kept = {"tables": earlier.get("tables", {}), "runs": earlier.get("runs", 0) + 1}
    return {"status": status, "seconds": 0, "limit": limit, "printed": "", **kept}


def run_section(
    section: Section, record: dict, folder: Path, is_dry_run: bool, environment: dict[str, str]
) -> None:
    """Run one section and add its results to its record, also if it was killed."""
    command = section.command(is_dry_run, folder / "running.json")
    started = time.monotonic()
    code = run_limited(command, record["limit"], folder / "running.log", environment)
    status = "done"
    if code is None:
        status = "time limit"
    elif code != 0:
        status = f"failed, exit code {code}"
    record |= {"status": status, "seconds": time.monotonic() - started, "command": command}
    add_results(record, folder)


def run_limited(
    command: Sequence[str], limit: float, log: Path, environment: dict[str, str]
) -> int | None:
    """Run a command in a separate process group, which is killed after `limit` seconds.

    Returns:
        The exit code; None if the command was killed.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=_lead_a_group,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(process)


def _lead_a_group() -> None:
    """In the section's process: a group of its own, which ends with the campaign under Linux."""
    os.setpgrp()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_group(process: subprocess.Popen) -> None:
    """Kill the remaining processes of the group, including children of a process that has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def clear(folder: Path) -> None:
    """Remove the files of the section that ran."""
    for file in [*folder.glob("running.*"), *folder.glob(".running.*")]:
        file.unlink()


if __name__ == "__main__":
    sys.exit(main())
