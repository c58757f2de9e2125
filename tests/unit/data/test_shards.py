"""Shards: made of any source, read by webdataset and by us, resumed, and refused in one line when
damaged."""

import errno
import gc
import os
import pickle
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shard_cases import edit_index
from tool_cases import refusal, snapshot
from webdataset import TarWriter, WebDataset

from swinv2_moe import files
from swinv2_moe.data import shards
from swinv2_moe.data.build import build_data
from swinv2_moe.data.prepare.index_shards import index_shards
from swinv2_moe.data.prepare.make_shards import ShardOptions, make_shards
from swinv2_moe.data.shards import load_shards
from swinv2_moe.data.sources import ImageArrays, ImageFiles, Sources, load_sources
from swinv2_moe.locks import lock

SMALL = ShardOptions(shard_mb=0.02)  # of noise images: about 6 in a shard


@pytest.fixture
def load(make_data):
    """`load("folder", root)`: the sources of a directory."""
    return lambda kind, path: load_sources(
        make_data({"DATA.DATASET": kind, "DATA.PATH": str(path)})
    )


@pytest.fixture
def sources(load, make_folder) -> Sources:
    return load("folder", make_folder(("cat", "cow", "dog"), per_class=10))


@pytest.fixture
def made(sources, tmp_path) -> Path:
    make_shards(sources, str(tmp_path / "shards"), SMALL, workers=2)
    return tmp_path / "shards"


def contents(source) -> dict[bytes, int]:
    return {source.read(i): int(source.targets[i]) for i in range(len(source))}


def test_other_labels(load, made):
    train = load("shards", made).train
    other = train.relabelled([5, 0, 7])
    assert set(other.targets) == {0, 5, 7}
    for source in (other, pickle.loads(pickle.dumps(other))):
        assert source.targets.tolist() == np.array([5, 0, 7])[train.targets].tolist()
        assert source.read(11) == train.read(11)


# making


def test_webdataset_and_we_read_what_the_source_holds(sources, made):
    assert sorted(path.name for path in made.iterdir()) == ["index.json", "train", "val"]
    tars = sorted(str(path) for path in made.glob("train/*.tar"))
    assert len(tars) >= 3
    samples = list(WebDataset(tars, shardshuffle=False))
    mine = load_shards(str(made))
    assert [sample["png"] for sample in samples] == [mine.train.read(i) for i in range(30)]
    assert [int(sample["cls"]) for sample in samples] == mine.train.targets.tolist()
    tar, key = Path(samples[7]["__url__"]).name, samples[7]["__key__"]
    assert mine.train.name(7) == f"train/{tar}: {key}.png"
    assert mine.class_names == ["cat", "cow", "dog"]
    for ours, theirs in zip(mine[:2], sources[:2], strict=True):
        assert contents(ours) == contents(theirs)
        assert ours.targets.tolist() != sorted(ours.targets)  # shuffled
    row, stem = key.split("-")
    assert mine.train.read(7) == sources.train.read(int(row))
    assert stem == Path(sources.train.name(int(row))).stem
    assert set(mine.train.open(0).size) == {24, 20}


def test_the_same_images_and_seed_give_the_same_bytes_whatever_the_workers(sources, made, tmp_path):
    make_shards(sources, str(tmp_path / "again"), SMALL, workers=1)
    assert snapshot(tmp_path / "again") == snapshot(made)
    make_shards(sources, str(tmp_path / "other"), ShardOptions(seed=1, shard_mb=0.02), workers=1)
    assert snapshot(tmp_path / "other")["train/000000.tar"] != snapshot(made)["train/000000.tar"]


class Interrupted(ImageFiles):
    """Does something once a worker asks it for a certain image."""

    def read(self, index: int) -> bytes:
        if index == self.at and os.getpid() != self.parent:
            self.act()
        return super().read(index)


def interrupted(source: ImageFiles, at: int, act) -> Interrupted:
    made = Interrupted(source.root, source.paths, source.targets)
    object.__setattr__(made, "at", at)
    object.__setattr__(made, "act", act)
    object.__setattr__(made, "parent", os.getpid())
    return made


@pytest.mark.parametrize("how", ["killed", "unreadable"])
def test_what_is_finished_is_kept_and_the_rest_is_made_after_a_restart(
    sources, made, tmp_path, how
):
    def act():
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EIO, "Input/output error")

    output = tmp_path / "interrupted"
    at = int(np.random.default_rng(0).permutation(30)[15])  # in the third shard
    bad = interrupted(sources.train, at, act)
    message = refusal(make_shards, sources._replace(train=bad), str(output), SMALL, 1)
    if how == "killed":
        assert message.startswith("a worker ended with status -9")
    else:
        assert message == f"{sources.train.name(at)}: cannot be read (Input/output error)"
    left = snapshot(output)
    assert "train/000001.tar" in left
    assert not [name for name in left if name.endswith("2.tar") or ".tmp" in name]
    assert "has not finished there" in refusal(load_shards, str(output))
    before = (output / "train/000000.tar").stat().st_ino
    make_shards(sources, str(output), SMALL, workers=2)
    assert (output / "train/000000.tar").stat().st_ino == before
    assert snapshot(output) == snapshot(made)


def test_a_full_disk_leaves_nothing_half_written_and_the_restart_goes_on(
    sources, made, tmp_path, monkeypatch
):
    output = tmp_path / "full"
    write = files.HashedFile.write

    def full(self, content):
        if "000001" in self._file.name and self.bytes > 5000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(files.HashedFile, "write", full)
        message = refusal(make_shards, sources, str(output), SMALL, 1)
    assert message == f"{output}/train/000001.tar: cannot be written (No space left on device)"
    assert {name for name in snapshot(output) if "1.tar" in name} == set()
    make_shards(sources, str(output), SMALL, workers=2)
    assert snapshot(output) == snapshot(made)


def test_other_arguments_or_images_than_the_first_time_are_refused(sources, made, tmp_path):
    # already done
    assert make_shards(sources, str(made), SMALL, 1)["class_names"] == ["cat", "cow", "dog"]

    def refused(sources, output, options=SMALL) -> str:
        return refusal(make_shards, sources, str(output), options, 1)

    says = "was begun with seed 0, not 3: continue with that value, or take another --output"
    assert refused(sources, made, ShardOptions(seed=3, shard_mb=0.02)) == f"{made} {says}"
    train = sources.train
    fewer = ImageFiles(train.root, train.paths[1:], train.targets[1:])
    assert "train_images 30, not 29" in refused(sources._replace(train=fewer), made)
    other = ImageFiles(train.root, train.paths[::-1], train.targets)
    assert "train_sha256" in refused(sources._replace(train=other), made)
    assert "is not empty" in refused(sources, tmp_path / "images")
    assert "train" in os.listdir(tmp_path / "images")
    (tmp_path / "file").touch()
    assert re.match(r".*/file: cannot be made", refused(sources, tmp_path / "file"))
    with lock(str(tmp_path)):
        assert refused(sources, tmp_path) == f"{tmp_path}: another process is writing there"


def left_out(index: dict, split: str) -> int:
    return sum(shard["left_out"] for shard in index[split]["shards"])


def test_images_that_are_missing_or_empty_are_left_out_and_counted(load, make_folder, tmp_path):
    root = make_folder(per_class=110)
    sources = load("folder", root)
    bad = [root / "train/cat/5.png", root / "train/dog/6.png", root / "val/dog/7.png"]
    bad[0].unlink()
    bad[1].write_bytes(b"")
    bad[2].write_bytes(bad[2].read_bytes()[:700])
    for check in (False, True):
        output = tmp_path / f"checked {check}"
        index = make_shards(sources, str(output), ShardOptions(shard_mb=0.1, check=check), 2)
        assert left_out(index, "train") == 2
        assert left_out(index, "val") == int(check)
        shards_of_both = index["train"]["shards"] + index["val"]["shards"]
        first = {shard["first_left_out"] for shard in shards_of_both}
        assert first - {None} <= set(map(str, bad))
        assert len(load_shards(str(output)).train) == 218
    for number in range(9):
        (root / f"train/cat/{number}.png").unlink(missing_ok=True)
    message = refusal(make_shards, sources, str(tmp_path / "more"), ShardOptions(shard_mb=0.1), 2)
    says = r"\d+ of 440 images are missing, empty or broken, .*; the first: .*/train/.*png"
    assert re.match(says, message)


def test_larger_images_are_made_smaller(tmp_path):
    rng = np.random.default_rng(0)
    pictures = {"edge.png": (400, 32), "small.png": (30, 40)}
    pictures |= {"tall.jpg": (50, 100), "wide.png": (100, 50)}
    for name, (width, height) in pictures.items():
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    names = np.array([name.encode() for name in pictures])
    source = ImageFiles(str(tmp_path), names, np.zeros(4, np.int64))
    make_shards(
        Sources(source, source, ["0"]), str(tmp_path / "out"), ShardOptions(short_side=32), 1
    )
    made = load_shards(str(tmp_path / "out")).train
    found = {made.name(i).split("-")[1]: made.open(i) for i in range(4)}
    sizes = {name: image.size for name, image in found.items()}
    smaller = {"tall.jpg": (32, 64), "wide.jpg": (64, 32)}
    assert sizes == {"edge.png": (400, 32), "small.png": (30, 40)} | smaller
    want = Image.open(tmp_path / "wide.png").resize((64, 32), Image.Resampling.BICUBIC)
    # noise, through JPEG
    assert np.abs(np.asarray(found["wide.jpg"], float) - np.asarray(want, float)).mean() < 25


def test_arrays_become_pngs(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    source = ImageArrays("CIFAR10", pixels, np.arange(5))
    make_shards(Sources(source, source, list("abcde")), str(tmp_path / "out"), ShardOptions(), 1)
    made = load_shards(str(tmp_path / "out")).val
    for i in range(5):
        assert made.name(i).endswith(f"-CIFAR10_{made.targets[i]}_.png")
        assert np.array_equal(np.asarray(made.open(i)), pixels[made.targets[i]])


# reading


@pytest.fixture
def build(make_data, made, full_augmentation):
    """`build({"DATA.NUM_WORKERS": 1})`: the loaders of `made`."""
    dataset = {"DATA.DATASET": "shards", "DATA.PATH": str(made)}
    return lambda keys=None: build_data(make_data(full_augmentation, dataset, keys or {}))


def test_the_loader_reads_every_image_once_with_any_number_of_workers_and_goes_on_in_mid_epoch(
    build,
):
    reference = None
    for workers in (0, 2):
        data = build({"DATA.NUM_WORKERS": workers})
        assert (data.train_size, data.val_size, data.class_names) == (30, 30, ["cat", "cow", "dog"])
        data.set_epoch(2)
        batches = list(data.train_loader)
        order = list(data.train_loader.sampler)
        assert len(set(order)) == len(order) == 28
        targets = torch.cat([batch.targets for batch in batches]).tolist()
        assert targets == data.train_loader.dataset.source.targets[order].tolist()
        assert not any(batch.unreadable for batch in batches)
        reference = reference or batches
        assert all(torch.equal(a.images, b.images) for a, b in zip(batches, reference, strict=True))
        data.set_epoch(2, skip_steps=5)
        rest = zip(data.train_loader, reference[5:], strict=True)
        assert all(torch.equal(a.images, b.images) for a, b in rest)
    val = torch.cat([batch.targets for batch in data.val_loader])
    assert torch.bincount(val).tolist() == [10] * 3


def open_tars(root: Path) -> int:
    gc.collect()
    files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(file.startswith(str(root)) and file.endswith(".tar") for file in files)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_few_files_are_open_at_a_time_and_forks_and_copies_read_on(made, monkeypatch):
    monkeypatch.setattr(shards, "_MAX_OPEN", 2)
    source = load_shards(str(made)).train
    assert open_tars(made) == 0
    whole = [source.read(i) for i in range(30)]
    assert open_tars(made) == 2
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.read(i) for i in reversed(range(30))] == whole[::-1]
    assert source.members.tobytes() not in pickle.dumps(source)  # a memory map
    child = os.fork()
    if child == 0:
        os._exit(0 if [source.read(i) for i in range(30)] == whole else 1)
    assert [source.read(i) for i in range(30)] == whole
    assert os.waitpid(child, 0)[1] == 0
    del source, copy
    assert open_tars(made) == 0


def test_an_image_damaged_within_its_shard_is_named(build, made):
    source = load_shards(str(made)).train
    shard, offset, size, _ = source.members[3].item()
    path = made / "train" / source.shards[shard]["name"]
    with path.open("r+b") as file:
        file.seek(offset + size // 2)
        file.write(bytes(size - size // 2))
    loader = build({"DATA.MAX_BAD_SHARE": 0.5}).train_loader
    assert {name for batch in loader for name in batch.unreadable} <= {source.name(3)}
    assert loader.dataset[3].unreadable == [source.name(3)]


def change_row(made: Path, key: str, value: int) -> None:
    rows = np.load(made / "val/members.npy")
    rows[key][2] = value
    np.save(made / "val/members.npy", rows)


def replace_rows(made: Path, rows: np.ndarray) -> None:
    np.save(made / "train/members.npy", rows, allow_pickle=True)


INDEX = r"^.*/index\.json: "
BY_US = INDEX + r"is not as `swinv2-moe make-shards` writes it "
ROWS, VAL_ROWS = r"^.*/train/members\.npy: ", r"^.*/val/members\.npy: "
DAMAGES = [  # what is done, what the line says
    (
        lambda made: os.truncate(made / "train/000001.tar", 1234),
        r"^.*/train/000001\.tar: has 1,234 bytes, index\.json records \d+,\d+$",
    ),
    (
        lambda made: (made / "val/000000.tar").unlink(),
        r"^.*/val/000000\.tar: cannot be read \(No such file .*\), index\.json lists it$",
    ),
    (
        lambda made: replace_rows(made, np.load(made / "train/members.npy")[1:]),
        ROWS + r"has 29 rows, index\.json records 30 images$",
    ),
    (
        lambda made: change_row(made, "label", 3),
        VAL_ROWS + r"label 3 is out of range, with 3 classes \(val/000000\.tar\)$",
    ),
    (
        lambda made: change_row(made, "offset", 10**9),
        VAL_ROWS + r"rows that point beyond the end of their shard \(val/000000\.tar\)$",
    ),
    (
        lambda made: change_row(made, "shard", 1),
        VAL_ROWS + r"rows of shard 1 where those of shard 0 should be",
    ),
    (
        lambda made: (made / "train/members.npy").unlink(),
        ROWS + r"cannot be read \(No such file or directory\)$",
    ),
    (
        lambda made: replace_rows(made, np.array([{}], object)),
        ROWS + r"cannot be read \(.*\)$",
    ),
    (
        lambda made: edit_index(made, lambda index: index.update(format_version=9)),
        INDEX + r"format version 9, this program knows 1$",
    ),
    (
        lambda made: edit_index(made, lambda index: index.pop("val")),
        BY_US + r"\(KeyError: 'val'\)$",
    ),
    (
        lambda made: edit_index(made, lambda index: index["train"]["shards"][1].pop("sha256")),
        BY_US + r"\(no sha256, or not of its type\)$",
    ),
    (lambda made: (made / "index.json").write_text('{"format_version": 1,'), INDEX + "is damaged"),
    (
        lambda made: (made / "index.json").unlink(),
        r"^DATA\.PATH is '.*': it has no index\.json; .*swinv2-moe make-shards --index",
    ),
]


def test_shards_that_are_not_as_they_were_made(load, made, tmp_path):
    for number, (damage, message) in enumerate(DAMAGES):
        copy = shutil.copytree(made, tmp_path / f"damaged {number}")
        damage(copy)
        assert re.search(message, refusal(load, "shards", copy))


def test_shards_under_a_configuration_of_something_else(load, build, made):
    assert refusal(load, "folder", made).endswith("; these are shards: DATA.DATASET shards")
    message = refusal(build, {"MODEL.NUM_CLASSES": 2})
    assert message.startswith("MODEL.NUM_CLASSES is 2, the data has 3 classes")


# other programs' shards


def write_tar(path: Path, samples: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TarWriter(str(path), encoder=False) as tar:
        for sample in samples:
            tar.write(sample)


@pytest.fixture
def foreign(made, tmp_path):
    """The images of `made` in tars of our own names, with labels as .cls, .json, or both."""
    root, source = tmp_path / "foreign", load_shards(str(made)).train
    forms = [
        lambda label: {"cls": b"%d" % label},
        lambda label: {"json": b'{"label": %d, "caption": "a b"}' % label, "txt": b"a b"},
        lambda label: {"cls": b"%d\n" % label, "json": b'{"url": "x"}', "seg.png": b"mask"},
    ]
    for number, form in enumerate(forms):
        samples = []
        for i in range(10 * number, 10 * number + 10):
            image = {"PNG" if i % 2 else "png": source.read(i)}
            label = int(source.targets[i])
            samples.append({"__key__": f"part/{i:03d}"} | image | form(label))
            if i == 7:
                samples[-1] |= {"cls": b"a name", "json": b'{"label": %d}' % label}
        write_tar(root / "train" / f"pics-{number}.tar", samples)
    shutil.copytree(root / "train", root / "val")
    return root


def test_the_index_of_foreign_shards(foreign, made):
    before = snapshot(foreign)
    index = index_shards(str(foreign), num_classes=0, check=True, workers=2)
    assert index["class_names"] == ["0", "1", "2"]
    ours, source = load_shards(str(foreign)).train, load_shards(str(made)).train
    assert [ours.read(i) for i in range(30)] == [source.read(i) for i in range(30)]
    assert ours.targets.tolist() == source.targets.tolist()
    assert ours.name(11) == "train/pics-1.tar: part/011.PNG"
    new = {"index.json", "train/members.npy", "val/members.npy"}
    assert snapshot(foreign).keys() - before.keys() == new
    assert index_shards(str(foreign), 0, True, 1) == index
    write_tar(foreign / "train/pics-3.tar", [])
    assert "was begun with tars 6, not 7" in refusal(index_shards, str(foreign), 0, True, 1)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"jpg": b"x"}, r"k has no label: no \.cls, and no \.json with a \"label\"$"),
        ({"jpg": b"x", "json": b'{"class": 1}'}, r"k has no label"),
        ({"jpg": b"x", "json": b'{"label'}, r"k has no label"),
        ({"jpg": b"x", "cls": b"cat"}, r"k: label 'cat' is not an integer; write the"),
        ({"jpg": b"x", "cls": b"1", "json": b'{"label": 0}'}, r"k: label 1 in its \.cls, 0 in its"),
        ({"jpg": b"x", "json": b'{"label": 1.5}'}, r"k: label '1\.5' is not an integer; write the"),
        (
            {"jpg": b"x", "json": b'{"label": true}'},
            r"k: label 'True' is not an integer; write the",
        ),
        ({"jpg": b"x", "cls": b"-1"}, r"k: label -1 is out of range"),
        ({"jpg": b"x", "cls": b"7"}, r"k: label 7 is out of range, with 5 classes$"),
        ({"cls": b"1"}, r"k has no image \(apng avif bmp .*\)$"),
        ({"cls": b"1", "jpg": b"x", "png": b"x"}, r"k has two images, \.jpg and \.png$"),
    ],
)
def test_foreign_samples_that_cannot_be_used(tmp_path, sample, message):
    for split in ("train", "val"):
        write_tar(tmp_path / split / "bad.tar", [{"__key__": "k", **sample}])
    found = refusal(index_shards, str(tmp_path), 5, False, 1)
    assert re.search(rf"bad\.tar: {message}", found)


def test_foreign_tars_that_are_cut_off_anywhere_are_named(foreign):
    path = foreign / "train/pics-1.tar"
    whole = path.read_bytes()
    member = len(whole) // 512 // 2 * 512  # blocks: cuts between members too
    for size in (member, member + 100, 5 * 512, 600, 0):
        path.write_bytes(whole[:size])
        message = refusal(index_shards, str(foreign), 0, False, 1)
        where = r"(after part/\d+|from the beginning)"
        assert re.match(rf"{path}: is cut off or damaged {where}", message)
        (foreign / "plan.json").unlink()
    path.write_bytes(whole[:member] + b"garbage!" * 64 + whole[member:])
    assert "pics-1.tar: is cut off or damaged" in refusal(index_shards, str(foreign), 0, False, 1)
    (foreign / "plan.json").unlink()
    path.write_bytes(whole)
    index_shards(str(foreign), 0, False, 2)
    assert len(load_shards(str(foreign)).train) == 30


def test_foreign_labels_with_gaps_and_folders_without_tars(foreign, tmp_path):
    message = refusal(index_shards, str(tmp_path / "nothing"), 0, False, 1)
    assert message.endswith("there is no train/*.tar")
    write_tar(foreign / "train/pics-9.tar", [{"__key__": "k", "png": b"x", "cls": b"5"}])
    message = refusal(index_shards, str(foreign), 0, False, 1)
    assert "labels of train reach 5 but 2 below have no image, the first is 3" in message
    (foreign / "plan.json").unlink()
    assert len(index_shards(str(foreign), 8, False, 1)["class_names"]) == 8


def test_what_systems_leave_in_foreign_tars_is_skipped(foreign):
    keys = ("part/@eaDir/k", "__MACOSX/part/k", "part/.thumbnails/k", "part/._k")
    samples = [{"__key__": key, "png": b"x"} for key in keys]
    samples.append({"__key__": "k", "png": b"x", "cls": b"2"})
    write_tar(foreign / "train/pics-9.tar", samples)
    index_shards(str(foreign), 0, False, 1)
    assert len(load_shards(str(foreign)).train) == 31
