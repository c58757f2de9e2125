"""Whatever happens to a file of a checkpoint is noticed before anything is loaded, and the one before it is taken."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from swinv2_moe.engine import train
from swinv2_moe.engine.checkpoint import DamagedError, find_checkpoint, open_checkpoint
from swinv2_moe.errors import UserError

FLIPS = 2  # bits of each file, one at a time


@pytest.fixture(scope="module")
def root(tmp_path_factory, make_config):
    """A run's checkpoints: of steps 2 and 4, each with weights, averaged weights and moments."""
    root = tmp_path_factory.mktemp("whole") / "run"
    train(make_config(root, {"TRAIN.MAX_STEPS": 4, "CHECKPOINT.STEPS": 2, "TRAIN.EMA_DECAY": 0.5}))
    return root / "checkpoints"


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def swap(file, other):
    file.rename(file.with_suffix(".swap"))
    other.rename(file)
    file.with_suffix(".swap").rename(other)


def damages(files, rng):
    """(what is done, to which file, how), for every file and every kind of damage."""
    for i, file in enumerate(files):
        size = file.stat().st_size
        for bit in rng.integers(8 * size, size=FLIPS).tolist():
            yield f"bit {bit} flipped", file, lambda f, bit=bit: flip(f, bit)
        cut = int(rng.integers(size))
        yield f"cut at {cut}", file, lambda f, cut=cut: os.truncate(f, cut)
        yield "one byte short", file, lambda f, size=size: os.truncate(f, size - 1)
        yield "one byte more", file, lambda f: f.write_bytes(f.read_bytes() + b"\0")
        yield "deleted", file, lambda f: f.unlink()
        other = files[(i + 1) % len(files)]
        yield f"swapped with {other.name}", file, lambda f, other=other: swap(f, other)


def test_every_damage_to_every_file(root):
    newest, before = root / "step-00000004", root / "step-00000002"
    files, spare = sorted(path for path in newest.rglob("*") if path.is_file()), root.parent / "spare"
    shutil.copytree(newest, spare)
    count = 0
    for what, file, damage in damages(files, np.random.default_rng(0)):
        damage(file)
        name = str(file.relative_to(newest))
        with pytest.raises(DamagedError) as caught:
            open_checkpoint(newest)
        found = find_checkpoint("auto", root)
        assert found.directory == before, (what, name)
        (said,) = found.skipped
        for message in (said, str(caught.value)):
            assert "\n" not in message
            swapped = "swapped" in what and any(str(path.relative_to(newest)) in message for path in files)
            absent = (what, name) == ("deleted", "meta.json") and "holds no checkpoint" in message
            assert name in message or swapped or absent, (what, name, message)
        shutil.rmtree(newest)
        shutil.copytree(spare, newest)
        count += 1
    assert count == len(files) * (FLIPS + 5) >= 200
    assert find_checkpoint("auto", root).directory == newest


def test_a_run_goes_on_from_the_one_before(root, tmp_path, make_config, capsys):
    shutil.copytree(root.parent, tmp_path / "run", symlinks=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    flip(checkpoints / "step-00000004" / "ema" / "model.safetensors", 80_000)
    train(make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 3, "TRAIN.EMA_DECAY": 0.5}), "auto")
    said = capsys.readouterr().out
    assert "passed over: checkpoint" in said
    assert "ema/model.safetensors is damaged" in said
    assert "step-00000002, step 2" in said
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"set-aside-step-00000004", "step-00000002", "step-00000003", "latest", "best"}


def test_none_is_whole(root, tmp_path):
    for step in (2, 4):
        shutil.copytree(root / f"step-{step:08d}", tmp_path / f"step-{step:08d}")
        (tmp_path / f"step-{step:08d}" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole: .*0004: model\.safetensors is missing.*0002"):
        find_checkpoint("auto", tmp_path)


def test_a_checkpoint_under_the_name_of_another_step(root, tmp_path):
    shutil.copytree(root / "step-00000004", tmp_path / "step-00000009")
    shutil.copytree(root / "step-00000002", tmp_path / "step-00000002")
    found = find_checkpoint("auto", tmp_path)
    assert found.directory.name == "step-00000002"
    assert "step-00000009 is one of step 4" in found.skipped[0]


def test_order_is_by_step_and_not_by_time(root, tmp_path):
    for step in (4, 2):
        shutil.copytree(root / f"step-{step:08d}", tmp_path / f"step-{step:08d}")
    os.utime(tmp_path / "step-00000004", (1, 1))
    assert find_checkpoint("auto", tmp_path).directory.name == "step-00000004"


def test_a_file_that_must_not_be_read_is_not_taken_for_damage(root, monkeypatch):
    """It may be whole: going on from the one before would throw work away."""
    real = Path.open

    def refuse(path, *args, **kwargs):
        if path == root / "step-00000004" / "model.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"0004/model\.safetensors cannot be read \(Permission denied\)"):
        find_checkpoint("auto", root)
