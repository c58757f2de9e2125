"""Folders of labelled photographs: COCO, VOC and YOLO, as their programs write them, give the same
boxes; a label that cannot be meant is named; equal pictures stay on one side of a split."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from swinv2_moe.data.labels import Labelled, read_folder
from swinv2_moe.errors import UserError

BOX = [10, 20, 30, 16]  # left, top, width, height in a picture of 80 x 60 px
CLASSES = ["cat", "dog"]


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (80, 60), **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def voc(name: str, *objects: tuple[str, list], size: tuple[int, int] = (80, 60)) -> str:
    rows = ""
    for label, (left, top, width, height) in objects:
        edges = zip(
            ("xmin", "ymin", "xmax", "ymax"), (left, top, left + width, top + height), strict=True
        )
        box = "".join(f"<{edge}>{value}</{edge}>" for edge, value in edges)
        rows += f"<object><name>{label}</name><bndbox>{box}</bndbox></object>"
    sides = f"<width>{size[0]}</width><height>{size[1]}</height><depth>3</depth>"
    return f"<annotation><filename>{name}</filename><size>{sides}</size>{rows}</annotation>"


def yolo(label: int, box: list, size: tuple[int, int] = (80, 60)) -> str:
    left, top, width, height = box
    shares = [(left + width / 2) / size[0], (top + height / 2) / size[1]]
    return " ".join(map(str, [label, *shares, width / size[0], height / size[1]])) + "\n"


def coco(names: list[str], boxes: list[list], **image) -> str:
    images = [
        {"id": i, "file_name": name, "width": 80, "height": 60} | image
        for i, name in enumerate(names)
    ]
    rows = [
        {"id": i, "image_id": i, "category_id": 7, "bbox": box, "area": 480, "iscrowd": 0}
        for i, box in enumerate(boxes)
    ]
    categories = [{"id": 0, "name": "animals", "supercategory": "none"}, {"id": 7, "name": "dog"}]
    return json.dumps({"images": images, "annotations": rows, "categories": categories})


def boxes(found: Labelled, split: str = "train") -> dict[str, list]:
    """Classes and boxes by picture."""
    content = found.splits[split]
    names = {row["id"]: row["name"] for row in content["categories"]}
    result: dict[str, list] = {row["file_name"]: [] for row in content["images"]}
    paths = {row["id"]: row["file_name"] for row in content["images"]}
    for row in content["annotations"]:
        rounded = np.round(row["bbox"], 6).tolist()
        result[paths[row["image_id"]]].append((names[row["category_id"]], rounded))
    return result


def roboflow_coco(root: Path) -> None:
    for number, split in enumerate(("train", "valid")):
        picture(root / split / "a_jpg.rf.1f.jpg", number)
        write(root / split / "_annotations.coco.json", coco(["a_jpg.rf.1f.jpg"], [BOX]))
    write(root / "README.dataset.txt", "dogs > v1\n")


def official_coco(root: Path) -> None:
    for number, split in enumerate(("train", "val")):
        picture(root / f"{split}2017" / "000001.jpg", number)
        write(root / f"annotations/instances_{split}2017.json", coco(["000001.jpg"], [BOX]))
        write(root / f"annotations/captions_{split}2017.json", '{"annotations": [{"caption": 1}]}')


def label_studio_coco(root: Path) -> None:
    names = [f"images/{i}-dog.jpg" for i in range(2)]
    for number, name in enumerate(names):
        picture(root / name, number)
    write(root / "result.json", coco([name.replace("/", "\\") for name in names], [BOX, BOX]))


def official_voc(root: Path) -> None:
    for number, split in enumerate(("train", "val")):
        picture(root / f"JPEGImages/{number}.jpg", number)
        write(root / f"Annotations/{number}.xml", voc(f"{number}.jpg", ("dog", BOX)))
        write(root / f"ImageSets/Main/{split}.txt", f"{number}\n")
    write(root / "ImageSets/Main/trainval.txt", "0\n1\n")


def label_studio_voc(root: Path) -> None:
    for number in range(2):
        picture(root / f"images/{number}-dog.jpg", number)
        write(root / f"Annotations/{number}-dog.xml", voc(f"{number}-dog", ("dog", BOX)))


def roboflow_voc(root: Path) -> None:
    for number, split in enumerate(("train", "valid")):
        picture(root / f"{split}/a.jpg", number)
        write(root / f"{split}/a.xml", voc("a.jpg", ("dog", BOX)))


def roboflow_yolo(root: Path) -> None:
    for number, split in enumerate(("train", "valid")):
        picture(root / f"{split}/images/a.jpg", number)
        write(root / f"{split}/labels/a.txt", yolo(1, BOX))
    write(
        root / "data.yaml",
        f"train: ../train/images\nval: ../valid/images\nnc: 2\nnames: {CLASSES}\n",
    )
    write(root / "README.roboflow.txt", "dogs\n")


def ultralytics_yolo(root: Path) -> None:
    for number, split in enumerate(("train", "val")):
        picture(root / f"images/{split}/a.jpg", number)
        write(root / f"labels/{split}/a.txt", yolo(1, BOX))
    write(root / "set.yaml", "path: ../x\ntrain: images/train\nnames:\n  0: cat\n  1: dog\n")


def label_studio_yolo(root: Path) -> None:
    for number in range(2):
        picture(root / f"images/{number}.jpg", number)
        left, top, width, height = BOX
        corners = [(left, top), (left + width, top), (left + width, top + height)]
        shares = " ".join(f"{x / 80} {y / 60}" for x, y in corners)
        write(root / f"labels/{number}.txt", f"1 {shares}\n")  # a polygon
    write(root / "classes.txt", "cat\ndog\n")
    write(root / "notes.json", json.dumps({"categories": [{"id": 0, "name": "x"}]}))


GIVEN = [roboflow_coco, official_coco, official_voc, roboflow_voc, roboflow_yolo, ultralytics_yolo]
NONE_GIVEN = [label_studio_coco, label_studio_voc, label_studio_yolo]


@pytest.mark.parametrize("make", GIVEN + NONE_GIVEN)
def test_each_program_s_form_gives_the_same_boxes(make, tmp_path: Path) -> None:
    make(tmp_path)
    found = read_folder(tmp_path)
    assert found.class_names == ["dog"]  # the other one has no objects
    assert found.left_out == []
    expected = [("dog", [float(value) for value in BOX])]
    seen = []
    for split in ("train", "val"):
        for path, rows in boxes(found, split).items():
            assert rows == expected
            assert (tmp_path / path).is_file()
            seen.append(path)
    assert len(set(seen)) == 2
    held_out = any("held out" in note for note in found.notes)
    assert held_out == (make in NONE_GIVEN)
    if make in GIVEN:
        (only,) = boxes(found, "train")
        assert "train" in only or only == "JPEGImages/0.jpg"


def test_test_pictures_are_a_split_of_their_own(tmp_path: Path) -> None:
    roboflow_yolo(tmp_path)
    picture(tmp_path / "test/images/b.jpg", 9)
    write(tmp_path / "test/labels/b.txt", yolo(1, BOX))
    assert list(read_folder(tmp_path).splits) == ["train", "val", "test"]
    for file in (tmp_path / "valid").rglob("*.*"):
        file.unlink()
    found = read_folder(tmp_path)
    assert list(found.splits) == ["train", "val"]
    assert any("pictures of test" in note for note in found.notes)


def yolo_folder(root: Path, lines: list[str], count: int = 20) -> Path:
    """Right labels, and one file with the given lines."""
    for number in range(count):
        picture(root / f"images/{number}.png", number)
        write(root / f"labels/{number}.txt", yolo(0, BOX) + yolo(1, BOX))
    picture(root / "images/odd.png", 99)
    write(root / "labels/odd.txt", "".join(f"{line}\n" for line in lines))
    write(root / "classes.txt", "cat\ndog\n")
    return root


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("0 0.5 0.5 1.2 0.2", "reaches outside of its picture of 80 x 60 px"),
        ("0 0.95 0.5 0.2 0.2", "reaches outside"),
        ("0 0.5 0.5 0 0.2", "has no area"),
        ("0 0.5 0.5 -0.1 0.2", "has no area"),
        ("0 nan 0.5 0.1 0.2", "is not finite"),
        ("7 0.5 0.5 0.2 0.2", "unknown class 7, there are 2 (0 to 1)"),
        ("-1 0.5 0.5 0.2 0.2", "unknown class -1"),
        ("0.5 0.5 0.5 0.2 0.2", "unknown class 0.5"),
        ("dog 0.5 0.5 0.2 0.2", "'dog' is not a number"),
        ("0 0.5 0.5 0.2", "3 numbers after the class"),
        ("0 40 30 20 20", "are not shares of the picture's sides"),
        ("0 1e999 0.5 0.2 0.2", "are not shares"),
    ],
)
def test_a_label_that_cannot_be_meant_is_named_and_left_out(
    tmp_path: Path, line: str, says: str
) -> None:
    found = read_folder(yolo_folder(tmp_path, [yolo(0, BOX).strip(), line]))
    (only,) = found.left_out
    assert only.startswith("labels/odd.txt: line 2: ")
    assert says in only
    assert f"left out: {only}" in found.lines()
    pictures = boxes(found, "train") | boxes(found, "val")
    assert len(pictures["images/odd.png"]) == 1


def test_a_box_that_is_a_little_over_the_edge_ends_there(tmp_path: Path) -> None:
    found = read_folder(yolo_folder(tmp_path, ["0 0.95 0.5 0.12 0.2"]))
    assert found.left_out == []
    rows = (boxes(found, "train") | boxes(found, "val"))["images/odd.png"]
    ((_, (left, _, width, _)),) = rows
    assert left + width == 80


def test_a_picture_without_a_file_and_one_that_is_none(tmp_path: Path) -> None:
    yolo_folder(tmp_path, [])
    (tmp_path / "images/3.png").unlink()
    (tmp_path / "images/4.png").write_bytes(b"no picture")
    found = read_folder(tmp_path)
    assert found.left_out == [
        "labels/3.txt: no picture '3', for 2 labels",
        "images/4.png: cannot be read as a picture (no readable image), for 2 labels",
    ]


def test_too_many_wrong_labels_end_with_the_first(tmp_path: Path) -> None:
    lines = ["9 0.5 0.5 0.2 0.2"] * 10
    with pytest.raises(
        UserError, match=r"10 of 50 labels .* labels/odd.txt: line 1: unknown class"
    ):
        read_folder(yolo_folder(tmp_path, lines))


def voc_folder(root: Path, odd: str) -> Path:
    for number in range(20):
        picture(root / f"{number}.png", number)
        write(root / f"{number}.xml", voc(f"{number}.png", ("dog", BOX)))
    picture(root / "odd.png", 99)
    write(root / "odd.xml", odd)
    return root


BILLION = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><annotation>&b;</annotation>'
OUTER = '<!DOCTYPE x [<!ENTITY a SYSTEM "http://127.0.0.1:9/x">]><annotation>&a;</annotation>'


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (BILLION, "declares a document type"),
        (OUTER, "declares a document type"),
        ("<annotation>" * 100_000, "nested more than 64 levels deep"),
        ("<annotation>", "not XML of labels (no element found"),
        ("\0", "not XML of labels"),
        (voc("odd.png", ("", BOX)), "object 1: has no name of a class"),
        (voc("odd.png", ("dog", BOX)).replace(">10<", ">ten<"), "'ten'"),
        (voc("odd.png", ("dog", BOX)).replace("bndbox", "polygon"), "is not four numbers"),
        (voc("odd.png", ("dog", [30, 20, -10, 5])), "has no area"),
        (voc("odd.png", ("dog", BOX), size=(800, 600)), "80 x 60 px upright, the label says 800"),
        (voc("none.gif", ("dog", BOX)), None),
    ],
)
def test_hostile_and_wrong_xml(tmp_path: Path, odd: str, says: str | None) -> None:
    found = read_folder(voc_folder(tmp_path, odd))
    if says is None:  # another name in the file: the picture beside it is meant
        assert found.left_out == []
        return
    (only,) = found.left_out
    assert only.startswith("odd.xml: ")
    assert says in only


def test_pictures_that_are_turned(tmp_path: Path) -> None:
    """Sizes and boxes are those of the upright picture."""
    voc_folder(tmp_path, voc("odd.jpg", ("dog", BOX)))
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "odd.png").unlink()
    picture(tmp_path / "odd.jpg", 99, (60, 80), exif=exif)
    found = read_folder(tmp_path)
    assert found.left_out == []
    sizes = {
        row["file_name"]: (row["width"], row["height"])
        for content in found.splits.values()
        for row in content["images"]
    }
    assert sizes["odd.jpg"] == (80, 60)
    write(tmp_path / "odd.xml", voc("odd.jpg", ("dog", BOX), size=(60, 80)))
    (only,) = read_folder(tmp_path).left_out
    assert "EXIF orientation" in only


def test_difficult_objects_are_ignored_in_coco_s_way(tmp_path: Path) -> None:
    odd = voc("odd.png", ("dog", BOX)).replace("</bndbox>", "</bndbox><difficult>1</difficult>")
    found = read_folder(voc_folder(tmp_path, odd))
    rows = [row for content in found.splits.values() for row in content["annotations"]]
    assert sum(row["iscrowd"] for row in rows) == 1


def coco_folder(root: Path, change) -> Path:
    names = [f"{number}.png" for number in range(20)]
    for number, name in enumerate(names):
        picture(root / name, number)
    content = json.loads(coco(names, [BOX] * 20))
    change(content)
    write(root / "labels.json", json.dumps(content))
    return root


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"category_id": 5}, "annotation 3: unknown class 5"),
        ({"image_id": "x"}, "annotation 3: there is no image 'x'"),
        ({"bbox": [1, 2, 3]}, "annotation 3: the box [1, 2, 3] is not four numbers"),
        ({"bbox": [1, 2, 3, None]}, "is not four numbers"),
        (
            {"bbox": [70, 2, 30, 4]},
            "the box from (70, 2) to (100, 6) reaches outside",
        ),
        ({"bbox": [1, 2, 0, 4]}, "has no area"),
    ],
)
def test_wrong_rows_of_coco(tmp_path: Path, change: dict, says: str) -> None:
    found = read_folder(coco_folder(tmp_path, lambda c: c["annotations"][3].update(change)))
    (only,) = found.left_out
    assert only.startswith("labels.json: ")
    assert says in only


def test_numbers_as_text_are_numbers(tmp_path: Path) -> None:
    change = {"bbox": [str(value) for value in BOX]}
    found = read_folder(coco_folder(tmp_path, lambda c: c["annotations"][3].update(change)))
    assert found.left_out == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: None, "holds no pictures"),
        (lambda root: picture(root / "a.png"), "has 1 pictures and no labels"),
        (lambda root: write(picture(root / "a.png").with_suffix(".json"), "{"), "not JSON"),
        (
            lambda root: write(
                picture(root / "a.png").with_suffix(".json"),
                '{"shapes": [], "imagePath": "a.png"}',
            ),
            "labelme's form",
        ),
        (lambda root: write(picture(root / "a.png").with_suffix(".txt"), ""), "no objects"),
        (
            lambda root: write(picture(root / "a.png").with_suffix(".txt"), yolo(0, BOX)),
            "at least two different pictures",
        ),
        (
            lambda root: write(picture(root / "val/a.png").with_suffix(".txt"), yolo(0, BOX)),
            "nothing to train on",
        ),
        (
            lambda root: write(root / "data.yaml", "names: [a, a]") or picture(root / "a.png"),
            "twice",
        ),
    ],
)
def test_folders_that_cannot_be_trained_on(tmp_path: Path, make, says: str) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match=says) as raised:
        read_folder(tmp_path)
    assert "\n" not in str(raised.value)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_folder(tmp_path / "none")


def test_unlabelled_pictures_are_left_out_and_empty_files_are_negatives(tmp_path: Path) -> None:
    yolo_folder(tmp_path, [])
    picture(tmp_path / "images/more.png", 100)
    found = read_folder(tmp_path)
    pictures = boxes(found, "train") | boxes(found, "val")
    assert pictures["images/odd.png"] == []
    assert "images/more.png" not in pictures
    assert any("pictures without labels are left out: 1" in note for note in found.notes)


def test_copies_and_augmented_copies_stay_on_one_side(tmp_path: Path) -> None:
    for number in range(30):
        picture(tmp_path / f"{number}.png", number)
        content = (tmp_path / f"{number}.png").read_bytes()
        (tmp_path / f"copy_{number}.png").write_bytes(content)
        for turn in "ab":
            picture(tmp_path / f"r{number}_jpg.rf.{turn}{turn}.jpg", 1000 * number + ord(turn))
    for file in list(tmp_path.iterdir()):
        write(file.with_suffix(".txt"), yolo(0, BOX))
    found = read_folder(tmp_path)
    train, val = set(boxes(found, "train")), set(boxes(found, "val"))
    assert len(val) in range(18, 31)  # a fifth of 120
    for number in range(30):
        for group in (
            {f"{number}.png", f"copy_{number}.png"},
            {f"r{number}_jpg.rf.{turn}{turn}.jpg" for turn in "ab"},
        ):
            assert group <= train or group <= val


def test_the_split_depends_on_names_alone(tmp_path: Path) -> None:
    yolo_folder(tmp_path / "one", [])
    yolo_folder(tmp_path / "two", [])
    os.utime(tmp_path / "two/images/3.png", (1, 1))
    assert read_folder(tmp_path / "one").splits == read_folder(tmp_path / "two").splits


def test_a_rare_class_is_on_both_sides_where_it_can_be(tmp_path: Path) -> None:
    yolo_folder(tmp_path, [], count=40)
    for number in range(6):
        write(tmp_path / f"labels/{number}.txt", yolo(0, BOX))
    (tmp_path / "classes.txt").write_text("cat\ndog\nfox\n")
    for number in range(6, 12):
        write(tmp_path / f"labels/{number}.txt", yolo(2, BOX))
    found = read_folder(tmp_path)
    assert found.class_names == ["cat", "dog", "fox"]
    for split in ("train", "val"):
        assert "fox" in {name for rows in boxes(found, split).values() for name, _ in rows}


def test_copies_across_given_splits_are_said(tmp_path: Path) -> None:
    roboflow_yolo(tmp_path)
    content = (tmp_path / "train/images/a.jpg").read_bytes()
    (tmp_path / "valid/images/a.jpg").write_bytes(content)
    assert any("1 of the 1 pictures to validate are also" in n for n in read_folder(tmp_path).notes)


def test_files_of_other_programs_beside_labels_are_no_matter(tmp_path: Path) -> None:
    voc_folder(tmp_path, voc("odd.png", ("dog", BOX)))
    write(tmp_path / "package.json", "{")
    write(tmp_path / "docker-compose.yaml", "a: [")
    write(tmp_path / "pom.xml", "<project/>")
    assert read_folder(tmp_path).left_out == []


def test_a_picture_with_two_files_of_labels(tmp_path: Path) -> None:
    voc_folder(tmp_path, voc("odd.png", ("dog", BOX)))
    write(tmp_path / "more/odd.xml", voc("odd.png", ("dog", BOX)))
    (only,) = read_folder(tmp_path).left_out
    assert only == "odd.xml: odd.png is also labelled by more/odd.xml, for 1 labels" or (
        only == "more/odd.xml: odd.png is also labelled by odd.xml, for 1 labels"
    )
