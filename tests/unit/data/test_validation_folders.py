"""Where validation images come from: val/ under another name, or a share of train/; and images of
train/ that nothing decodes."""

import os
import shutil
import unicodedata

import numpy as np
import pytest

from swinv2_moe.config import load_config
from swinv2_moe.data import images
from swinv2_moe.data.build import build_data
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError


def names(source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_val_is_used_without_a_line(load, root):
    (root / "valid").mkdir()
    sources = load()
    assert sources.notes == ()
    assert names(sources.val)[0] == f"{root}/val/cat/0.png"


def test_other_names_of_the_validation_folder(load, root, make_data):
    before = "val"
    for name in ("validation", "valid", "test"):
        os.rename(root / before, root / name)
        before = name
        sources = load()
        assert names(sources.val)[0] == f"{root}/{name}/cat/0.png"
        line = f"{root} has no val/ folder: the images of {name}/ are used for validation"
        assert sources.notes == (line,)
    section = make_data({"DATA.DATASET": "folder", "DATA.PATH": str(root)})
    assert build_data(section).notes == (line,)


def test_valid_comes_before_test(load, root):
    shutil.copytree(root / "val", root / "test")
    os.rename(root / "val", root / "valid")
    assert names(load().val)[0] == f"{root}/valid/cat/0.png"


def test_class_folders_that_differ_name_the_folder(load, root):
    os.rename(root / "val", root / "valid")
    os.rename(root / "valid" / "cat", root / "valid" / "cow")
    with pytest.raises(UserError, match=r"valid/ 2, .*only in train/: cat; only in valid/: cow"):
        load()


def test_names_in_another_unicode_form(load, root):
    for split, form in (("train", "NFC"), ("val", "NFD")):
        os.rename(root / split / "cat", root / split / unicodedata.normalize(form, "kätzchen"))
    with pytest.raises(
        UserError, match=r"equal, but with .*accents in another Unicode form: rename"
    ):
        load()


@pytest.mark.parametrize(
    ("folders", "says"),
    [
        (("Training", "Testing"), "rename Testing/ to val/ and Training/ to train/"),
        (("Train", "Val"), "rename Train/ to train/ and Val/ to val/"),
        (("Training Set", "val"), "rename Training Set/ to train/"),
        (("train", "Test-Set"), "rename Test-Set/ to val/"),
    ],
)
def test_folders_that_are_no_classes(load, root, folders, says):
    for old, new in zip(("train", "val"), folders, strict=True):
        os.rename(root / old, root / new)
    split = {} if "val" in folders else {"DATA.VAL_SPLIT": 0.2}
    with pytest.raises(UserError) as error:
        load(split)
    assert str(error.value) == f"DATA.PATH is '{root}': {says}"


def test_one_of_two_such_folders_is_named(load, root):
    os.rename(root / "train", root / "Training")
    shutil.copytree(root / "val", root / "Testing")
    os.rename(root / "val", root / "Validation")
    with pytest.raises(UserError, match=r"rename Testing/ to val/ and Training/ to train/$"):
        load({"DATA.VAL_SPLIT": 0.2})


def test_classes_with_such_names(load, root):
    shutil.rmtree(root / "val")
    for label in ("cat", "dog"):
        os.rename(root / "train" / label, root / f"{label}s")
    os.rename(root / "cats", root / "Training")
    shutil.rmtree(root / "train")
    assert load({"DATA.VAL_SPLIT": 0.2}).class_names == ["Training", "dogs"]


@pytest.fixture
def flat(root):
    """The class folders in `root` itself."""
    shutil.rmtree(root / "val")
    for label in ("cat", "dog"):
        (root / "train" / label).rename(root / label)
    (root / "train").rmdir()
    return root


@pytest.mark.parametrize("inner", ["", "cat"])
def test_a_folder_test_beside_class_folders_is_no_class(load, flat, inner):
    shutil.copytree(flat / "cat", flat / "test" / inner, dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"has no train/ .* or set DATA\.VAL_SPLIT 0\.2: it holds"):
        load()
    sources = load({"DATA.VAL_SPLIT": 0.2})
    assert (sources.class_names, len(sources.train), len(sources.val)) == (["cat", "dog"], 32, 8)
    assert sources.notes[0] == (
        f"warning: {flat}/test is left out: beside class folders it is not taken for a class; if"
        " it is one, rename it, for example to test_class/"
    )
    (flat / "test").rename(flat / "test_class")
    assert load({"DATA.VAL_SPLIT": 0.2}).class_names == ["cat", "dog", "test_class"]


@pytest.mark.parametrize("name", ["Test", "tests", "Val-Set", "test images", "train2", "holdout"])
def test_other_names_of_it_are_refused(load, flat, name):
    (flat / "dog").rename(flat / name)
    says = f"'{flat}': {name}/ lies beside class folders; .* for example to {name}_class/$"
    with pytest.raises(UserError, match=says):
        load({"DATA.VAL_SPLIT": 0.2})
    (flat / name).rename(flat / f"{name}_class")
    assert len(load({"DATA.VAL_SPLIT": 0.2}).class_names) == 2


@pytest.mark.parametrize(
    "name", ["labels", "Annotations", "ground truth", "masks", "images", "SegmentationClass"]
)
def test_folders_that_hold_no_class_are_refused(load, root, name):
    for split in ("train", "val"):
        shutil.copytree(root / split / "cat", root / split / name)
    with pytest.raises(
        UserError, match=f"^{root}/train: {name}/ lies where each folder is a class"
    ):
        load()
    shutil.rmtree(root / "val")
    with pytest.raises(UserError, match=f"; move it elsewhere, or rename .* {name}_class/$"):
        load({"DATA.VAL_SPLIT": 0.2})


def test_val_beside_class_folders_says_what_to_do(load, flat):
    (flat / "dog").rename(flat / "val")
    with pytest.raises(UserError, match=r"found: cat, val; move the class folders into train/$"):
        load()
    with pytest.raises(UserError, match=r"images in val/; move the class folders into train/$"):
        load({"DATA.VAL_SPLIT": 0.2})


def test_files_without_the_ending_of_an_image(load, root):
    folder = root / "train" / "cat"
    for number in range(12):
        os.rename(folder / f"{number}.png", folder / f"{number}")
    (root / "train" / "dog" / "notes.txt").touch()  # few such files need no line
    line = f"warning: files left out: 12 files without an image's ending; the first: {folder}/0"
    assert load().notes == (line,)
    for number in range(12, 20):
        os.rename(folder / f"{number}.png", folder / f"{number}")
    with pytest.raises(UserError, match=r"hold no image: cat; 20 files without an image's ending"):
        load()


def test_a_split_holds_out_a_share_of_each_class(load, root):
    complete = load().train
    shutil.rmtree(root / "val")
    sources = load({"DATA.VAL_SPLIT": 0.1})
    train, val = names(sources.train), names(sources.val)
    assert np.bincount(sources.val.targets).tolist() == [2, 2]
    assert sorted(train + val) == sorted(names(complete))
    label_of = dict(zip(names(complete), complete.targets, strict=True))
    for source in (sources.train, sources.val):
        assert [label_of[name] for name in names(source)] == source.targets.tolist()
    assert sources.notes == (
        f"DATA.VAL_SPLIT 0.1: 4 of the 40 images of {root}/train are held out for validation",
    )


def test_a_split_depends_on_the_names_alone(load, root):
    shutil.rmtree(root / "val")
    first = load({"DATA.VAL_SPLIT": 0.2, "SEED": 0})
    second = load({"DATA.VAL_SPLIT": 0.2, "SEED": 1})
    assert names(first.val) == names(second.val)
    smaller = load({"DATA.VAL_SPLIT": 0.1})
    assert set(names(smaller.val)) < set(names(first.val))


def test_a_split_of_few_images_keeps_one_on_each_side(load, root):
    shutil.rmtree(root / "val")
    for label in ("cat", "dog"):
        for number in range(2, 20):
            (root / "train" / label / f"{number}.png").unlink()
    for share in (0.01, 0.9):
        sources = load({"DATA.VAL_SPLIT": share})
        assert np.bincount(sources.train.targets).tolist() == [1, 1]
        assert np.bincount(sources.val.targets).tolist() == [1, 1]
    (root / "train" / "dog" / "1.png").unlink()
    with pytest.raises(UserError, match=r"1 of 2 class folders of .*train hold a single .*: dog$"):
        load({"DATA.VAL_SPLIT": 0.1})


def test_a_split_beside_validation_images_is_refused(load, root):
    before = "val"
    for name in ("val", "validation", "valid"):
        os.rename(root / before, root / name)
        before = name
        with pytest.raises(UserError, match=f"DATA.VAL_SPLIT is 0.1: .* has validation .* {name}/"):
            load({"DATA.VAL_SPLIT": 0.1})
    os.rename(root / "valid", root / "test")  # which is left alone
    assert names(load({"DATA.VAL_SPLIT": 0.1}).val)[0].startswith(f"{root}/train/")


def test_a_split_of_another_dataset_is_refused():
    with pytest.raises(UserError, match=r"DATA\.VAL_SPLIT is 0\.1: .*DATA\.DATASET is 'digits'"):
        load_config(None, ["DATA.VAL_SPLIT", "0.1"])


@pytest.fixture
def without_heif(monkeypatch):
    """As on a machine without pillow-heif."""
    monkeypatch.setattr(images, "SUFFIXES", (".png",))
    monkeypatch.setattr(images, "NOT_DECODED", {".heic": "needs the package pillow-heif"})


def test_images_that_nothing_decodes_are_counted_and_named(load, root, without_heif):
    for number in range(3):
        (root / "train" / "cat" / f"IMG_{number}.HEIC").touch()
    (root / "val" / "dog" / "IMG_9.heic").touch()
    sources = load()
    assert (len(sources.train), len(sources.val)) == (40, 40)
    assert sources.notes == (
        "warning: images left out: 3 .heic (needs the package pillow-heif); the first:"
        f" {root}/train/cat/IMG_0.HEIC",
        "warning: images left out: 1 .heic (needs the package pillow-heif); the first:"
        f" {root}/val/dog/IMG_9.heic",
    )


def test_a_class_of_such_images_alone_says_why_it_is_empty(load, root, without_heif):
    for number in range(20):
        os.rename(root / f"train/cat/{number}.png", root / f"train/cat/{number}.heic")
    with pytest.raises(UserError, match=r"hold no image: cat; images left out: 20 \.heic"):
        load()


def test_heic_is_read_where_its_package_is(root, load):
    pillow_heif = pytest.importorskip("pillow_heif", reason="needs the heic extra")
    pixels = np.full((30, 40, 3), 90, np.uint8)
    file = root / "train" / "cat" / "a.heic"
    pillow_heif.from_bytes("RGB", (40, 30), pixels.tobytes()).save(file)
    sources = load()
    assert len(sources.train) == 41
    image = sources.train.open(names(sources.train).index(str(file)))
    assert (image.size, image.mode) == ((40, 30), "RGB")
    assert abs(np.asarray(image, int) - 90).max() < 10


# class folders in the directory itself, and validation images alone


def test_class_folders_alone_are_split(load, root):
    shutil.rmtree(root / "val")
    for label in ("cat", "dog"):
        (root / "train" / label).rename(root / label)
    (root / "train").rmdir()
    with pytest.raises(UserError, match=r"found: cat, dog; if these .* DATA\.VAL_SPLIT 0\.1 would"):
        load()
    sources = load({"DATA.VAL_SPLIT": 0.1})
    assert (sources.class_names, len(sources.train), len(sources.val)) == (["cat", "dog"], 36, 4)


def test_images_beside_each_other_say_what_to_do(load, root):
    shutil.rmtree(root / "val")
    for number, image in enumerate((root / "train").rglob("*.png")):
        image.rename(root / f"{number}.png")
    shutil.rmtree(root / "train")
    with pytest.raises(UserError, match=r"a folder with its name, and DATA\.VAL_SPLIT 0\.1"):
        load()


def test_an_evaluation_needs_only_validation_images(make_data, root, load):
    def load_val(path):
        section = make_data({"DATA.DATASET": "folder", "DATA.PATH": str(path)})
        return load_sources(section, validation_only=True)

    shutil.rmtree(root / "train")
    found = load_val(root)
    assert (len(found.train), names(found.val)[0]) == (0, f"{root}/val/cat/0.png")
    assert names(load_val(root / "val").val) == names(found.val)
    with pytest.raises(UserError, match=r"has no train/ folder; found: val$"):
        load()
