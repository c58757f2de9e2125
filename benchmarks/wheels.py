"""Packages and sources for a machine without a network: they are collected elsewhere, and wheels
are unpacked on that machine.

This module needs only the standard library, since it runs before the packages are available.
"""

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = ROOT / "pyproject.toml"
# Packages that the benchmarks, tests/conftest.py and the GPU tests import, except torch, triton,
# torchvision, tensorboard, huggingface-hub and what these depend on. pytest-timeout is needed
# because pyproject.toml sets its option `timeout`.
ALONE = ("timm",)  # without its dependencies: torch is one of them
CARRIED = (
    *ALONE,
    "yacs",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "rich",
    "argcomplete",
    "PyYAML",
    "safetensors",
    "psutil",
)
OPTIONAL = ("apache-tvm-ffi",)  # loads QuACK's kernels; without its dependency, which torch brings
PEERS = ROOT / "output" / "peers"
SOURCES = {  # of peers without wheels
    "Tutel": "https://github.com/microsoft/Tutel",
    "scattermoe": "https://github.com/shawntan/scattermoe",
}
TO_COPY = ("output/wheels", "output/quack", "output/peers", "output/campaign")
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


class WheelError(Exception):
    """An error with a message of one line for the user."""


def collect(folder: Path) -> None:
    """Download the wheels of CARRIED with their dependencies, and the sources of peers. Needs a
    network. A source that cannot be had is named; the peer's row is then missing.

    Raises:
        WheelError: pip could not download all wheels.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    command += ["--constraint", str(CONSTRAINTS), "--dest", str(folder)]
    with_needs = [name for name in CARRIED if name not in ALONE]
    for names in (with_needs, ["--no-deps", *ALONE, *OPTIONAL]):
        if subprocess.run([*command, *names]).returncode != 0:
            raise WheelError(f"--wheels {folder}: pip download failed, its message is above")
    for name, address in SOURCES.items():
        if (PEERS / name).exists():
            continue
        clone = ["git", "clone", "--quiet", "--depth", "1", address, str(PEERS / name)]
        if subprocess.run(clone).returncode != 0:
            print(f"{name}: no sources from {address}; its row will be missing", flush=True)
        shutil.rmtree(PEERS / name / ".git", ignore_errors=True)


def sizes_to_copy() -> dict[str, int]:
    """Bytes of the checkout, without what git ignores, and of the folders to carry with it."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, capture_output=True, check=False).stdout.decode().split("\0")
    files = {"the checkout": [ROOT / name for name in listed if name]}
    files |= {name: sorted((ROOT / name).rglob("*")) for name in TO_COPY}
    return {
        name: sum(file.lstat().st_size for file in found if file.is_file())
        for name, found in files.items()
    }


def unpack_missing(folder: Path, target: Path) -> list[str]:
    """Unpack into `target` each wheel of `folder` whose distribution is not installed, or older
    than pyproject.toml allows.

    A wheel is a zip archive of files for site-packages, so this needs no pip.

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
    """The names in CARRIED that are not installed, or too old."""
    return [name for name in CARRIED if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    """Whether a distribution is here, of at least the version that pyproject.toml asks for."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return _numbers(found) >= minimum_versions().get(_normal(name), (0,))


def minimum_versions() -> dict[str, tuple[int, ...]]:
    """The lowest version of each dependency in pyproject.toml, by its normal name."""
    dependencies = PROJECT.read_text().partition("[project.optional-dependencies]")[0]
    bounds = re.findall(r'"([\w-]+)[^"]*?>=([\d.]+)', dependencies)
    return {_normal(name): _numbers(version) for name, version in bounds}


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: of "1.0.31.dev0" 1, 0 and 31."""
    leading = re.match(r"[\d.]*\d", version)
    return tuple(map(int, leading[0].split("."))) if leading else (0,)


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")
