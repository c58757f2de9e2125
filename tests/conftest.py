"""Fixtures for every test."""

import os
import signal

# As `make test` sets it. Commands would otherwise say how many threads a busy machine leaves them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# isort: split

import pytest
import torch
from gloo_processes import run_on_processes
from hypothesis import settings

# A busy machine takes any time for one example.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

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
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in _LAUNCHER | _TERMINAL or name.startswith("TORCHELASTIC_"):
                patch.delenv(name)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Seed torch, so that fixtures make the same random tensors in any order and in every run."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call():
    """Seed torch again, with another number: the tests' tensors differ from the fixtures' ones."""
    torch.manual_seed(1)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors of tests are tiny: a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_processes(tmp_path_factory):
    """`run_processes(function, n, *args, seconds=240)`: `function(rank, *args)` in each of n
    processes of a gloo world.

    The function must be importable (at a module's top level). A failure shows the child's
    traceback.
    """

    def run(function, num_processes: int, *args, seconds: float = 240) -> None:
        store = tmp_path_factory.mktemp("world") / "store"
        run_on_processes(function, num_processes, store, *args, seconds=seconds)

    return run
