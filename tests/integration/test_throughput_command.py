"""tools/throughput.py and tools/roofline.py on small models, in this process and on two ranks, and
what they refuse."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tool_cases import ROOT, command

from swinv2_moe.commands.throughput import _latency, _rate
from swinv2_moe.measure import roofline as roofline_module
from swinv2_moe.measure import rounds

CFG = ("--cfg", ROOT / "configs" / "quickstart_digits.yaml")
QUICK = ("--rounds", "3", "--warmup", "1")


@pytest.fixture
def throughput(monkeypatch, capsys):
    """`throughput(*arguments)`: tools/throughput.py in this process, with a small matrix
    product."""
    monkeypatch.setitem(rounds._PRODUCT_SIDE, "cpu", 512)
    return command("throughput", monkeypatch, capsys)


@pytest.fixture
def roofline(monkeypatch, capsys):
    """`roofline(*arguments)`: tools/roofline.py in this process, with small files, copies and few
    saves."""
    monkeypatch.setitem(rounds._PRODUCT_SIDE, "cpu", 512)
    monkeypatch.setattr(roofline_module, "_FILE", 2**21)
    monkeypatch.setattr(roofline_module, "_COPY", 2**22)
    monkeypatch.setattr(roofline_module, "_SAVES", 1)
    return command("roofline", monkeypatch, capsys)


@pytest.fixture(scope="session")
def tiny(small) -> list[str]:
    """Without DATA.BATCH_SIZE, on which both commands have an option."""
    pairs = zip(small[::2], small[1::2], strict=True)
    return ["--opts", *(word for pair in pairs if pair[0] != "DATA.BATCH_SIZE" for word in pair)]


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_throughput_of_one_process(throughput, tiny, tmp_path):
    chosen = (
        "--mode",
        "inference",
        "training",
        "--batch-sizes",
        "2",
        "--dtypes",
        "float32",
        "bfloat16",
    )
    finished = throughput(*CFG, "--output", tmp_path / "a" / "b", *chosen, *QUICK, *tiny)
    assert (finished.status, finished.err) == (0, "")
    rows = rows_of(tmp_path / "a" / "b" / "throughput.csv")
    assert [(r["mode"], r["dtype"]) for r in rows] == [
        (mode, dtype) for mode in ("inference", "training") for dtype in ("float32", "bfloat16")
    ]
    assert len({r["run"] for r in rows}) == 4
    for r in rows:
        assert (r["ranks"], r["rounds"], len(r["moe_ms"].split())) == ("1", "3", 3)
        assert float(r["moe_mfu"]) > 0
        assert int(r["moe_parameters"]) > int(r["dense_parameters"])
        assert abs(int(r["moe_macs"]) / int(r["dense_macs"]) - 1) < 0.05
        states = 3 if r["mode"] == "training" else 1  # the weights and, in training, two moments
        assert float(r["moe_held_bytes"]) == pytest.approx(
            states * 4 * int(r["moe_parameters"]), rel=1e-3
        )
    assert (tmp_path / "a" / "b" / "throughput.png").stat().st_size > 10_000
    assert "3 rounds after 1 to warm up" in finished.out
    assert "threads; load" in finished.out
    for dtype in ("float32", "bfloat16"):
        name = f"training, batch 2, {dtype}, f = 1.25"
        assert f"{name}: " in finished.out  # the heading of its speeds
        assert f"| {name} " in finished.out  # its lines in the table of memory
    assert "| ms p50/p90/max |" in " ".join(finished.out.split())
    assert finished.out.count("| experts |") == 4  # a line in each of two modes and two dtypes


def test_throughput_of_two_ranks(start_ranks, tiny, tmp_path):
    chosen = (
        "--mode",
        "inference",
        "training",
        "--batch-sizes",
        "2",
        "--rounds",
        "2",
        "--warmup",
        "0",
    )
    ended = start_ranks(2, "tools/throughput.py", *CFG, "--output", tmp_path, *chosen, *tiny)
    assert [outcome.status for outcome in ended] == [0, 0], ended
    rows = rows_of(tmp_path / "throughput.csv")
    assert [(r["mode"], r["ranks"]) for r in rows] == [("inference", "2"), ("training", "2")]
    for r in rows:
        fastest = 4 / min(map(float, r["moe_ms"].split())) * 1e3  # two images of each rank
        assert float(r["moe_images_per_second_q3"]) <= fastest
        assert int(r["moe_held_bytes"]) < 0.8 * (3 if r["mode"] == "training" else 1) * 4 * int(
            r["moe_parameters"]
        )
    # the main rank alone speaks
    assert [outcome.out.count("2 processes") for outcome in ended] == [1, 0]


def test_throughput_beside_the_einsum_baseline(throughput, tiny, tmp_path):
    chosen = ("--batch-sizes", "2", "--mode", "inference", "training", "--baseline", "einsum")
    finished = throughput(*CFG, "--output", tmp_path, *chosen, *QUICK, *tiny)
    assert (finished.status, finished.err) == (0, "")
    for r, published in zip(rows_of(tmp_path / "throughput.csv"), ("2.11", "1.55"), strict=True):
        assert len(r["einsum_ms"].split()) == 3
        assert float(r["moe_over_einsum"]) > 0
        assert r["einsum_held_bytes"] == r["moe_held_bytes"]
        assert f"einsum published {published}\n" in finished.out
    assert finished.out.count("| einsum  |") == 2
    printed = finished.out.replace(str(tmp_path), "DIR")
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_float16_needs_a_gpu(throughput, tiny, tmp_path):
    finished = throughput(*CFG, "--output", tmp_path, "--dtypes", "float16", *QUICK, *tiny)
    assert (finished.status, finished.err.count("\n")) == (2, 1)
    assert "--dtypes is 'float16', which needs a GPU" in finished.err


def test_roofline(roofline, tiny, tmp_path):
    finished = roofline(*CFG, "--output", tmp_path, "--batch-size", "16", *QUICK, *tiny)
    assert (finished.status, finished.err) == (0, "")
    found = json.loads((tmp_path / "roofline.json").read_text())
    assert list(found["phases"]) == [name for name in roofline_module.PHASES if name != "exchange"]
    assert {phase["run"] for name, phase in found["phases"].items() if name != "checkpoint"} == {
        found["step"]["run"]
    }
    assert (
        found["phases"]["checkpoint"]["run"]
        == found["peaks"]["written"]["run"]
        != found["step"]["run"]
    )
    assert all(phase["share_of_roof"] > 0 for phase in found["phases"].values())
    assert all(share > 0 for share in found["step"]["accounted"])
    lines = {
        line.split("|")[1].strip(): line.split("|")[2:-1]
        for line in finished.out.splitlines()
        if "|" in line
    }
    assert [cell.strip() for cell in lines["exchange"]] == ["-"] * 10
    assert set(roofline_module.PHASES) < set(lines)
    assert ", without mixup, accumulation or averaged weights\n" in finished.out
    assert "its phases, measured alone, add up to" in finished.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["roofline.json", "roofline.png"]
    assert (tmp_path / "roofline.png").stat().st_size > 10_000


def test_roofline_of_a_dense_model_on_photographs(roofline, tiny, make_photographs, tmp_path):
    chosen = ("--data", make_photographs(), "--batch-size", "4")
    finished = roofline(
        *CFG, "--output", tmp_path, *chosen, *QUICK, *tiny, "MODEL.MOE.NUM_EXPERTS", "0"
    )
    assert (finished.status, finished.err) == (0, "")
    phases = json.loads((tmp_path / "roofline.json").read_text())["phases"]
    assert list(phases) == ["data", "trunk", "optimiser", "checkpoint"]
    assert phases["data"]["disk"] > 4 * 500  # four JPEGs
    assert "4 images of" in finished.out


BAD = {
    "dtype": (["--dtypes", "float8"], "--dtypes is 'float8', allowed: float32, bfloat16, float16"),
    "batch": (["--batch-sizes", "0"], "--batch-sizes is 0, it must be at least 1"),
    "rounds": (["--rounds", "0"], "--rounds is 0, it must be at least 1"),
    "baseline": (["--baseline", "tutel"], "--baseline is 'tutel', allowed: dense, einsum"),
    "mode": (["--mode", "eval"], "--mode is 'eval', allowed: inference, training"),
    "factor": (["--capacity-factors", "nan"], "MODEL.MOE.EVAL_CAPACITY_FACTOR"),
    "dense": (["--opts", "MODEL.MOE.NUM_EXPERTS", "0"], "MODEL.MOE.NUM_EXPERTS is 0"),
    "ignored": (["--opts", "COMPILE", "true"], "--opts COMPILE is True, but --compile decides"),
    "no such file": (["--cfg", "none.yaml"], "none.yaml: cannot be read"),
    "unknown key": (["--opts", "MODEL.MOE.EXPERTS", "4"], "unknown key MODEL.MOE.EXPERTS"),
    "a file in the way": (["--output", "{file}/under"], "cannot be made a directory"),
}


@pytest.mark.parametrize("case", BAD)
def test_throughput_refuses(case, throughput, tmp_path):
    arguments, text = BAD[case]
    (tmp_path / "file").write_text("")
    arguments = [a.format(file=tmp_path / "file") for a in arguments]
    refused(throughput(*CFG, "--output", tmp_path / "out", *arguments), text)
    assert not (tmp_path / "out").exists()


def refused(finished, text: str) -> None:
    assert (finished.status, finished.out) == (2, "")
    assert len(finished.err.splitlines()) == 1, finished.err
    assert finished.err.startswith("error: ")
    assert text in finished.err


BAD_ROOFLINE = {
    "rounds": (["--rounds", "0"], "--rounds is 0, it must be at least 1"),
    "batch": (["--batch-size", "0"], "--batch-size is 0, it must be at least 1"),
    "no data": (
        ["--cfg", "{root}/configs/imagenette_96.yaml"],
        "DATA.PATH (or --data) must name its directory",
    ),
    "compiled": (["--opts", "COMPILE", "true"], "COMPILE is True: the phases of such a step"),
    "accumulated": (
        ["--opts", "TRAIN.ACCUMULATION_STEPS", "4"],
        "ACCUMULATION_STEPS is 4, but what is measured has 1",
    ),
    "recomputed": (["--opts", "TRAIN.USE_CHECKPOINT", "true"], "TRAIN.USE_CHECKPOINT is True"),
    "a file in the way": (["--output", "{file}/under"], "cannot be made a directory"),
}


@pytest.mark.parametrize("case", BAD_ROOFLINE)
def test_roofline_refuses(case, roofline, tmp_path):
    arguments, text = BAD_ROOFLINE[case]
    (tmp_path / "file").write_text("")
    arguments = [a.format(file=tmp_path / "file", root=ROOT) for a in arguments]
    refused(roofline(*CFG, "--output", tmp_path / "out", *arguments), text)
    assert not (tmp_path / "out").exists()


def test_too_few_images_for_a_batch_leaves_nothing(roofline, tiny, tmp_path):
    refused(
        roofline(*CFG, "--output", tmp_path, "--batch-size", "9999", *tiny),
        "DATA.BATCH_SIZE is 9999",
    )
    assert list(tmp_path.iterdir()) == []


def test_tables_fit_100_columns_whatever_was_measured():
    """Rounds that differ by a factor of a thousand."""
    times = [0.012, 0.8, 9_876.5]
    assert len(_rate([1e3 / t for t in times])) <= 24
    assert len(_latency(SimpleNamespace(times=times))) <= 24
