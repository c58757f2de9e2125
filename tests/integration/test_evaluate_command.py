"""tools/evaluate.py on folders of JPEGs: its tables and files, three ranks as one, every input that
cannot work."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tool_cases import assert_one_line, command

from moe_core.files import fsync_and_hash
from swinv2_moe.checkpoints.checkpoint import read_meta, write_meta

LAYERS = ["layers.1.blocks.0.mlp.moe", "layers.2.blocks.0.mlp.moe"]


@pytest.fixture
def evaluate(monkeypatch, capsys):
    """`evaluate(*arguments)`: tools/evaluate.py in this process."""
    return command("evaluate", monkeypatch, capsys)


@pytest.fixture(scope="module")
def places(tmp_path_factory, runs):
    """Copies of a checkpoint that are not as they should be, and folders without images."""
    root = tmp_path_factory.mktemp("evaluate")
    whole = runs / "experts" / "checkpoints" / "latest"
    for name in ("nan", "nameless"):
        shutil.copytree(whole, root / name)
    meta, weights = read_meta(whole), root / "nan" / "model.safetensors"
    save_file(load_file(weights) | {"norm.weight": torch.full((64,), torch.nan)}, weights)
    files = meta["files"] | {"model.safetensors": fsync_and_hash(weights)}
    write_meta(root / "nan", meta | {"files": files})
    write_meta(root / "nameless", meta | {"class_names": []})
    (root / "empty").mkdir()
    for split in ("train", "val"):
        (root / "no_images" / split / "red").mkdir(parents=True)
    return root


def numbers(finished):
    """The lines of the tables, in words."""
    assert (finished.status, finished.err) == (0, "")
    return [line.split() for line in finished.out.splitlines()]


@pytest.fixture
def measure(evaluate, runs, tmp_path):
    """`measure(*arguments)`: the file that an evaluation of the run with experts writes, and the
    lines that it prints in words."""
    file = tmp_path / "found.json"

    def run(*arguments: object, resume: str = "experts") -> tuple[dict, list[list[str]]]:
        rows = numbers(evaluate("--resume", runs / resume, "--output", file, *arguments))
        return json.loads(file.read_text()), rows

    return run


def test_table_and_file(evaluate, measure, runs, photographs):
    """What the run's own validation found, whether the run is named or its checkpoint; nothing in
    it is touched."""
    before = {path: path.lstat().st_mtime_ns for path in runs.rglob("*")}
    found, rows = measure("--checkpoint", "latest")
    epoch = json.loads((runs / "experts" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (found["images"], found["classes"], found["step"], found["world_size"]) == (13, 2, 6, 1)
    assert (found["top1"], found["top5"]) == (pytest.approx(epoch["val_top1"]), None)
    assert found["loss"] == pytest.approx(epoch["val_loss"], rel=1e-5)  # other sums of 13 in fp32
    total = ["13", f"{found['top1']:.2f}%", "-", f"{found['confidence']:.2f}%"]
    assert total in [row[:4] for row in rows]
    assert {one["name"]: one["images"] for one in found["per_class"]} == {"blue": 8, "red": 5}
    for one in found["per_class"]:
        assert [one["name"], str(one["images"]), f"{one['top1']:.2f}%"] in rows
    assert sum(one["images"] for one in found["reliability"]) == 13
    assert (found["num_experts"], found["top_k"], found["capacity_factor"]) == (6, 1, 1.25)
    # with a capacity the images of a batch affect each other
    assert (found["batch_prioritized"], found["shuffled"]) == (True, True)
    assert list(found["dropped_share_by_layer"]) == LAYERS
    assert found["other_class_names"] is None
    assert found["unreadable_images"] == found["passed_over"] == []
    latest = runs / "experts" / "checkpoints" / "latest"
    checkpoint = evaluate("--resume", latest, "--data", photographs)
    assert numbers(checkpoint)[1:] == rows[2:]  # without the line about the choice
    assert {path: path.lstat().st_mtime_ns for path in runs.rglob("*")} == before


def test_which_checkpoint_of_a_run(evaluate, measure, runs, best_step):
    """By default the one whose accuracy was the best in validation, which it reaches again."""
    lines = (runs / "experts" / "metrics.jsonl").read_text().splitlines()
    best = max(json.loads(line).get("val_top1", 0) for line in lines)
    results = {}
    for which in ((), ("--checkpoint", "best"), ("--checkpoint", "3")):
        results[which], rows = measure(*which)
        del results[which]["machine"]  # its load changes
        assert rows[0] == results[which]["selected"].split()
    default, named, third = results.values()
    assert default["top1"] == pytest.approx(best)
    assert default == named
    assert default["step"] == best_step
    assert third["step"] == 3
    says = f"--checkpoint 4: {runs / 'experts'} has checkpoints of the steps 3, 6"
    assert_one_line(evaluate("--resume", runs / "experts", "--checkpoint", "4"), says)


def test_other_routing(measure):
    found = {}
    for factor in ("0.5", "-0.5", "0"):
        found[factor], rows = measure("--capacity-factor", factor, "--top-k", "2")
        assert "6 experts, K = 2, capacity factor" in " ".join(" ".join(row) for row in rows)
        assert (found[factor]["top_k"], found[factor]["capacity_factor"]) == (2, float(factor))
    first, second = found["0.5"]["dropped_share_by_layer"].values()  # of 4 times as many tokens
    assert 0.4 < found["0.5"]["dropped_share"] == pytest.approx((4 * first + second) / 5)
    assert found["-0.5"]["loss"] == found["0.5"]["loss"] != found["0"]["loss"]
    dropless = found["0"]
    assert [dropless["dropped_share"], *dropless["dropped_share_by_layer"].values()] == [0, 0, 0]


def test_three_ranks_count_what_one_does(measure, start_ranks, runs, tmp_path):
    """Dropless, so that nothing depends on who shares a batch."""
    arguments = ["--capacity-factor", "0", "--opts", "DATA.BATCH_SIZE", "3"]
    one, _ = measure(*arguments)
    output = ["--output", tmp_path / "3.json"]
    arguments = ["--resume", runs / "experts", *arguments]
    ended = start_ranks(3, "tools/evaluate.py", *output, *arguments)
    assert [outcome.status for outcome in ended] == [0, 0, 0], ended
    says = "6 experts, K = 1, capacity factor 0"
    assert [outcome.out.count(says) for outcome in ended] == [1, 0, 0]
    three = json.loads((tmp_path / "3.json").read_text())
    assert three["world_size"] == 3
    for key in ("per_class", "images", "top1", "top5"):
        assert three[key] == one[key]
    for key in ("loss", "ece"):  # other sums of 13 images: some 2^-24 of a value near 1 each
        assert three[key] == pytest.approx(one[key], rel=1e-4)


def test_a_dense_model(measure):
    found, rows = measure(resume="dense")
    assert "dense," in rows[1]
    assert found["dropped_share"] is None
    assert "num_experts" not in found


def test_classes_of_other_names(evaluate, measure, runs, places, photographs, tmp_path):
    """A test set with one known class, in val/ alone; the other is named and left out."""
    shutil.copytree(photographs / "val" / "blue", tmp_path / "data" / "val" / "[azure]")
    shutil.copytree(photographs / "val" / "red", tmp_path / "data" / "val" / "red")
    line = (
        "1 of 2 classes of the data are unknown to the checkpoint, their 8 validation images are"
        " left out: [azure]; 1 of 2 classes of the checkpoint are not in the data: blue"
    )
    data = ("--data", tmp_path / "data")
    found, rows = measure(*data)
    assert line.split() in rows
    assert (found["other_class_names"], found["images"], found["classes"]) == (line, 5, 2)
    assert [one["images"] for one in found["per_class"]] == [0, 5]
    assert found["per_class"][1] == measure()[0]["per_class"][1]
    assert "[azure]" in evaluate("--resume", places / "nameless", *data).out
    shutil.rmtree(tmp_path / "data" / "val" / "red")
    refused = evaluate("--resume", runs / "experts", *data)
    assert_one_line(refused, "the data have other classes")


def test_many_classes_show_their_ends(measure, monkeypatch):
    tool = sys.modules["swinv2_moe.measure.accuracy"]
    found = tool.accuracy_of

    def with_more_classes(*args):
        more = [{"name": f"class{i:02d}", "images": 4, "top1": float(i)} for i in range(30)]
        return found(*args) | {"per_class": more[::-1]}

    monkeypatch.setattr(tool, "accuracy_of", with_more_classes)
    _, rows = measure()
    shown = [row[0] for row in rows if row and row[0].startswith(("class", "..."))][1:]
    first, last = (f"class{i:02d}" for i in range(5)), (f"class{i:02d}" for i in range(25, 30))
    assert shown == [*first, "...", *last]


def test_broken_images_do_not_count(evaluate, runs, make_photographs):
    data = make_photographs()
    images = sorted((data / "val").rglob("*.jpg"))
    images[0].write_bytes(b"not a picture")
    arguments = ("--resume", runs / "experts", "--data", data, "--opts", "DATA.MAX_BAD_SHARE")
    finished = evaluate(*arguments, "0.1")
    assert "15" in [row[0] for row in numbers(finished) if row]
    assert f"1 images could not be read; the first: {images[0]}" in finished.out
    finished = evaluate(*arguments, "0.01")
    assert "error: 1 of 16 images could not be read, DATA.MAX_BAD_SHARE allows" in finished.err
    for image in images:
        image.write_bytes(b"not a picture")
    assert_one_line(evaluate(*arguments, "1"), "error: 16 of 16 images could not be read")


def test_outputs_that_are_not_finite(evaluate, places):
    says = f"checkpoint {places / 'nan'}: its outputs are not finite"
    assert_one_line(evaluate("--resume", places / "nan"), says)


# arguments after the good ones ({root} is `places`), and what the one line must name
BAD_INPUT = {
    "--resume {root}/empty": "--resume ... empty ... holds no checkpoint",
    "--resume auto": "--resume auto ... must be a run or a checkpoint",
    "--opts MODEL.SWINV2.EMBED_DIM 32": "does not fit ... patch_embed.proj.weight",
    "--dataset digits": (
        "experts/checkpoints/step- ... the data have other classes"
        " ... 2 of the checkpoint: blue, red"
    ),
    "--resume {root}/nameless --dataset digits": (
        "nameless: has 2 classes without names, the data (digits) has 10"
    ),
    "--data {root}/no_images": "no_images ... no images",
    "--capacity-factor nan": "--capacity-factor is nan ... finite",
    "--sweep 1 0": "--sweep has left: --capacity-factor ... `throughput --capacity-factors`",
    "--top-k 7": "MODEL.MOE.TOP_K is 7 ... MODEL.MOE.NUM_EXPERTS (6)",
    "--resume {runs}/dense --capacity-factor 0": "--capacity-factor ... dense ... has no experts",
    "--capacity-factor 1 --opts MODEL.MOE.ROUTER soft": (
        "--capacity-factor 1: MODEL.MOE.ROUTER 'soft' has no capacity factor"
    ),
    "--top-k 2 --opts MODEL.MOE.ROUTER soft": (
        "--top-k 2: with MODEL.MOE.ROUTER 'soft' every token gets the results of all experts"
    ),
    "--capacity-factor 0 --opts MODEL.MOE.ROUTER expert_choice": (
        "--capacity-factor 0: with MODEL.MOE.ROUTER 'expert_choice' ... must not be 0"
    ),
    "--output {root}": "--output ... must be a file",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_one_line(words, evaluate, runs, places, monkeypatch):
    """Before an image is read; nothing in the run is touched."""
    monkeypatch.setattr("swinv2_moe.measure.accuracy.predict", None)
    before = {path: path.lstat().st_mtime_ns for path in runs.rglob("*")}
    refused = evaluate("--resume", runs / "experts", words, root=places, runs=runs)
    assert_one_line(refused, BAD_INPUT[words])
    assert {path: path.lstat().st_mtime_ns for path in runs.rglob("*")} == before


def test_results_that_cannot_be_written(evaluate, runs, tmp_path):
    """They are shown all the same."""
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    finished = evaluate("--resume", runs / "experts", "--output", full)
    assert finished.status == 2
    assert "top-1" in finished.out
    says = f"error: --output {full}: cannot be written (No space left on device)\n"
    assert finished.err == says
