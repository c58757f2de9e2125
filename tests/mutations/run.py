"""Known faults ("mutations") that the tests must notice: `mutations.txt` lists them.

    python tests/mutations/run.py                # each mutation with the files of tests beside it
    python tests/mutations/run.py --only NAME    # mutations whose name contains NAME; repeatable
    python tests/mutations/run.py --all          # each mutation with the whole suite: hours

Each mutation replaces a text in a scratch copy of the repository, and pytest runs there until the
first failure. It is killed if a test fails, and survives if all pass. Before, the files of tests
run once without a mutation.

The status is 1 if a mutation survives without a stated reason, and 2 if the run has no meaning: a
text that is missing or not unique, a file of tests that is missing, or one that fails without a
mutation. A mutated C++ kernel stays in the user's cache directory, under a name of its own.
"""

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

LIST = Path(__file__).with_name("mutations.txt")
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 900  # seconds of a mutation's tests; a hang is noticed too
LIMIT_OF_SUITE = 4 * 3600
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class UnusableError(Exception):
    """The run has no meaning."""


@dataclass
class Mutation:
    """An entry of the list."""

    name: str
    area: str
    file: str = ""
    text: list[str] = field(default_factory=list)  # lines
    replacement: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)  # files, relative to tests/
    survives: str = ""  # the reason, if no test is to notice it

    def apply(self, content: str) -> str:
        return content.replace("\n".join(self.text), "\n".join(self.replacement))

    def problem(self, root: Path) -> str:
        """Why the mutation cannot be used; "" if it can."""
        if not (root / self.file).is_file():
            return f"{self.file} does not exist"
        content = (root / self.file).read_text()
        count = content.count("\n".join(self.text))
        if count != 1:
            return f"its text is {count} times in {self.file}"
        missing = [file for file in self.tests if not (root / "tests" / file).is_file()]
        if missing or not self.tests:
            return f"no such file of tests: {' '.join(missing)}"
        if self.file.endswith(".py"):
            try:
                compile(self.apply(content), self.file, "exec")
            except SyntaxError as error:
                return f"{self.file} is not valid Python with it ({error})"
        return ""


def read_list(text: str) -> list[Mutation]:
    """The mutations of a list. Its head says how it is written."""
    mutations: list[Mutation] = []
    area = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("== "):
            area = line[3:]
        elif not line.startswith(" "):
            mutations.append(Mutation(line, area))
            if mutations[:-1]:
                mutations[-1].file, mutations[-1].tests = mutations[-2].file, mutations[-2].tests
        elif line.startswith("  in: "):
            mutations[-1].file = line[6:]
        elif line.startswith("  - "):
            mutations[-1].text.append(line[4:])
        elif line.startswith("  + "):
            mutations[-1].replacement.append(line[4:])
        elif line.startswith("  by: "):
            mutations[-1].tests = line[6:].split()
        elif line.startswith("  survives: "):
            mutations[-1].survives = line.removeprefix("  survives: ")
        else:
            raise UnusableError(f"{LIST.name}:{number}: {line!r} is no line of the list")
    return mutations


def check(mutations: list[Mutation], root: Path) -> None:
    """Raise UnusableError, which names each mutation that cannot be used."""
    if not mutations:
        raise UnusableError("there is no such mutation")
    counts = Counter(mutation.name for mutation in mutations)
    problems = [f"{name}: this name is there twice" for name in counts if counts[name] > 1]
    problems += [f"{m.name}: {problem}" for m in mutations if (problem := m.problem(root))]
    if problems:
        raise UnusableError("\n".join(problems))


def copy_repository(root: Path, target: Path) -> Path:
    """Copy the files that git tracks."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in names.stdout.decode().split("\0"):
        if name and os.path.lexists(root / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)
    return target


def run_tests(copy: Path, tests: list[str], limit: float, stop: bool = True) -> str:
    """Run files of tests in a copy. Returns "" if all pass, or what fails: the names of tests (one
    with `stop`), or how pytest ended.

    Raises:
        UnusableError: pytest could not run.
    """
    options = ["-q", "--tb=no", "-p", "no:randomly", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *["-x"] * stop, *tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "the time limit"
    failed = _FAILURE.findall(output)
    if process.returncode == 0:
        return ""
    if process.returncode < 0:
        return f"signal {-process.returncode}"
    if process.returncode > 2 or not failed:  # 1: a failure; 2: a file that cannot be imported
        raise UnusableError(f"pytest ended with status {process.returncode}:\n{output[-3000:]}")
    return " ".join(failed)


def try_mutation(
    copy: Path, mutation: Mutation, number: int, tests: list[str], limit: float
) -> str:
    """What kills the mutation, as `run_tests` returns it; "" if it survives."""
    file = copy / mutation.file
    original, times = file.read_text(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_text(mutation.apply(original))
    # A time of its own: Python takes a compiled form of the same time and size for this one.
    os.utime(file, (10**9 + number, 10**9 + number))
    try:
        return run_tests(copy, tests, limit)
    finally:
        file.write_text(original)
        os.utime(file, ns=times)


def try_all(mutations: list[Mutation], args: argparse.Namespace, scratch: Path) -> list[str]:
    """What kills each mutation, in the order of the list."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for job in range(args.jobs):
        copies.put(copy_repository(args.root, scratch / str(job)))

    def tests_of(chosen: list[Mutation]) -> list[str]:
        return sorted({f"tests/{file}" for mutation in chosen for file in mutation.tests})

    def examine(number: int) -> str:
        mutation, copy, started = mutations[number], copies.get(), time.perf_counter()
        tests, limit = tests_of([mutation]), LIMIT
        if args.all:
            tests, limit = ["tests"], LIMIT_OF_SUITE
        try:
            killer = try_mutation(copy, mutation, number, tests, limit)
        finally:
            copies.put(copy)
        word, by = ("killed", f" by {killer}") if killer else ("SURVIVED", "")
        seconds = time.perf_counter() - started
        print(f"{word:8} {seconds:4.0f} s  {mutation.name}{by}", flush=True)
        return killer

    copy = copies.get()
    tests = ["tests"] if args.all else tests_of(mutations)
    failed = run_tests(copy, tests, LIMIT_OF_SUITE, stop=False)
    copies.put(copy)
    if failed:
        raise UnusableError(f"fails without a mutation: {failed}")
    print(f"{len(tests)} files of tests pass without a mutation", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        return list(pool.map(examine, range(len(mutations))))


def summary(mutations: list[Mutation], killers: list[str]) -> str:
    """Killed and all mutations by area, and the survivors."""
    lines = []
    pairs = list(zip(mutations, killers, strict=True))
    for area in [*dict.fromkeys(mutation.area for mutation in mutations), "all"]:
        killed = [bool(killer) for mutation, killer in pairs if area in (mutation.area, "all")]
        lines.append(f"{area:16} {sum(killed):3} / {len(killed):3}")
    for mutation, killer in pairs:
        if not killer:
            reason = mutation.survives or "no reason is stated"
            lines.append(f"survives: {mutation.name}: {reason}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time")
    parser.add_argument("--all", action="store_true", help="run the whole suite for each")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout to copy")
    args = parser.parse_args()
    try:
        mutations = read_list(LIST.read_text())
        if args.only:
            mutations = [m for m in mutations if any(name in m.name for name in args.only)]
        check(mutations, args.root)
        with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
            killers = try_all(mutations, args, Path(scratch))
    except UnusableError as error:
        print(error, file=sys.stderr)
        return 2
    print(summary(mutations, killers))
    pairs = zip(mutations, killers, strict=True)
    return int(any(not killer and not mutation.survives for mutation, killer in pairs))


if __name__ == "__main__":
    sys.exit(main())
