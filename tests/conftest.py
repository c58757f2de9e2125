"""Fixtures for every test."""

import os
import random
import signal

# As `make test` sets it: the tensors of tests are tiny, a second thread only waits for the first.
# Commands would otherwise say how many threads a busy machine leaves them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test depends on a network, or on weights that this machine has in its caches.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_CACHE"] = os.environ["TORCH_HOME"] = os.path.join(os.devnull, "no cache")

# isort: split

import numpy as np
import pytest
import torch
from gloo_processes import Pool
from hypothesis import settings

from moe_core.ops import backend
from moe_core.ops.native import library

# The same examples in every run. A busy machine takes any time for one of them.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
# `make test-random` gives this one's seed.
settings.register_profile("random", database=None, deadline=None)
settings.load_profile("fixed")

# Of a launcher that started pytest (torchrun, srun), and of a terminal or CI system that wants
# colours or other widths.
_LAUNCHER = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}
_TERMINAL = {
    "FORCE_COLOR",
    "PYTHON_COLORS",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "COLUMNS",
    "LINES",
}


@pytest.fixture(autouse=True, scope="session")
def plain_environment():
    """Runs see one process, no terminal and Ctrl-C, wherever the tests run; a shell's background
    jobs ignore that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    choose_library()
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in _LAUNCHER | _TERMINAL or name.startswith("TORCHELASTIC_"):
                patch.delenv(name)
        yield


def pytest_configure(config):
    """pytest-randomly gives the order of tests alone; the seeds are those below."""
    config.option.randomly_reset_seed = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Fixtures make the same random numbers in any order and in every run."""
    seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call():
    """The numbers of tests differ from those of their fixtures."""
    seed(1)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - what it seeds is numpy's global state
    torch.manual_seed(number)


@pytest.fixture(autouse=True)
def nothing_of_ranks_left():
    """No test leaves a process group, or the variables of a launcher, to the tests after it."""
    yield
    left = sorted(_LAUNCHER & os.environ.keys())
    for name in left:
        del os.environ[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        left.append("a process group")
    assert left == []


def choose_library() -> None:
    """Choose the C++ library on the machine as it is. Otherwise a test that plays another CPU might
    be the first to choose, and its choice would stay for all tests after it."""
    library.chosen()
    library.chosen("auto")  # as operations call it, another place in the cache


@pytest.fixture
def choose_again(monkeypatch):
    """`choose_again()`: the next operation chooses its form and its C++ library anew."""

    def forget() -> None:
        library.chosen.cache_clear()
        backend.language.cache_clear()

    yield forget
    monkeypatch.undo()
    forget()
    choose_library()


@pytest.fixture(scope="module")
def run_processes(tmp_path_factory):
    """`run_processes(function, n, *args)`: `function(rank, *args)` in each of n processes of a
    gloo world; `Pool.run` has the options.

    The processes serve all tests of a file. The function must be importable (at a module's top
    level).
    """
    pool = Pool(tmp_path_factory.mktemp("worlds"))
    yield pool.run
    pool.close()
