"""What `inspect` says of a checkpoint, and of one that is not whole."""

import json
import os
import shutil
from pathlib import Path

import pytest

from swinv2_moe.checkpoints.checkpoint import write_meta

LAYERS = ["layers.1.blocks.1.mlp.moe", "layers.2.blocks.0.mlp.moe", "layers.2.blocks.1.mlp.moe"]


@pytest.fixture
def run(make_checkpoint, tmp_path) -> Path:
    """A run directory whose checkpoint of step 7 has averages and moments, and in one layer older
    experts."""
    ours, _ = make_checkpoint()
    meta = json.loads((ours / "meta.json").read_text())
    weights = dict(meta["files"])
    for section in ("ema", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        for file in weights:
            (ours / section / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ours / file, ours / section / file)
        meta["files"] |= {f"{section}/{file}": record for file, record in weights.items()}
    meta["experts"][LAYERS[1]] = [7, 3, 5, 3]
    training = {"epoch": 2, "epoch_step": 3, "epoch_loss": 4.5, "validated_step": 6}
    training |= {"steps_per_epoch": 12, "global_batch": 8, "skipped": 0, "strategies": []}
    training |= {"best_top1": 50.0, "last_top1": None}
    training["loss_scaler"] = {"scale": 1.0, "good_steps": 0, "updates": 7}
    meta["training"] = training
    del meta["checksum"]
    write_meta(ours, meta)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    ours.rename(checkpoints / "step-00000007")
    (checkpoints / "latest").symlink_to("step-00000007")
    return tmp_path / "run"


def test_as_json(run, convert):
    directory = run / "checkpoints" / "step-00000007"
    trunk = (directory / "model.safetensors").stat().st_size
    experts, layers = {}, {}
    for name in LAYERS:
        files = (directory / "experts" / name).iterdir()
        experts[name] = sum(file.stat().st_size for file in files)
        layers[name] = {"experts": 4, "bytes": experts[name]}
    whole = [13, trunk + sum(experts.values())]
    facts = {"directory": str(directory), "step": 7, "epoch": 2.25, "classes": 5, "damaged": {}}
    for path in (run, directory):
        finished = convert("inspect", path, "--json")
        assert finished.status == 0
        said = json.loads(finished.out)
        assert {key: said[key] for key in facts} == facts
        sections = ("weights", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq")
        assert said["sections"] == dict.fromkeys(sections, whole)
        assert said["layers"] == layers


def test_as_a_table(run, convert):
    finished = convert("inspect", run)
    assert finished.status == 0
    for text in ("step 7, epoch 2.25, saved 20", "swin_moe, dim 8", "4 experts, top-1"):
        assert text in finished.out
    assert "5 named classes" in finished.out
    assert "every file has its checksum" in finished.out
    rows = {
        line.split()[0]: " ".join(line.split()[1:])
        for line in finished.out.splitlines()
        if line[2:].strip()
    }
    assert rows["optimizer/exp_avg"].startswith("13 ")
    assert rows[LAYERS[0]].startswith("4 ")


def test_weights_alone_and_a_dense_model(convert, make_checkpoint):
    ours, _ = make_checkpoint("MODEL.MOE.NUM_EXPERTS", 0)
    finished = convert("inspect", ours)
    assert finished.status == 0
    assert "step 7, weights alone" in finished.out
    assert "dense" in finished.out
    assert json.loads(convert("inspect", ours, "--json").out)["layers"] == {}


def test_every_damaged_file_is_named_and_the_status_is_1(run, convert):
    directory = run / "checkpoints" / "step-00000007"
    missing, changed = "model.safetensors", "ema/model.safetensors"
    short = f"ema/experts/{LAYERS[0]}/0001.safetensors"
    (directory / missing).unlink()
    os.truncate(directory / short, 10)
    content = bytearray((directory / changed).read_bytes())
    content[-1] ^= 1
    (directory / changed).write_bytes(content)
    finished = convert("inspect", run)
    assert finished.status == 1
    assert f"{missing} is missing" in finished.out
    assert f"{short} has 10 bytes" in finished.out
    assert f"{changed} is damaged (its checksum differs)" in finished.out
    assert "every file" not in finished.out
    said = convert("inspect", run, "--json")
    assert said.status == 1
    assert set(json.loads(said.out)["damaged"]) == {missing, short, changed}


def test_a_damaged_description(run, convert):
    meta = run / "checkpoints" / "step-00000007" / "meta.json"
    meta.write_text(meta.read_text().replace('"step": 7', '"step": 8'))
    finished = convert("inspect", run)
    assert (finished.status, finished.out) == (1, "")
    assert "meta.json is damaged" in finished.err
    assert finished.err.count("\n") == 1


@pytest.mark.parametrize("what", ["nothing", "an empty directory", "a run without one", "a file"])
def test_no_checkpoint(what, convert, tmp_path):
    path = tmp_path / "c"
    if what == "a file":
        path.write_text("")
    elif what != "nothing":
        (path / "checkpoints" if "run" in what else path).mkdir(parents=True)
    finished = convert("inspect", path)
    assert (finished.status, finished.out) == (2, "")
    problem = f"checkpoint {path}: holds no checkpoint (a directory with meta.json)"
    if what == "nothing":
        problem = f"CHECKPOINT {path}: no such file or directory"
    assert finished.err == f"error: {problem}\n"
