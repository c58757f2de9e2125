"""The benchmarks of one layer on tiny shapes: `make bench-gpu` runs the same scripts with --device cuda."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARGUMENTS = {
    "layer": "--shapes 64x16x4 48x16x4x2 --rounds 2",
    "pieces": "--shapes 64x16x4x2 --rounds 2",
    "memory": "--size 32 --measure 4096",
    "alltoall": "--ranks 2 --ranks-per-node 1 --rounds 1",
}


def run(script: str, output: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, f"benchmarks/{script}.py", *ARGUMENTS[script].split(), *more, "--output", str(output)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name == "layer" else pytest.mark.slow) for name in ARGUMENTS]
)
def test_a_benchmark_prints_its_table_and_keeps_it_with_versions_and_commit(script, tmp_path):
    output = tmp_path / "found.json"
    done = run(script, output)
    assert done.returncode == 0, done.stderr
    (title, table), *others = json.loads(output.read_text())["tables"].items()
    assert not others
    assert table["rows"]
    assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert {"device", "threads", "commit", "torch", "date"} <= table["environment"].keys()
    for text in (done.stdout, output.with_suffix(".md").read_text()):
        assert title in text
        assert " | ".join(table["rows"][0]) in text


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_tables_of_several_scripts_share_a_file(tmp_path):
    output = tmp_path / "found.json"
    for script in ("pieces", "memory", "pieces"):
        assert run(script, output).returncode == 0
    assert list(json.loads(output.read_text())["tables"]) == ["The parts of one MoE layer", "Memory of one MoE layer"]


def test_what_is_wrong_is_named_and_not_timed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import layer
    import peers

    monkeypatch.setitem(peers.BUILT_IN, "loop", lambda moe, x: 1.01 * peers.by_loop(moe, x))
    case = layer.Case((64, 16, 4), "float32", "cpu", True)
    assert "grouped_mm" in case.alternatives
    assert "loop" not in case.alternatives
    assert case.left_out["loop"].startswith("wrong: an error of")
