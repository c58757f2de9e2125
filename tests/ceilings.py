"""What may not grow: `make lint` compares the size of each room with its ceiling.

    python tests/ceilings.py [--lower]

Prints what is above its ceiling of `ceilings.txt`, and what is so far below that the ceiling should
be lowered; `--lower` lowers these. Measured are the lines of each folder of the product (with
comments and docstrings), of the tests and of the benchmarks, the words of the documentation, the
configuration keys, and the chains of `chains.py`.
"""

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from chains import files_and_returns, forward_pass, journey_of_configuration, training_step

import moe_core

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".txt")
SOURCES = (".py", ".cpp", ".hpp")
_SLACK = 0.03  # of a ceiling; below it the ceiling has to be lowered


class Ceiling(NamedTuple):
    most: int
    reason: str  # why it was raised; empty: it was not


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lower", action="store_true", help="lower the ceilings that are too high")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not Path(moe_core.__file__).is_relative_to(ROOT):
        sys.exit(f"moe_core is imported from {Path(moe_core.__file__).parent}, not from {ROOT}")
    measured = sizes(ROOT) | chains()
    if args.lower:
        FILE.write_text(lowered(FILE.read_text(), measured))
    ceilings = parsed(FILE.read_text())
    found = problems(measured, ceilings) + raised(ceilings, parsed(committed()))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


def sizes(root: Path) -> dict[str, int]:
    """Lines by room, words and keys."""
    lines: Counter[str] = Counter()
    for package in ("moe_core", "swinv2_moe"):
        for file in sources(root / package):
            room, *inner = file.relative_to(root / package).parts
            room = f"{package}/{room}" if inner else f"{package}, loose files"
            for name in (room, package, "moe_core and swinv2_moe"):
                lines[name] += number_of_lines(file)
    for folder in ("benchmarks", "tests"):
        lines[folder] = sum(map(number_of_lines, sources(root / folder)))
    pages = [page for page in (root / "docs").rglob("*.md") if page.name != "log.md"]
    keys = (root / "docs/reference/configuration-keys.md").read_text().splitlines()
    return dict(lines) | {
        "tests/mutations/mutations.txt": number_of_lines(root / "tests/mutations/mutations.txt"),
        "docs without the log, words": sum(len(page.read_text().split()) for page in pages),
        "configuration keys": sum(line.startswith("| `") for line in keys),
    }


def sources(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.suffix in SOURCES]


def number_of_lines(file: Path) -> int:
    return file.read_text().count("\n")


def chains() -> dict[str, int]:
    forward, step, configuration = forward_pass(), training_step(), journey_of_configuration()
    files, returns = files_and_returns(configuration)
    return {
        "forward pass, functions": len(forward.functions),
        "forward pass, files": len(forward.files),
        "training step, files": len(step.files),
        "configuration, times handed on": len(configuration),
        "configuration, files": len(files),
        "configuration, returns": returns,
    }


def parsed(text: str) -> dict[str, Ceiling]:
    """Lines `NAME: NUMBER  # REASON`, whose reason may be missing."""
    ceilings = {}
    for line in text.splitlines():
        entry, _, reason = line.partition("#")
        if entry.strip():
            name, _, most = entry.rpartition(":")
            ceilings[name] = Ceiling(int(most), reason.strip())
    return ceilings


def problems(measured: dict[str, int], ceilings: dict[str, Ceiling]) -> list[str]:
    """What is above its ceiling, far below it, or only on one side."""
    found = [
        f"{name}: has no ceiling in {FILE.name}"
        for name in sorted(measured.keys() - ceilings.keys())
    ]
    for name, (most, _) in ceilings.items():
        number = measured.get(name)
        if number is None:
            found.append(f"{name}: has a ceiling in {FILE.name}, but does not exist")
        elif number > most:
            found.append(f"{name}: {number}, at most {most} ({FILE.name})")
        elif is_far_below(number, most):
            found.append(
                f"{name}: {number}, far below its ceiling of {most}: lower it with"
                " python tests/ceilings.py --lower"
            )
    return found


def is_far_below(number: int, most: int) -> bool:
    return number < (1 - _SLACK) * most


def raised(ceilings: dict[str, Ceiling], before: dict[str, Ceiling]) -> list[str]:
    """Ceilings that were raised without a new reason."""
    return [
        f"{name}: its ceiling was raised from {before[name].most} to {most}: say why behind a # in"
        f" {FILE.name}"
        for name, (most, reason) in ceilings.items()
        if name in before and most > before[name].most and reason in ("", before[name].reason)
    ]


def committed() -> str:
    """The file of the last commit; empty without git or where it is not in it."""
    command = ["git", "show", f"HEAD:{FILE.relative_to(ROOT)}"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return ""


def lowered(text: str, measured: dict[str, int]) -> str:
    """The text with the measured number in place of each ceiling that is too high, without the
    lines of what does not exist."""
    lines = []
    for line in text.splitlines(keepends=True):
        for name, (most, _) in parsed(line).items():
            if name not in measured:
                line = ""
            elif is_far_below(measured[name], most):
                line = f"{name}: {measured[name]}\n"
        lines.append(line)
    return "".join(lines)


if __name__ == "__main__":
    main()
