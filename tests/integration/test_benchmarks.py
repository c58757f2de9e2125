"""The benchmarks on tiny shapes: `make bench-gpu` runs the same scripts with --device cuda."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import layer
import peers
import pieces
import timing

from swinv2_moe.measure import rounds

ROOT = Path(__file__).parents[2]
NETWORK = (
    "--device cpu --cfg configs/quickstart_digits.yaml --batch-sizes 2 --dtypes float32 --rounds 2"
)
SMALLER = (
    "--opts MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.DEPTHS [1,1,1] MODEL.MOE.BLOCKS [[],[0],[0]]"
)
ARGUMENTS = {
    "layer": "--shapes 48x32x4x2x24 48x16x8x4x16xsigmoid --rounds 2",
    "tuning experts": "--device cpu --shapes 70x16x4x2 --rounds 1",
    "tuning attention": "--device cpu --shapes 4x16x1x16 --rounds 1",
    "pieces": "--shapes 64x16x4x2 --rounds 2",
    "routers": "--shapes 2x16x16x4 --rounds 2",
    "memory": "--size 32 --measure 4096",
    "alltoall": "--ranks 2 --ranks-per-node 1 --rounds 1 --algorithms linear 2dh channels",
    "model": f"{NETWORK} {SMALLER}",
    "shares": f"{NETWORK} --passes 1 {SMALLER}",
    "model --timm": f"{NETWORK} {SMALLER}",
    "model --graph": f"{NETWORK} {SMALLER}",
}


def run(script: str, output: Path, *more: str) -> subprocess.CompletedProcess:
    name, *words = script.split()
    words += ARGUMENTS[script].split()
    command = [sys.executable, f"benchmarks/{name}.py", *words, *more]
    command += ["--output", str(output)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "script",
    [pytest.param(name, marks=() if name == "layer" else pytest.mark.slow) for name in ARGUMENTS],
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


@pytest.mark.parametrize("script", ["alltoall", "memory", "model", "routers", "shares", "tuning"])
def test_a_script_finds_what_it_imports(script):
    """The slow tests run these."""
    pytest.importorskip("triton")
    importlib.import_module(script)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_tables_of_several_scripts_share_a_file(tmp_path):
    output = tmp_path / "found.json"
    for script in ("pieces", "memory", "pieces"):
        assert run(script, output).returncode == 0
    titles = ["The parts of one MoE layer", "Memory of one MoE layer"]
    assert list(json.loads(output.read_text())["tables"]) == titles


def test_what_is_wrong_is_named_and_not_timed(monkeypatch):
    monkeypatch.setitem(peers.BUILT_IN, "loop", lambda moe, x: 1.01 * peers.by_loop(moe, x))
    case = layer.Case((64, 16, 4), "float32", "cpu", True)
    assert "grouped_mm" in case.alternatives
    assert "loop" not in case.alternatives
    assert case.left_out["loop"].startswith("wrong: an error of")


def test_fine_experts_do_the_work_of_the_dense_network():
    fine = [shape for shape in layer.shapes_of(["64x16x4", "narrow"]) if len(shape) > 3]
    assert len(fine) == 4
    for tokens, model_dim, num_experts, top_k, hidden_dim, gates in fine:
        assert (num_experts, top_k * hidden_dim, gates) == (32, 4 * model_dim, "sigmoid")
        assert f"{tokens}x{model_dim}x8" in layer.NARROW  # beside 8 experts of the same block


def test_a_step_leaves_no_gradients_for_the_next_alternative_to_free():
    case = layer.Case((64, 16, 4), "float32", "cpu", True)
    parameters = [p for module in case.modules for p in module.parameters()]
    for run in case.alternatives.values():
        learned = []
        handles = [p.register_post_accumulate_grad_hook(learned.append) for p in parameters]
        case.step(run)
        assert learned
        assert all(parameter.grad is None for parameter in (case.x, *learned))
        for handle in handles:
            handle.remove()


def test_parts_are_timed_without_drawing_their_gradients(tmp_path, monkeypatch):
    shapes, randn_like = [], torch.randn_like
    monkeypatch.setattr(
        torch, "randn_like", lambda t: shapes.append((t.shape, t.dtype)) or randn_like(t)
    )
    words = f"pieces.py --device cpu {ARGUMENTS['pieces']} --dtypes float32 --output"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(tmp_path / "found.json")])
    pieces.main()
    assert len(shapes) == len(set(shapes)) > 1  # before the rounds that count


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_shares_of_both_passes(tmp_path):
    output = tmp_path / "found.json"
    assert run("shares", output).returncode == 0
    (table,) = json.loads(output.read_text())["tables"].values()
    for found in table["data"]:
        (experts, _), (dense, _) = found["experts"], found["dense"]
        assert not any(dense[kind] for kind in ("experts", "router", "dispatch"))
        assert all(experts[kind] for kind in ("experts", "router", "dispatch"))
        assert all(
            experts[kind] and dense[kind]
            for kind in ("attention", "other matrix products", "normalisation")
        )
        assert bool(experts["optimiser"]) == (found["mode"] == "training")


def test_einsum_is_left_out_where_its_masks_are_large(monkeypatch):
    monkeypatch.setattr(layer, "EINSUM_TOKENS", 50)
    case = layer.Case((64, 16, 4), "float32", "cpu", True)
    assert layer.EINSUM not in case.alternatives
    assert case.left_out[layer.EINSUM].startswith("above 50 tokens: its fp32 masks [T, E, C]")


def test_a_graph_replays_steps_whose_gradients_are_not_accumulated(monkeypatch):
    """The capture itself needs a GPU."""
    captured = []
    monkeypatch.setattr(layer, "capture", lambda work: captured.append(work) or work)
    case = layer.Case((64, 16, 4), "float32", "cpu", False, True)
    case.alternatives["dense"] = case.alternatives["dense, float32"]
    for times in case.times_of_graphs(2):
        assert set(times) == {"moe_core", "dense", layer.PRODUCT}
        assert all(len(t) == 2 for t in times.values())
    assert len(captured) == 4
    parameters = [p for module in case.modules for p in module.parameters()]
    assert all(tensor.grad is None for tensor in (case.x, *parameters))


def test_parts_as_graphs_are_rows_of_their_own(monkeypatch):
    monkeypatch.setattr(pieces, "capture", lambda work: work)

    def timed(calls, rounds, device):
        return {name: [2.0] for name in calls}

    monkeypatch.setattr(pieces, "timed", timed)
    bench = pieces.Bench("64x16x4", "float32", "cpu")
    measured = pieces.measure(bench, SimpleNamespace(device="cuda", rounds=1))
    assert list(measured) == ["many calls", "graph replay"]
    rows = list(pieces.rows("", "graph replay", measured["graph replay"]))
    assert rows[0][1] == "router, graph replay"
    assert rows[0][3] == "1.000 (1.000 - 1.000)"


def test_on_a_gpu_a_time_is_the_mean_of_many_calls(monkeypatch):
    """By a clock of which each call takes 2 ms."""
    calls = []
    clock = SimpleNamespace(perf_counter=lambda: 2e-3 * len(calls))
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(rounds, "time", clock)
    monkeypatch.setattr(timing, "MILLISECONDS", 9.0)
    found = timing.timed({"work": lambda: calls.append(1)}, 2, "cuda")
    assert len(calls) == 3 + 5 * 3  # to calibrate; a round to warm up, two that count
    assert found["work"] == pytest.approx([2.0, 2.0])
    assert found["work"].run
