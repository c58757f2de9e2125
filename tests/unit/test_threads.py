"""The number of threads on idle and busy machines, in containers, and where the user says it."""

import os
import subprocess
import sys

import pytest

from swinv2_moe import threads

CORES = 8


@pytest.fixture
def chosen(monkeypatch, tmp_path, capsys):
    """`chosen(idle=..., quota=..., **environment)`: OMP_NUM_THREADS afterwards, and what was
    printed, on a machine of 8 cores."""

    def choose(idle=None, quota=None, **environment):
        for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
            monkeypatch.setenv(name, "")  # or a missing name would keep the choice after the test
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))
        file = tmp_path / "cpu.max"
        file.unlink(missing_ok=True)
        if quota is not None:
            file.write_text(quota)
        monkeypatch.setattr(threads, "_QUOTA", file)
        monkeypatch.setattr(threads, "idle_cores", lambda seconds: idle)
        threads.choose_threads()
        number = os.environ.get("OMP_NUM_THREADS")
        os.environ.pop("OMP_NUM_THREADS", None)
        return number, capsys.readouterr().err

    return choose


def test_an_idle_machine_keeps_torchs_default(chosen):
    for idle in (8.0, 7.6, None):
        assert chosen(idle) == (None, "")


@pytest.mark.parametrize(("idle", "number"), [(5.2, "5"), (0.9, "1"), (0.1, "1"), (0.0, "1")])
def test_a_busy_machine_gives_its_idle_cores_and_at_least_one(chosen, idle, number):
    line = f"{number} CPU threads (8 cores, {idle:.1f} of them idle; OMP_NUM_THREADS overrides)\n"
    assert chosen(idle) == (number, line)


def test_the_quota_of_a_container(chosen):
    assert chosen(8.0, "200000 100000")[0] == "2"
    assert chosen(1.0, "200000 100000")[0] == "1"
    assert chosen(8.0, "50000 100000")[0] == "1"
    for no_quota in ("max 100000", "1600000 100000", "", "nonsense"):
        assert chosen(8.0, no_quota) == (None, "")


def test_the_environment_overrides(chosen):
    assert chosen(1.0, OMP_NUM_THREADS="7") == ("7", "")


def test_waiting_is_passive_beside_other_programs_unless_the_user_says_otherwise(chosen):
    chosen(8.0)
    assert "OMP_WAIT_POLICY" not in os.environ  # active waiting is faster on idle cores
    chosen(5.0)
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    chosen(5.0, OMP_WAIT_POLICY="ACTIVE")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, None),  # a count would override the policy
    ],
)
def test_waiting_is_short_unless_the_user_says_otherwise(monkeypatch, variables, count):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # or a missing name would keep the choice after the test
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    threads.limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == count


def test_idle_cores_of_this_machine():
    idle = threads.idle_cores(0.05)
    assert idle is None or 0 <= idle <= len(os.sched_getaffinity(0))
    assert 1 <= threads.available_cores() <= len(os.sched_getaffinity(0))


def test_a_command_chooses_before_torch_is_there():
    code = (
        "import sys, os\n"
        "from swinv2_moe import threads\n"
        "threads.idle_cores = lambda seconds: 1.0\n"
        "os.sched_getaffinity = lambda pid: set(range(8))\n"
        "from swinv2_moe.commands import run\n"
        "from swinv2_moe import input_paths\n"
        "input_paths.check_run = lambda run: None\n"  # which ends before torch is imported
        "sys.argv = ['tools/evaluate.py', '--resume', 'nowhere']\n"
        "try:\n"
        "    run('evaluate')\n"
        "finally:\n"
        "    print(sys.modules['torch'].get_num_threads(), os.environ.get('GOMP_SPINCOUNT'))\n"
    )
    names = [name for name in os.environ if name[:4] != "OMP_" and name != "GOMP_SPINCOUNT"]
    environment = {name: os.environ[name] for name in names}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "1 None\n"
    lines = done.stderr.splitlines()
    assert lines[0].startswith("1 CPU threads (")
    assert lines[1].startswith("error: ")
    assert len(lines) == 2
