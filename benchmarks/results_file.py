"""Tables are printed and saved as benchmarks/results/<device>-<date>.json, with a .md file of the
same content."""

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

DIRECTORY = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Table:
    """The measurements of one script. `data` has all numbers from which the cells are computed."""

    title: str
    command: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    data: object = None

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", f"`{self.command}`", ""]
        lines += [f"| {' | '.join(self.columns)} |", "|" + " --- |" * len(self.columns)]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]).rstrip() + "\n"


def publish(table: Table, device: str, output: Path | None = None) -> None:
    """Print the table and save it in the file of this device and day. It replaces an earlier table
    with the same title."""
    print(table.markdown(), flush=True)
    keep(table, device, output)


def keep(table: Table, device: str, output: Path | None = None) -> None:
    """As `publish`, without printing. Scripts save partial results with it, since a time limit may
    end them at any moment."""
    path = output or DIRECTORY / f"{_slug(device_name(device))}-{datetime.date.today()}.json"
    content = json.loads(path.read_text()) if path.exists() else {"tables": {}}
    content["tables"][table.title] = vars(table) | {"environment": environment(device)}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1) + "\n")
    replace_file(path.with_suffix(".md"), _document(content["tables"]))


def replace_file(file: Path, text: str) -> None:
    """Write a file so that a reader finds either the earlier text or the new one."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(text)
    os.replace(temporary, file)


def environment(device: str) -> dict[str, str | int]:
    """Device, threads, versions and commit, for the head of a record."""
    described = {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        described |= {"driver": _driver(), "triton": _version("triton"), "timm": _version("timm")}
        major, minor = torch.cuda.get_device_capability()
        described["capability"] = f"{major}.{minor}"
    return described | {"date": f"{datetime.date.today()}"}


def device_name(device: str) -> str:
    """The GPU's name; or the processor's name with its number of cores, and AMX if available."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.processor() or platform.machine()} CPU"
    model = re.search(r"model name\s*: (.*)", info)
    amx = " AMX" if "amx_bf16" in info else ""
    return (
        f"{model[1].strip() if model else platform.machine()} x{info.count('processor	')}{amx}"
    )


def _document(tables: dict[str, dict]) -> str:
    parts = ["Written by the scripts of benchmarks/; medians (quartiles) of interleaved rounds.\n"]
    for table in tables.values():
        fields = {name: table[name] for name in ("title", "command", "columns", "rows", "notes")}
        head = ", ".join(f"{key} {value}" for key, value in table["environment"].items())
        parts.append(f"{Table(**fields).markdown()}\n{head}\n")
    return "\n".join(parts)


def _commit() -> str:
    """The commit; with changes to its files, "-dirty-" and a hash of them."""
    git = ["git", "-C", str(DIRECTORY.parent)]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        name = subprocess.run(describe, capture_output=True, check=True).stdout.decode().strip()
        if name.endswith("-dirty"):
            changes = subprocess.run([*git, "diff", "HEAD"], capture_output=True, check=True).stdout
            name += f"-{hashlib.sha256(changes).hexdigest()[:8]}"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.partition("\n")[0].strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("(r)", "")).strip("-")
