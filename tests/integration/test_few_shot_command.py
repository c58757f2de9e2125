"""tools/few_shot.py on folders of JPEGs and on the digits: its table, its file, and every input
that cannot work."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tool_cases import assert_one_line, command

from moe_core.files import fsync_and_hash
from swinv2_moe.checkpoints.checkpoint import read_meta, write_meta
from swinv2_moe.config import load_config
from swinv2_moe.train.run import train


@pytest.fixture
def few_shot(monkeypatch, capsys):
    """`few_shot(*arguments)`: tools/few_shot.py in this process."""
    return command("few_shot", monkeypatch, capsys)


@pytest.fixture(scope="module")
def run(tmp_path_factory, photographs, small):
    """A run of one step, with averaged weights and keys of a machine that is not this one."""
    output = tmp_path_factory.mktemp("few_shot") / "run"
    keys = (
        "TRAIN.MAX_STEPS 1 TRAIN.EMA_DECAY 0.5 DATA.GLOBAL_BATCH_SIZE 16 DATA.DATASET folder"
        " MODEL.MOE.EXPERT_PARALLEL_SIZE 4 MODEL.MOE.STRATEGY auto"
    )
    train(load_config(None, [*small, *keys.split()], data=str(photographs), output=str(output)))
    return output


def test_table_and_file(few_shot, run, photographs, tmp_path):
    file = tmp_path / "results.json"
    words = ("--data", photographs, "--output", file, "--opts", "DATA.BATCH_SIZE", "10")
    finished = few_shot("--resume", run, *words)
    assert (finished.status, finished.err) == (0, "")
    found = json.loads(file.read_text())
    counts = [found[key] for key in ("step", "classes", "train_images", "val_images")]
    assert counts == [1, 2, 48, 13]
    assert list(found["few_shot"]) == ["1", "5", "10"]
    rows = [line.split() for line in finished.out.splitlines()]
    for shots, result in found["few_shot"].items():
        assert len(result["top1"]) == 5
        mean, std = f"{result['mean']:.2f}%", f"{result['std']:.2f}"
        assert [f"{shots}-shot", "ridge", mean, std, "5"] in rows
    assert found["few_shot"]["10"]["mean"] == 100  # red and blue
    assert ["20-NN,", "all", "images", f"{found['knn']['top1']:.2f}%", "-", "-"] in rows


def test_the_averaged_weights_are_measured(few_shot, run, photographs, tmp_path):
    """With NaN in the other weights nothing changes; with NaN in these, the features are
    refused."""
    checkpoint = next((run / "checkpoints").glob("step-*"))
    arguments = ("--data", photographs, "--shots 1 --draws 1 --opts DEVICE cpu")
    outputs = []
    for section in ("", "ema"):
        copy = tmp_path / f"nan_{section}"
        shutil.copytree(checkpoint, copy)
        name = str((copy / section / "model.safetensors").relative_to(copy))
        tensors = load_file(copy / name) | {"norm.weight": torch.full((64,), torch.nan)}
        save_file(tensors, copy / name)
        meta = read_meta(checkpoint)
        write_meta(copy, meta | {"files": meta["files"] | {name: fsync_and_hash(copy / name)}})
        outputs.append(few_shot("--resume", copy, *arguments))
    assert outputs[0].status == 0
    assert outputs[1].status == 2
    assert "nan_ema: its features are not finite" in outputs[1].err


def test_other_data_with_other_classes(few_shot, run, tmp_path):
    arguments = ("--resume", run, "--dataset", "digits", "--output", tmp_path / "digits.json")
    finished = few_shot(*arguments, "--classifier logistic --shots 1 --draws 1")
    assert (finished.status, finished.err) == (0, "")
    found = json.loads((tmp_path / "digits.json").read_text())
    assert (found["dataset"], found["classes"], found["val_images"]) == ("digits", 10, 360)
    assert found["few_shot"]["1"]["std"] is None


def test_broken_images_are_counted_and_never_drawn(few_shot, run, make_photographs):
    data = make_photographs(broken=4)
    arguments = ("--resume", run, "--data", data, "--knn 5 --opts DATA.MAX_BAD_SHARE")
    finished = few_shot("--shots 20", *arguments, "0.1")
    assert (finished.status, finished.err) == (0, "")
    assert "44 + 16 images" in finished.out
    assert "4 images could not be read; the first: " in finished.out
    finished = few_shot("--shots 21", *arguments, "0.1")
    says = "error: --shots 21: class 'red' has 20 training images that can be read\n"
    assert finished.err == says
    finished = few_shot(*arguments, "0.01")
    assert_one_line(finished, "4 of 64 images could not be read")


def test_validation_images_none_of_which_can_be_read(few_shot, run, make_photographs):
    data = make_photographs()
    for image in (data / "val").rglob("*.jpg"):
        image.write_bytes(b"not a picture")
    finished = few_shot("--resume", run, "--data", data, "--opts", "DATA.MAX_BAD_SHARE", "0.5")
    assert_one_line(finished, "error: none of the 16 validation images can be read; the first: ")


@pytest.fixture(scope="module")
def places(tmp_path_factory, photographs):
    root = tmp_path_factory.mktemp("places")
    (root / "empty").mkdir()
    for split in ("train", "val"):
        shutil.copytree(photographs / split / "red", root / "one_class" / split / "red")
    return root


# arguments after the good ones ({root} is `places`), and what the one line must name
BAD_INPUT = {
    "--shots 5 25": "--shots 25 ... class 'blue' has 24 training images",
    "--knn 49": "--knn 49 ... 48 training images",
    "--data {root}/one_class": "1 class ('red')",
    "--resume {root}/empty": "--resume ... empty ... holds no checkpoint",
    "--output {root}": "--output ... must be a file",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_one_line(words, few_shot, run, photographs, places, monkeypatch):
    """Before an image is read."""
    monkeypatch.setattr("swinv2_moe.measure.few_shot._extract", None)
    finished = few_shot("--resume", run, "--data", photographs, words, root=places)
    assert_one_line(finished, BAD_INPUT[words])
