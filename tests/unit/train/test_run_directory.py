"""What a run leaves behind, and what it says."""

import json
import os

import pytest
import torch
from run_cases import LAYERS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tool_cases import refusal

from swinv2_moe.config import flatten, load_config, model_config
from swinv2_moe.measure.live_run import LiveRun
from swinv2_moe.measure.run_record import read_run
from swinv2_moe.models import measure_model
from swinv2_moe.train.evaluation import evaluate as measure
from swinv2_moe.train.run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_config):
    """A finished run: its directory, configuration and summary."""
    root = tmp_path_factory.mktemp("runs") / "a" / "run"
    config = make_config(root, {"TRAIN.EPOCHS": 3, "SAVE_FREQ": 3})
    return root, config, train(config)


def test_metrics(run, read_metrics):
    root, _, summary = run
    steps, epochs = read_metrics(root)
    start = json.loads((root / "metrics.jsonl").read_text().splitlines()[0])
    assert (start["step"], start["steps_per_epoch"]) == (0, 5)
    assert [line["step"] for line in steps] == list(range(1, 16))
    assert [line["epoch"] for line in steps] == [1] * 5 + [2] * 5 + [3] * 5
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    assert [line["step"] for line in epochs] == [5, 10, 15]
    for line in epochs:
        losses = [s["loss"] for s in steps if s["epoch"] == line["epoch"]]
        assert line["train_loss"] == pytest.approx(sum(losses) / 5, rel=1e-5)  # added in fp32
        assert 0 <= line["val_top1"] <= line["val_top5"] <= 100
    for line in steps:
        assert {"loss", "aux_loss", "lr", "grad_norm", "images_per_second"} <= line.keys()
        assert list(line["moe_layers"]) == LAYERS
        for layer in line["moe_layers"].values():
            assert len(layer["load"]) == 4
            assert sum(layer["load"]) == pytest.approx(4, abs=1e-3)  # relative to an even share
            assert 0 <= layer["dropped_share"] < 1
            assert 0 < layer["entropy"] <= 1.3863
    assert epochs[-1]["val_top1"] == summary["val_top1"]
    assert max(line["val_top1"] for line in epochs) == summary["best_val_top1"]
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]


def test_summary(run):
    root, config, returned = run
    summary = json.loads((root / "summary.json").read_text())
    assert summary == returned
    size = measure_model(model_config(config), 10)
    assert (summary["parameters"], summary["active_macs"]) == size
    assert (summary["epochs"], summary["steps"], summary["world_size"]) == (3, 15, 1)
    assert summary["images_per_second"] > 0
    assert 0 < 15 * 32 / summary["images_per_second"] < summary["seconds"]


def test_config_loads_again(run):
    root, config, _ = run
    assert flatten(load_config(root / "config.yaml")) == flatten(config)


def test_tensorboard(run):
    sizes = {"scalars": 0, "histograms": 0}
    events = EventAccumulator(str(run[0] / "tensorboard"), size_guidance=sizes).Reload()
    scalars = set(events.Tags()["scalars"])
    for key in ("loss", "lr", "grad_norm", "aux_loss", "images_per_second"):
        assert f"train/{key}" in scalars
    for key in ("train_loss", "val_top1", "val_loss"):
        assert f"epoch/{key}" in scalars
    for key in ("dropped_share", "entropy", "load_max", "load_min"):
        assert {f"{layer}/{key}" for layer in LAYERS} <= scalars
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 16))
    assert [event.step for event in events.Scalars("epoch/val_top1")] == [5, 10, 15]
    assert set(events.Tags()["histograms"]) == {f"{layer}/expert_load" for layer in LAYERS}
    assert len(events.Histograms(f"{LAYERS[0]}/expert_load")) == 15


def test_checkpoints_are_pruned_to_the_last_two_and_best(run, read_metrics):
    root = run[0] / "checkpoints"
    accuracies = [line["val_top1"] for line in read_metrics(run[0])[1]]
    best = f"step-{5 * (1 + accuracies.index(max(accuracies))):08d}"
    assert os.readlink(root / "latest") == "step-00000015"
    assert os.readlink(root / "best") == best
    names = {"latest", "best", "step-00000010", "step-00000015", best}
    assert {path.name for path in root.iterdir()} == names
    paths = [path for path in (root / "latest").rglob("*") if path.is_file()]
    files = {str(path.relative_to(root / "latest")) for path in paths}
    experts = {f"experts/{layer}/{e:04d}.safetensors" for layer in LAYERS for e in range(4)}
    trunk = {"model.safetensors"} | experts
    sections = ("", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")
    assert files == {"meta.json"} | {f"{section}{file}" for section in sections for file in trunk}


def test_a_run_is_not_overwritten(run):
    root, config, _ = run
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert "already holds a run; --resume auto" in refusal(train, config)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_resuming_a_finished_run_changes_no_result(run):
    root, config, summary = run
    metrics = (root / "metrics.jsonl").read_text()
    weights = (root / "checkpoints" / "latest" / "model.safetensors").stat().st_mtime_ns
    again = train(config, "auto")
    kept = ("val_top1", "best_val_top1", "epochs", "steps", "parameters", "active_macs")
    assert {key: again[key] for key in kept} == {key: summary[key] for key in kept}
    assert (root / "metrics.jsonl").read_text() == metrics
    assert (root / "checkpoints" / "latest" / "model.safetensors").stat().st_mtime_ns == weights


def test_a_dense_run(tmp_path, make_config, read_metrics):
    keys = {"MODEL.MOE.NUM_EXPERTS": 0, "TRAIN.MAX_STEPS": 2, "AMP_ENABLE": True}
    summary = train(make_config(tmp_path / "run", keys))
    steps, _ = read_metrics(tmp_path / "run")
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["aux_loss"] == 0 and "moe_layers" not in line for line in steps)
    assert summary["parameters"] < measure_model(model_config(make_config(tmp_path)), 10).parameters
    assert not (tmp_path / "run" / "checkpoints" / "latest" / "experts").exists()


def test_validation_leaves_the_model_in_training(make_trainer):
    trainer = make_trainer({"MODEL.MOE.GATE_NOISE": 10.0})
    for name, parameter in trainer.step.model.named_parameters():
        if name.endswith("norm2.weight"):  # 0 at first: experts would not show
            torch.nn.init.ones_(parameter)
    images = next(iter(trainer.data.val_loader)).images
    trainer.step.wrapped.train()
    assert not trainer.step.model(images).equal(trainer.step.model(images))
    frozen = trainer.step.model.layers[2].blocks[0].mlp.moe.router
    frozen.eval()
    accuracy = trainer.validate()
    assert accuracy.images == 40
    evaluating = {module for module in trainer.step.wrapped.modules() if not module.training}
    assert evaluating == set(frozen.modules())
    assert not trainer.step.model(images).equal(trainer.step.model(images))
    trainer.step.model.eval()
    measure(trainer.step.model, trainer.data.val_loader, trainer.world, trainer.step.autocast)
    assert not any(module.training for module in trainer.step.model.modules())


def test_a_run_shorter_than_print_freq_can_be_viewed(tmp_path, make_config, read_metrics):
    keys = {"TRAIN.MAX_STEPS": 2, "TRAIN.EPOCHS": 1, "TRAIN.WARMUP_EPOCHS": 0, "PRINT_FREQ": 1000}
    train(make_config(tmp_path, keys))
    steps, _ = read_metrics(tmp_path)
    assert [line["step"] for line in steps] == [2]
    live = LiveRun(tmp_path)
    live.read()
    assert live.last["step"] == 2
    assert read_run(tmp_path).layers == LAYERS
