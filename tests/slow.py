"""The slow tests, in parts of less than 40 minutes on two cores. Not a test itself.

    make test-slow PART=3/8        # or: python tests/slow.py --part 3/8
    make test-slow                 # all of them
    python tests/slow.py tests/integration/test_signals.py ...

Each file runs alone, one for each core. `slow.csv` beside this script keeps what became of each
file: the seconds, the commit and the date of its last run, and how it ended. The seconds of the
last runs balance the parts. Exits with 1 if anything failed.

TUTEL_SOURCE and SWIN_SOURCE name folders with Microsoft's Tutel and Swin-Transformer; without them
the tests of their programs skip.
"""

import argparse
import csv
import datetime
import os
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".csv")
COLUMNS = ["file", "seconds", "commit", "date", "outcome"]
UNKNOWN_SECONDS = 60.0  # of a file that never ran
_lock = threading.Lock()


def slow_files() -> list[str]:
    """Files with tests that are deselected in `make test`."""
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    slow = [file for file in files if "pytest.mark.slow" in file.read_text()]
    return [file.relative_to(ROOT).as_posix() for file in slow]


def read_record() -> dict[str, dict[str, str]]:
    if not RECORD.exists():
        return {}
    with RECORD.open(newline="") as lines:
        return {row["file"]: row for row in csv.DictReader(lines)}


def write_record(row: dict[str, str]) -> None:
    """One row at a time: what ran is kept if the rest is interrupted. Files that have no slow
    test any more leave."""
    with _lock:
        rows = read_record() | {row["file"]: row}
        kept = [rows[file] for file in slow_files() if file in rows]
        temporary = RECORD.with_suffix(".tmp")
        with temporary.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
        temporary.replace(RECORD)


def select_part(part: int, parts: int) -> list[str]:
    """The longest file goes to the part with the fewest seconds so far, and so on."""
    record = read_record()

    def seconds(file: str) -> float:
        return float(record[file]["seconds"]) if file in record else UNKNOWN_SECONDS

    totals = [0.0] * parts
    chosen: list[list[str]] = [[] for _ in range(parts)]
    for file in sorted(slow_files(), key=lambda file: (-seconds(file), file)):
        least = totals.index(min(totals))
        totals[least] += seconds(file)
        chosen[least].append(file)
    return chosen[part - 1]


def current_commit() -> str:
    """With "+" where tracked files, the record aside, differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RECORD}")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)


def run(file: str, commit: str) -> bool:
    """Run one file's slow tests and keep the outcome; whether none failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "--randomly-seed=1", file]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        tests = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    ends = Counter(
        next((kinds[part.tag] for part in test if part.tag in kinds), "passed") for test in tests
    )
    named = [f"{ends[end]} {end}" for end in ("passed", "failed", "skipped") if ends[end]]
    outcome = ", ".join(named)
    passed = done.returncode == 0
    if not passed and not ends["failed"]:
        outcome = f"pytest ended with {done.returncode}"
    seconds = sum(float(test.get("time", 0)) for test in tests)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    write_record(dict(zip(COLUMNS, [file, f"{seconds:.0f}", commit, date, outcome], strict=True)))
    print(f"{'ok' if passed else 'FAILED'}  {file}: {outcome} ({seconds:.0f} s)", flush=True)
    if not passed:
        print(done.stdout[-20_000:], done.stderr[-5_000:], flush=True)
    return passed


def part_of(text: str) -> tuple[int, int]:
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=part_of, default=(1, 1), help="3/8: the third of eight")
    parser.add_argument("files", nargs="*", help="these files in place of a part")
    args = parser.parse_args()
    files = args.files or select_part(*args.part)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        results = list(pool.map(partial(run, commit=current_commit()), files))
    print(f"{sum(results)} of {len(results)} files passed")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
