"""Whatever happens to a file of a checkpoint is noticed before anything is loaded, and the one
before it is taken."""

import errno
import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from run_cases import LAYERS
from tool_cases import refusal

from swinv2_moe.checkpoints import checkpoint
from swinv2_moe.checkpoints.checkpoint import (
    DamagedError,
    find_checkpoint,
    open_checkpoint,
    read_meta,
    write_meta,
)
from swinv2_moe.errors import UserError
from swinv2_moe.train.run import train

NEWEST, BEFORE = "step-00000004", "step-00000002"


@pytest.fixture(scope="module")
def root(tmp_path_factory, make_config):
    """A run's checkpoints: of steps 2 and 4, each with weights, averaged weights and moments."""
    root = tmp_path_factory.mktemp("whole") / "run"
    train(make_config(root, {"TRAIN.MAX_STEPS": 4, "CHECKPOINT.STEPS": 2, "TRAIN.EMA_DECAY": 0.5}))
    return root / "checkpoints"


@pytest.fixture
def run(root, tmp_path):
    """The checkpoints of a run, to be damaged."""
    return shutil.copytree(root, tmp_path / "run", symlinks=True)


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def swap(file, other):
    file.rename(file.with_suffix(".swap"))
    other.rename(file)
    file.with_suffix(".swap").rename(other)


def damages(files, rng):
    """(what is done, to which file, how), for every kind of damage to each of the files."""
    for i, file in enumerate(files):
        size = file.stat().st_size
        bit, cut = int(rng.integers(8 * size)), int(rng.integers(size))
        other = files[(i + 1) % len(files)]
        yield f"bit {bit} flipped", file, lambda f, bit=bit: flip(f, bit)
        yield f"cut at {cut}", file, lambda f, cut=cut: os.truncate(f, cut)
        yield "one byte short", file, lambda f, size=size: os.truncate(f, size - 1)
        yield "one byte more", file, lambda f: f.write_bytes(f.read_bytes() + b"\0")
        yield "deleted", file, lambda f: f.unlink()
        yield f"swapped with {other.name}", file, lambda f, other=other: swap(f, other)


def damage_each(root, files):
    newest, before, spare = root / NEWEST, root / BEFORE, root.parent / "spare"
    shutil.copytree(newest, spare)
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
            swapped = "swapped" in what and any(
                str(path.relative_to(newest)) in message for path in files
            )
            absent = (what, name) == ("deleted", "meta.json") and "holds no checkpoint" in message
            assert name in message or swapped or absent, (what, name, message)
        shutil.rmtree(newest)
        shutil.copytree(spare, newest)
    assert find_checkpoint("auto", root).directory == newest


def test_every_damage_to_a_file_of_each_kind(run):
    kinds = ["meta.json", "model.safetensors", "ema/model.safetensors"]
    kinds += [f"experts/{LAYERS[0]}/0002.safetensors"]
    listed = sorted(read_meta(run / NEWEST)["files"])
    kinds += [listed[0], listed[-1]]  # the first of the averages, the last of the moments
    damage_each(run, [run / NEWEST / name for name in kinds])


@pytest.mark.slow
def test_every_damage_to_every_file(run):
    files = sorted(path for path in (run / NEWEST).rglob("*") if path.is_file())
    assert len(files) > 30
    damage_each(run, files)


def test_a_run_goes_on_from_the_one_before(root, tmp_path, make_config, capsys):
    shutil.copytree(root.parent, tmp_path / "run", symlinks=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    flip(checkpoints / NEWEST / "ema" / "model.safetensors", 80_000)
    train(make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 3, "TRAIN.EMA_DECAY": 0.5}), "auto")
    said = capsys.readouterr().out
    assert "skipped: checkpoint" in said
    assert "ema/model.safetensors is damaged" in said
    assert "step-00000002, step 2" in said
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"set-aside-step-00000004", "step-00000002", "step-00000003", "latest", "best"}


def test_none_is_whole(run):
    for name in (NEWEST, BEFORE):
        (run / name / "model.safetensors").unlink()
    message = r"no checkpoint in .* is whole: .*0004: model\.safetensors is missing.*0002"
    with pytest.raises(UserError, match=message):
        find_checkpoint("auto", run)


def test_order_is_by_the_step_in_the_name_and_not_by_time(run):
    os.utime(run / NEWEST, (1, 1))
    assert find_checkpoint("auto", run).directory.name == NEWEST
    (run / NEWEST).rename(run / "step-00000009")
    found = find_checkpoint("auto", run)
    assert found.directory.name == BEFORE
    assert "step-00000009 is one of step 4" in found.skipped[0]


def test_a_file_that_must_not_be_read_is_not_taken_for_damage(root, monkeypatch):
    """It may be whole: going on from the one before would throw work away."""
    real = os.open

    def refuse(path, *args, **kwargs):
        if path == root / NEWEST / "model.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    message = r"0004/model\.safetensors cannot be read \(Permission denied\)"
    with pytest.raises(UserError, match=message):
        find_checkpoint("auto", root)


def passed_over(run, reason):
    """That the newest checkpoint is passed over for a reason, in one line, and the one before it
    taken."""
    found = find_checkpoint("auto", run)
    assert found.directory.name == BEFORE
    (said,) = found.skipped
    assert NEWEST in said
    assert reason in said
    assert "\n" not in said
    assert len(said) < 1000


def write_sealed(directory, text):
    """meta.json with whatever text, under the checksum that belongs to it: what a hostile writer
    would do."""
    text = text.replace("CHECKSUM", "0" * 64)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    (directory / "meta.json").write_text(text.replace("0" * 64, checksum))


def change_meta(directory, place, value):
    """The value at a place ("training/epoch") replaced, under the right checksum; "removed" leaves
    it out."""
    meta = read_meta(directory)
    *way, last = place
    inner = meta
    for key in way:
        inner = inner[key]
    if value == "removed":
        del inner[last]
    else:
        inner[last] = value
    write_meta(directory, meta)


TRUNK = ("files", "model.safetensors")
VALIDATIONS = ("training", "time_to_target", "validations")
RECORD = {"bytes": 1, "sha256": "0" * 64}
WRONG = [  # a place in meta.json, what stands there, what the line says
    (("step",), 4.0, "step is 4.0, it must be a whole number"),
    (("step",), 2**63, "step is 9223372036854775808"),
    (("config",), ["a"], "config is a list, it must be text"),
    (("class_names",), "removed", "class_names is missing"),
    (("class_names", 3), None, "class_names/3 is null, it must be text"),
    (("files",), None, "files is null, it must be an object"),
    (("files",), {}, "files does not list model.safetensors"),
    (TRUNK, "removed", "files does not list model.safetensors"),
    ((*TRUNK, "bytes"), -1, "bytes is -1"),
    ((*TRUNK, "sha256"), "x" * 10_000_000, "sha256 is 'xxxx"),
    ((*TRUNK, "sha256"), "removed", "sha256 is missing"),
    (("files", "../../../etc/passwd"), RECORD, "a name in files is '../../../etc/passwd'"),
    (("files", "a\0b"), RECORD, "a name in files is 'a\\x00b'"),
    (("files", "ema/model.safetensors"), "removed", "does not list 'ema/model.safetensors'"),
    (("experts", LAYERS[0]), [4, 4, None, 4], f"experts/{LAYERS[0]}/2 is null"),
    (("experts", LAYERS[0]), [4] * 5, f"does not list experts/{LAYERS[0]}/0004"),
    (("windows",), "wide", "windows is 'wide'"),
    (("training",), {}, "training/epoch is missing"),
    (("training", "epoch_loss"), float("nan"), "training/epoch_loss is nan"),
    (("training", "steps_per_epoch"), 0, "training/steps_per_epoch is 0"),
    (("training", "loss_scaler"), "removed", "training/loss_scaler is missing"),
    (VALIDATIONS, [[1, 2, 3]], "validations/0 has 3 items, it must have 4"),
]


def test_a_value_of_another_form(run):
    newest = run / NEWEST
    meta = (newest / "meta.json").read_bytes()
    for place, value, reason in WRONG:
        change_meta(newest, place, value)
        passed_over(run, reason)
        with pytest.raises(DamagedError):
            open_checkpoint(newest)
        (newest / "meta.json").write_bytes(meta)
    change_meta(newest, ("saved",), "removed")  # write_meta adds it
    assert find_checkpoint("auto", run).directory == newest


def test_json_of_another_kind(run):
    for text, reason in (
        ("[" * 100_000, "nested too deeply"),
        ('{"step": %s, "checksum": "CHECKSUM", "format_version": 1}' % ("9" * 5000), "meta.json"),
        ('{"checksum": ""}', "its checksum differs"),
        ('{"checksum": "\\ud800"}', "its checksum differs"),
        ("null", "it has no checksum"),
    ):
        write_sealed(run / NEWEST, text)
        passed_over(run, reason)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", ["meta.json", f"ema/experts/{LAYERS[0]}/0002.safetensors"])
def test_what_is_not_a_regular_file(file, run):
    path = run / NEWEST / file
    for make in (
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path.name),
    ):
        path.unlink()
        make(path)
        passed_over(run, file)
    path.unlink()
    path.mkdir()
    passed_over(run, file)


def test_a_file_of_holes_is_told_by_its_size(run):
    os.truncate(run / NEWEST / "model.safetensors", 1 << 40)
    passed_over(run, "model.safetensors has 1,099,511,627,776 bytes")
    os.truncate(run / NEWEST / "meta.json", 1 << 40)
    passed_over(run, "larger than 67,108,864 bytes")


def test_links_that_lead_out_of_the_checkpoint(run):
    """Of a file that is listed, even with the right content, and of a directory."""
    newest, outside = run / NEWEST, run / "outside"
    (newest / "model.safetensors").rename(outside)
    (newest / "model.safetensors").symlink_to(outside)
    passed_over(run, "model.safetensors' is a link that leads out of the checkpoint")
    (newest / "model.safetensors").unlink()
    outside.rename(newest / "model.safetensors")
    assert find_checkpoint("auto", run).directory == newest
    (newest / "experts").rename(outside)
    (newest / "experts").symlink_to(outside)
    passed_over(run, "experts' is a link that leads out")


def test_links_within_the_checkpoint_and_to_it_are_followed(run):
    newest = run / NEWEST
    (newest / "model.safetensors").rename(newest / "moved")
    (newest / "model.safetensors").symlink_to("moved")
    assert find_checkpoint("auto", run).directory == newest
    assert open_checkpoint(run / "latest").meta["step"] == 4


def test_sealed_headers_of_other_forms_are_one_line(run, make_config):
    """The checksum is right, so that only reading can tell: nothing is loaded."""
    newest = run / NEWEST
    file = newest / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for key, value in (("shape", [1 << 40]), ("data_offsets", [0, 1 << 50]), ("dtype", "X9")):
        tensor = header["norm.weight"] | {key: value}
        new = json.dumps(header | {"norm.weight": tensor}).encode()
        file.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + size :])
        checksum = hashlib.sha256(file.read_bytes()).hexdigest()
        change_meta(newest, TRUNK, {"bytes": file.stat().st_size, "sha256": checksum})
        config = make_config(run.parent, {"TRAIN.MAX_STEPS": 5, "TRAIN.EMA_DECAY": 0.5})
        message = "model.safetensors: cannot be read as weights"
        assert message in refusal(train, config, str(newest))


def test_checkpoints_that_a_training_replaces_meanwhile(run, monkeypatch):
    """Both that were listed are gone before they are read: two saves of a training that runs."""

    def replaced(*args):
        monkeypatch.undo()
        shutil.rmtree(run / BEFORE)
        (run / NEWEST).rename(run / f"{NEWEST}-1")
        return open_checkpoint(*args)

    monkeypatch.setattr(checkpoint, "open_checkpoint", replaced)
    found = find_checkpoint("auto", run)
    assert (found.directory.name, found.skipped) == (f"{NEWEST}-1", ())
