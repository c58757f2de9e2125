"""tools/throughput.py on small models, in this process and on two ranks, and what it refuses."""

import csv
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tool_cases import ROOT, assert_one_line, command

from swinv2_moe.commands.throughput import _latency, _rate
from swinv2_moe.measure import rounds

CFG = ("--cfg", ROOT / "configs" / "quickstart_digits.yaml")
QUICK = "--rounds 3 --warmup 1"


@pytest.fixture
def throughput(monkeypatch, capsys):
    """`throughput(*arguments)`: tools/throughput.py in this process, with a small matrix
    product."""
    monkeypatch.setitem(rounds._PRODUCT_SIDE, "cpu", 512)
    return command("throughput", monkeypatch, capsys)


@pytest.fixture(scope="session")
def tiny(small) -> list[str]:
    """Without DATA.BATCH_SIZE, for which the command has an option."""
    pairs = zip(small[::2], small[1::2], strict=True)
    return ["--opts", *(word for pair in pairs if pair[0] != "DATA.BATCH_SIZE" for word in pair)]


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_throughput_of_one_process(throughput, tiny, tmp_path):
    output = tmp_path / "a" / "b"
    chosen = "--mode inference training --batch-sizes 2 --dtypes float32 bfloat16"
    finished = throughput(*CFG, "--output", output, chosen, QUICK, *tiny)
    assert (finished.status, finished.err) == (0, "")
    rows = rows_of(output / "throughput.csv")
    cases = list(itertools.product(("inference", "training"), ("float32", "bfloat16")))
    assert [(r["mode"], r["dtype"]) for r in rows] == cases
    assert len({r["run"] for r in rows}) == 4
    for r in rows:
        assert (r["ranks"], r["rounds"], len(r["moe_ms"].split())) == ("1", "3", 3)
        assert float(r["moe_mfu"]) > 0
        assert int(r["moe_parameters"]) > int(r["dense_parameters"])
        assert abs(int(r["moe_macs"]) / int(r["dense_macs"]) - 1) < 0.05
        states = 3 if r["mode"] == "training" else 1  # the weights and, in training, two moments
        held = states * 4 * int(r["moe_parameters"])
        assert float(r["moe_held_bytes"]) == pytest.approx(held, rel=1e-3)
    assert "3 rounds after 1 to warm up" in finished.out
    assert "threads; load" in finished.out
    for dtype in ("float32", "bfloat16"):
        name = f"training, batch 2, {dtype}, f = 1.25"
        assert f"{name}: " in finished.out  # the heading of its speeds
        assert f"| {name} " in finished.out  # its lines in the table of memory
    assert "| ms p50/p90/max |" in " ".join(finished.out.split())
    assert finished.out.count("| experts |") == 4  # a line in each of two modes and two dtypes


def test_throughput_of_two_ranks(start_ranks, tiny, tmp_path):
    chosen = "--mode inference training --batch-sizes 2 --rounds 2 --warmup 0"
    ended = start_ranks(2, "tools/throughput.py", *CFG, "--output", tmp_path, chosen, *tiny)
    assert [outcome.status for outcome in ended] == [0, 0], ended
    rows = rows_of(tmp_path / "throughput.csv")
    assert [(r["mode"], r["ranks"]) for r in rows] == [("inference", "2"), ("training", "2")]
    for r in rows:
        fastest = 4 / min(map(float, r["moe_ms"].split())) * 1e3  # two images of each rank
        assert float(r["moe_images_per_second_q3"]) <= fastest
        states = 3 if r["mode"] == "training" else 1
        assert int(r["moe_held_bytes"]) < 0.8 * states * 4 * int(r["moe_parameters"])
    # the main rank alone speaks
    assert [outcome.out.count("2 processes") for outcome in ended] == [1, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_float16_needs_a_gpu(throughput, tiny, tmp_path):
    finished = throughput(*CFG, "--output", tmp_path, "--dtypes", "float16", QUICK, *tiny)
    assert_one_line(finished, "--dtypes is 'float16', which needs a GPU")


BAD = {
    "--rounds 0": "--rounds is 0, it must be at least 1",
    "--capacity-factors nan": "MODEL.MOE.EVAL_CAPACITY_FACTOR",
    "--opts COMPILE true": "--opts COMPILE is True, but --compile decides",
    "--output {file}/under": "cannot be made a directory",
}


@pytest.mark.parametrize("words", BAD)
def test_throughput_refuses(words, throughput, tmp_path):
    (tmp_path / "file").write_text("")
    finished = throughput(*CFG, "--output", tmp_path / "out", words, file=tmp_path / "file")
    assert_one_line(finished, BAD[words])
    assert not (tmp_path / "out").exists()


def test_tables_fit_100_columns_whatever_was_measured():
    """Rounds that differ by a factor of a thousand."""
    times = [0.012, 0.8, 9_876.5]
    assert len(_rate([1e3 / t for t in times])) <= 24
    assert len(_latency(SimpleNamespace(times=times))) <= 24
