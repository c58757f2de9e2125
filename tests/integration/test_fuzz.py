"""Damaged and hostile files of every kind end in one line or in the right content."""

import subprocess
import sys

import pytest
from fuzz import COUNTS, FEW
from tool_cases import ROOT


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (["--few"], FEW),
        pytest.param([], COUNTS, marks=[pytest.mark.slow, pytest.mark.timeout(2400)]),
    ],
    ids=["few", "all"],
)
def test_hostile_files(options, counts):
    """In a process of its own, which forks one for each case."""
    command = [sys.executable, "tests/integration/fuzz.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind, count in counts.items():
        assert f"{kind}: {count} cases: " in done.stdout
