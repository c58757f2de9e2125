"""The benchmarks on tiny shapes: `make bench-gpu` runs the same scripts with --device cuda."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import layer
import peers
import results_file
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
    "layer": "--shapes 48x32x4x2x24 --rounds 2",
    "tuning experts": "--device cpu --shapes 70x16x4x2 --rounds 1",
    "tuning attention": "--device cpu --shapes 4x16x1x16 --rounds 1",
    "ceilings": "--device cpu --rounds 2",
    "kernels layer": "--device cpu --shapes 64x16x4x2 --rounds 2",
    "memory": "--size 32 --measure 4096",
    "alltoall": "--ranks 2 --ranks-per-node 1 --rounds 1 --algorithms linear 2dh channels",
    "model": f"{NETWORK} {SMALLER}",
    "kernels network": f"{NETWORK} --passes 1 {SMALLER}",
    "model --timm": f"{NETWORK} {SMALLER}",
    "model --graph": f"{NETWORK} {SMALLER}",
}


@pytest.fixture(autouse=True)
def as_before_deepspeed(nothing_of_ranks_left):
    """DeepSpeed, a peer where it is installed, starts a process group and sets its variables."""
    before = os.environ.copy()
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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


@pytest.mark.parametrize("script", ["alltoall", "ceilings", "kernels", "memory", "model", "tuning"])
def test_a_script_finds_what_it_imports(script):
    """The slow tests run these."""
    pytest.importorskip("triton")
    importlib.import_module(script)


def test_plans_of_the_network_need_the_common_options_alone():
    """kernels.py has no --graph."""
    import model

    args = model.make_parser("").parse_args(NETWORK.split())
    modes = [[combination.mode for combination, *_ in plan] for plan in model.plans(args)]
    assert modes == [["inference"], ["training"]]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_tables_of_several_scripts_share_a_file(tmp_path):
    output = tmp_path / "found.json"
    for script in ("ceilings", "memory", "ceilings"):
        assert run(script, output).returncode == 0
    titles = ["Ceilings", "Memory of one MoE layer"]
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
    for tokens, model_dim, num_experts, top_k, hidden_dim in fine:
        assert (num_experts, top_k * hidden_dim) == (32, 4 * model_dim)
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


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_operators_of_both_networks_in_both_passes(tmp_path):
    output = tmp_path / "found.json"
    assert run("kernels network", output).returncode == 0
    (table,) = json.loads(output.read_text())["tables"].values()
    names = {entry["pass"]: {name for name, *_ in entry["kernels"]} for entry in table["data"]}
    assert [name.split()[-1] for name in names] == ["experts", "dense"] * 2
    for name, operators in names.items():
        assert ("moe_core::route" in operators) == name.endswith("experts")
        assert ("aten::addmm" in operators) or ("aten::linear" in operators)


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


def test_a_token_whose_experts_are_nearly_tied_is_not_compared(monkeypatch):
    case = layer.Case((64, 16, 4), "float32", "cpu", False, check=False)
    tied = 3
    with torch.no_grad():  # the second expert's logit of one token is that of the first
        router, token = case.layer.router.weight, case.x[tied]
        logits = router @ token
        first, second = logits.topk(2).indices
        router[second] += token * (logits[first] - logits[second]) / (token @ token)
    *_, is_clear = case._reference()
    assert not is_clear[tied]
    assert is_clear.sum() > 60
    wrong = case.alternatives["dense, float32"]
    right = case.alternatives[layer.LAYER]
    rows = torch.zeros(64, 1)

    def wrong_in_one(x):
        return right(x) * (1 - rows) + wrong(x) * rows

    case.alternatives = {"close": wrong_in_one}
    rows[tied] = 1
    case._leave_out_what_is_wrong()
    assert "close" in case.alternatives
    rows[tied - 1] = 1
    case._leave_out_what_is_wrong()
    assert "close" in case.left_out


def test_all_choices_are_clear_where_all_experts_are_chosen():
    assert layer.clearly_routed(torch.zeros(3, 2), 2).all()
    assert layer.clearly_routed(torch.tensor([[1.0, 1.0, 0.5]]), 2).all()
    assert not layer.clearly_routed(torch.tensor([[1.0, 0.5, 0.5]]), 2).any()


def test_on_a_gpu_tiles_are_compared_by_graphs_and_one_that_fails_is_named(monkeypatch):
    pytest.importorskip("triton")
    import tuning

    captured = []

    def capture(work):
        if work.args == ("too large",):
            raise RuntimeError("out of shared memory")
        captured.append(work)
        return work

    monkeypatch.setattr(tuning, "capture", capture)
    monkeypatch.setattr(tuning, "timed", lambda calls, *_: {name: [2.0] for name in calls})
    x = torch.ones(3, requires_grad=True)
    names = [tuning.IN_USE, "too large", "other"]
    others = dict.fromkeys(names, lambda: 2 * x)
    subject = tuning.Subject(lambda: x, [x], torch.ones(3), {}, others)
    rows, _, left_out = tuning.measure(subject, "3", 1, "cuda")
    assert [row[1] for row in rows] == [tuning.IN_USE, "other"]
    assert len(captured) == 4
    assert left_out == ["3: too large is not measured. RuntimeError: out of shared memory"]


def test_changed_files_have_another_name_than_their_commit(tmp_path, monkeypatch):
    """Results of two states of the files are not continued as one."""

    def git(*words: str) -> None:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        subprocess.run(command, check=True, capture_output=True)

    git("init")
    file = tmp_path / "file"
    file.write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    monkeypatch.setattr(results_file, "DIRECTORY", tmp_path / "results")
    names = [results_file._commit()]
    for text in ("two", "three", "two"):
        file.write_text(text)
        names.append(results_file._commit())
    clean, two, three, again = names
    assert two == again != three
    assert two.startswith(f"{clean[:10]}-dirty-")


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
