"""The campaign of GPU measurements: time limits, resuming, refusals, wheels and goals, on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import campaign
import campaign_report
import wheels

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"device": "a GPU", "commit": "1234567890"}


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """`main(*options)`: status, output and errors of the campaign, in this process."""
    monkeypatch.setattr(campaign, "describe_device", lambda *_: dict(ENVIRONMENT))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = signal.getsignal(signal.SIGTERM)

    def run(*options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["campaign.py", "--output", str(tmp_path), *options])
        return campaign.main(), *capsys.readouterr()

    yield run
    signal.signal(signal.SIGTERM, before)


def read(output: Path) -> dict:
    return json.loads((output / "campaign.json").read_text())


def fake_section(name: str, code: str = "pass") -> SimpleNamespace:
    """A section that runs Python code."""
    words = [sys.executable, "-u", "-c", code]
    return SimpleNamespace(name=name, weight=1, command=lambda *_: words)


def options(output: Path) -> SimpleNamespace:
    return SimpleNamespace(sections=None, dry_run=True, output=output)


def record(status: str, limit: float) -> dict:
    return {"status": status, "limit": limit, "seconds": 1, "printed": "", "tables": {}}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_section_that_exceeds_its_limit_is_killed_with_its_children(tmp_path, monkeypatch):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid)\n"
        "time.sleep(600)\n"
    )

    class LimitOnceItHasPrinted(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is None:
                return super().wait()
            while not (tmp_path / "slow.log").read_text().endswith("\n"):
                time.sleep(0.01)
            raise subprocess.TimeoutExpired("slow", timeout)

    monkeypatch.setattr(subprocess, "Popen", LimitOnceItHasPrinted)
    found = campaign.run_section(fake_section("slow", code), True, 5, tmp_path, dict(os.environ))
    assert found["status"] == "time limit"
    assert found["printed"].startswith("child ")
    while is_running(int(found["printed"].split()[1])):  # killed after kill() has returned
        time.sleep(0.01)


def test_the_sections_together_stay_within_the_limit(tmp_path, monkeypatch):
    """Each gets its share of what is left."""
    now, limits = [1000.0], []

    def run_section(section, is_dry_run, limit, *_):
        limits.append(limit)
        now[0] += limit / len(limits)
        return record("time limit", limit)

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(campaign, "time", clock)
    monkeypatch.setattr(campaign, "run_section", run_section)
    monkeypatch.setattr(campaign, "SECTIONS", [fake_section(f"slow{i}") for i in range(3)])
    state = {"dry_run": True, "environment": ENVIRONMENT, "sections": {}}
    campaign.run_sections(state, options(tmp_path), 1090, tmp_path, {})
    assert limits == pytest.approx([30, 30, 45])
    assert read(tmp_path)["sections"].keys() == {"slow0", "slow1", "slow2"}


def test_resuming_runs_what_is_missing_what_now_has_more_time_and_last_what_failed(
    tmp_path, monkeypatch
):
    names = ("done", "failed", "killed", "killed_late", "missing")
    monkeypatch.setattr(campaign, "SECTIONS", [fake_section(name) for name in names])
    sections = {
        "done": record("done", 5),
        "failed": record("failed, exit code 1", 5),
        "killed": record("time limit", 5),
        "killed_late": record("time limit", 50_000),
    }
    state = {"dry_run": True, "environment": ENVIRONMENT, "sections": dict(sections)}
    deadline = time.monotonic() + 600
    campaign.run_sections(state, options(tmp_path), deadline, tmp_path, dict(os.environ))
    found = {name: record["status"] for name, record in state["sections"].items()}
    assert found["killed"] == found["missing"] == found["failed"] == "done"
    assert list(state["sections"]) == ["done", "failed", "killed", "killed_late", "missing"]
    assert state["sections"]["killed_late"] == sections["killed_late"]


def test_a_dry_run_of_one_section_is_resumed(main, tmp_path):
    """A reduced dry run; the whole one is marked slow."""
    assert main("--dry-run", "--sections", "memory")[0] == 0
    first = read(tmp_path)["sections"]
    assert first["memory"]["tables"]
    assert main("--dry-run", "--resume", "--sections", "memory")[0] == 0
    assert read(tmp_path)["sections"] == first
    text = (tmp_path / "campaign.md").read_text()
    assert "A dry run" in text
    assert "| tests | not run |" in text
    assert "Memory of one MoE layer" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["campaign.json", "campaign.md"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_dry_run_fills_every_section(tmp_path):
    command = [sys.executable, "benchmarks/campaign.py", "--output", str(tmp_path)]
    command += ["--dry-run", "--minutes", "9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    state = read(tmp_path)
    assert {record["status"] for record in state["sections"].values()} == {"done"}
    tests = state["sections"].pop("tests")["tests"]
    assert tests["failures"] == tests["errors"] == 0
    assert tests["tests"] > 0
    names = "layer fine tiles attention pieces memory routers model shares trunk graph"
    assert " ".join(state["sections"]) == names
    for section in state["sections"].values():
        for table in section["tables"].values():
            assert table["rows"]
            assert table["data"]
    assert {goal["verdict"] for goal in state["goals"]} == {"not measured"}


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        *(
            (None, ["--minutes", value], f"--minutes is {value}, it must be above 0")
            for value in ("0", "-1", "nan")
        ),
        (None, ["--dry-run", "--output", "/dev/null/x"], "cannot be written"),
        *(
            (text, ["--resume"], "campaign.json cannot be read")
            for text in ("", "[]", '{"environment": {}}')
        ),
    ],
)
def test_bad_input_is_one_line(main, tmp_path, content, options, message):
    if content is not None:
        (tmp_path / "campaign.json").write_text(content)
    status, _, err = main(*options)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_resuming_nothing_begins(tmp_path):
    args = SimpleNamespace(resume=True, output=tmp_path, dry_run=True)
    assert campaign.open_state(args, ENVIRONMENT)["sections"] == {}


def test_what_failed_comes_last():
    chosen = [fake_section(name) for name in ("failed", "missing")]
    waiting = campaign.waiting_sections(chosen, {"failed": {"status": "failed, exit code 1"}})
    assert [section.name for section in waiting] == ["missing", "failed"]


def test_resuming_another_commit_or_device_is_refused(tmp_path):
    args = SimpleNamespace(resume=True, output=tmp_path, dry_run=False)
    state = {"dry_run": False, "environment": ENVIRONMENT, "sections": {}}
    (tmp_path / "campaign.json").write_text(json.dumps(state))
    assert campaign.open_state(args, ENVIRONMENT) == state
    for key in ("commit", "device"):
        message = f"is of {key} {ENVIRONMENT[key]}, this is another"
        with pytest.raises(campaign.CampaignError, match=message):
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
    make_wheel(tmp_path, "not_a_real_package")
    make_wheel(tmp_path, "yacs")
    target = tmp_path / "packages"
    assert wheels.unpack_missing(tmp_path, target) == ["not_a_real_package"]
    assert (target / "not_a_real_package.py").exists()
    assert not (target / "yacs.py").exists()


def test_a_damaged_wheel_is_named(tmp_path):
    (tmp_path / "not_a_real_package-1.0-py3-none-any.whl").write_text("no zip")
    with pytest.raises(wheels.WheelError, match=r"not_a_real_package-1.0.*cannot be unpacked"):
        wheels.unpack_missing(tmp_path, tmp_path / "packages")


def test_packages_to_carry_are_listed(main, tmp_path):
    status, out, _ = main("--wheels")
    assert status == 0
    assert {"yacs", "pytest", "hypothesis", "pytest-timeout"} <= set(out.split())
    assert not any(tmp_path.iterdir())


def layer_entry(tokens: int, model_dim: int, timing: str, ratio: float) -> dict:
    entry = {"shape": [tokens, model_dim, 8], "dtype": "bfloat16", "layer": True}
    entry |= {"pass": "training", "timing": timing, "ratio": [ratio] * 3}
    return entry | {"share_of_peak": [0.45] * 3}


def test_goals_are_reached_missed_or_not_measured():
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
