"""What a run runs on and from: enough to tell, later, why two runs differ."""

import os
import platform
import resource
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from swinv2_moe.imports import imported_files
from swinv2_moe.train.distributed import World

_PACKAGES = ("torch", "torchvision", "timm", "triton", "numpy")


def describe_environment(world: World) -> dict:
    """When, by which command and commit, with which versions and imported files, on what; ready for
    JSON."""
    on_gpu = world.device.type == "cuda"
    imported = imported_files()
    return {
        "started": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC",
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(world.device) if on_gpu else _processor(),
        "cuda": torch.version.cuda if on_gpu else None,
        "processes": world.size,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        **({"imported": ", ".join(map(str, imported))} if imported else {}),
        **code_versions(),
    }


def code_versions() -> dict[str, str | None]:
    """The commit of this code and the versions of what it stands on; None where one is unknown."""
    packages = {name: _version(name) for name in _PACKAGES}
    return {"commit": _commit(), "python": platform.python_version()} | packages


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of a GPU's memory by tensors there, else of
    the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def _commit() -> str | None:
    """The commit of this code, with a + if it was changed since; None outside a checkout of its
    own."""
    root = Path(__file__).parents[2]
    # installed elsewhere; git would answer for whatever repository that lies in
    if not (root / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", root, *words], capture_output=True, text=True, check=True, timeout=20
            ).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changes else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if names:
        return names[0]
    return platform.processor() or platform.machine()
