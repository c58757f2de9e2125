"""tools/train_on_gpu.py on a CPU: packs, crops, and a run that is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from swinv2_moe.config import data_config, load_config
from swinv2_moe.data.build import build_data

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
import train_on_gpu  # noqa: E402

SIDE = 32
SMALL = (
    f"DEVICE cpu DATA.IMG_SIZE {SIDE} DATA.BATCH_SIZE 8 DATA.NUM_WORKERS 0 TRAIN.DISTILL.TEACHER ''"
    " MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.DEPTHS [1,1,1] MODEL.SWINV2.NUM_HEADS [1,1,1]"
    " MODEL.MOE.BLOCKS [[],[0],[0]] MODEL.MOE.NUM_EXPERTS 4"
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A folder of two classes, 20 pictures to train on and 4 to validate."""
    folder, noise = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 2)):
        for name in ("blue", "red"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


def options(text: str) -> list[str]:
    return [word.strip("'") for word in text.split()]


def test_packs_hold_all_pictures_and_are_small_enough(pictures, tmp_path):
    packs = train_on_gpu.pack(pictures, tmp_path, None, 30_000)
    assert len(packs) > 2
    names = []
    for file in packs:
        assert file.stat().st_size <= 30_000
        with zipfile.ZipFile(file) as archive:
            found = archive.namelist()
        assert {"blue", "red"} == {name.split("/")[1] for name in found}
        names += found
    unpacked = train_on_gpu.unpack(tmp_path)
    assert len(names) == len(set(names)) == 24
    for name in names:
        assert (unpacked / name).read_bytes() == (pictures / name).read_bytes()


def test_a_pack_encoded_anew_is_smaller(pictures, tmp_path):
    sizes = []
    for quality in (None, 30):
        (file,) = train_on_gpu.pack(pictures, tmp_path / str(quality), quality, 1 << 20)
        sizes.append(file.stat().st_size)
    assert sizes[1] < sizes[0]
    unpacked = train_on_gpu.unpack(tmp_path / "30")
    assert Image.open(unpacked / "train/red/0.png").format == "WEBP"


def test_packs_that_cannot_be_used_are_one_line(pictures, tmp_path):
    def problem() -> str:
        with pytest.raises(train_on_gpu.PackError) as error:
            train_on_gpu.unpack(tmp_path)
        return str(error.value)

    assert "needs the packs of one set" in problem()
    first, second, *_ = packs = train_on_gpu.pack(pictures, tmp_path, None, 30_000)
    second.rename(tmp_path / "elsewhere")
    assert problem().endswith(f"{second.name} must be copied there first")
    (tmp_path / "elsewhere").rename(second)
    content = first.read_bytes()
    first.write_bytes(content[:1000])
    assert f"{first}: cannot be unpacked" in problem()
    first.write_bytes(content)
    (tmp_path / "pictures-1-of-9.zip").write_bytes(content)
    assert "needs the packs of one set" in problem()
    (tmp_path / "pictures-1-of-9.zip").unlink()
    assert len(list(train_on_gpu.unpack(tmp_path).rglob("*.png"))) == 24
    assert len(packs) > 2
    with pytest.raises(train_on_gpu.PackError, match="no pictures in train/ and val/"):
        train_on_gpu.pack(tmp_path / "none", tmp_path, None, 1)


@pytest.fixture
def loader(pictures):
    """`loader(*options)`: the loader from memory, of a configuration."""

    def make(*more: str) -> train_on_gpu.OnDevice:
        opts = [*options(SMALL), "DATA.PATH", str(pictures), *more]
        config = data_config(load_config(train_on_gpu.CONFIG, opts))
        return train_on_gpu.OnDevice(build_data(config).train_loader, config, torch.device("cpu"))

    return make


def test_a_whole_picture_is_the_picture(loader):
    """To the rounding of the position, in fp32: 2^-24 times 32 pixels times a step of 255 / 58."""
    found = loader("AUG.SCALE", "[1.0,1.0]", "AUG.HFLIP", "0.0")
    chosen = torch.tensor([3, 0, 11])
    mean, std = (
        torch.tensor(value).view(3, 1, 1) for value in (found.config.mean, found.config.std)
    )
    wanted = (found.pictures[chosen].float() / 255 - mean) / std
    whole = found.crops(chosen, found.boxes(), found.config)
    torch.testing.assert_close(whole, wanted, rtol=0, atol=1e-4)
    flipped = loader("AUG.SCALE", "[1.0,1.0]", "AUG.HFLIP", "1.0")
    mirrored = flipped.crops(chosen, flipped.boxes(), flipped.config)
    torch.testing.assert_close(mirrored, wanted.flip(3), rtol=0, atol=1e-4)


def test_a_crop_depends_on_the_epoch_and_the_picture_alone(loader):
    one, other = loader(), loader("DATA.BATCH_SIZE", "4")
    boxes = one.boxes()
    assert torch.equal(boxes, other.boxes())
    left, top, width, height = boxes.t()
    low, high = one.config.augment.scale
    area = width.abs() * height
    assert ((area > 0.99 * low * 0.75) & (area <= high)).all()
    assert ((torch.minimum(left, left + width) >= -1e-6) & (top >= 0)).all()
    assert ((torch.maximum(left, left + width) <= 1 + 1e-6) & (top + height <= 1 + 1e-6)).all()
    assert len(set((width < 0).tolist())) == 2
    one.loader.dataset.epoch = 1
    assert not torch.equal(boxes, one.boxes())


def test_batches_have_each_picture_once_and_their_order_is_the_samplers(loader):
    found = loader()
    batches = list(found)
    assert len(batches) == len(found) == 2  # of 8 pictures; the last 4 are dropped
    indices = torch.cat([batch.indices for batch in batches])
    assert indices.tolist() == list(found.loader.sampler)
    for batch in batches:
        assert torch.equal(batch.targets, found.targets[batch.indices])
        assert torch.equal(batch.images, found.crops(batch.indices, found.boxes(), found.config))


def test_the_teacher_sees_the_crops_of_the_student(loader):
    found = loader()
    teacher = SimpleNamespace(module=torch.nn.Flatten(), name="a teacher")
    outputs = SimpleNamespace(
        teacher=teacher, columns=None, autocast=torch.no_grad, config=found.config
    )
    online = train_on_gpu.OnlineTeacher(outputs, found)
    online.prepare(2, None, None)
    for batch in found:
        assert torch.equal(online(batch.indices), batch.images.flatten(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_and_its_weights_can_be_evaluated(pictures, tmp_path):
    train_on_gpu.pack(pictures, tmp_path / "packs", None, 30_000)
    run, kept = tmp_path / "run", tmp_path / "kept"
    command = [sys.executable, "tools/train_on_gpu.py", "train", "--pictures", tmp_path / "packs"]
    command += ["--output", run, "--keep", kept, "--minutes", "5", "--opts", *options(SMALL)]
    command = [str(word) for word in command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    first = subprocess.Popen([*command, "TRAIN.EPOCHS", "1000"], cwd=ROOT, env=environment)
    while not list((run / "checkpoints").glob("step-*/meta.json")):
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    short = [word if word != "5" else "0.1" for word in command]  # less than it keeps for saving
    done = subprocess.run(
        [*short, "TRAIN.EPOCHS", "1000"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the run goes on with the next call" in done.stdout
    assert (kept / "weights.safetensors").exists()
    steps = max(int(file.name.partition("-")[2]) for file in (run / "checkpoints").glob("step-*"))
    epochs = steps // 2 + 2  # of two steps
    again = [*command, "TRAIN.EPOCHS", str(epochs)]
    done = subprocess.run(again, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the run has ended" in done.stdout
    assert f"epoch {epochs}/{epochs}" in done.stdout
    assert f"epoch 1/{epochs}" not in done.stdout
    assert json.loads((run / "summary.json").read_text())["steps"] == 2 * epochs
    evaluate = [sys.executable, "-m", "swinv2_moe", "evaluate"]
    for trained in (run, kept / "weights.safetensors"):
        words = [*evaluate, str(trained), "--data", str(pictures), "--opts", "DEVICE", "cpu"]
        found = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
