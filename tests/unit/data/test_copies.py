"""Copies: equal bytes stay on one side of DATA.VAL_SPLIT, and a warning counts those that do not,
or that have two labels."""

import os
import shutil

import numpy as np
import pytest

from swinv2_moe.data import copies
from swinv2_moe.data.copies import contradictions, copies_note, digest, first_copies, first_equal
from swinv2_moe.data.prepare.make_shards import ShardOptions, make_shards
from swinv2_moe.data.sources import ImageFiles, load_sources
from swinv2_moe.data.sources.folder import _split
from swinv2_moe.errors import UserError


def files_of(folder, names) -> ImageFiles:
    paths = np.array([os.fsencode(name) for name in names], object)
    return ImageFiles(str(folder), paths, np.zeros(len(names), np.int64))


def test_equal_files_are_found(tmp_path):
    long = bytes(range(256)) * 100  # longer than the end that is compared first
    contents = [b"a", b"b", long + b"x", b"a", b"", long + b"x", b"", b"x" + long[1:] + b"x", b"ab"]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}").write_bytes(content)
    (tmp_path / "9").mkdir()
    os.mkfifo(tmp_path / "10")
    names = [*map(str, range(11)), "missing", "nul\0"]
    first = first_copies(files_of(tmp_path, names))
    assert first.tolist() == [0, 1, 2, 0, 4, 2, 6, 7, 8, 9, 10, 11, 12]
    assert first_copies(files_of(tmp_path, [])).tolist() == []
    parts = (files_of(tmp_path, names[:3]), files_of(tmp_path, names[3:]))
    assert first_copies(*parts).tolist() == first.tolist()


def test_only_files_of_equal_size_are_read(tmp_path, monkeypatch):
    for number, content in enumerate((b"a", b"bb", b"cc", b"dddd")):
        (tmp_path / f"{number}").write_bytes(content)
    read = []

    def recorded(path):
        read.append(os.path.basename(path))
        return open(path, "rb")

    monkeypatch.setattr(copies, "open_regular", recorded)
    first = first_copies(files_of(tmp_path, "0123"))
    assert (first.tolist(), sorted(read)) == ([0, 1, 2, 3], ["1", "2"])


def test_a_lack_of_descriptors_is_no_unreadable_file(tmp_path, monkeypatch):
    for number in range(2):
        (tmp_path / f"{number}").write_bytes(b"a")

    def lacking(path):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(copies, "open_regular", lacking)
    with pytest.raises(OSError, match="Too many open files"):
        first_copies(files_of(tmp_path, "01"))


def test_contradictions_and_the_warning():
    values = np.array([7, 8, 7, 0, 9, 8, 0, 7], np.uint64)
    targets = np.array([0, 1, 1, 0, 1, 1, 0, 0])
    first = first_equal(values)
    assert first.tolist() == [0, 1, 0, 3, 4, 1, 6, 0]
    # 2 has another label than 0; 5 and 7 are in validation and copies of 1 and 0
    assert contradictions(first, targets, 5).tolist() == [2, 5, 7]
    assert contradictions(first, targets, 8).tolist() == [2]
    (line,) = copies_note(first, targets, 5, str)
    assert line == (
        "warning: copies (equal bytes): 2 of the 3 validation images are also in training, 1"
        " with several labels; the first: 2 = 0; `train --check-files` lists them"
    )
    assert copies_note(np.arange(8), targets, 5, str) == []
    assert digest(b"") == 0 != digest(b"a")


def contents(source) -> list[bytes]:
    return [source.read(row) for row in range(len(source))]


def names(source) -> list[str]:
    return [os.path.relpath(source.path(row), source.root) for row in range(len(source))]


def test_copies_stay_on_one_side(load, root, tmp_path):
    shutil.rmtree(root / "val")
    before = load({"DATA.VAL_SPLIT": 0.2})
    for file in sorted((root / "train").rglob("*.png")):
        shutil.copy(file, file.with_name(f"{file.stem} (1).png"))
    for number in range(3):  # also in another class
        shutil.copy(root / f"train/cat/{number}.png", root / f"train/dog/cat {number}.png")
    sources = load({"DATA.VAL_SPLIT": 0.2})
    train, val = contents(sources.train), contents(sources.val)
    assert len(train) + len(val) == 83
    assert not set(train) & set(val)
    assert np.bincount(sources.val.targets).tolist() == [8, 9]
    assert sources.notes == (
        f"DATA.VAL_SPLIT 0.2: 17 of the 83 images of {root}/train are held out for validation; 43"
        " are copies (equal bytes), on the side of their original",
        "warning: copies (equal bytes): 3 with several labels; the first:"
        f" {root}/train/dog/cat 0.png = {root}/train/cat/0 (1).png; `train --check-files` lists"
        " them",
    )
    # the copies changed few sides, and a folder that moves changes none
    kept = set(names(sources.val)) & set(names(before.val))
    assert len(kept) >= 4
    moved = root.rename(tmp_path / "moved")
    images = ImageFiles(str(moved / "train"), *_joined(sources))
    assert names(_split(images, ["cat", "dog"], 0.2)[1]) == names(sources.val)


def _joined(sources) -> tuple[np.ndarray, np.ndarray]:
    """Paths and targets of both splits, in the order of the folder."""
    paths = np.concatenate([sources.train.paths, sources.val.paths])
    targets = np.concatenate([sources.train.targets, sources.val.targets])
    order = np.argsort(paths)
    return paths[order], targets[order]


def test_an_added_image_moves_few(load, root):
    shutil.rmtree(root / "val")
    before = set(names(load({"DATA.VAL_SPLIT": 0.2}).val))
    shutil.copy(root / "train/cat/3.png", root / "train/cat/new.png")
    (root / "train/dog/new.png").write_bytes(b"another")
    assert len(before ^ set(names(load({"DATA.VAL_SPLIT": 0.2}).val))) <= 4


def test_a_class_of_copies(load, root):
    """One of two images, each many times: its copies are held out, more than the share."""
    shutil.rmtree(root / "val")
    folder = root / "train" / "dog"
    for number in range(2, 20):
        shutil.copy(folder / f"{number % 2}.png", folder / f"{number}.png")
    sources = load({"DATA.VAL_SPLIT": 0.1})
    assert np.bincount(sources.val.targets).tolist() == [2, 10]
    for number in range(1, 20):
        shutil.copy(folder / "0.png", folder / f"{number}.png")
    with pytest.raises(UserError, match=r"1 of 2 .* a single image \(copies do not count\): dog"):
        load({"DATA.VAL_SPLIT": 0.1})


def test_copies_in_shards_are_counted(root, make_data, tmp_path, monkeypatch):
    for number in range(2):
        shutil.copy(root / f"train/cat/{number}.png", root / f"val/cat/copy {number}.png")
    folder = make_data({"DATA.DATASET": "folder", "DATA.PATH": str(root)})
    options = ShardOptions(shard_mb=0.01)
    make_shards(load_sources(folder), str(tmp_path / "shards"), options, workers=1)
    monkeypatch.setattr("swinv2_moe.data.shards._MAX_OPEN", 1)
    section = make_data({"DATA.DATASET": "shards", "DATA.PATH": str(tmp_path / "shards")})
    (note,) = load_sources(section).notes
    assert "2 of the 42 validation images are also in training; the first: val/" in note
    assert load_sources(section, validation_only=True).notes == ()


def test_copies_between_train_and_val_are_counted(load, root, make_data):
    for number in range(2):
        shutil.copy(root / f"train/cat/{number}.png", root / f"val/cat/copy {number}.png")
    line = (
        "warning: copies (equal bytes): 2 of the 42 validation images are also in training; the"
        f" first: {root}/val/cat/copy 0.png = {root}/train/cat/0.png; `train --check-files` lists"
        " them"
    )
    assert load().notes == (line,)
    train, val = root / "train.txt", root / "val.txt"
    train.write_text("train/cat/0.png 0\ntrain/dog/0.png 1\ntrain/dog/0.png 1\n")
    val.write_text("val/cat/copy 0.png 1\n")
    lists = {"DATA.TRAIN_LIST": str(train), "DATA.VAL_LIST": str(val)}
    section = make_data({"DATA.DATASET": "list", "DATA.PATH": str(root)}, lists)
    assert load_sources(section).notes == (
        "warning: copies (equal bytes): 1 of the 1 validation images are also in training, 1"
        f" with several labels; the first: {root}/val/cat/copy 0.png = {root}/train/cat/0.png;"
        " `train --check-files` lists them",
    )
