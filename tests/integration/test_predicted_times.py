"""Predicted times of a layer on a GPU (benchmarks/predict.py): waves, intervals, eager mode, which
of the measured rows lie inside, and files of another kind."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from swinv2_moe.errors import UserError

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
pytest.importorskip("triton")

import predict  # noqa: E402 - it imports triton
from layer_model import KERNELS, Kernel, Machine, milliseconds  # noqa: E402

H100 = ROOT / "benchmarks/results/nvidia-h100-80gb-hbm3-2026-11-26.json"
SHAPES = ((18432, 512, 8), (18432, 512, 32), (73728, 512, 8), (18432, 512, 32, 4, 512))
MODES = list(itertools.product(KERNELS, (False, True), (False, True)))  # training, as a graph
TEN = Machine(  # a device of ten SMs
    10, 232448, copy=1e12, library=2e13, grouped=1e13, large=3.2e13,
    shortest=1, gap=0.5, prologue=2, partial=0.5, host={"moe_core": 100, "dense": 10},
)  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (Kernel("few bytes", 1e5), 1),
        (Kernel("few bytes, three launches", 1e5, launches=3), 3),
        (Kernel("read, then written", 3e6, 2e6), 3 + 2),
        (Kernel("cuBLAS", library_flops=4e8), 20),
        # 10 programs of 1e7 FLOPs take 10 us; two prologues a program's SM
        (Kernel("one wave", programs=10, program_flops=1e7), 10 + 2),
        (Kernel("one program more", programs=11, program_flops=1e7), 20 + 4),
        (Kernel("a partial wave", programs=25, program_flops=1e7), 30 + 6),
        (Kernel("two at a time", programs=25, program_flops=1e7, resident=2), 30 + 4),
        (Kernel("bytes are longer", 5e7, programs=25, program_flops=1e7), 50 + 6),
        (Kernel("instructions after it", 0, 1e6, 2e6, programs=10, program_flops=1e7), 10 + 2 + 2),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_time_of_a_kernel(kernel, expected):
    assert kernel.microseconds(TEN) == pytest.approx(expected)


def test_launches_are_those_that_the_profiler_counted():
    """On an H100, at 53aaa47. With K > 1 each way sums the rows in a kernel of its own."""
    counted = {
        (name, training): sum(k.launches for k in KERNELS[name](SHAPES[0], TEN, training))
        for name, training in itertools.product(KERNELS, (False, True))
    }
    assert counted == {
        ("moe_core", False): 9, ("moe_core", True): 25, ("dense", False): 10, ("dense", True): 29,
    }  # fmt: skip
    of_several = KERNELS["moe_core"](SHAPES[3], TEN, True)
    assert sum(kernel.launches for kernel in of_several) == 27


def test_products_of_a_layer_by_hand():
    """1,280 tokens in blocks of 128 rows, and half a block more for each of 2 experts."""
    kernels = {k.name: k for k in KERNELS["moe_core"]((1280, 256, 2, 1, 512), TEN, True)}
    hidden, model = kernels["hidden_kernel"], kernels["model_kernel"]
    assert hidden.programs == 11 * 4  # tiles of 128 columns
    assert hidden.program_flops == 2 * 128 * 128 * 256
    assert hidden.end_bytes == 2 * 2 * 1280 * 512  # the hidden layer before and after GELU
    assert model.programs == 11  # tiles of 256 columns
    assert model.program_flops == 2 * 128 * 256 * 512
    weights = kernels["weight_grad_kernel"]
    assert weights.programs == 2 * 4
    assert weights.program_flops == 2 * 128 * 256 * (640 + 32)


def test_eager_mode_takes_the_longer_of_device_and_host():
    shape = (73728, 512, 8)
    for name, launches in (("moe_core", 9), ("dense", 10)):
        graph = milliseconds(shape, name, False, True, TEN)
        for host in (1, 1e6):
            machine = TEN._replace(host={name: host})
            assert milliseconds(shape, name, False, True, machine) == graph
            eager = milliseconds(shape, name, False, False, machine)
            assert eager == pytest.approx(max(graph, launches * host / 1e3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_intervals_are_in_order_and_grow_with_the_work(shape):
    ceilings = predict.Ceilings(H100)
    larger = (2 * shape[0], *shape[1:])
    machines = ceilings.machines(shape)
    for name, training, is_graph in MODES:
        for size in (shape, larger):
            times = [milliseconds(size, name, training, is_graph, each) for each in machines]
            assert times == sorted(times)
        if is_graph:
            for machine in machines:
                one, two = (
                    milliseconds(size, name, training, is_graph, machine)
                    for size in (shape, larger)
                )
                assert one < two


def results(
    folder: Path, *data: dict, device: str = "NVIDIA H100", title: str = "Ceilings"
) -> Path:
    table = {"title": title, "data": data, "environment": {"device": device, "commit": "1"}}
    file = folder / f"{title}.json"
    file.write_text(json.dumps({"tables": {title: table}}))
    return file


def ceilings(folder: Path, spread: float = 0, without: str = "", **others) -> Path:
    """A file of ceilings whose rounds differ by the factor 1 + spread."""
    amounts = {
        "a + a": 0, "copy of 1024 MiB": 2e9, "large matrix product": 7e11,
        "18432x512x2048, dense, up": 6e11,
        "18432x512x2048, grouped_mm, E = 8, up": 6e11,
    }  # fmt: skip
    data = [
        {"name": name, "ms": [1, 1 + spread / 2, 1 + spread], "amount": amount}
        for name, amount in amounts.items()
        if name != without
    ]
    return results(folder, *data, **others)


def test_an_interval_is_as_wide_as_the_spread_of_the_ceilings(tmp_path, monkeypatch):
    for name in ("SHORTEST", "GAP", "PROLOGUE"):
        monkeypatch.setattr(predict, name, (1, 1, 1))
    widths = []
    for spread in (0.0, 0.1, 0.2):
        low, expected, high = predict.Ceilings(ceilings(tmp_path, spread)).machines(SHAPES[0])
        low, high = (each._replace(partial=expected.partial) for each in (low, high))
        of = [milliseconds(SHAPES[0], "moe_core", True, True, each) for each in (low, high)]
        widths.append(of[1] - of[0])
    assert widths[0] == 0
    assert 0 < widths[1] < widths[2]


def test_an_h200_has_the_memory_of_its_data_sheet(tmp_path):
    of_h100 = predict.Ceilings(ceilings(tmp_path)).machines(SHAPES[0])
    of_h200 = predict.Ceilings(ceilings(tmp_path), h200=True).machines(SHAPES[0])
    for before, after in zip(of_h100, of_h200, strict=True):
        assert after.copy == pytest.approx(before.copy * 4.8 / 3.35)
        assert after._replace(copy=before.copy) == before
    for other in ("NVIDIA A100", "NVIDIA H100 PCIe", "NVIDIA H200"):
        with pytest.raises(UserError, match=f"is of '{other}', not of an H100 SXM"):
            predict.Ceilings(ceilings(tmp_path, device=other), h200=True)


def test_rows_with_sigmoid_gates_are_left_out(tmp_path):
    row = {"shape": [64, 16, 4], "dtype": "bfloat16", "timing": "graph replay", "ms": [1.0]}
    row |= {"pass": "training", "name": "moe_core", "ratio": [1.0]}
    rows = [row, row | {"shape": [64, 16, 4, 1, 64, "sigmoid"]}]
    found = predict.compared(predict.Ceilings(ceilings(tmp_path)), {"data": rows})
    assert [line[0] for line in found] == ["64x16x4"]


def test_the_host_is_measured_by_a_small_layer_or_guessed_from_a_launch(tmp_path):
    found = predict.Ceilings(ceilings(tmp_path))
    assert found.host("moe_core") == (5e3, 15e3, 40e3)
    small = {"ms": [2.0], "kernels": [["a_kernel", 4.0, 1.0], ["b_kernel", 1.0, 1.0]]}
    for tokens, host in ((18432, 15e3), (64, 400)):
        row = small | {"pass": f"{tokens}x64x8, bfloat16, moe_core, training"}
        found.passes = [row]
        assert found.host("moe_core")[1] == host


def test_measured_rows_are_inside_or_outside(tmp_path, monkeypatch, capsys):
    low, expected, high = (
        milliseconds(SHAPES[0], "dense", True, True, machine)
        for machine in predict.Ceilings(ceilings(tmp_path, 0.2)).machines(SHAPES[0])
    )
    row = {"shape": SHAPES[0], "dtype": "bfloat16", "timing": "graph replay", "pass": "training"}
    row |= {"name": "dense", "ratio": [1.0]}
    rows = [row | {"ms": [time]} for time in (expected, 2 * high, low / 2)]
    skipped = [row | {"ms": [1], "dtype": "float32"}, row | {"ms": [1], "name": "a peer"}]
    against = results(tmp_path, *rows, *skipped, title="One MoE layer")
    words = ["predict.py", str(tmp_path / "Ceilings.json"), "--against", str(against)]
    monkeypatch.setattr(sys, "argv", words)
    predict.main()
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if "dense, training" in line]
    assert [line.split("| ")[-1] for line in lines] == ["inside |", "outside |", "outside |"]
    assert "(+0%)" in lines[0]
    assert "1 of 3 rows are inside" in printed


def test_a_campaign_has_ceilings_and_rows_of_several_sections(tmp_path, monkeypatch, capsys):
    row = {"shape": SHAPES[0], "dtype": "bfloat16", "timing": "graph replay", "pass": "training"}
    row |= {"name": "moe_core", "ratio": [1.0], "ms": [1.0]}
    parts = [ceilings(tmp_path), *2 * [results(tmp_path, row, title="One MoE layer")]]
    sections = {f"{i}": json.loads(part.read_text()) for i, part in enumerate(parts)}
    campaign = tmp_path / "campaign.json"
    campaign.write_text(json.dumps({"sections": sections}))
    words = ["predict.py", str(campaign), "--against", str(campaign)]
    monkeypatch.setattr(sys, "argv", words)
    predict.main()
    assert "of 2 rows are inside" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: folder / "no", "no: No such file or directory"),
        (lambda folder: ROOT / "pyproject.toml", "is no file of results or of a campaign"),
        (lambda folder: results(folder, {"ms": [0]}), "is no file of results or of a campaign"),
        (lambda folder: results(folder, {"ms": "ab"}), "is no file of results or of a campaign"),
        (lambda folder: results(folder, title="x"), "has no ceilings: run benchmarks/ceilings.py"),
        (lambda folder: ceilings(folder, device="TPU"), "the device 'TPU' is not one of H100"),
        (lambda folder: ceilings(folder, without="a + a"), "lacks a ceiling: a + a"),
        (lambda folder: ceilings(folder, without="large matrix product"), "lacks a ceiling: large"),
    ],
    ids=range(8),
)
def test_a_file_of_another_kind_is_named_in_one_line(write, message, tmp_path):
    with pytest.raises(UserError) as error:
        predict.Ceilings(write(tmp_path)).machines(SHAPES[0])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_compares_the_rows_of_the_h100():
    command = [sys.executable, "benchmarks/predict.py", str(H100), "--against", str(H100)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "16 of 16 rows are inside" in done.stdout
    assert "14 of 16 rows are inside" in done.stdout


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("NVIDIA H200", "is of NVIDIA H200, the ceilings are of NVIDIA H100"),
        ("NVIDIA H100", "has no rows of benchmarks/layer.py in bfloat16"),
    ],
)
def test_results_that_cannot_be_compared_are_one_line(device, message, tmp_path, monkeypatch):
    against = results(tmp_path, {"ms": [1.0]}, device=device, title="One MoE layer")
    words = ["predict.py", str(ceilings(tmp_path)), "--against", str(against)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(UserError, match=message):
        predict.main()
