"""Which files of a folder are images: the same for training, prediction, class maps, detection's
pictures and examples/classify.py."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from swinv2_moe.config import data_config
from swinv2_moe.data.images import NOT_DECODED, SUFFIXES, image_paths
from swinv2_moe.data.prepare.class_maps import class_names
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def classify(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import classify

    return classify


@pytest.fixture
def load(make_config, make_folder):
    """`load()`: the sources of `load.root`, which has 4 images of each of cat and dog."""
    root = make_folder()
    config = data_config(make_config({"DATA.DATASET": "folder", "DATA.PATH": str(root)}))

    def load():
        return load_sources(config)

    load.root = root
    return load


def names(source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_the_example_has_the_same_endings(classify):
    assert sorted(classify.SUFFIXES.split()) == sorted((*SUFFIXES, *NOT_DECODED))


def test_what_systems_leave_behind_is_no_image(load, classify):
    before = load()
    extra = ["train/.ipynb_checkpoints", "train/cat/@eaDir", "train/__MACOSX", "train/@eaDir"]
    extra += ["train/dog/.thumbnails", "train/dog/deeper/.ipynb_checkpoints"]
    for folder in extra:
        (load.root / folder).mkdir(parents=True)
        shutil.copy(load.root / "train/cat/0.png", load.root / folder / "a.png")
    for name in ("._0.png", ".hidden.png", "Thumbs.db", "desktop.ini"):
        (load.root / "train/cat" / name).write_bytes(b"\0\5\x16\7")
    found = load()
    assert (names(found.train), found.class_names) == (names(before.train), before.class_names)
    assert found.notes == ()
    assert class_names(str(load.root)) == ["cat", "dog"]
    wanted = sorted(map(Path, names(before.train)))
    assert image_paths([load.root / "train"]) == wanted
    assert classify.find([str(load.root / "train")]) == wanted


LINKS = {
    "the folder above": ("train/cat/all", ".."),
    "the root": ("train/cat/all", "../.."),
    "itself": ("train/cat/all", "."),
    "another class": ("train/cat/all", "../dog"),
    "the validation images": ("train/cat/all", "../../val"),
    "validation images of the class": ("train/cat/all", "../../val/cat"),
    "a dead end": ("train/cat/all", "nowhere"),
}


@pytest.mark.parametrize("case", LINKS)
def test_no_link_gives_an_image_twice_or_to_another_class(load, case, classify):
    before = load()
    link, target = LINKS[case]
    (load.root / link).symlink_to(target)
    found = load()
    assert (names(found.train), found.train.targets.tolist()) == (
        names(before.train),
        before.train.targets.tolist(),
    )
    wanted = sorted(map(Path, names(before.train)))
    if "validation" not in case:
        assert image_paths([load.root / "train"]) == wanted
    assert classify.find([str(load.root / "train")]) == image_paths([load.root / "train"])


def test_links_to_folders_elsewhere_are_followed_once(load, tmp_path):
    shutil.copytree(load.root / "train/cat", tmp_path / "more/deeper")
    (tmp_path / "more/circle").symlink_to(tmp_path / "more")
    for name in ("a", "b"):
        (load.root / "train/cat" / name).symlink_to(tmp_path / "more")
    assert names(load().train)[:8] == [
        *(f"{load.root}/train/cat/{i}.png" for i in range(4)),
        *(f"{load.root}/train/cat/a/deeper/{i}.png" for i in range(4)),
    ]
    (load.root / "train/cat").rename(tmp_path / "cats")  # a class folder may be a link
    (load.root / "train/cat").symlink_to(tmp_path / "cats")
    assert len(load().train) == 12


def test_a_class_by_a_link_has_a_folder_of_its_own(load):
    for split in ("train", "val"):
        (load.root / split / "kitty").symlink_to("cat")
    with pytest.raises(UserError, match=r"kitty and .*cat are the same folder"):
        load()
    for split in ("train", "val"):
        (load.root / split / "kitty").unlink()
    (load.root / "train/kitty").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"train/kitty: a link to nothing"):
        load()


def test_images_that_are_left_out_are_counted_by_ending(load):
    for name in ("a.JP2", "b.jp2", "c.svg"):
        (load.root / "train/cat" / name).touch()
    shutil.copy(load.root / "train/cat/0.png", load.root / "train/loose.png")
    assert load().notes == (
        "warning: images left out: 2 .jp2 (not supported), 1 .svg (not supported); the first:"
        f" {load.root}/train/cat/a.JP2",
        f"warning: images left out: 1 in no class folder; the first: {load.root}/train/loose.png",
    )


@pytest.mark.parametrize("ending", ["gif", "GIF", "jfif", "pbm"])
def test_more_endings_of_formats_that_are_read(load, ending, classify):
    kind = {"jfif": "JPEG", "pbm": "PPM"}.get(ending, "GIF")
    file = load.root / f"train/cat/x.{ending}"
    Image.new("1", (9, 9), 1).save(file, kind)
    source = load().train
    assert source.open(names(source).index(str(file))).size == (9, 9)
    assert file in image_paths([load.root])
    assert file in classify.find([str(load.root)])


def test_a_folder_that_cannot_be_read_is_named(load, monkeypatch):
    """Instead of being taken for an empty one."""
    import os

    scandir = os.scandir

    def denied(path):
        if str(path).endswith("deeper"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    (load.root / "train/cat/deeper").mkdir()
    monkeypatch.setattr(os, "scandir", denied)  # root, as in a container, may read anything
    with pytest.raises(UserError, match=r"train/cat/deeper: cannot be read \(Permission denied\)"):
        load()
