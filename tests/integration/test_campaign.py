"""The campaign of GPU measurements: time limits, resuming, refusals, wheels and goals, on a CPU."""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"device": "a GPU", "commit": "1234567890"}


@pytest.fixture(autouse=True)
def scripts_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def run(output: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "benchmarks/campaign.py", "--output", str(output), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def read(output: Path) -> dict:
    return json.loads((output / "campaign.json").read_text())


def fake_section(name: str, code: str, weight: float = 1):
    """A section that runs Python code, which may write tables."""
    return SimpleNamespace(
        name=name, weight=weight, command=lambda *_: [sys.executable, "-u", "-c", code]
    )


def options(output: Path) -> SimpleNamespace:
    return SimpleNamespace(sections=None, dry_run=True, output=output)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_section_that_exceeds_its_limit_is_killed_with_its_children(tmp_path):
    import campaign

    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid)\n"
        "time.sleep(60)\n"
    )
    started = time.monotonic()
    # Python needs a moment to print, more on a busy machine
    record = campaign.run_section(fake_section("slow", code), True, 5, tmp_path, dict(os.environ))
    assert time.monotonic() - started < 20
    assert record["status"] == "time limit"
    assert record["printed"].startswith("child ")
    child = int(record["printed"].split()[1])
    # The kernel kills it after kill() has returned.
    while is_running(child) and time.monotonic() - started < 30:
        time.sleep(0.01)
    assert not is_running(child)


def test_the_sections_together_stay_within_the_limit(tmp_path, monkeypatch):
    import campaign

    sections = [fake_section(f"slow{i}", "import time; time.sleep(60)") for i in range(3)]
    monkeypatch.setattr(campaign, "SECTIONS", sections)
    state = {"dry_run": True, "environment": ENVIRONMENT, "sections": {}}
    started = time.monotonic()
    environment = dict(os.environ)
    campaign.run_sections(state, options(tmp_path), started + 9, tmp_path, environment)
    assert time.monotonic() - started < 12
    assert [record["status"] for record in state["sections"].values()] == ["time limit"] * 3
    assert read(tmp_path)["sections"].keys() == {"slow0", "slow1", "slow2"}


def test_resuming_runs_what_is_missing_what_now_has_more_time_and_last_what_failed(
    tmp_path, monkeypatch
):
    import campaign

    names = ("done", "failed", "killed", "killed_late", "missing")
    monkeypatch.setattr(campaign, "SECTIONS", [fake_section(name, "pass") for name in names])
    head = {"seconds": 1, "printed": "", "tables": {}}
    sections = {
        "done": head | {"status": "done", "limit": 5},
        "failed": head | {"status": "failed, exit code 1", "limit": 5},
        "killed": head | {"status": "time limit", "limit": 5},
        "killed_late": head | {"status": "time limit", "limit": 5000},
    }
    state = {"dry_run": True, "environment": ENVIRONMENT, "sections": dict(sections)}
    deadline = time.monotonic() + 60
    campaign.run_sections(state, options(tmp_path), deadline, tmp_path, dict(os.environ))
    found = {name: record["status"] for name, record in state["sections"].items()}
    assert found["killed"] == found["missing"] == found["failed"] == "done"
    assert list(state["sections"]) == ["done", "failed", "killed", "killed_late", "missing"]
    assert state["sections"]["killed_late"] == sections["killed_late"]


def test_a_dry_run_of_one_section_is_resumed_by_the_others(tmp_path):
    """A reduced dry run; the whole one is marked slow."""
    done = run(tmp_path, "--dry-run", "--sections", "memory")
    assert done.returncode == 0, done.stderr
    first = read(tmp_path)["sections"]["memory"]
    done = run(tmp_path, "--dry-run", "--resume", "--sections", "memory", "pieces")
    assert done.returncode == 0, done.stderr
    state = read(tmp_path)
    assert state["sections"]["memory"] == first
    assert state["sections"]["pieces"]["tables"]
    text = (tmp_path / "campaign.md").read_text()
    assert "A dry run" in text
    assert "| tests | not run |" in text
    assert "Memory of one MoE layer" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["campaign.json", "campaign.md"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_dry_run_fills_every_section(tmp_path):
    done = run(tmp_path, "--dry-run", "--minutes", "9")
    assert done.returncode == 0, done.stdout + done.stderr
    state = read(tmp_path)
    assert {record["status"] for record in state["sections"].values()} == {"done"}
    tests = state["sections"].pop("tests")["tests"]
    assert tests["failures"] == tests["errors"] == 0
    assert tests["tests"] > 0
    assert list(state["sections"]) == [
        "layer",
        "tiles",
        "attention",
        "pieces",
        "memory",
        "routers",
        "model",
        "shares",
        "trunk",
        "graph",
    ]
    for record in state["sections"].values():
        for table in record["tables"].values():
            assert table["rows"]
            assert table["data"]
    assert {goal["verdict"] for goal in state["goals"]} == {"not measured"}


def refused(output: Path, *more: str) -> str:
    done = run(output, *more)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_minutes_must_be_above_zero(tmp_path, minutes):
    assert f"--minutes is {minutes}, it must be above 0" in refused(tmp_path, "--minutes", minutes)


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(tmp_path / "file", "--dry-run")


def test_resuming_nothing_begins(tmp_path):
    import campaign

    args = SimpleNamespace(resume=True, output=tmp_path, dry_run=True)
    assert campaign.open_state(args, ENVIRONMENT)["sections"] == {}


def test_what_failed_comes_last():
    import campaign

    chosen = [fake_section(name, "pass") for name in ("failed", "missing")]
    records = {"failed": {"status": "failed, exit code 1"}}
    waiting = campaign.waiting_sections(chosen, records)
    assert [section.name for section in waiting] == ["missing", "failed"]


@pytest.mark.parametrize("content", ["", "[]", '{"environment": {}}'])
def test_resuming_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "campaign.json").write_text(content)
    assert "campaign.json cannot be read" in refused(tmp_path, "--dry-run", "--resume")


@pytest.mark.parametrize("key", ["commit", "device"])
def test_resuming_another_commit_or_device_is_refused(tmp_path, key):
    import campaign

    args = SimpleNamespace(resume=True, output=tmp_path, dry_run=False)
    state = {"dry_run": False, "environment": ENVIRONMENT, "sections": {}}
    (tmp_path / "campaign.json").write_text(json.dumps(state))
    assert campaign.open_state(args, ENVIRONMENT) == state
    with pytest.raises(campaign.CampaignError, match=f"is of {key} {ENVIRONMENT[key]}, this is"):
        campaign.open_state(args, ENVIRONMENT | {key: "another"})
    args.dry_run = True
    with pytest.raises(campaign.CampaignError, match="dry_run False"):
        campaign.open_state(args, ENVIRONMENT)


def make_wheel(folder: Path, name: str) -> Path:
    file = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "VALUE = 3\n")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n")
    return file


def test_only_wheels_of_missing_packages_are_unpacked(tmp_path):
    import wheels

    make_wheel(tmp_path, "not_a_real_package")
    make_wheel(tmp_path, "yacs")
    target = tmp_path / "packages"
    assert wheels.unpack_missing(tmp_path, target) == ["not_a_real_package"]
    assert (target / "not_a_real_package.py").exists()
    assert not (target / "yacs.py").exists()


def test_a_damaged_wheel_is_named(tmp_path):
    import wheels

    (tmp_path / "not_a_real_package-1.0-py3-none-any.whl").write_text("no zip")
    with pytest.raises(wheels.WheelError, match=r"not_a_real_package-1.0.*cannot be unpacked"):
        wheels.unpack_missing(tmp_path, tmp_path / "packages")


def test_packages_to_carry_are_listed(tmp_path):
    done = run(tmp_path, "--wheels")
    assert done.returncode == 0
    assert {"yacs", "pytest", "hypothesis", "pytest-timeout"} <= set(done.stdout.split())
    assert not any(tmp_path.iterdir())


def layer_entry(tokens: int, model_dim: int, timing: str, ratio: float) -> dict:
    entry = {"shape": [tokens, model_dim, 8], "dtype": "bfloat16", "layer": True}
    entry |= {"pass": "training", "timing": timing, "ratio": [ratio] * 3}
    return entry | {"share_of_peak": [0.45] * 3}


def test_goals_are_reached_missed_or_not_measured():
    import campaign_report

    data = [
        layer_entry(144 * 128, 512, "many calls", 4.0),
        layer_entry(144 * 128, 512, "graph replay", 1.6),
        layer_entry(144 * 128, 768, "many calls", 2.0),
    ]
    network = {"mode": "training", "batch_size": 128, "dtype": "bfloat16"}
    network |= {"dense_ms": [96.0], "moe_ms": [100.0]}
    memory = {"tokens": 4096, "dtype": "bfloat16", "dropout": 0.1, "saved": 6}
    memory |= {"counted, Tutel": 10}
    tables = {"layer": data, "model": [network], "memory": [memory]}
    sections = {name: {"tables": {"": {"data": data}}} for name, data in tables.items()}
    state = {"dry_run": False, "sections": sections}
    judged = [row for goal in campaign_report.GOALS for row in campaign_report.judge(goal, state)]
    found = [(row["goal"].partition(",")[0], row["case"], row["verdict"]) for row in judged]
    assert found == [
        ("layer to dense speed", "E = 8, graph replay", "missed by 0.175"),
        ("layer to dense speed", "", "not measured"),
        ("network to dense speed", "batch 128", "reached"),
        ("network to dense speed", "", "not measured"),
        ("activations kept", "4,096 tokens", "missed by 0.100"),
        ("share of peak at d = 768 (SonicMoE: 0.41)", "18432x768x8, many calls", "reached"),
    ]
