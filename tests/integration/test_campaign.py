"""The campaign of GPU measurements: what begins, what a killed call loses, what is continued,
wheels and goals, on a CPU."""

import json
import os
import signal
import subprocess
import sys
import tarfile
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


def fake_section(name: str, code: str = "pass", seconds: float = 1) -> SimpleNamespace:
    """A section that runs Python code; its words have the file of the tables."""

    def command(is_dry_run, tables) -> list[str]:
        return [sys.executable, "-u", "-c", code, str(tables)]

    fields = {"name": name, "title": name, "seconds": seconds, "script": "", "tiny": "", "tool": ""}
    return SimpleNamespace(command=command, **fields)


def options(output: Path) -> SimpleNamespace:
    return SimpleNamespace(sections=["all"], dry_run=False, output=output)


def record(status: str, limit: float = 5, tables: dict | None = None) -> dict:
    fields = {"status": status, "limit": limit, "seconds": 1, "printed": "", "runs": 1}
    return fields | {"tables": tables or {}}


def new_state(**sections) -> dict:
    return {"dry_run": False, "environment": ENVIRONMENT, "sections": sections}


def table(title: str) -> dict:
    fields = {"title": title, "command": "", "columns": [""], "rows": [["1"]], "notes": []}
    return {title: fields | {"data": []}}


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
            while not (tmp_path / "running.log").read_text().endswith("\n"):
                time.sleep(0.01)
            raise subprocess.TimeoutExpired("slow", timeout)

    monkeypatch.setattr(subprocess, "Popen", LimitOnceItHasPrinted)
    found = record("running")
    campaign.run_section(fake_section("slow", code), found, tmp_path, True, dict(os.environ))
    assert found["status"] == "time limit"
    assert found["printed"].startswith("child ")
    while is_running(int(found["printed"].split()[1])):  # killed after kill() has returned
        time.sleep(0.01)


def test_a_section_begins_only_if_it_can_end_in_the_time_left(tmp_path, monkeypatch, capsys):
    """What is too long is postponed by name, and what comes after it may fit."""
    now, limits = [1000.0], {}

    def run_section(section, found, *_):
        limits[section.name] = found["limit"]
        now[0] += section.seconds
        found["status"] = "done"

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(campaign, "time", clock)
    monkeypatch.setattr(campaign, "run_section", run_section)
    needs = {"first": 40, "long": 60, "short": 50, "too_late": 1}
    sections = [fake_section(name, seconds=seconds) for name, seconds in needs.items()]
    monkeypatch.setattr(campaign, "SECTIONS", sections)
    state = new_state()
    campaign.run_sections(state, options(tmp_path), 1090, {})
    assert limits == {"first": 90, "short": 50}
    assert state["sections"].keys() == limits.keys()
    assert "long: postponed, needs 60 of 50 s" in capsys.readouterr().out
    assert read(tmp_path)["sections"].keys() == limits.keys()


def test_what_failed_comes_last_and_what_was_killed_needs_more_time(tmp_path, monkeypatch):
    names = ("done", "failed", "killed", "killed_late", "interrupted", "missing", "skipped")
    monkeypatch.setattr(campaign, "SECTIONS", [fake_section(name) for name in names])
    state = new_state(
        done=record("done"),
        failed=record("failed, exit code 1"),
        killed=record("time limit"),
        killed_late=record("time limit", 50_000),
        interrupted=record("interrupted", 50_000),
        skipped=record("skipped: no ncu"),
    )
    order = []
    monkeypatch.setattr(campaign, "run_section", lambda section, *_: order.append(section.name))
    monkeypatch.setattr(campaign, "SHORT", -1)  # this call has spent some time already
    campaign.run_sections(state, options(tmp_path), time.monotonic() + 600, {})
    assert order == ["interrupted", "missing", "killed", "failed"]
    assert state["sections"]["killed_late"] == record("time limit", 50_000)


def test_what_was_killed_after_a_whole_call_has_its_turn_again(tmp_path, monkeypatch):
    """It never ends in such calls, nor does the other, and a third one always fails."""
    now, order = [0.0], []

    def run_section(section, found, *_):
        order.append(section.name)
        now[0] += 20 if section.name == "failed" else found["limit"]
        found["status"] = "failed, exit code 1" if section.name == "failed" else "time limit"

    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(campaign, "run_section", run_section)
    names = ("killed", "failed", "also_killed")
    monkeypatch.setattr(campaign, "SECTIONS", [fake_section(name, seconds=60) for name in names])
    state = new_state(killed=record("time limit", 530), also_killed=record("time limit", 530))
    state["sections"]["failed"] = record("failed, exit code 1")
    for _ in range(6):
        campaign.run_sections(state, options(tmp_path), now[0] + 537, {})
    assert order == 2 * ["killed", "also_killed", "failed"]


def test_a_section_whose_program_is_missing_is_skipped_by_name(tmp_path, monkeypatch):
    section = fake_section("ncu")
    section.tool = "no-such-profiler"
    monkeypatch.setattr(campaign, "SECTIONS", [section])
    state = new_state()
    campaign.run_sections(state, options(tmp_path), time.monotonic() + 600, {})
    assert state["sections"]["ncu"]["status"] == "skipped: no-such-profiler is not installed"
    assert campaign.is_finished(state["sections"]["ncu"])


def test_a_call_that_is_killed_inside_a_section_loses_no_row(tmp_path, monkeypatch):
    """The process of the campaign is killed; the next call has its tables, and keeps them until the
    section has new ones."""
    rows = json.dumps({"tables": table("kept")})
    code = (
        f"import os, sys, time; open(sys.argv[1], 'w').write({rows!r})\n"
        "print('row', os.getpid()); time.sleep(600)"
    )
    driver = (
        "import sys; sys.path[:0] = ['benchmarks', 'tests/integration']\n"
        "import campaign, test_campaign as t, os, time, pathlib\n"
        f"campaign.SECTIONS = [t.fake_section('slow', {code!r})]\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "args = t.options(folder)\n"
        "campaign.run_sections(t.new_state(), args, time.monotonic() + 600, dict(os.environ))\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", driver], cwd=ROOT, start_new_session=True)
    log = tmp_path / "running.log"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    printed = log.read_text()
    while is_running(int(printed.split()[1])):  # the section ends with the campaign
        time.sleep(0.01)
    assert read(tmp_path)["sections"]["slow"]["status"] == "running"
    monkeypatch.setattr(campaign, "SECTIONS", [fake_section("slow", "raise SystemExit(3)")])
    state = campaign.open_state(tmp_path, False, ENVIRONMENT)
    found = state["sections"]["slow"]
    assert (found["status"], found["printed"]) == ("interrupted", printed)
    assert found["tables"] == table("kept")
    campaign.run_sections(state, options(tmp_path), time.monotonic() + 600, dict(os.environ))
    found = read(tmp_path)["sections"]["slow"]
    assert (found["status"], found["tables"]) == ("failed, exit code 3", table("kept"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["campaign.json", "campaign.md"]


def test_a_dry_run_of_one_section_is_resumed(main, tmp_path):
    """A reduced dry run; the whole one is marked slow."""
    assert main("--dry-run", "--sections", "memory")[0] == 0
    first = read(tmp_path)["sections"]
    assert first["memory"]["tables"]
    assert main("--dry-run", "--sections", "memory")[0] == 0
    assert read(tmp_path)["sections"] == first
    text = (tmp_path / "campaign.md").read_text()
    assert "A dry run" in text
    assert "| layer | not run |" in text
    assert "Memory of one MoE layer" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["campaign.json", "campaign.md"]


def test_the_kit_has_its_seven_parts_in_order_and_ends_in_time():
    parts = {section.name: section.seconds for section in campaign.KIT}
    assert parts == {
        "quack": 40, "products": 100, "ncu": 50, "network-kernels": 75, "network": 100,
        "narrow": 45, "peers": 60,
    }  # fmt: skip
    assert sum(parts.values()) <= 60 * campaign.MINUTES - 30 <= 520 - 30
    assert campaign.chosen_sections(SimpleNamespace(sections=None)) == list(campaign.KIT)
    names = [section.name for section in campaign.SECTIONS]
    assert len(set(names)) == len(names)
    chosen = campaign.chosen_sections(SimpleNamespace(sections=["tests", "quack"]))
    assert [section.name for section in chosen] == ["quack", "tests"]


def test_each_part_of_the_kit_leaves_the_later_ones_their_time(tmp_path, monkeypatch):
    """Also if every one of them takes all that it is given."""
    now, limits = [0.0], {}

    def run_section(section, found, *_):
        limits[section.name] = found["limit"]
        now[0] += found["limit"]
        found["status"] = "time limit"

    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(campaign, "run_section", run_section)
    monkeypatch.setattr(campaign, "obstacle", lambda *_: "")
    args = SimpleNamespace(sections=None, dry_run=False, output=tmp_path)
    campaign.run_sections(new_state(), args, 511, {})
    assert list(limits) == [section.name for section in campaign.KIT]
    assert all(limits[section.name] >= section.seconds for section in campaign.KIT)
    assert now[0] <= 511


def test_what_is_to_be_copied_is_counted_and_limited(tmp_path, monkeypatch, capsys):
    (tmp_path / "output/quack").mkdir(parents=True)
    (tmp_path / "output/quack/up.so").write_bytes(bytes(3 << 20))
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("/output/\n")
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    campaign.print_sizes()
    printed = capsys.readouterr().out
    assert printed.startswith("to copy: 4.0 of 64 MiB (the checkout 1.0, output/wheels 0.0, ")
    monkeypatch.setattr(campaign, "MOST_TO_COPY", 3)
    with pytest.raises(campaign.CampaignError, match="at most 3 can be"):
        campaign.print_sizes()


def test_the_table_is_printed_last(tmp_path, monkeypatch, capsys):
    state = new_state(quack=record("done", tables=table("Products")))
    lines = list(campaign_report.last_table(state, list(campaign.KIT)))
    assert lines[0] == f"quack: {campaign.KIT[0].title}: done, 1 of 40 s"
    assert lines[1:3] == ["  ", "  1"]
    assert lines[3].startswith("products: Products of seven shapes: not begun, 0 of 100 s")
    monkeypatch.setattr(campaign_report, "MOST_ROWS", 0)
    lines = list(campaign_report.last_table(state, list(campaign.KIT)))
    assert lines[2] == "  1 more rows in campaign.md"


def test_tutel_is_built_beside_the_sections_and_ends_with_them(tmp_path, monkeypatch):
    folder = tmp_path / "Tutel"
    folder.mkdir()
    code = "import os, sys, time\nprint(os.getpid(), *sys.argv[1:], flush=True)\ntime.sleep(600)\n"
    (folder / "setup.py").write_text(code)
    monkeypatch.setattr(campaign, "PEERS", tmp_path)
    log = folder / "build.log"
    with campaign.tutel_being_built(dict(os.environ)):
        while not log.read_text().endswith("\n"):
            time.sleep(0.01)
    pid, *words = log.read_text().split()
    assert words == ["build_ext", "--inplace"]
    while is_running(int(pid)):
        time.sleep(0.01)
    log.unlink()
    (folder / "tutel_custom_kernel.so").touch()
    with campaign.tutel_being_built({}):
        assert not log.exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_dry_run_fills_every_section(tmp_path):
    command = [sys.executable, "benchmarks/campaign.py", "--output", str(tmp_path)]
    command += ["--dry-run", "--minutes", "18"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    state = read(tmp_path)
    assert {record["status"] for record in state["sections"].values()} == {"done"}
    assert list(state["sections"]) == [section.name for section in campaign.KIT]
    for name, found in state["sections"].items():
        for kept in found["tables"].values():
            assert kept["rows"]
            assert kept["data"]
        assert found["tables"] or (name == "ncu" and "ours, hidden gradient" in found["printed"])
    assert "MiB (the checkout" in done.stdout
    assert "quack: QuACK's kernels and ours against fp64: done" in done.stdout


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        *(
            (None, ["--minutes", value], f"--minutes is {value}, it must be above 0")
            for value in ("0", "-1", "nan")
        ),
        (None, ["--dry-run", "--output", "/dev/null/x"], "cannot be written"),
        *((text, [], "campaign.json cannot be read") for text in ("", "[]", '{"environment": {}}')),
    ],
)
def test_bad_input_is_one_line(main, tmp_path, content, options, message):
    if content is not None:
        (tmp_path / "campaign.json").write_text(content)
    status, _, err = main(*options)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_results_are_continued_on_the_same_device_and_commit_alone(tmp_path, monkeypatch, capsys):
    """Others are set aside; carried ones stay where they are."""
    carried, output = tmp_path / "carried", tmp_path / "out"
    monkeypatch.setattr(campaign, "CARRIED_RESULTS", carried)
    for folder in (carried, output):
        folder.mkdir()
    assert campaign.open_state(output, False, ENVIRONMENT)["sections"] == {}
    state = new_state(layer=record("done"))
    (carried / "campaign.json").write_text(json.dumps(state))
    assert campaign.open_state(output, False, ENVIRONMENT) == state
    for key in ("commit", "device"):
        other = ENVIRONMENT | {key: "another"}
        assert campaign.open_state(output, False, other)["sections"] == {}
        assert (
            f"is of {key} {ENVIRONMENT[key]}, this is another: not used" in capsys.readouterr().out
        )
    (carried / "campaign.json").rename(output / "campaign.json")
    assert campaign.open_state(output, True, ENVIRONMENT)["sections"] == {}
    assert "with dry_run False" in capsys.readouterr().out
    assert json.loads((output / "campaign-earlier.json").read_text()) == state


def test_kernels_are_compiled_for_each_architecture_into_one_file(main, tmp_path, monkeypatch):
    compiled = []

    def run(command, cwd, env):
        compiled.append(command[command.index("--architecture") + 1])
        file = Path(env["TRITON_CACHE_DIR"], compiled[-1], "a.cubin")
        file.parent.mkdir(parents=True)
        file.write_bytes(b"code")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(campaign.subprocess, "run", run)
    status, out, err = main("--precompile")
    file = tmp_path / "kernels.tar.gz"
    assert (status, out, err) == (0, f"{file}: 2 kernels\n", "")
    assert compiled == ["80", "90"]
    with tarfile.open(file) as archive:
        assert {"versions.json", "triton/80/a.cubin", "triton/90/a.cubin"} <= set(
            archive.getnames()
        )
    assert list(tmp_path.iterdir()) == [file]


def test_carried_kernels_are_unpacked_from_both_places(tmp_path, monkeypatch):
    places = []
    monkeypatch.setattr(campaign, "unpack", lambda folder, versions: places.append(folder))
    campaign.use_carried_kernels(tmp_path, {})
    assert places == [tmp_path, campaign.CARRIED_RESULTS]


@pytest.mark.parametrize("code", [0, 1])
def test_kernels_that_do_not_compile_are_one_line(code, main, monkeypatch, tmp_path):
    done = SimpleNamespace(returncode=code)  # without a kernel
    monkeypatch.setattr(campaign.subprocess, "run", lambda *_, **__: done)
    status, _, err = main("--precompile")
    assert (status, err) == (2, "campaign.py: kernels do not compile for sm_80\n")
    assert not any(tmp_path.iterdir())


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


def test_a_package_that_is_too_old_is_unpacked_too(tmp_path, monkeypatch):
    lowest = wheels.minimum_versions()
    assert lowest["timm"] >= (1, 0, 31)
    assert "pytest-xdist" not in lowest  # whichever is there will do
    make_wheel(tmp_path, "timm")
    for version, unpacked in (("1.0.29", ["timm"]), ("1.0.31", []), ("1.1.0.dev0", [])):
        monkeypatch.setattr(wheels.importlib.metadata, "version", lambda name, v=version: v)
        assert wheels.unpack_missing(tmp_path, tmp_path / version) == unpacked
        assert ("timm" in wheels.missing()) == bool(unpacked)


def test_a_damaged_wheel_is_named(tmp_path):
    (tmp_path / "not_a_real_package-1.0-py3-none-any.whl").write_text("no zip")
    with pytest.raises(wheels.WheelError, match=r"not_a_real_package-1.0.*cannot be unpacked"):
        wheels.unpack_missing(tmp_path, tmp_path / "packages")


def test_packages_to_carry_are_listed(main, tmp_path):
    status, out, _ = main("--wheels")
    assert status == 0
    assert {"yacs", "pytest", "hypothesis", "pytest-timeout"} <= set(out.split())
    assert not any(tmp_path.iterdir())


def test_a_report_names_a_kernel_that_the_engine_disabled():
    found = record("done", tables=table("Layer"))
    found["printed"] = "a row\nmoe_core kernels: ... (H100). Please report this line; more\n"
    lines = list(campaign_report.section_lines(found))
    assert "- moe_core kernels: ... (H100). Please report this line; more" in lines
    assert not any("a row" in line for line in lines)
    found["status"] = "failed, exit code 1"
    assert any("a row" in line for line in campaign_report.section_lines(found))
