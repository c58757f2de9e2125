"""swinv2_moe.detection.annotations: what is wrong with a file is named, and COCO's own quirks are
not wrong."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from swinv2_moe.detection import annotations
from swinv2_moe.detection.annotations import check_annotations, file_sizes
from swinv2_moe.errors import UserError


def box(number: int, image: int = 1, category: int = 7, bbox=(10.0, 20.0, 30.0, 40.0), **keys):
    row = {"id": number, "image_id": image, "category_id": category, "bbox": list(bbox)}
    row |= {"area": 1.0, "iscrowd": 0, "segmentation": [[10, 20, 40, 20, 40, 60]]}
    return row | keys


@pytest.fixture
def content() -> dict:
    """Three images of 100 x 80 px, the last without objects, one in a folder; a crowd; two
    classes."""
    names = ("a.jpg", "inside/b.jpg", "c.jpg")
    return {
        "images": [
            {"id": n + 1, "file_name": name, "width": 100, "height": 80}
            for n, name in enumerate(names)
        ],
        "annotations": [
            box(5),
            box(6, image=2, category=3),
            box(7, image=2, iscrowd=1, segmentation={"size": [80, 100], "counts": [10, 7990]}),
        ],
        "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}],
    }


@pytest.fixture
def check(tmp_path: Path):
    """Write the content and its images, and check them."""

    def run(content: object, **options):
        for image in content["images"]:
            if isinstance(image, dict):
                file = tmp_path / "images" / image["file_name"]
                file.parent.mkdir(parents=True, exist_ok=True)
                if not file.exists():
                    Image.new("L", (100, 80)).save(file)
        (tmp_path / "a.json").write_text(json.dumps(content))
        return check_annotations(tmp_path / "a.json", tmp_path / "images", **options)

    return run


def test_counts_what_there_is(check, content) -> None:
    found = check(content)
    assert found.image_files == ["a.jpg", "inside/b.jpg", "c.jpg"]
    assert found.image_sizes.tolist() == [[100, 80]] * 3
    assert (found.boxes, found.crowd_boxes) == (3, 1)
    assert (found.thin_boxes, found.images_without_boxes) == (0, 1)
    assert found.class_names == ["cat", "dog"]
    assert str(found).endswith(
        "3 images (1 without objects), 3 objects (1 crowds, 0 thinner than a pixel), 2 classes"
    )


@pytest.mark.parametrize("crowds", [False, True])
def test_accepts_files_of_negatives_and_of_crowds(check, content, crowds) -> None:
    rows = content["annotations"]
    content["annotations"] = [row | {"iscrowd": 1} for row in rows if crowds]
    found = check(content, class_names=["cat", "dog"])
    assert found.boxes == found.crowd_boxes == 3 * crowds
    assert (found.images_of_classes, found.objects_of_classes) == (2 * crowds, 0)
    assert "; none can be found: an average precision of this file is undefined" in str(found)


def test_counts_objects_of_the_models_classes(check, content) -> None:
    found = check(content, class_names=["dog"])
    assert (found.boxes, found.images_of_classes, found.objects_of_classes) == (3, 1, 1)


def test_accepts_what_coco_has(check, content) -> None:
    content["annotations"] = [box(n) for n in range(1, 20_001)]
    # annotation 918 of COCO 2017: 2 in 860,001
    content["annotations"][0] = box(1, bbox=(96.65, 38.33, 1.03, 0.0))
    content["annotations"][1] = box(2, bbox=(-0.3, 0.0, 100.9, 80.4))  # rounded over the edge
    content["annotations"][2] = box(3, area=0)
    content["annotations"][3] = box(4, segmentation=[[1, 1, 5, 5, 9, 9]])  # no pixel
    assert check(content).thin_boxes == 1


def rle(counts: object, size: object = (80, 100)) -> dict:
    return box(8, segmentation={"size": size, "counts": counts})


def polygons(*outlines: object) -> dict:
    return box(8, segmentation=list(outlines))


# Annotation 8 beside the good ones, and what the one line must say
BAD_ANNOTATIONS = {
    "right of the image": (
        box(8, bbox=(90, 0, 11.5, 5)),
        *("(image 1)", "[90, 0, 11.5, 5]", "100 x 80 px"),
    ),
    "below the image": (box(8, bbox=(0, 70, 5, 11.5)), "outside"),
    "no area": (box(8, bbox=(1, 2, 0, 5)), "[1, 2, 0, 5]", "area"),
    "negative extent": (box(8, bbox=(9, 2, -3, 5)), "negative"),
    "three numbers": (box(8, bbox=(9, 2, 3)), "[9, 2, 3]"),
    "a text as number": (box(8, bbox=(9, 2, "3", 4)), "'3'"),
    "NaN": (box(8, bbox=(9, float("nan"), 3, 4)), "nan"),
    "endless box": (box(8, bbox=(9, 2, 10**400, 4)), "is not four numbers"),
    "unknown category": (box(8, category=99), "no category 99"),
    "unknown image": (box(8, image=44), "no image 44"),
    "negative area": (
        box(8, area=-1),
        "the area -1 is not between 0 and that of its image of 100 x 80 px",
    ),
    # from 10^10 on the evaluation ignores the object
    "area of another image": (box(8, area=1e10), "10000000000.0"),
    "area NaN": (box(8, area=float("nan")), "the area nan"),
    "areas of 0": (box(8, area=0), '"area" is 0'),
    "crowd of another kind": (box(8, iscrowd=256), '"iscrowd" is 256'),
    "no mask": (polygons(), "no segmentation"),
    "outline of gigabytes": (
        polygons([0, 0, 10**8, 0, 10**8, 10**8]),
        *("[0, 0, 100000000,", "an outline of more than 16,777,216 px"),
    ),
    "outline there and back": (polygons([0, 0, 99, 79] * 200_000), "an outline of more than"),
    "outline to NaN": (polygons([0, 0, 1, 0, 1, float("nan")]), "nan", "not finite"),
    "polygon of texts": (polygons(["0", "1"]), "['0', '1'] is not a list of numbers"),
    "polygon that is none": (
        box(8, segmentation=7),
        "7 is neither a list of polygons nor an RLE",
    ),
    "polygon of an endless number": (polygons([10**400, 0.5, 1, 1, 1, 1]), "not finite"),
    "polygon beyond the image": (
        polygons([100, 0, 120, 0, 120, 9]),
        "[[100, 0, 120, 0, 120, 9]] has no pixel",
    ),
    "polygon that is a line": (polygons([0.1, 0.1, 5.3, 5.3, 9.7, 9.7]), "has no pixel"),
    "mask without foreground": (rle([8000]), "has no pixel"),
    "mask of another size": (
        rle("x", [10**5, 10**5]),
        "size [100000, 100000], not [80, 100]",
    ),
    # run lengths of a mask of 100 x 80 px that no reader decodes
    "runs too long": (rle([10, 5, 100_000]), "counts of 100,015 px, not 8,000"),
    "runs too short": (rle([10, 5]), "counts of 15 px, not 8,000"),
    "negative run": (rle([10, -5, 7995]), "the counts [10, -5, 7995], not integers from 0 on"),
    "runs of floats": (rle([10.0, 5.0, 7985.0]), "[10.0, 5.0, 7985.0], not integers"),
    "runs missing": (rle(None), "the counts None, neither a list nor a string"),
    "text too short": (rle("1?"), "counts of 16 px"),
    "text of other characters": (rle("abcdefg!!"), "'abcdefg!!', which cannot be decoded"),
    "text of a negative run": (rle("N"), "'N', which cannot be decoded"),
    "text of an endless number": (rle("o" * 99 + "0"), "which cannot be decoded"),
}
for _size in (None, [100, 80], [80.0, 100.0]):
    BAD_ANNOTATIONS[f"runs of size {_size}"] = (rle([10, 7990], _size), "size", "not [80, 100]")
for _outline in ([], [5, 5], [10, 10, 30, 25], [1, 2, 3, 4, 5]):
    BAD_ANNOTATIONS[f"polygon {_outline}"] = (
        polygons(_outline),
        *(f"has {len(_outline)} numbers; a polygon is an even number", "at least 6"),
    )

# What is changed elsewhere in the file, and what the one line must say
DAMAGE = {
    "annotation id twice": (lambda c: c["annotations"].append(box(5)), "id 5", '"annotations"'),
    "image id twice": (lambda c: c["images"].append(c["images"][0]), "id 1", '"images"'),
    "category id twice": (
        lambda c: c["categories"].append({"id": 3, "name": "cow"}),
        *("id 3", '"categories"'),
    ),
    "category name twice": (
        lambda c: c["categories"].append({"id": 4, "name": "dog"}),
        *("'dog'", "more than once"),
    ),
    "image without height": (
        lambda c: c["images"][1].update(height=0),
        *("image 2", "inside/b.jpg", "100 x 0 px"),
    ),
    "key left out": (
        lambda c: c["annotations"][1].pop("iscrowd"),
        *('entry 1 of "annotations" (id 6)', '"iscrowd"'),
    ),
    "key of another kind": (lambda c: c["images"][0].update(width="100"), "\"width\" is '100'"),
    "entry of another kind": (
        lambda c: c["images"].insert(0, "a.jpg"),
        *('entry 0 of "images"', "'a.jpg'"),
    ),
    "null record": (lambda c: c["annotations"].insert(1, None), 'entry 1 of "annotations" is None'),
    "endless id": (lambda c: c["images"][0].update(id=10**4000), '"id" is 1000'),
    "more pixels than are decoded": (
        lambda c: c["images"][0].update(width=13_000, height=13_000),
        *("image 1 ('a.jpg')", "13000 x 13000 px, the limit is 120,000,000"),
    ),
    "crowd that is a boolean": (
        lambda c: c["annotations"].append(box(8, iscrowd=True)),
        *("(id 8)", '"iscrowd" is True'),
    ),
    "annotation id 0": (
        lambda c: c["annotations"].append(box(0)),
        *('the id 0 in "annotations"', "takes 0 for no match", "number annotations from 1 on"),
    ),
    "negative annotation ids": (
        lambda c: c["annotations"].extend([box(-1), box(-5)]),
        *('the id -5 in "annotations"', "(2 such)"),
    ),
    "negative image id": (lambda c: c["images"][2].update(id=-3), 'the id -3 in "images"'),
    "id that is a fraction": (lambda c: c["annotations"].append(box(8.0)), '"id" is 8.0'),
}


@pytest.mark.parametrize("name", [*BAD_ANNOTATIONS, *DAMAGE])
def test_damage_is_named_in_one_line(check, content, name: str) -> None:
    if name in DAMAGE:
        change, *words = DAMAGE[name]
        change(content)
    else:
        annotation, *words = BAD_ANNOTATIONS[name]
        content["annotations"].append(annotation)
        words.append("annotation 8")
    with pytest.raises(UserError) as caught:
        check(content)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    assert [word for word in ("a.json", *words) if word not in message] == []


def test_a_name_that_leads_out_of_the_images_is_refused(tmp_path: Path, check, content) -> None:
    content["images"][0]["file_name"] = "./a.jpg"
    assert check(content).image_files[0] == "./a.jpg"
    outside = ["", ".", "..", "../../b.jpg", "a/../../b.jpg", "/etc/b.jpg"]
    for name in [*outside, "b\0.jpg", "b\n.jpg", "\ud800", "x/" * 5000, "é" * 200]:
        content["images"][1]["file_name"] = name
        (tmp_path / "a.json").write_text(json.dumps(content))
        words = r"image 2: .* does not name a file below its directory"
        with pytest.raises(UserError, match=words) as caught:
            check_annotations(tmp_path / "a.json", tmp_path / "images")
        assert repr(name)[:80] in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_counts_the_others_like_the_first(check, content) -> None:
    content["annotations"] += [box(n, category=99) for n in range(100, 103)]
    with pytest.raises(UserError, match=r"annotation 100.*no category 99 \(3 such\)"):
        check(content)


def test_boxes_alone_need_no_masks(check, content) -> None:
    del content["annotations"][0]["segmentation"]
    assert check(content, masks=False).boxes == 3


def test_polygons_may_have_any_number_of_points_that_are_drawn(check, content) -> None:
    angles = np.linspace(0, 2 * np.pi, 20_000)
    outline = (50 + 30 * np.stack([np.cos(angles), np.sin(angles)], axis=1)).ravel().tolist()
    # The evaluation ignores later polygons of too few points.
    content["annotations"].append(box(8, segmentation=[outline, [], [-3, -2, 120, -2, 120, 90]]))
    assert check(content).boxes == 4


@pytest.mark.timeout(60)
def test_what_is_no_annotation_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for text in (b"[" * 100_000, b"1" * 5000, b'{"images": ' + b"[" * 100_000):
        file.write_bytes(text)
        words = r"a\.json: not JSON \((nested too deeply|Exceeds the limit)"
        with pytest.raises(UserError, match=words):
            check_annotations(file, tmp_path)
    for text in (b"", b"{", b'{"images": [}', b"\xff\xfe", b"[1, 2]", b"null"):
        file.write_bytes(text)
        with pytest.raises(UserError, match=r"a\.json: not (JSON|a COCO annotation file)"):
            check_annotations(file, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match=r"cannot be read \(not a regular file\)"):
            check_annotations(path, tmp_path)
    with pytest.raises(UserError, match=r"none\.json: cannot be read \(No such file"):
        check_annotations(tmp_path / "none.json", tmp_path)


def test_images_missing_or_empty(tmp_path: Path, check, content) -> None:
    check(content)
    with pytest.raises(UserError, match="nowhere: cannot be read"):
        check_annotations(tmp_path / "a.json", tmp_path / "nowhere")
    file = tmp_path / "images/inside/b.jpg"
    for damage, word in ((lambda: file.write_bytes(b""), "empty"), (file.unlink, "missing")):
        damage()
        words = f"1 of its 3 images are {word} in .*, the first: inside/b.jpg"
        with pytest.raises(UserError, match=words):
            check_annotations(tmp_path / "a.json", tmp_path / "images")


def test_classes_must_be_the_models_in_its_order(check, content) -> None:
    assert check(content, class_names=("cat", "dog")).boxes == 3
    assert check(content, class_names=("dog",)).boxes == 3  # the file may have more
    words = r"no category 'cow', a class of the model \(2 such\)"
    with pytest.raises(UserError, match=words):
        check(content, class_names=("cat", "cow", "hen"))
    with pytest.raises(UserError, match="another order than the model's: 'cat', not 'dog'"):
        check(content, class_names=("dog", "cat"))


def test_classes_are_found_by_name_for_the_runner(check, content) -> None:
    found = check(content, class_names=("dog", "cow", "cat"), by_runner=True)
    assert (found.missing_classes, found.unknown_classes) == (["cow"], [])
    assert str(found).endswith("; evaluated without the model's classes 'cow'")
    found = check(content, class_names=("dog",), by_runner=True)
    assert str(found).endswith("; ignores the classes 'cat', not the model's")
    with pytest.raises(UserError, match=r"no category 'Cat'.*; it has 'cat', 'dog', not the model"):
        check(content, class_names=("Cat",), by_runner=True)
    content["annotations"].append(box(0))
    assert check(content, by_runner=True).boxes == 4


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("turned", [True, False])
def test_sizes_are_those_that_mmdetection_reads(tmp_path, check, content, format, turned) -> None:
    mmcv = pytest.importorskip("mmcv")
    (tmp_path / "images").mkdir()
    file, exif = tmp_path / "images/a.jpg", Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (100, 80)).save(file, format, exif=exif)
    flag = "color" if turned else "color_ignore_orientation"
    height, width = mmcv.imread(str(file), flag).shape[:2]
    content["images"][0].update(width=width, height=height)
    content["annotations"][0].update(bbox=[0, 0, 10, 10])
    assert check(content, turned=turned).sizes_compared == 3
    content["images"][0].update(width=height, height=width)
    words = rf"image 1 \('a.jpg'\): {height} x {width} px here, {width} x {height} in its file"
    with pytest.raises(UserError, match=words):
        check(content, turned=turned)


def test_files_that_are_no_images_are_named(tmp_path: Path, check, content, monkeypatch) -> None:
    check(content)
    (tmp_path / "images/c.jpg").write_bytes(b"pixels")
    with pytest.raises(UserError, match=r"image 3 \('c.jpg'\): not an image in a format that"):
        check(content)
    monkeypatch.setattr(annotations, "MAX_HEADERS", 2)  # of the first two images
    assert str(check(content)).endswith("; size compared with the file for 2 images")


def test_is_quick_on_as_many_images_as_coco_has(tmp_path: Path, monkeypatch) -> None:
    """One listing of each folder: no call for each of 118,287 images."""
    for folder in ("", "inside"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for number in range(50):
            (tmp_path / folder / f"{number}.jpg").write_bytes(b"x" * (number + 1))
    listings = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listings.append(path) or real(path))
    names = [f"{folder}{number}.jpg" for folder in ("", "inside/") for number in range(50)]
    assert file_sizes(tmp_path, names) == dict(zip(names, [*range(1, 51)] * 2, strict=True))
    assert len(listings) == 2
    assert np.mean([Path(path).is_dir() for path in listings]) == 1
