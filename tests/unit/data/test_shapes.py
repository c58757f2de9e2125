"""data/make_shapes.py: the same bytes again, and annotations that fit the pixels."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from shapes_cases import CLASSES, Options, main, make_shapes
from tool_cases import in_this_process, snapshot

from swinv2_moe import commands
from swinv2_moe.detection.annotations import check_annotations
from swinv2_moe.errors import UserError

FEW = Options(train=4, val=2, min_size=64, max_size=96, seed=3)


def test_the_same_options_give_the_same_bytes(tmp_path: Path) -> None:
    counts = [make_shapes(tmp_path / name, FEW) for name in ("one", "two")]
    make_shapes(tmp_path / "other", replace(FEW, seed=4))
    make_shapes(tmp_path / "more", replace(FEW, train=6))
    one, two, other, more = (snapshot(tmp_path / name) for name in ("one", "two", "other", "more"))
    assert one == two
    assert counts[0] == counts[1]
    assert len(one) == 6 + 2
    pictures = [name for name in one if name.endswith(".png")]
    assert all(one[name] != other[name] for name in pictures)
    # an image does not depend on how many there are
    assert all(one[name] == more[name] for name in pictures)


def test_passes_its_own_check_and_shows_every_class(tmp_path: Path) -> None:
    counts = make_shapes(tmp_path, replace(FEW, train=12))
    for split, images in (("train", 12), ("val", 2)):
        file = tmp_path / f"annotations/instances_{split}.json"
        found = check_annotations(file, tmp_path / split, CLASSES)
        assert (len(found.image_files), found.boxes) == (images, counts[split])
        assert found.images_without_boxes == 0
    content = json.loads((tmp_path / "annotations/instances_train.json").read_text())
    assert {row["category_id"] for row in content["annotations"]} == {1, 2, 3}


def test_annotations_fit_the_pixels(tmp_path: Path) -> None:
    """Without its objects an image is a smooth texture: the colour changes where a polygon
    begins."""
    make_shapes(tmp_path, replace(FEW, train=8, min_size=128, max_size=128, max_objects=1))
    content = json.loads((tmp_path / "annotations/instances_train.json").read_text())
    assert len(content["annotations"]) == 8
    for row in content["annotations"]:
        file = tmp_path / "train" / f"{row['image_id'] - 1:06d}.png"
        pixels = np.asarray(Image.open(file), np.float32)
        polygon = np.array(row["segmentation"][0]).reshape(-1, 2)
        corner, extent = np.array(row["bbox"][:2]), np.array(row["bbox"][2:])
        np.testing.assert_allclose(
            [polygon.min(0), polygon.max(0)], [corner, corner + extent], atol=0.011
        )
        masks = [
            mask_of(corner + extent / 2 + (polygon - corner - extent / 2) * scale)
            for scale in (0.85, 1.15, 1.35)
        ]
        inside, around = masks[0], masks[2] & ~masks[1]
        # Pillow's mask has the edge's pixels too
        assert row["area"] == pytest.approx(mask_of(polygon).sum(), rel=0.15)
        # the mean colour over a ring is that of the background, over the inside that of the object
        assert np.abs(pixels[inside].mean(0) - pixels[around].mean(0)).max() > 15


def mask_of(polygon: np.ndarray) -> np.ndarray:
    mask = Image.new("1", (128, 128))
    ImageDraw.Draw(mask).polygon([tuple(corner) for corner in polygon], fill=1)
    return np.asarray(mask)


def test_impossible_options() -> None:
    for wrong, words in (
        ({"train": 0}, "train is 0"),
        ({"min_size": 8}, "min_size is 8"),
        ({"max_size": 63}, r"max_size \(63\) must be at least min_size \(64\)"),
        ({"seed": -1}, "seed is -1"),
    ):
        with pytest.raises(UserError, match=words):
            replace(FEW, **wrong)


def test_the_command_keeps_what_is_there(tmp_path: Path, monkeypatch, capsys) -> None:
    make = in_this_process("data/make_shapes.py", main, monkeypatch, capsys)
    new = make(tmp_path / "new", "--train", 2, "--val", 1, "--max-size", 160)
    assert new.status == 0
    folders = [line.split(":")[0] for line in new.out.splitlines()]
    assert folders == [f"{tmp_path}/new/train", f"{tmp_path}/new/val"]
    before = snapshot(tmp_path)
    again = make(tmp_path / "new", "--train", 1, "--val", 1)
    assert again == (2, "", f"error: {tmp_path}/new: must be a new or empty directory\n")
    assert snapshot(tmp_path) == before


def test_the_verb_runs_the_script(tmp_path, monkeypatch, capsys):
    words = ["swinv2-moe", "make-shapes", str(tmp_path / "shapes")]
    monkeypatch.setattr(sys, "argv", words)
    commands.main()
    assert (tmp_path / "shapes/annotations/instances_train.json").is_file()
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(commands, "SCRIPTS", {"make-shapes": "data/none.py"})  # no clone
    with pytest.raises(SystemExit):
        commands.main()
    assert "'make-shapes' is not a command" in capsys.readouterr().err
