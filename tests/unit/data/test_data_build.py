"""Every source, and one clear line for everything that can be wrong with it."""

import json
import os
import pickle
import re
import shutil

import numpy as np
import pytest
import tool_cases
import torch
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10, ImageFolder

from swinv2_moe.config import data_config
from swinv2_moe.data.build import build_data, in_recorded_order
from swinv2_moe.data.images import subfolders
from swinv2_moe.data.sources import listed, load_sources
from swinv2_moe.errors import UserError


def refusal(config, rank=0, world_size=1) -> str:
    return tool_cases.refusal(build_data, data_config(config), rank, world_size)


# digits


def test_digits_are_sklearns_with_a_stratified_fifth_held_out(make_config):
    sources = load_sources(data_config(make_config()))
    assert (len(sources.train), len(sources.val)) == (1437, 360)
    pixels, targets = load_digits(return_X_y=True)
    rows = [tuple(row) for row in pixels.astype(int).tolist()]
    originals = dict(zip(rows, targets, strict=True))
    seen = set()
    for source in (sources.train, sources.val):
        share = np.bincount(source.targets, minlength=10) / np.bincount(targets)
        assert np.ptp(share) < 0.01
        for index, target in enumerate(source.targets):
            values = np.asarray(source.open(index)).astype(int) * 16 / 255
            row = tuple(values.round().astype(int).ravel().tolist())
            assert originals[row] == target
            seen.add(row)
    assert seen == set(originals)
    assert np.asarray(sources.train.open(0)).max() == 255


def test_digits_validation_part_does_not_depend_on_the_seed(make_data):
    parts = [load_sources(make_data({"SEED": seed})).val for seed in (0, 1)]
    assert np.array_equal(parts[0].images, parts[1].images)
    assert np.array_equal(parts[0].targets, parts[1].targets)


def test_digits_build(make_data):
    section = make_data({"DATA.BATCH_SIZE": 128, "DATA.NUM_WORKERS": 2})
    data = build_data(section, rank=1, world_size=2)
    assert (data.num_classes, data.class_names) == (10, list("0123456789"))
    assert (data.train_size, data.val_size) == (1437, 360)
    assert (len(data.train_loader), len(data.val_loader)) == (5, 2)
    assert data.train_loader.num_workers == 0
    assert sum(len(batch.targets) for batch in data.val_loader) == 180
    data.set_epoch(0, skip_steps=3)
    assert len(list(data.train_loader)) == 2


def test_a_resume_in_mid_epoch_gives_the_same_batches(make_data):
    data, again = (build_data(make_data({"DATA.BATCH_SIZE": 256})) for _ in range(2))
    data.set_epoch(4)
    whole = list(data.train_loader)
    again.set_epoch(4, skip_steps=3)
    rest = list(again.train_loader)
    assert len(rest) == len(whole) - 3
    assert all(torch.equal(a.images, b.images) for a, b in zip(whole[3:], rest, strict=True))


def test_an_overlarge_step_and_a_class_count_mismatch_name_both_numbers(make_config):
    message = refusal(make_config({"DATA.BATCH_SIZE": 500}), world_size=4)
    assert message.startswith("DATA.BATCH_SIZE is 500: a step over 4 ranks takes 2000 images,")
    assert message.endswith(" the training set has 1437")
    message = refusal(make_config({"MODEL.NUM_CLASSES": 12}))
    assert message.startswith("MODEL.NUM_CLASSES is 12, the data has 10 classes")
    right = data_config(make_config({"MODEL.NUM_CLASSES": 10}))
    assert build_data(right).num_classes == 10


# folder, imagenet


@pytest.fixture
def folder_config(make_config, make_folder):
    root = make_folder(("cat", "cow", "dog"))
    return make_config({"DATA.DATASET": "folder", "DATA.PATH": str(root)})


@pytest.mark.parametrize("dataset", ["folder", "imagenet"])
def test_folder_is_torchvisions_image_folder(folder_config, dataset):
    folder_config.DATA.DATASET = dataset
    root = folder_config.DATA.PATH
    open(f"{root}/train/cat/notes.txt", "w").close()
    os.makedirs(f"{root}/train/dog/deeper")
    shutil.copy(f"{root}/val/dog/0.png", f"{root}/train/dog/deeper/x.JPEG")
    sources = load_sources(data_config(folder_config))
    for source, split in ((sources.train, "train"), (sources.val, "val")):
        reference = ImageFolder(f"{root}/{split}")
        samples = [(source.name(i), source.targets[i]) for i in range(len(source))]
        assert samples == reference.samples
        assert sources.class_names == reference.classes


def test_numbered_folders_are_in_the_order_of_their_numbers(make_data, make_folder):
    """As timm has them; a checkpoint of earlier versions keeps theirs, which is torchvision's."""
    root = make_folder(("1", "2", "010"), per_class=2)
    sources = load_sources(make_data({"DATA.DATASET": "folder", "DATA.PATH": str(root)}))
    assert sources.class_names == ["1", "2", "010"]
    assert sources.val.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert sources.val.name(5) == f"{root}/val/010/1.png"
    reference = ImageFolder(f"{root}/train")
    train = in_recorded_order(sources, reference.classes).train
    assert [(train.name(i), train.targets[i]) for i in range(len(train))] == reference.samples
    assert in_recorded_order(sources, ["1", "2", "3"]) is sources


@pytest.mark.parametrize(
    "ordered",
    [
        ["class_1x2", "class_2x2", "class_10x2"],
        ["1.0", "2.0", "10.0"],
        ["-3", "1", "2", "10"],
        ["1.5", "2.5", "10.5"],
        ["１", "２", "１０"],  # full width
        ["a10b10", "a1b1", "a2b2"],  # two numbers
        ["a1", "a10", "a2", "b3"],
    ],
)
def test_classes_that_differ_in_one_number_are_in_its_order(ordered, tmp_path):
    for name in ordered:
        (tmp_path / name).mkdir()
    assert subfolders(str(tmp_path)) == ordered


def test_two_forms_of_one_class_are_refused(make_data, make_folder):
    for names in (("1", "01"), ("1", "1.0"), ("caf\u00e9", "cafe\u0301")):
        root = make_folder(names, per_class=2, name=names[1])
        with pytest.raises(UserError, match=r": the class folders '.*' and '.*' have the"):
            load_sources(make_data({"DATA.DATASET": "folder", "DATA.PATH": str(root)}))


def test_folder_paths_may_have_spaces_and_any_script(make_data, make_folder):
    root = make_folder(("two words", "čeština", "日本"), name="my images")
    data = build_data(make_data({"DATA.DATASET": "folder", "DATA.PATH": str(root)}))
    assert sum(len(batch.unreadable) for batch in data.val_loader) == 0
    assert data.class_names == ["two words", "čeština", "日本"]


def test_a_class_folder_of_another_encoding(make_data, make_folder):
    """Its name can be printed, and is not that of another."""
    root = make_folder()
    for split in ("train", "val"):
        for name in (b"\xe9t\xe9", b"\xe8t\xe9"):  # Latin-1
            shutil.copytree(root / split / "cat", root / split / os.fsdecode(name))
    data = build_data(make_data({"DATA.DATASET": "folder", "DATA.PATH": str(root)}))
    assert data.class_names == ["cat", "dog", "\\xe8t\\xe9", "\\xe9t\\xe9"]
    assert (data.val_size, sum(len(batch.unreadable) for batch in data.val_loader)) == (16, 0)


def test_a_missing_path_and_a_file_for_a_path(folder_config, tmp_path):
    folder_config.DATA.PATH = str(tmp_path / "nowhere")
    assert refusal(folder_config) == f"DATA.PATH is '{tmp_path}/nowhere': no such directory"
    (tmp_path / "a.zip").touch()
    folder_config.DATA.PATH = str(tmp_path / "a.zip")
    says = f"DATA.PATH is '{tmp_path}/a.zip': a file, it must be a directory"
    assert refusal(folder_config) == says


def test_a_folder_without_train_or_val_says_what_it_found(folder_config, tmp_path):
    root = folder_config.DATA.PATH
    os.rename(f"{root}/val", f"{root}/other")
    assert refusal(folder_config) == (
        f"DATA.PATH is '{root}': it has no val/ folder; found: other, train; DATA.VAL_SPLIT 0.1"
        " would hold out a tenth of train/"
    )
    folder_config.DATA.PATH = f"{root}/train"
    assert refusal(folder_config).endswith(
        f"found: cat, cow, dog; DATA.PATH {root} is the folder above, with train/ in it"
    )
    (tmp_path / "empty").mkdir()
    folder_config.DATA.PATH = str(tmp_path / "empty")
    assert refusal(folder_config).endswith("it has no train/ and no val/ folder; found: nothing")
    folder_config.DATA.DATASET = "imagenet"
    assert refusal(folder_config).endswith(
        "found: nothing (data/README.md says how to unpack ImageNet)"
    )


def test_a_folder_without_images(folder_config):
    root = folder_config.DATA.PATH
    for name in ("cat", "cow", "dog"):
        shutil.rmtree(f"{root}/train/{name}")
        os.makedirs(f"{root}/train/{name}")
    open(f"{root}/train/cat/readme.txt", "w").close()
    message = refusal(folder_config)
    assert message.startswith(f"{root}/train: no images in its 3 class folders (.jpg .jpeg")
    shutil.rmtree(f"{root}/val")
    os.makedirs(f"{root}/val")
    open(f"{root}/val/loose.png", "w").close()
    assert refusal(folder_config) == (
        f"{root}/val has no class folder in it, only: loose.png; move the images of each class into"
        " a folder with its name"
    )


def test_an_empty_class_folder(folder_config):
    root = folder_config.DATA.PATH
    shutil.rmtree(f"{root}/val/cow")
    os.makedirs(f"{root}/val/cow")
    assert refusal(folder_config) == f"{root}/val: 1 of 3 class folders hold no image: cow"


def test_classes_that_differ(folder_config):
    root = folder_config.DATA.PATH
    os.rename(f"{root}/val/cow", f"{root}/val/horse")
    for number in range(5):
        shutil.copytree(f"{root}/train/cat", f"{root}/train/extra{number}")
    assert refusal(folder_config) == (
        f"DATA.PATH is '{root}': train/ has 8 class folders and val/ 3, they must be the same"
        " (only in train/: cow, extra0, extra1, ... (6 in all); only in val/: horse)"
    )


def test_a_directory_that_may_not_be_read(folder_config, monkeypatch):
    denied = f"{folder_config.DATA.PATH}/val"
    # root, as in a container, may read anything
    monkeypatch.setattr(os, "access", lambda path, mode: path != denied)
    assert refusal(folder_config) == f"DATA.PATH is '{denied}': permission denied"


# list


@pytest.fixture
def list_config(make_config, make_folder, tmp_path):
    """`list_config(train_lines)`: lists beside the image folder, of 4 images of class 0 and 4 of
    class 1."""

    def make(train: str | None = None, val: str | None = None, **keys):
        root = tmp_path / "images" if (tmp_path / "images").exists() else make_folder()
        for split, text in (("train", train), ("val", val)):
            good = [f"{split}/cat/{i}.png 0\n{split}/dog/{i}.png 1\n" for i in range(4)]
            (root / f"{split}.txt").write_text("".join(good) if text is None else text)
        lists = {"DATA.TRAIN_LIST": str(root / "train.txt"), "DATA.VAL_LIST": str(root / "val.txt")}
        more = {name.replace("__", "."): value for name, value in keys.items()}
        return make_config({"DATA.DATASET": "list"}, lists, more)

    return make


def test_list_lines(list_config, tmp_path):
    config = list_config()
    data = build_data(data_config(config))
    assert (data.num_classes, data.class_names) == (2, ["0", "1"])
    assert (data.train_size, data.val_size) == (8, 8)
    batches = list(data.val_loader)
    assert torch.cat([batch.targets for batch in batches]).tolist() == [0, 1] * 4
    assert not any(batch.unreadable for batch in batches)
    config.DATA.DATASET, config.DATA.PATH = "folder", str(tmp_path / "images")
    by_folder = torch.cat([batch.images for batch in build_data(data_config(config)).val_loader])
    by_list = torch.cat([batch.images for batch in batches])
    assert torch.equal(by_list, by_folder[[0, 4, 1, 5, 2, 6, 3, 7]])


def test_list_paths_may_hold_spaces_and_be_absolute_and_lines_may_be_windows(list_config, tmp_path):
    config = list_config()
    root = tmp_path / "images"
    os.rename(root / "train/cat/0.png", root / "train/cat/my own 0.png")
    lines = ["train/cat/my own 0.png\t0", "", f"  {root}/train/dog/0.png   1  "]
    lines += ["train/dog/1.png 1", "train/dog/2.png 1"]
    (root / "train.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    source = load_sources(data_config(config)).train
    assert source.name(0) == f"{root}/train/cat/my own 0.png"
    assert source.name(1) == f"{root}/train/dog/0.png"
    assert source.targets.tolist() == [0, 1, 1, 1]
    assert all(source.open(i).size == (24, 20) for i in range(4))


def test_list_paths_and_lists_are_relative_to_data_path_when_it_is_given(list_config, tmp_path):
    config = list_config(DATA__PATH=str(tmp_path / "images"))
    shutil.move(tmp_path / "images/train.txt", tmp_path / "elsewhere.txt")
    config.DATA.TRAIN_LIST, config.DATA.VAL_LIST = str(tmp_path / "elsewhere.txt"), "val.txt"
    sources = load_sources(data_config(config))
    assert sources.train.open(0).size == sources.val.open(0).size == (24, 20)


def test_swins_json_map(list_config, tmp_path):
    """What Swin-Transformer's imagenet22k_dataset.py reads: entry[0] the path, int(entry[1]) the
    label."""
    cats, dogs = ([f"train/{name}/{i}.png" for i in range(4)] for name in ("cat", "dog"))
    entries = [[path, 0] for path in cats] + [[path, 1] for path in dogs]
    longer = [[path, str(label), "n01440764"] for path, label in entries]
    for text in (json.dumps(entries), json.dumps(longer, indent=1)):
        source = load_sources(data_config(list_config(text))).train
        assert source.targets.tolist() == [0] * 4 + [1] * 4
        assert source.name(5) == str(tmp_path / "images/train/dog/1.png")


COMMAS = """\
path,label
train/cat/0.png,0
"train/dog/0.png", 1
  train/dog/1.png ,1

"""
SPACES = "train/cat/0.png 0\ntrain/dog/0.png\t1\ntrain/dog/1.png  1"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (COMMAS, "utf-8"),
        (COMMAS.replace(",", ";"), "utf-8-sig"),
        (SPACES, "utf-16"),
        ("path label\n" + SPACES, "utf-32"),
    ],
)
def test_lists_of_spreadsheets(list_config, tmp_path, text, encoding):
    config = list_config()
    name = "dög, 1"
    (tmp_path / "images/train/dog").rename(tmp_path / "images/train" / name)
    if text is COMMAS:
        text = text.replace("train/dog/1.png", f'"train/{name}/1.png"')
    text = text.replace("dog", name)
    (tmp_path / "images/train.txt").write_bytes(text.replace("\n", "\r\n").encode(encoding))
    source = load_sources(data_config(config)).train
    assert source.targets.tolist() == [0, 1, 1]
    assert source.name(2) == f"{tmp_path}/images/train/{name}/1.png"
    assert source.open(2).size == (24, 20)


CAT = '[["train/cat/0.png", 0]'
NO_PAIR = r"expected \[path, label\], found"
NO_JSON = r"not valid JSON \("
LISTS = [  # the text of train.txt, what the line says after that name
    ("train/cat/0.png 0\ntrain/dog/0.png\n", ":2: expected a path and a label, found 'train/dog/0"),
    ("train/cat/0.png 0\n\ntrain/dog/0.png one\n", ":3: label 'one' is not an integer"),
    ("train/cat/0.png,cat\n", ":1: label 'cat' is not an integer; a list numbers .* folder with"),
    ("train/cat/0.png,0,24\n", ":1: expected a path and a label, found 'train/cat/0.png,0,24'"),
    ("t\0r\0a\0i\0n\0 \0000\0", ": looks like UTF-16 without its mark; save it as UTF-8"),
    ("train/cat/0.png 0.5\n", r":1: label '0\.5' is not an integer"),
    ("train/cat/0.png -1\n", ":1: label -1 is negative"),
    (f"train/cat/0.png {10**12}\n", ":1: label 10{12} is out of range"),
    ("", "': the list is empty"),
    ("[]", "': the list is empty"),
    (CAT + ', ["train/cat/1.png"]]', ": entry 1: " + NO_PAIR),
    ('[["train/cat/0.png", true]]', ": entry 0: label 'True' is not an integer"),
    (CAT + ',\n["train/cat/1', ":2: " + NO_JSON),
    (CAT + '\n["train/cat/1.png", 1]]', ":2: " + NO_JSON + r"Expecting ',' delimiter\)"),
    (CAT + "]\n]", ":2: " + NO_JSON + r"Extra data\)"),
    ("train/cat/0.png 0\n" + "x" * 9000 + " 1\n", ":2: a line of more than 8,192 characters"),
    ("train/cat/\0.png 0\n", r": 'train/cat/\\x00\.png' is not the name of a file"),
    ('[["train/cat/\\u0000.png", 0]]', r": 'train/cat/\\x00\.png' is not the name of a file"),
    ('[["train/cat/\\ud800.png", 0]]', r": 'train/cat/\\ud800\.png' is not the name of a file"),
    ('[["", 0]]', ": '' is not the name of a file"),
    ('[["a", ' + "[" * 100_000, ": " + NO_JSON + r"nested too deeply\)"),
    ('[["a", ' + "1" * 5000 + "]]", ": " + NO_JSON + "Exceeds the limit"),
    ("\x00\x01\x02\xff binary\nrubbish", ":1: label 'binary' is not an integer"),
    (
        "cat/0.png 0\ndog/0.png 1\n",
        r".*none of the 2 listed images looked for exists, for example .*images/cat/0\.png",
    ),
    (
        "train/cat/0.png 1\ntrain/dog/0.png 2\n",
        r".*of the labels 0 to 2, 1 have no image \(0\); close the gaps",
    ),
]


def test_a_list_that_cannot_be_used(list_config):
    for text, message in LISTS:
        assert re.search(rf"train\.txt{message}", refusal(list_config(text))), text[:99]


def test_labels_are_held_to_the_class_count(list_config):
    val = "val/cat/0.png 0\nval/dog/0.png 2\n"
    message = refusal(list_config(val=val))
    assert message.endswith("val.txt:2: label 2 is out of range, with 2 classes")
    message = refusal(list_config(MODEL__NUM_CLASSES=1))
    assert message.endswith("train.txt:2: label 1 is out of range, with 1 classes")
    # a list need not show every class
    data = build_data(data_config(list_config(val=val, MODEL__NUM_CLASSES=5)))
    assert data.num_classes == len(data.class_names) == 5


def test_a_list_file_that_is_not_there(list_config, tmp_path):
    config = list_config(DATA__TRAIN_LIST="nowhere.txt")
    assert refusal(config) == "DATA.TRAIN_LIST is 'nowhere.txt': no such file"
    config.DATA.PATH = str(tmp_path / "images")
    assert refusal(config).endswith(f"no such file, nor in DATA.PATH ('{tmp_path}/images')")
    config.DATA.TRAIN_LIST = str(tmp_path / "images")
    says = f"DATA.TRAIN_LIST is '{tmp_path}/images': a directory, it must be a file"
    assert refusal(config) == says
    config.DATA.PATH = str(tmp_path / "gone")
    assert refusal(config) == f"DATA.PATH is '{tmp_path}/gone': no such directory"


@pytest.mark.timeout(300)
def test_a_list_that_is_a_pipe_or_a_device(list_config, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        message = refusal(list_config(DATA__TRAIN_LIST=path))
        assert message == f"DATA.TRAIN_LIST is {path!r}: cannot be read (not a regular file)"


def test_a_list_with_one_path_that_would_make_all_of_them_long(list_config, monkeypatch):
    monkeypatch.setattr(listed, "_SMALL", 1000)
    lines = [f"train/cat/{i}.png 0\ntrain/dog/{i}.png 1\n" for i in range(4)] * 100
    assert len(load_sources(data_config(list_config("".join(lines)))).train) == 800
    message = refusal(list_config("".join([*lines, "./" * 2000 + "train/cat/0.png 0\n"])))
    assert "has a path of 4,015 bytes, among many that are far shorter" in message


# CIFAR


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_absent_cifar_is_refused_and_never_downloaded(make_config, tmp_path, dataset, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", None)
    config = make_config({"DATA.DATASET": dataset, "DATA.PATH": str(tmp_path)})
    folder = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[dataset]
    message = refusal(config)
    says = f"DATA.PATH is '{tmp_path}': it holds no intact {folder}/ (nothing is downloaded"
    assert message.startswith(says)
    assert message.endswith("found: nothing")
    (tmp_path / folder).mkdir()
    assert folder in refusal(config)
    config.DATA.PATH = str(tmp_path / "gone")
    assert refusal(config).endswith("no such directory")


def test_cifar_is_read_by_torchvision(make_data, tmp_path, monkeypatch):
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    for name, part in (("train", slice(0, 12)), ("test", slice(12, 20))):
        labels = [i % 10 for i in range(20)][part]
        content = {"data": pixels[part].reshape(-1, 3072), "labels": labels}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(CIFAR10, "train_list", [["train", None]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test", None]])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": "meta", "key": "label_names", "md5": None})
    keys = {"DATA.DATASET": "cifar10", "DATA.PATH": str(tmp_path), "DATA.NUM_WORKERS": 1}
    data = build_data(make_data(keys))
    assert (data.train_size, data.val_size, data.class_names) == (12, 8, list("abcdefghij"))
    assert data.train_loader.num_workers == 1
    image = np.asarray(data.val_loader.dataset.source.open(0))
    assert np.array_equal(image, pixels[12].transpose(1, 2, 0))
    assert data.val_loader.dataset.source.name(3) == "CIFAR10[3]"
