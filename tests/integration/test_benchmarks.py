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
import torch.nn.functional as F

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
    "products": "--device cpu --shapes 70x64x6x2 --rounds 1",
    "products --check": "--device cpu --shapes 70x64x6x2",
    "kernels layer": "--device cpu --shapes 64x16x4x2 --rounds 2",
    "memory": "--size 32 --measure 4096",
    "alltoall": "--ranks 2 --ranks-per-node 1 --rounds 1 --algorithms linear 2dh channels",
    "model": f"{NETWORK} {SMALLER}",
    "kernels network": f"{NETWORK} --passes 1 {SMALLER}",
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


def table_of(done: subprocess.CompletedProcess, output: Path) -> dict:
    """The table that a script has printed and kept, with versions and commit."""
    assert done.returncode == 0, done.stderr
    (title, table), *others = json.loads(output.read_text())["tables"].items()
    assert not others
    assert table["rows"]
    assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert {"device", "threads", "commit", "torch", "date"} <= table["environment"].keys()
    for text in (done.stdout, output.with_suffix(".md").read_text()):
        assert title in text
        assert " | ".join(table["rows"][0]) in text
    return table


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("script", ARGUMENTS)
def test_a_benchmark_prints_its_table_and_keeps_it(script, tmp_path):
    output = tmp_path / "found.json"
    table_of(run(script, output), output)


@pytest.mark.parametrize("script", ["alltoall", "kernels", "memory", "model", "products"])
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
    for script in ("kernels layer", "memory", "kernels layer"):
        assert run(script, output).returncode == 0
    titles = ["Kernels of a layer", "Memory of one MoE layer"]
    assert list(json.loads(output.read_text())["tables"]) == titles


def test_what_is_wrong_is_named_and_not_timed(monkeypatch):
    monkeypatch.setitem(peers.BUILT_IN, "loop", lambda moe, x: 1.01 * peers.by_loop(moe, x))
    case = layer.Case((64, 16, 4), "float32", "cpu", list(peers.BUILT_IN))
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
    case = layer.Case((64, 16, 4), "float32", "cpu", list(peers.BUILT_IN))
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
    case = layer.Case((64, 16, 4), "float32", "cpu", list(peers.BUILT_IN))
    assert layer.EINSUM not in case.alternatives
    assert case.left_out[layer.EINSUM].startswith("above 50 tokens: its fp32 masks [T, E, C]")


def test_a_graph_replays_steps_whose_gradients_are_not_accumulated(monkeypatch):
    """The capture itself needs a GPU."""
    captured = []
    monkeypatch.setattr(layer, "capture", lambda work: captured.append(work) or work)
    case = layer.Case((64, 16, 4), "float32", "cpu", (), True)
    case.alternatives["dense"] = case.alternatives["dense, float32"]
    for times in case.times_of_graphs(2):
        assert set(times) == {"moe_core", "dense", layer.PRODUCT}
        assert all(len(t) == 2 for t in times.values())
    assert len(captured) == 4
    parameters = [p for module in case.modules for p in module.parameters()]
    assert all(tensor.grad is None for tensor in (case.x, *parameters))


def test_a_token_whose_experts_are_nearly_tied_is_not_compared(monkeypatch):
    case = layer.Case((64, 16, 4), "float32", "cpu", (), check=False)
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


class Kernels:
    """QuACK's six kernels by their conventions, in plain torch: they fill the outputs given."""

    @staticmethod
    def parts(ends, ids=None):
        for e, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
            yield e, slice(start, end), slice(start, end) if ids is None else ids[start:end].long()

    def up(self, a, b, d, c, epilogue, schedule, rows, *_):
        bias, hidden, *none = epilogue
        ends, _, ids, _ = rows
        for e, place, tokens in self.parts(ends, ids):
            d[place] = a[tokens] @ b[e] + bias[e]
            hidden[place] = F.gelu(d[place])
        assert none == [None, None]

    def hidden_grad(self, a, b, d, c, epilogue, schedule, rows, *_):
        gate, weighted, dots, sums, *_ = epilogue
        ends, _, ids, tiles = rows
        assert tiles.tolist() == F.pad(-(-ends.diff() // 128), (1, 0)).cumsum(0).tolist()
        assert dots.shape == (len(d), -(-d.shape[1] // 128))
        assert sums.shape[0] >= tiles[-1]
        for e, place, tokens in self.parts(ends, ids):
            z = c[place].clone().requires_grad_()
            grad = a[tokens] @ b[e] * gate[place, None]
            d[place] = torch.autograd.grad(F.gelu(z), z, grad)[0]
            weighted[place] = F.gelu(z.detach()) * gate[place, None]

    def down(self, a, b, d, c, epilogue, schedule, rows, *_):
        for e, place, _ in self.parts(rows[0]):
            d[place] = a[place] @ b[e].t()
            if epilogue[2] is not None:
                d[place] += epilogue[2][e]

    token_grad = down

    def w1_grad(self, a, b, d, c, epilogue, schedule, rows, *_):
        for e, place, tokens in self.parts(rows[1], rows[2]):
            d[e] = a[:, tokens] @ b[:, place].t()

    w2_grad = w1_grad


def test_quacks_kernels_are_called_by_their_conventions(tmp_path):
    """With an expert that has no row. In fp32: an error of some 1e-6."""
    pytest.importorskip("triton")
    import products
    from quack_kernels import Quack

    inputs = products.Inputs((70, 64, 6, 2), "cpu", torch.float32, is_uneven=True)
    assert (inputs.ends.diff() == 0).sum() == 2
    quack, kernels = Quack(tmp_path), Kernels()
    with pytest.raises(RuntimeError, match="see the note"):
        quack.products(inputs)
    assert quack.note.startswith(f"QuACK: no libraries in {tmp_path}")
    names = ("up", "down", "hidden_grad", "token_grad", "w1_grad", "w2_grad")
    quack.kernels = {name: getattr(kernels, name) for name in names}
    expected, found = products.reference(inputs), quack.products(inputs)
    assert list(found) == list(products.PRODUCTS)
    for name, work in found.items():
        torch.testing.assert_close(work().double(), expected[name], rtol=1e-4, atol=1e-4)


def test_a_product_that_is_wrong_or_not_there_is_named(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    import products
    from quack_kernels import Quack

    (tmp_path / "up.so").write_bytes(b"no library")
    quack = Quack(tmp_path)
    assert quack.note.startswith("QuACK: ")
    assert quack.kernels == {}
    inputs = products.Inputs((70, 64, 6, 2), "cpu", torch.float32)

    def wrong(i):
        return {name: lambda name=name: 1.1 * expected[name] for name in products.PRODUCTS}

    expected = products.reference(inputs)
    monkeypatch.setattr(products, "ours", wrong)
    rows = list(products.checked(inputs, quack))
    assert rows[0] == ["ours", "up", "WRONG: 1.0e-01"]
    assert ["QuACK", "all", "RuntimeError: see the note on QuACK"] in rows
    args = SimpleNamespace(device="cpu", dtype=torch.float32, rounds=1)
    notes = {}
    row, numbers = next(products.times_of((70, 64, 6, 2), args, quack, notes))
    assert row[:2] == ["70x64x6x2", "up"]
    assert row[3] == "-"
    assert set(numbers["ms"]) == {"ours", "F.grouped_mm", "cuBLAS, dense"}
    assert notes == {"QuACK": "QuACK is not measured. RuntimeError: see the note on QuACK"}


def test_peers_are_measured_one_after_the_other(tmp_path):
    output = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/layer.py", "--device", "cpu", "--shapes", "64x16x4"]
    command += ["--dtypes", "float32", "--rounds", "1", "--output", str(output)]
    command += ["--peers", "grouped_mm", "ScatterMoE", "loop"]
    table = table_of(subprocess.run(command, cwd=ROOT, capture_output=True, text=True), output)
    names = [row[1] for row in table["rows"]]
    both = ["moe_core", "dense, float32"]
    assert sorted(names[:3]) == sorted([*both, "grouped_mm"])
    assert sorted(names[3:6]) == sorted([*both, "ScatterMoE"])
    assert "not measured: " in table["rows"][5][2]
    assert sorted(names[6:]) == sorted([*both, "loop"])


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
