"""Freed memory is used again, unless the user has set the allocator."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from swinv2_moe import threads
from swinv2_moe.ranks import world as world_module

# Writes blocks above 32 MiB, for each of which glibc makes a mapping by default, and smaller ones,
# in several rounds. Prints the page faults after the first round, divided by the pages written.
# Without huge pages, which some systems use for every program: they save page faults.
PROGRAM = """
import ctypes, resource, sys
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
from swinv2_moe.threads import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
MIB = 1 << 20
ROUNDS = 4
sizes = [40 * MIB, 24 * MIB, 3 * MIB]
def one_round():
    blocks = [bytearray(size) for size in sizes]
    for block in blocks:
        for start in range(0, len(block), 4096):
            block[start] = 1
one_round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(ROUNDS):
    one_round()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults / (ROUNDS * sum(sizes) / resource.getpagesize()))
"""

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt"
)


def fault_share(word: str, **variables: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name[:7] != "MALLOC_"}
    environment.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, word],
        capture_output=True,
        text=True,
        env=environment | variables,
        check=True,
    )
    return float(done.stdout)


@needs_glibc
def test_freed_memory_is_used_again():
    assert fault_share("keep") < 0.05


@needs_glibc
def test_without_it_pages_are_cleared_again():
    assert fault_share("default") > 0.4


@needs_glibc
@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
)
def test_the_users_settings_stay(variables):
    assert fault_share("keep", **variables) > 0.4


def test_another_c_library(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    threads.keep_freed_memory()


def test_a_run_on_a_cpu_calls_it(monkeypatch):
    calls = []
    monkeypatch.setattr(world_module, "keep_freed_memory", lambda: calls.append(1))
    with world_module.open_world("cpu") as world:
        assert world.device == torch.device("cpu")
    assert calls == [1]
