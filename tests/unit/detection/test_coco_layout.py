"""swinv2_moe.detection.coco and data/prepare_coco.py: archives and folders laid out, what is
missing named."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from PIL import Image
from shapes_cases import Options, make_shapes
from tool_cases import command

from swinv2_moe.detection import annotations
from swinv2_moe.detection.coco import check_split, lay_out, splits, unpack
from swinv2_moe.errors import UserError


@pytest.fixture(scope="module")
def coco(tmp_path_factory) -> Path:
    """Folders with COCO's names and a few small images in them."""
    directory = tmp_path_factory.mktemp("coco")
    make_shapes(directory, Options(train=3, val=2, min_size=64, max_size=80))
    for split in ("train", "val"):
        (directory / split).rename(directory / f"{split}2017")
        (directory / f"annotations/instances_{split}.json").rename(
            directory / f"annotations/instances_{split}2017.json"
        )
    return directory


def pack(coco: Path, target: Path) -> None:
    """As COCO's own archives: one folder in each."""
    names = {"train2017": "train2017", "val2017": "val2017"}
    names["annotations"] = "annotations_trainval2017"
    for folder, name in names.items():
        with zipfile.ZipFile(target / f"{name}.zip", "w") as archive:
            for file in sorted((coco / folder).iterdir()):
                archive.write(file, f"{folder}/{file.name}")


def test_archives_are_unpacked_and_kept(coco: Path, tmp_path: Path) -> None:
    downloads, target = tmp_path / "downloads", tmp_path / "coco"
    downloads.mkdir()
    pack(coco, downloads)
    before = {file.name: file.read_bytes() for file in downloads.iterdir()}
    assert lay_out(downloads, target) == []
    assert {file.name: file.read_bytes() for file in downloads.iterdir()} == before
    assert files(target) == files(coco)
    assert [str(check_split(*split, None)).split(":")[1] for split in splits(target)] == [
        str(check_split(*split, None)).split(":")[1] for split in splits(coco)
    ]


def files(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*.*")}


def test_unpacking_goes_on_where_it_was_stopped(coco: Path, tmp_path: Path) -> None:
    pack(coco, tmp_path)
    target = tmp_path / "coco"
    lay_out(tmp_path, target)
    there = target / "train2017/000000.png"
    kept = there.stat().st_mtime_ns, there.stat().st_ino
    (target / "train2017/000001.png").write_bytes(b"cut off")
    (target / "train2017/000002.png").unlink()
    lay_out(tmp_path, target)
    assert files(target) == files(coco)
    assert (there.stat().st_mtime_ns, there.stat().st_ino) == kept


def test_folders_elsewhere_are_linked_to(coco: Path, tmp_path: Path) -> None:
    target = tmp_path / "coco"
    for _ in range(2):  # again: nothing more to do
        assert lay_out(coco, target) == []
        links = sorted(target.iterdir())
        assert [path.name for path in links] == ["annotations", "train2017", "val2017"]
        assert all(path.is_symlink() and path.samefile(coco / path.name) for path in links)


def test_folders_without_the_year(coco: Path, tmp_path: Path) -> None:
    source = tmp_path / "open"
    shutil.copytree(coco, source)
    for split in ("train", "val"):
        (source / f"{split}2017").rename(source / split)
        (source / f"annotations/instances_{split}2017.json").rename(
            source / f"annotations/instances_{split}.json"
        )
    assert lay_out(source, source) == []
    assert [check_split(*split, None).boxes > 0 for split in splits(source)] == [True, True]


def test_another_folder_of_that_name_stays(coco: Path, tmp_path: Path) -> None:
    (tmp_path / "train2017").mkdir()
    with pytest.raises(UserError, match="train2017: is there already"):
        lay_out(coco, tmp_path)


def test_what_is_missing_is_named_with_its_address(
    coco: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    shutil.copytree(coco / "val2017", tmp_path / "val2017")
    done = command("prepare_coco", monkeypatch, capsys, "data")(tmp_path)
    assert done.status == 2
    assert done.out.splitlines() == [
        "missing: train2017/ or train2017.zip (118,287 images, 18 GB):"
        " http://images.cocodataset.org/zips/train2017.zip",
        "missing: annotations/ or annotations_trainval2017.zip (0.25 GB):"
        " http://images.cocodataset.org/annotations/annotations_trainval2017.zip",
    ]
    assert done.err == f"error: {tmp_path}: 2 of the 3 parts of COCO are not there\n"


def test_a_broken_archive(coco: Path, tmp_path: Path) -> None:
    pack(coco, tmp_path)
    archive, target = tmp_path / "train2017.zip", tmp_path / "coco"
    content = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as whole:
        place = whole.infolist()[1].header_offset + 200  # within the second image
    content[place] ^= 1
    archive.write_bytes(content)
    words = r"train2017\.zip: a broken archive \(Bad CRC-32.*000001\.png"
    with pytest.raises(UserError, match=words):
        unpack(archive, target, "train2017")
    assert sorted(file.name for file in (target / "train2017").glob("*.png")) == ["000000.png"]
    archive.write_bytes(content[:500])
    with pytest.raises(UserError, match="a broken archive"):
        unpack(archive, target, "train2017")


OUTSIDE = [
    "../outside.png",
    "train2017/../../outside.png",
    "/train2017/x.png",
    "train2017/a\nb.png",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_member_that_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "train2017.zip", "w") as archive:
        archive.writestr("train2017/a.png", b"x")
        archive.writestr(name, b"x")
    with pytest.raises(UserError, match="which is not in train2017/") as caught:
        unpack(tmp_path / "train2017.zip", tmp_path / "in" / "coco", "train2017")
    assert f"holds {name!r}" in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["train2017.zip"]


def test_members_in_subfolders(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "train2017.zip", "w") as archive:
        archive.writestr("train2017/part/a.png", b"x")
    unpack(tmp_path / "train2017.zip", tmp_path / "coco", "train2017")
    assert (tmp_path / "coco/train2017/part/a.png").read_bytes() == b"x"


@pytest.mark.parametrize("change", ["encrypted", "unknown compression", "deflated rubbish"])
def test_members_that_zipfile_cannot_read(tmp_path: Path, change: str) -> None:
    archive = tmp_path / "train2017.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("train2017/a.png", b"abc" * 100)
    content = bytearray(archive.read_bytes())
    directory = content.index(b"PK\x01\x02")
    if change == "encrypted":
        content[6] |= 1
        content[directory + 8] |= 1
    elif change == "unknown compression":
        content[8] = content[directory + 10] = 77
    else:
        start = 30 + len("train2017/a.png")
        content[start : start + 4] = b"\xff" * 4
    archive.write_bytes(content)
    with pytest.raises(UserError, match=r"train2017\.zip: a broken archive \("):
        unpack(archive, tmp_path / "coco", "train2017")


def test_the_command_counts(coco: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    done = command("prepare_coco", monkeypatch, capsys, "data")(
        coco, "--output", tmp_path / "coco", "--decode", "all"
    )
    assert (done.status, done.err) == (0, "")
    lines = [line for line in done.out.splitlines() if str(tmp_path) in line]
    assert [line.split(": ")[1].split(" (")[0] for line in lines[:2]] == ["3 images", "2 images"]
    assert lines[2:] == [f"{tmp_path / 'coco'} is complete"]


@pytest.fixture
def copied(coco: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(coco, tmp_path / "coco"))


def check_train(directory: Path, decoded: int | None = None):
    return check_split(*next(splits(directory)), decoded)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_images_that_are_broken_or_none(copied: Path) -> None:
    file = copied / "train2017/000001.png"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UserError, match=r"1 of 3 images are unusable, the first: 000001\.png"):
        check_train(copied)
    assert check_train(copied, 1).boxes  # only the first is decoded
    Image.new("1", (13_000, 13_000)).save(file)
    words = r"image 2 \('000001\.png'\): .*, 13000 x 13000 in its file"
    with pytest.raises(UserError, match=words):
        check_train(copied)
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    with pytest.raises(UserError, match=r"image 2 \('000001\.png'\): not an image in a format"):
        check_train(copied)


def test_images_of_another_size(copied: Path, monkeypatch) -> None:
    monkeypatch.setattr(annotations, "MAX_HEADERS", 1)  # that of the first image
    file = copied / "annotations/instances_train2017.json"
    content = json.loads(file.read_text())
    content["images"][2]["width"] += 5
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"000002\.png \(\d+ x \d+ px, its annotations say"):
        check_train(copied)
