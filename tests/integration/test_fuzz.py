"""Damaged and hostile files of every kind end in one line or in the right content."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def fuzz(*options: str, seconds: float) -> str:
    command = [sys.executable, "tests/integration/fuzz.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["checkpoints", "weights", "shards", "configurations"])
def test_some_hostile_files(kind):
    assert f"{kind}: 25 cases: " in fuzz("--only", kind, "--count", "25", seconds=280)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_hostile_files():
    printed = fuzz(seconds=2300)
    for counted in ("checkpoints: 300", "weights: 150", "shards: 100", "configurations: 80"):
        assert f"{counted} cases: " in printed
