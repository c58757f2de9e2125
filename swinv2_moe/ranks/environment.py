"""The environment of a run: machine, versions, commit and command."""

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
from swinv2_moe.output import without_credentials
from swinv2_moe.ranks.world import World

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("torch", "torchvision", "timm", "triton", "numpy")


def describe_environment(world: World) -> dict:
    """The environment of this run, ready for JSON."""
    device, cuda = _processor(), None
    if world.device.type == "cuda":
        device, cuda = torch.cuda.get_device_name(world.device), torch.version.cuda
    environment = {
        "started": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC",
        "command": without_credentials(" ".join([Path(sys.argv[0]).name] + sys.argv[1:])),
        "device": device,
        "cuda": cuda,
        "processes": world.size,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }
    imported = imported_files()
    if imported:
        environment["imported"] = ", ".join(str(file) for file in imported)
    return environment | code_versions()


def code_versions() -> dict[str, str | None]:
    """The commit of this code and the versions of Python and of the main packages; None if
    unknown."""
    packages = {name: _version(name) for name in _PACKAGES}
    return {"commit": commit_of(_ROOT), "python": platform.python_version()} | packages


def peak_memory(device: torch.device) -> int:
    """The peak memory of this process in bytes: of tensors on a GPU, otherwise of the machine's
    memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def commit_of(root: Path) -> str | None:
    """The commit of a git checkout, followed by + if files have changed since. None if `root` is
    no checkout of its own, as an installed package or an unpacked archive."""
    # Without this check, git would describe a repository that contains the installed package.
    if not (root / ".git").exists():
        return None
    try:
        commit = _git_output(root, "rev-parse HEAD").strip()
        changes = _git_output(root, "status --porcelain --untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    if changes:
        return f"{commit}+"
    return commit


def _git_output(root: Path, arguments: str) -> str:
    command = ["git", "-C", str(root)] + arguments.split()
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return result.stdout


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if names:
        return names[0]
    return platform.processor() or platform.machine()
