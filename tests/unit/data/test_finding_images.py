"""Which files of a folder are images: the same for training, prediction, class maps, detection's
pictures and examples/classify.py."""

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from swinv2_moe.data.classes import class_names
from swinv2_moe.data.images import NOT_DECODED, SUFFIXES, image_paths
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def classify(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import classify

    return classify


@pytest.fixture
def root(make_folder) -> Path:
    """4 images of each of cat and dog."""
    return make_folder()


@pytest.fixture
def load(make_data, root):
    """`load()`: the sources of `root`."""
    section = make_data({"DATA.DATASET": "folder", "DATA.PATH": str(root)})
    return lambda: load_sources(section)


def names(source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_the_example_has_the_same_endings(classify):
    assert sorted(classify.SUFFIXES.split()) == sorted((*SUFFIXES, *NOT_DECODED))


def test_what_systems_leave_behind_is_no_image(load, root, classify):
    before = load()
    extra = [
        "train/.ipynb_checkpoints",
        "train/cat/@eaDir",
        "train/__MacOSX",
        "train/@eaDir",
        "train/@Recycle",
    ]
    extra += ["train/dog/.thumbnails", "train/dog/deeper/.ipynb_checkpoints"]
    for folder in extra:
        (root / folder).mkdir(parents=True)
        shutil.copy(root / "train/cat/0.png", root / folder / "a.png")
    for name in ("._0.png", ".hidden.png", "Thumbs.db", "desktop.ini"):
        (root / "train/cat" / name).write_bytes(b"\0\5\x16\7")
    found = load()
    assert (names(found.train), found.class_names) == (names(before.train), before.class_names)
    assert found.notes == ()
    assert class_names(str(root)) == ["cat", "dog"]
    wanted = sorted(map(Path, names(before.train)))
    assert image_paths([root / "train"]) == wanted
    assert classify.find([str(root / "train")]) == wanted


LINKS = ["..", "../..", ".", "../dog", "../../val", "../../val/cat", "nowhere"]


@pytest.mark.parametrize("target", LINKS)
def test_no_link_gives_an_image_twice_or_to_another_class(load, root, target, classify):
    before = load()
    (root / "train/cat/all").symlink_to(target)
    found = load()
    assert names(found.train) == names(before.train)
    assert found.train.targets.tolist() == before.train.targets.tolist()
    wanted = sorted(map(Path, names(before.train)))
    if "val" not in target:
        assert image_paths([root / "train"]) == wanted
    assert classify.find([str(root / "train")]) == image_paths([root / "train"])


def test_links_to_folders_elsewhere_are_followed_once(load, root, tmp_path):
    shutil.copytree(root / "train/cat", tmp_path / "more/deeper")
    (tmp_path / "more/circle").symlink_to(tmp_path / "more")
    for name in ("a", "b"):
        (root / "train/cat" / name).symlink_to(tmp_path / "more")
    assert names(load().train)[:8] == [
        *(f"{root}/train/cat/{i}.png" for i in range(4)),
        *(f"{root}/train/cat/a/deeper/{i}.png" for i in range(4)),
    ]
    (root / "train/cat").rename(tmp_path / "cats")  # a class folder may be a link
    (root / "train/cat").symlink_to(tmp_path / "cats")
    assert len(load().train) == 12


def test_a_class_by_a_link_has_a_folder_of_its_own(load, root):
    for split in ("train", "val"):
        (root / split / "kitty").symlink_to("cat")
    with pytest.raises(UserError, match=r"kitty and .*cat are the same folder"):
        load()
    for split in ("train", "val"):
        (root / split / "kitty").unlink()
    (root / "train/kitty").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"train/kitty: a link to nothing"):
        load()


def test_images_that_are_left_out_are_counted_by_ending(load, root):
    for name in ("a.JP2", "b.jp2", "c.svg"):
        (root / "train/cat" / name).touch()
    shutil.copy(root / "train/cat/0.png", root / "train/loose.png")
    assert load().notes == (
        "warning: images left out: 2 .jp2 (not supported), 1 .svg (not supported); the first:"
        f" {root}/train/cat/a.JP2",
        f"warning: images left out: 1 in no class folder; the first: {root}/train/loose.png",
    )


def test_more_endings_of_formats_that_are_read(load, root, classify):
    for ending, kind in (("gif", "GIF"), ("GIF", "GIF"), ("jfif", "JPEG"), ("pbm", "PPM")):
        file = root / f"train/cat/x.{ending}"
        Image.new("1", (9, 9), 1).save(file, kind)
        source = load().train
        assert source.open(names(source).index(str(file))).size == (9, 9)
        assert file in image_paths([root])
        assert file in classify.find([str(root)])


def test_a_folder_that_cannot_be_read_is_named(load, root, monkeypatch):
    """Instead of being taken for an empty one."""
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("deeper"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    (root / "train/cat/deeper").mkdir()
    monkeypatch.setattr(os, "scandir", denied)  # root, as in a container, may read anything
    with pytest.raises(UserError, match=r"train/cat/deeper: cannot be read \(Permission denied\)"):
        load()
