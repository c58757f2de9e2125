"""`train --data PICTURES` without --cfg, and `swinv2_moe.fit`: from a folder to a model that
predicts, with the package's model as a stand-in, and what is printed on the way."""

import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from tool_cases import assert_one_line, command

import swinv2_moe
from swinv2_moe.config import config_from_text
from swinv2_moe.convert.convert import export_weights
from swinv2_moe.errors import UserError
from swinv2_moe.models import bundled

QUICK = ["TRAIN.EPOCHS", "2", "DATA.NUM_WORKERS", "0", "DEVICE", "cpu"]
COLOURS = {"blue": (40, 40, 220), "red": (220, 40, 40)}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> Path:
    """A folder with tiny.safetensors: a model of digits after two steps, at 16 px."""
    from swinv2_moe.config import load_config
    from swinv2_moe.train.run import train

    folder = tmp_path_factory.mktemp("bundled")
    small = "MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.DEPTHS [1,1,1] MODEL.MOE.BLOCKS [[],[0],[0]]"
    opts = f"{small} MODEL.MOE.NUM_EXPERTS 4 TRAIN.MAX_STEPS 2 DATA.NUM_WORKERS 0 DEVICE cpu"
    train(load_config("quickstart_digits", opts.split(), output=str(folder / "run")))
    export_weights("single", folder / "run", folder / "tiny.safetensors")
    return folder


@pytest.fixture
def photos(tmp_path, stand_in, monkeypatch) -> Path:
    """Ten pictures of each of two colours, in folders of classes; the package has its model."""
    monkeypatch.setattr(bundled, "DIRECTORY", stand_in)
    monkeypatch.chdir(tmp_path)
    for name, colour in COLOURS.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            pixels = tuple(channel + 3 * number for channel in colour)
            Image.new("RGB", (40, 36), pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def configuration(run: Path):
    return config_from_text((run / "config.yaml").read_text(), "run")


def test_a_folder_is_enough(photos, train_command):
    """What was found, chosen and tried is printed before the first epoch and written to
    config.yaml; the last lines are commands for this run; the same command goes on with it."""
    finished = train_command("--data", "photos", "--opts", *QUICK)
    assert (finished.status, finished.err) == (0, "")
    lines = finished.out.splitlines()
    assert lines[0].startswith("photos: 2 classes, 16 pictures to train on and 4 to validate")
    weights = "weights: bundled:tiny (swinv2_moe, 4 experts, trained at 16 px); neither in a cache"
    assert lines[1].startswith(weights)
    first_epoch = next(i for i, line in enumerate(lines) if line.startswith("epoch 1/2"))
    before = "\n".join(lines[:first_epoch])
    for words in (
        "a linear classifier on the frozen network, by size of image:",
        "16 of 16 pictures in cross-validation, 100% (81 to 100)",
        "DATA.IMG_SIZE 16: the smallest whose log loss is within 2% of the lowest",
        "TRAIN.EPOCHS 2",
        "DATA.BATCH_SIZE 8",
        "expected duration",
        "the frozen network: 4 of 4 held-out pictures, 100% (51 to 100)",
    ):
        assert words in before, words
    assert any("checkpoints/final: trained on all 20 pictures" in line for line in lines)
    assert lines[-5].startswith("result: ")
    assert lines[-5].endswith(": 4 of 4 held-out pictures, 100% (51 to 100)")
    commands = [line.removeprefix("next:").strip() for line in lines[-3:]]
    assert all("output/photos" in command for command in commands)
    config = configuration(Path("output/photos"))
    assert config.MODEL.PRETRAINED == "bundled:tiny"
    assert (config.DATA.IMG_SIZE, config.MODEL.SWINV2.WINDOW_SIZE) == (16, 4)
    assert (config.TRAIN.PROBE, config.MODEL.MOE.CAPACITY_FACTOR) == (True, 0)
    assert (config.DATA.BATCH_SIZE, config.TRAIN.EPOCHS) == (8, 2)

    again = train_command("--data", "photos")
    assert again.status == 2
    assert "already holds a run; --resume auto continues it" in again.err
    resumed = train_command("--data", "photos", "--resume", "auto", "--opts", "TRAIN.EPOCHS", "3")
    assert (resumed.status, resumed.err) == (0, "")
    assert "epoch 3/3" in resumed.out
    assert "weights:" not in resumed.out
    shutil.copytree("photos", "others/photos")
    other = train_command("--data", "others/photos", "--resume", "auto")
    assert_one_line(
        other,
        "--data others/photos: output/photos holds a run on other pictures (photos); --output names"
        " another directory",
    )


def test_fit_returns_what_load_returns(photos, capsys):
    larger = [*QUICK, "DATA.IMG_SIZE", "24"]
    model = swinv2_moe.fit("photos", "run", larger)
    assert "weights: bundled:tiny" in capsys.readouterr().out
    swin = configuration(Path("run")).MODEL.SWINV2
    assert (swin.WINDOW_SIZE, swin.PRETRAINED_WINDOW_SIZES) == (6, [4, 4, 2])
    assert model.class_names == ["blue", "red"]
    loaded = swinv2_moe.load("run", "cpu")
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, loaded.module.state_dict()[name]), name
    with pytest.raises(UserError, match="already holds a run; `swinv2-moe train run` continues it"):
        swinv2_moe.fit(photos, Path("run"), dict(zip(QUICK[::2], QUICK[1::2], strict=True)))
    loaded = swinv2_moe.load(Path("run"), "cpu", {"DATA.IMG_SIZE": 48})
    assert loaded.facts["image_size"] == 48


def test_what_fit_refuses(photos):
    (photos.parent / "set" / "val").mkdir(parents=True)
    photos.rename(photos.parent / "set" / "train")
    with pytest.raises(UserError, match="one of the folders of a data set"):
        swinv2_moe.fit("set/train", "run", {"DEVICE": "cpu"})
    with pytest.raises(TypeError, match="a mapping of keys to values"):
        swinv2_moe.fit("set", "run", "TRAIN.EPOCHS 1")
    assert not Path("run").exists()


def test_ranks_decide_alike(photos, start_ranks, stand_in, tmp_path):
    """The batch of each rank is its share of the largest one."""
    weights = ["MODEL.PRETRAINED", stand_in / "tiny.safetensors"]
    outcomes = start_ranks(
        2,
        "tools/train.py",
        "--data",
        photos,
        "--output",
        tmp_path / "two",
        "--opts",
        *QUICK,
        *weights,
    )
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    assert configuration(tmp_path / "two").DATA.BATCH_SIZE == 4
    assert not configuration(tmp_path / "two").TRAIN.ON_ALL
    assert outcomes[0].out.count("expected duration") == 1
    assert "expected duration" not in outcomes[1].out


def test_the_model_of_the_package_by_name(photos, stand_in, monkeypatch, capsys):
    """`load`, RUN of a command and timm give what the file was made from; without the file one line
    says where it is missing."""
    expected = swinv2_moe.load(str(stand_in / "run"), "cpu")
    model = swinv2_moe.load("tiny", "cpu")
    of_timm = timm.create_model("swinv2_moe_bundled_tiny", pretrained=True)
    for name, tensor in expected.module.state_dict().items():
        assert torch.equal(tensor, model.module.state_dict()[name]), name
        assert torch.equal(tensor, of_timm.state_dict()[name]), name
    assert model.class_names == expected.class_names
    assert of_timm.pretrained_cfg["input_size"] == (3, 16, 16)
    other = timm.create_model("swinv2_moe_bundled_tiny", pretrained=True, num_classes=3)
    assert torch.equal(other.patch_embed.proj.weight, of_timm.patch_embed.proj.weight)
    finished = command("predict", monkeypatch, capsys)("bundled:tiny", photos / "red" / "0.png")
    assert finished.status == 0
    monkeypatch.setattr(bundled, "DIRECTORY", photos)
    missing = f"this installation has no {photos / 'tiny.safetensors'}"
    with pytest.raises(UserError, match=re.escape(missing)):
        swinv2_moe.load("tiny")
    with pytest.raises(UserError, match=re.escape(missing)):
        timm.create_model("swinv2_moe_bundled_tiny", pretrained=True)


def test_weights_of_a_byte_each(stand_in, tmp_path, monkeypatch):
    """`load` and timm read the weights of an int8 file alike."""
    export_weights("single", stand_in / "run", tmp_path / "tiny.safetensors", dtype="int8")
    monkeypatch.setattr(bundled, "DIRECTORY", tmp_path)
    model = swinv2_moe.load("tiny", "cpu")
    of_timm = timm.create_model("swinv2_moe_bundled_tiny", pretrained=True)
    for name, tensor in of_timm.state_dict().items():
        assert tensor.dtype == torch.float32, name
        assert torch.equal(tensor, model.module.state_dict()[name]), name
    assert of_timm.pretrained_cfg["state_dict"] is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "FOLDER fine-tunes a model on a folder of pictures"),
        (["--data", "none"], "error: DATA.PATH is 'none': no such directory"),
        (["--data", "photos", "--resume", "other"], "error: --resume other: needs the --cfg"),
        (["--data", "photos/blue"], "error: DATA.PATH is 'photos/blue'"),
    ],
)
def test_one_line_for_arguments_that_cannot_be_used(photos, train_command, words, reason):
    finished = train_command(*words)
    assert finished.status == 2
    assert reason in finished.err.splitlines()[-1]
