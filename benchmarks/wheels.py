"""Packages that a machine without a network lacks: collected as wheels elsewhere, unpacked there.

Needs the standard library alone, since it runs before any of the packages is there.
"""

import importlib
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# What the benchmarks, tests/conftest.py and the GPU tests import beyond torch, triton, timm,
# tensorboard and what those bring; pytest-timeout because pyproject.toml sets its `timeout`.
CARRIED = (
    "yacs",
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "rich",
    "argcomplete",
    "PyYAML",
    "safetensors",
)
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


class WheelError(Exception):
    """One line for the user."""


def collect(folder: Path) -> None:
    """Download the wheels of CARRIED and of their dependencies. Needs a network.

    Raises:
        WheelError: pip could not get all of them.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    command += ["--constraint", str(CONSTRAINTS), "--dest", str(folder)]
    command += CARRIED
    if subprocess.run(command).returncode != 0:
        raise WheelError(f"--wheels {folder}: pip download failed, its message is above")


def unpack_missing(folder: Path, target: Path) -> list[str]:
    """Unpack into `target` each wheel of `folder` whose distribution is not installed.

    A wheel is a zip archive whose top is what site-packages gets, so this needs no pip.

    Returns:
        The names of the distributions that were unpacked.

    Raises:
        WheelError: a wheel cannot be read, or `target` cannot be written.
    """
    unpacked = []
    for wheel in sorted(folder.glob("*.whl")):
        name = wheel.name.partition("-")[0]
        if _is_installed(name):
            continue
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
        except (OSError, zipfile.BadZipFile) as error:
            raise WheelError(f"{wheel}: cannot be unpacked into {target} ({error})") from error
        unpacked.append(name)
    if unpacked:
        importlib.invalidate_caches()
    return unpacked


def missing() -> list[str]:
    """The names in CARRIED that are not installed."""
    return [name for name in CARRIED if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
