"""The page of runs without a checkpoint: what is reckoned from all of a run's parts, and names as
they are."""

import html
import json
import re

import pytest

from swinv2_moe.config import default_config
from swinv2_moe.measure.report import render
from swinv2_moe.measure.report_validation import ReportValidation
from swinv2_moe.measure.run_record import read_runs

SUMMARY = {"parameters": 1e6, "active_macs": 1e6, "world_size": 2, "device": "cpu"}
SUMMARY |= {"seconds": 9, "images_per_second": 9}


@pytest.fixture
def make_run(tmp_path):
    """`make_run(name, top5)`: a run of two parts, of which the second was quick."""

    def make(name, top5=90.0):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        (directory / "config.yaml").write_text(default_config().dump())
        rates = {1: 100, 2: 120, 3: 110, 4: 1000}
        lines = [
            {"step": i, "epoch": 1, "loss": 1.0, "images_per_second": rate}
            for i, rate in rates.items()
        ]
        scores = {"val_top1": 50.0, "val_top5": top5, "val_loss": 1.0}
        lines += [
            {"step": 2 * i, "epoch": i, "seconds": 3500.0 - 3000 * i} | scores for i in (0, 1)
        ]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (directory / "summary.json").write_text(json.dumps(SUMMARY))
        return directory

    return make


def page_of(*directories) -> str:
    runs = read_runs(directories)
    return html.unescape(render(runs, [ReportValidation(problem="No predictions.")] * len(runs)))


def tiles(page: str) -> dict[str, str]:
    return dict(re.findall(r'<span class="soft small">(.*?)</span><b>(.*?)</b>', page))


def test_all_steps_count_whether_logged_or_not(make_run):
    run = make_run("run")
    end = {"step": 9, "epoch": 2, "seconds": 1.0, "val_top1": 1.0, "val_top5": 2.0, "val_loss": 1.0}
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(end) + "\n")
    assert tiles(page_of(run))["epochs, steps"] == "2, 9"  # the last line is of epoch 2


def test_figures_are_the_whole_runs(make_run):
    page = page_of(make_run("run"))
    assert "Strategies" not in page  # without a tuner
    assert "under the tuner" not in page
    found = tiles(page)
    assert found["training and validation"] == "1 h 07 min"  # 3,500 + 500 s; the summary knows of 9
    assert found["images/s, median"] == "115"
    assert found["top-5, last"] == "90.00%"


def test_top5_of_few_classes_is_left_out(make_run):
    page = page_of(make_run("run", top5=100.0))
    assert "top-1, last" in tiles(page)
    assert "top-5" not in page


@pytest.mark.parametrize("names", [("_old", "cat $x_$"), ("a/run", "b/run")])
def test_every_run_stands_in_the_legends(make_run, names):
    page = page_of(*map(make_run, names))
    for name in names:
        assert f">{name} training<" in page  # of the losses
        assert f">{name}<" in page


def test_the_tuners_decisions(make_run):
    run = make_run("run")
    layers = "M=96 H=384 E=8 K=1 over 4 ranks, capacity up to 256"
    first = {"event": "decided", "layers": layers, "to": "r=1 d=1 linear", "ms": 3.25}
    time = first | {"event": "time"}  # of an earlier version
    other = first | {"to": "r=0 d=1 linear", "ms": None}
    lines = [{"step": 10 * i, "strategy": event} for i, event in enumerate([first, time, other])]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.write(json.dumps({"step": 50, "strategy": {"event": "decided"}}) + "\n")
    page = page_of(run)
    table = page[page.index('id="strategies-1"') :]
    rows = re.findall(r"<tr>(<td>.*?)</tr>", table[: table.index("</section>")])
    assert [re.findall("<td>(.*?)</td>", row) for row in rows] == [
        ["0", layers, "r=1 d=1 linear", "3.25"],
        ["20", layers, "r=0 d=1 linear", "-"],
    ]
    assert "1 damaged lines" in page


def test_where_the_time_went(make_run):
    run = make_run("run")
    old = page_of(run)
    assert "Where the time went" not in old  # a run of an earlier version
    seconds = {"staging": 10.0, "start": 5.0, "training": 80.0, "other": 5.0}
    summary = SUMMARY | {"phases": seconds, "target_top1": 40.0, "time_to_solution": 62.5}
    (run / "summary.json").write_text(json.dumps(summary | {"joules_to_target": 2500.0}))
    page = page_of(run)
    note = (
        "100.0 s in all parts of the run, 95.0% of it accounted for; time to solution (top-1 40%)"
    )
    assert f"{note}: 62.5 s, 2.5 kJ" in page
    widths = [float(width) for width in re.findall(r'<i style="width: ([\d.]+)%; background', page)]
    assert widths == [10, 5, 80, 5]
    (row,) = re.findall(r"</i>training</th>(.*?)</tr>", page)
    assert re.findall(r"<td>(.*?)</td>", row) == ["80.0 s", "80.0%"]


def test_phases_that_are_damaged(make_run):
    run = make_run("run")
    for phases in ({"training": "x"}, {"training": -(2**70)}, [], {}, 3):
        (run / "summary.json").write_text(json.dumps(SUMMARY | {"phases": phases}))
        assert "Where the time went" not in page_of(run), phases


def test_the_best_epoch_may_not_be_the_last(make_run):
    run = make_run("run")
    end = {"step": 9, "epoch": 2, "seconds": 1.0, "val_top1": 1.0, "val_top5": 2.0, "val_loss": 1.0}
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(end) + "\n")
    found = tiles(page_of(run))
    assert (found["top-1, last"], found["top-1, best"]) == ("1.00%", "50.00%")


def test_the_result_is_first_and_the_machine_is_folded(make_run):
    run = make_run("run")
    with (run / "metrics.jsonl").open("a") as lines:
        step = {"step": 5, "epoch": 1, "loss": 1.0, "images_per_second": 9, "aux_loss": 1.0}
        load = {f"moe/load/blocks.1.mlp.moe/{expert}": 1.0 for expert in (0, 1)}
        lines.write(json.dumps(step | {"memory_bytes": 1e9, "moe/entropy": 0.5} | load) + "\n")
    page = page_of(run)
    order = [
        *('id="summary"', 'id="validation-1"', 'id="curves"', ">Loss<", 'id="routing"'),
        *(">Routing entropy<", 'id="configuration"', '<details id="machine"', ">Throughput<"),
        *(">Memory<", 'id="environment"'),
    ]
    places = [page.find(name) for name in order]
    assert -1 not in places
    assert places == sorted(places)
    assert 'id="routing"' not in page_of(make_run("dense"))
