"""tools/evaluate.py on folders of JPEGs: its tables and files, three ranks as one, every input that
cannot work."""

import json
import shutil
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tool_cases import command

from moe_core.files import fsync_and_hash
from swinv2_moe.config import load_config
from swinv2_moe.train import train
from swinv2_moe.train.checkpoint import read_meta, write_meta

LAYERS = ["layers.1.blocks.0.mlp.moe", "layers.2.blocks.0.mlp.moe"]


@pytest.fixture
def evaluate(monkeypatch, capsys):
    """`evaluate(*arguments)`: tools/evaluate.py in this process, with few rounds of timing."""
    monkeypatch.setattr("swinv2_moe.measure.accuracy.ROUNDS", 3)
    return command("evaluate", monkeypatch, capsys)


@pytest.fixture(scope="module")
def photographs(make_photographs):
    """13 validation images: neither 2 nor 3 ranks divide them."""
    root = make_photographs()
    for number in range(3):
        (root / "val" / "red" / f"{number:02d}.jpg").unlink()
    return root


@pytest.fixture(scope="module")
def runs(tmp_path_factory, photographs, small):
    """Two epochs with experts and one step without; copies of the first that are not as they should
    be."""
    root = tmp_path_factory.mktemp("evaluate")
    keys = {
        "run": ["MODEL.MOE.NUM_EXPERTS", "6", "MODEL.MOE.EVAL_CAPACITY_FACTOR", "1.25"],
        "dense": ["MODEL.MOE.NUM_EXPERTS", "0", "TRAIN.MAX_STEPS", "1"],
    }
    for name, opts in keys.items():
        opts = [
            *small,
            "DATA.DATASET",
            "folder",
            "AUG.MIXUP",
            "0",
            "AUG.CUTMIX",
            "0",
            "TRAIN.BASE_LR",
            "3e-2",
            *opts,
        ]
        train(load_config(None, opts, data=str(photographs), output=str(root / name)))
    whole = root / "run" / "checkpoints" / "latest"
    for name in ("nan", "damaged", "nameless", "newer"):
        shutil.copytree(whole, root / name)
    meta = read_meta(whole)
    tensors = load_file(root / "nan" / "model.safetensors") | {
        "norm.weight": torch.full((64,), torch.nan)
    }
    save_file(tensors, root / "nan" / "model.safetensors")
    files = meta["files"] | {
        "model.safetensors": fsync_and_hash(root / "nan" / "model.safetensors")
    }
    write_meta(root / "nan", meta | {"files": files})
    (root / "damaged" / "model.safetensors").unlink()
    write_meta(root / "nameless", meta | {"class_names": []})
    write_meta(root / "newer", meta | {"format_version": 9})
    (root / "empty").mkdir()
    for split in ("train", "val"):
        (root / "no_images" / split / "red").mkdir(parents=True)
    return root


def numbers(finished):
    """The lines of the tables, in words."""
    assert (finished.status, finished.err) == (0, "")
    return [line.split() for line in finished.out.splitlines()]


def test_table_and_file(evaluate, runs, photographs, tmp_path):
    """What the run's own validation found, whether the run is named or its checkpoint; nothing in
    it is touched."""
    before = {path: path.lstat().st_mtime_ns for path in runs.rglob("*")}
    newest = ["--resume", runs / "run", "--checkpoint", "latest"]
    rows = numbers(evaluate(*newest, "--output", tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    epoch = json.loads((runs / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (found["images"], found["classes"], found["step"], found["world_size"]) == (13, 2, 6, 1)
    assert (found["top1"], found["top5"]) == (pytest.approx(epoch["val_top1"]), None)
    assert found["loss"] == pytest.approx(epoch["val_loss"])
    assert ["13", f"{found['top1']:.2f}%", "-", f"{found['confidence']:.2f}%"] in [
        row[:4] for row in rows
    ]
    assert {one["name"]: one["images"] for one in found["per_class"]} == {"blue": 8, "red": 5}
    for one in found["per_class"]:
        assert [one["name"], str(one["images"]), f"{one['top1']:.2f}%"] in rows
    assert sum(one["images"] for one in found["reliability"]) == 13
    assert (found["num_experts"], found["top_k"], found["capacity_factor"]) == (6, 1, 1.25)
    assert (found["batch_prioritized"], found["shuffled"]) == (True, False)
    assert list(found["dropped_share_by_layer"]) == LAYERS
    assert (found["other_class_names"], found["unreadable_images"], found["passed_over"]) == (
        None,
        [],
        [],
    )
    assert "sweep" not in found
    checkpoint = evaluate(
        "--resume", runs / "run" / "checkpoints" / "latest", "--data", photographs
    )
    assert numbers(checkpoint)[1:] == rows[2:]  # without the line about the choice
    assert {path: path.lstat().st_mtime_ns for path in runs.rglob("*")} == before


def test_which_checkpoint_of_a_run(evaluate, runs, tmp_path):
    """By default the one whose accuracy was the best in validation, which it reaches again."""
    epochs = [
        json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    best = max(line.get("val_top1", 0) for line in epochs)
    results = {}
    for which in (None, "best", "3"):
        arguments = ["--resume", runs / "run", "--output", tmp_path / "found.json"]
        if which is not None:
            arguments += ["--checkpoint", which]
        finished = evaluate(*arguments)
        assert finished.status == 0
        results[which] = json.loads((tmp_path / "found.json").read_text())
        del results[which]["machine"]  # its load changes
        assert finished.out.splitlines()[0] == results[which]["selected"]
    assert results[None]["top1"] == pytest.approx(best)
    assert results[None] == results["best"]
    assert results["3"]["step"] == 3
    refused = evaluate("--resume", runs / "run", "--checkpoint", "4")
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.endswith(
        f"--checkpoint 4: {runs / 'run'} has checkpoints of the steps 3, 6\n"
    )


def test_other_routing(evaluate, runs, tmp_path):
    found = {}
    for factor in ("0.5", "-0.5", "0"):
        arguments = (
            "--capacity-factor",
            factor,
            "--top-k",
            "2",
            "--output",
            tmp_path / "found.json",
        )
        assert (
            "6 experts, K = 2, capacity factor"
            in evaluate("--resume", runs / "run", *arguments).out
        )
        found[factor] = json.loads((tmp_path / "found.json").read_text())
        assert (found[factor]["top_k"], found[factor]["capacity_factor"]) == (2, float(factor))
    layers = found["0.5"]["dropped_share_by_layer"].values()
    assert 0.4 < found["0.5"]["dropped_share"] == pytest.approx(sum(layers) / 2, abs=0.2)
    assert found["-0.5"]["loss"] == found["0.5"]["loss"] != found["0"]["loss"]
    assert (found["0"]["dropped_share"], *found["0"]["dropped_share_by_layer"].values()) == (
        0,
        0,
        0,
    )


def test_sweep(evaluate, runs, tmp_path):
    """Its row of the checkpoint's own factor is the result without a sweep, and the base of the
    speeds."""
    evaluate("--resume", runs / "run", "--output", tmp_path / "plain.json")
    finished = evaluate(
        "--resume", runs / "run", "--sweep", "0", "0.5", "1.25", "--output", tmp_path / "sweep.json"
    )
    rows = numbers(finished)
    assert rows[-1] == ["figure:", str(tmp_path / "sweep.png")]
    plain, found = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "sweep")
    )
    for key in ("loss", "dropped_share", "capacity_factor"):
        assert found[key] == plain[key]
    half, own, dropless = found["sweep"]
    assert [row["capacity_factor"] for row in found["sweep"]] == [0.5, 1.25, 0]
    assert found["rounds"] == 3
    assert own["speed_ratio"] == {"median": 1, "quartiles": [1, 1]}
    assert (own["top1"], own["loss"], own["dropped_share"]) == (
        plain["top1"],
        plain["loss"],
        plain["dropped_share"],
    )
    assert half["dropped_share"] > own["dropped_share"] >= dropless["dropped_share"] == 0
    for row in found["sweep"]:
        low, high = row["images_per_second"]["quartiles"]
        assert 0 < low <= row["images_per_second"]["median"] <= high
        assert [f"{row['capacity_factor']:g}", f"{row['dropped_share']:.2%}"] in [
            words[:2] for words in rows
        ]
    with Image.open(tmp_path / "sweep.png") as image:
        assert image.format == "PNG"


def test_three_ranks_count_what_one_does(evaluate, start_ranks, runs, tmp_path):
    """Dropless, so that nothing depends on who shares a batch; the sweep times all ranks
    together."""
    arguments = [
        "--resume",
        runs / "run",
        "--capacity-factor",
        "0",
        "--opts",
        "DATA.BATCH_SIZE",
        "3",
        "--output",
    ]
    numbers(evaluate(*arguments, tmp_path / "1.json"))
    ended = start_ranks(3, "tools/evaluate.py", *arguments, tmp_path / "3.json", "--sweep", 0.5)
    assert [outcome.status for outcome in ended] == [0, 0, 0], ended
    assert [outcome.out.count("6 experts, K = 1, capacity factor 0") for outcome in ended] == [
        1,
        0,
        0,
    ]
    one, three = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 3))
    assert three["world_size"] == 3
    assert three["per_class"] == one["per_class"]
    assert [three[key] for key in ("images", "top1", "top5")] == [
        one[key] for key in ("images", "top1", "top5")
    ]
    assert [three[key] for key in ("loss", "ece")] == pytest.approx(
        [one[key] for key in ("loss", "ece")], rel=1e-4
    )
    assert [row["capacity_factor"] for row in three["sweep"]] == [0.5, 0]
    assert (tmp_path / "3.png").is_file()


def test_a_dense_model(evaluate, runs, tmp_path):
    rows = numbers(evaluate("--resume", runs / "dense", "--output", tmp_path / "found.json"))
    assert "dense," in rows[1]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["dropped_share"] is None
    assert "num_experts" not in found


def test_classes_of_other_names(evaluate, runs, photographs, tmp_path):
    """A test set with one known class, in val/ alone; the other is named and left out."""
    shutil.copytree(photographs / "val" / "blue", tmp_path / "data" / "val" / "[azure]")
    shutil.copytree(photographs / "val" / "red", tmp_path / "data" / "val" / "red")
    line = (
        "1 of 2 classes of the data are unknown to the checkpoint, their 8 validation images are"
        " left out: [azure]; 1 of 2 classes of the checkpoint are not in the data: blue"
    )
    arguments = ("--data", tmp_path / "data", "--output", tmp_path / "found.json")
    finished = evaluate("--resume", runs / "run", *arguments)
    assert line in finished.out.splitlines()
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["other_class_names"], found["images"], found["classes"]) == (line, 5, 2)
    assert [one["images"] for one in found["per_class"]] == [0, 5]
    whole = tmp_path / "whole.json"
    evaluate("--resume", runs / "run", "--output", whole)
    assert found["per_class"][1] == json.loads(whole.read_text())["per_class"][1]
    assert "[azure]" in evaluate("--resume", runs / "nameless", *arguments).out
    shutil.rmtree(tmp_path / "data" / "val" / "red")
    finished = evaluate("--resume", runs / "run", *arguments)
    assert (finished.status, finished.err.count("\n")) == (2, 1)
    assert "has none of the classes of the data" in finished.err


def test_many_classes_show_their_ends(evaluate, runs, make_photographs, monkeypatch):
    tool = sys.modules["swinv2_moe.measure.accuracy"]
    found = tool.measure

    def with_more_classes(*args):
        more = [{"name": f"class{i:02d}", "images": 4, "top1": float(i)} for i in range(30)]
        return found(*args) | {"per_class": more[::-1]}

    monkeypatch.setattr(tool, "measure", with_more_classes)
    rows = numbers(evaluate("--resume", runs / "run"))
    shown = [row[0] for row in rows if row and row[0].startswith(("class", "..."))][1:]
    assert shown == [
        *(f"class{i:02d}" for i in range(5)),
        "...",
        *(f"class{i:02d}" for i in range(25, 30)),
    ]


def test_broken_images_do_not_count(evaluate, runs, make_photographs):
    data = make_photographs()
    images = sorted((data / "val").rglob("*.jpg"))
    images[0].write_bytes(b"not a picture")
    arguments = ("--resume", runs / "run", "--data", data, "--opts", "DATA.MAX_BAD_SHARE")
    finished = evaluate(*arguments, "0.1")
    assert "15" in [row[0] for row in numbers(finished) if row]
    assert f"1 images could not be read; the first: {images[0]}" in finished.out
    finished = evaluate(*arguments, "0.01")
    assert finished.err.startswith(
        "error: 1 of 16 images could not be read, DATA.MAX_BAD_SHARE allows"
    )
    for image in images:
        image.write_bytes(b"not a picture")
    finished = evaluate(*arguments, "1")
    assert (finished.status, finished.out) == (2, "")
    assert finished.err.startswith("error: 16 of 16 images could not be read")


def test_outputs_that_are_not_finite(evaluate, runs):
    finished = evaluate("--resume", runs / "nan")
    assert (finished.status, finished.out) == (2, "")
    assert finished.err == f"error: checkpoint {runs / 'nan'}: its outputs are not finite\n"


# arguments after the good ones ({root} is `runs`), and what the one line must name
BAD_INPUT = {
    "no checkpoint": (["--resume", "{root}/empty"], ["--resume", "empty", "holds no checkpoint"]),
    "auto": (["--resume", "auto"], ["--resume auto", "must be a run or a checkpoint"]),
    "damaged": (["--resume", "{root}/damaged"], ["damaged: model.safetensors", "is missing"]),
    "newer format": (
        ["--resume", "{root}/newer"],
        ["newer has format version 9, this program knows 1"],
    ),
    "another model": (
        ["--opts", "MODEL.SWINV2.EMBED_DIM", "32"],
        ["does not fit", "patch_embed.proj.weight"],
    ),
    "other classes": (
        ["--dataset", "digits"],
        ["run/checkpoints/step-", "has none of the classes", "2 of the checkpoint: blue, red"],
    ),
    "other classes, unnamed": (
        ["--resume", "{root}/nameless", "--dataset", "digits"],
        ["nameless: has 2 classes without names, the data (digits) has 10"],
    ),
    "no data": (["--data", "{root}/nowhere"], ["DATA.PATH", "nowhere"]),
    "no images": (["--data", "{root}/no_images"], ["no_images", "no images"]),
    "no such kind of data": (
        ["--dataset", "foldr"],
        ["DATA.DATASET is 'foldr'", "did you mean folder?"],
    ),
    "capacity of nothing": (["--capacity-factor", "nan"], ["--capacity-factor is nan", "finite"]),
    "endless sweep": (["--sweep", "1", "inf"], ["--sweep is inf", "finite"]),
    "more than all experts": (
        ["--top-k", "7"],
        ["MODEL.MOE.TOP_K is 7", "MODEL.MOE.NUM_EXPERTS (6)"],
    ),
    "no experts chosen": (["--top-k", "0"], ["MODEL.MOE.TOP_K is 0", "at least 1"]),
    "capacity of a dense model": (
        ["--resume", "{root}/dense", "--capacity-factor", "0"],
        ["--capacity-factor", "dense", "has no experts"],
    ),
    "K of a dense model": (
        ["--resume", "{root}/dense", "--top-k", "1"],
        ["--top-k", "dense", "has no experts"],
    ),
    "sweep of a dense model": (
        ["--resume", "{root}/dense", "--sweep", "1"],
        ["--sweep", "dense", "has no experts"],
    ),
    "capacity of Soft MoE": (
        ["--capacity-factor", "1", "--opts", "MODEL.MOE.ROUTER", "soft"],
        ["--capacity-factor 1: MODEL.MOE.ROUTER 'soft' has no capacity factor"],
    ),
    "sweep of Soft MoE": (
        ["--sweep", "2", "--opts", "MODEL.MOE.ROUTER", "soft"],
        ["--sweep 2: MODEL.MOE.ROUTER 'soft' has no capacity factor"],
    ),
    "K of Soft MoE": (
        ["--top-k", "2", "--opts", "MODEL.MOE.ROUTER", "soft"],
        ["--top-k 2: with MODEL.MOE.ROUTER 'soft' every token gets the results of all experts"],
    ),
    "dropless where experts choose": (
        ["--capacity-factor", "0", "--opts", "MODEL.MOE.ROUTER", "expert_choice"],
        ["--capacity-factor 0: with MODEL.MOE.ROUTER 'expert_choice'", "must not be 0"],
    ),
    "dropless sweep where experts choose": (
        ["--sweep", "1", "0", "--opts", "MODEL.MOE.ROUTER", "expert_choice"],
        ["--sweep 0: with MODEL.MOE.ROUTER 'expert_choice'", "must not be 0"],
    ),
    "output in no directory": (["--output", "{root}/none/r.json"], ["--output", "none/r.json"]),
    "output is a directory": (["--output", "{root}"], ["--output", "must be a file"]),
    "output is the figure": (
        ["--output", "{root}/a.png", "--sweep", "1"],
        ["a.png", "the sweep's figure"],
    ),
    "unknown key": (
        ["--opts", "DATA.IMGSIZE", "16"],
        ["--opts unknown key DATA.IMGSIZE", "did you mean"],
    ),
    "odd opts": (["--opts", "DATA.IMG_SIZE"], ["pairs", "DATA.IMG_SIZE"]),
    "global batch": (
        ["--opts", "DATA.GLOBAL_BATCH_SIZE", "15", "TRAIN.ACCUMULATION_STEPS", "2"],
        ["SIZE is 15"],
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line(case, evaluate, runs, photographs, monkeypatch):
    def too_late(*args):
        raise AssertionError("images were read")

    monkeypatch.setattr("swinv2_moe.measure.accuracy.predict", too_late)
    before = {path: path.lstat().st_mtime_ns for path in runs.rglob("*")}
    arguments, texts = BAD_INPUT[case]
    finished = evaluate(
        "--resume", runs / "run", *[argument.format(root=runs) for argument in arguments]
    )
    assert (finished.status, finished.out) == (2, "")
    lines = finished.err.splitlines()
    assert len(lines) == 1, finished.err
    assert [text for text in texts if text not in lines[0]] == [], lines[0]
    assert {path: path.lstat().st_mtime_ns for path in runs.rglob("*")} == before


def test_results_that_cannot_be_written(evaluate, runs, tmp_path):
    """They are shown all the same."""
    (tmp_path / "full").symlink_to("/dev/full")
    finished = evaluate("--resume", runs / "run", "--output", tmp_path / "full")
    assert finished.status == 2
    assert "top-1" in finished.out
    assert (
        finished.err
        == f"error: --output {tmp_path / 'full'}: cannot be written (No space left on device)\n"
    )
