"""What is chosen for a folder, and the canvas: boxes stay on their pixels under zoom."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tool_cases import ROOT

pytest.importorskip("mmdet")

from mmdet.structures.bbox import HorizontalBoxes

from swinv2_moe.data.labels import Labelled
from swinv2_moe.detection.fit import (
    Given,
    Times,
    canvas,
    choose,
    parse_given,
    within_minutes,
)
from swinv2_moe.detection.recipe import Recipe, mmengine_config, read_recipe
from swinv2_moe.detection.transforms import GREY, LoadOnCanvas
from swinv2_moe.errors import UserError


def labelled(count: int = 100, side: float = 60, size: tuple[int, int] = (640, 480)) -> Labelled:
    """Pictures with one square object each."""
    width, height = size
    splits = {}
    for split, number in (("train", count), ("val", 20)):
        images = [
            {"id": i, "file_name": f"{i}.jpg", "width": width, "height": height}
            for i in range(number)
        ]
        rows = [
            {"id": i + 1, "image_id": i, "category_id": 1, "bbox": [0, 0, side, side]}
            for i in range(number)
        ]
        splits[split] = {"images": images, "annotations": rows, "categories": []}
    return Labelled(Path("photos"), "YOLO text", ["cat"], splits)


@pytest.mark.parametrize(
    ("side", "size", "expected"),
    [
        (60, (640, 480), [256, 192]),
        (26, (640, 480), [320, 256]),  # 240 px are not a multiple of 32
        (8, (640, 480), [416, 320]),  # the largest, where they have 5 px
        (60, (480, 640), [192, 256]),
        (60, (96, 96), [128, 128]),  # enlarged by a half at most
        (200, (4000, 1000), [256, 128]),  # 2 : 1 at most
    ],
)
def test_size_by_the_objects(side: float, size: tuple[int, int], expected: list[int]) -> None:
    recipe, lines = choose(labelled(side=side, size=size), Given())
    assert recipe.size == expected
    assert any(line.startswith(f"size {expected[0]} x {expected[1]} px: ") for line in lines)


def test_a_mixture_of_orientations_is_square() -> None:
    assert canvas(320, [(640, 480)] * 3 + [(480, 640)]) == [320, 320]
    assert canvas(320, [(640, 480)] * 9 + [(480, 640)]) == [320, 256]


@pytest.mark.parametrize(
    ("count", "batch", "epochs"), [(3, 1, 300), (20, 2, 300), (100, 4, 160), (5000, 4, 20)]
)
def test_batch_and_epochs_by_the_pictures(count: int, batch: int, epochs: int) -> None:
    recipe, _ = choose(labelled(count), Given())
    assert (recipe.batch, recipe.epochs) == (batch, epochs)
    given, _ = choose(labelled(count), Given(batch=3, epochs=7, lr=0.1))
    assert (given.batch, given.epochs, given.lr) == (3, 7, 0.1)


def test_what_fits_into_the_minutes() -> None:
    folder = labelled()
    recipe, _ = choose(folder, Given())
    quick, lines = within_minutes(recipe, folder, Times(0.01, 0.01), Given(), 1, 10)
    assert quick == replace(recipe, seconds=quick.seconds)
    assert lines == [
        "epochs 160: 16,000 pictures in all, in 20 to 300 passes; 10 validations, ends after 4"
        " without a better one",
        "expected duration: 41 s, at 400.0 pictures a second",
    ]
    # 1,800 - 10 s, of them 0.9, without 2 x 5 batches of 3 s: 25 passes of 25 steps of 2.53 s
    slow, lines = within_minutes(recipe, folder, Times(2.53, 3.0), Given(), 1, 10)
    assert slow.seconds == 1581
    assert (slow.epochs, slow.validations, slow.zoom) == (160, 10, [0.8, 1.25])
    assert lines[0].startswith("epochs 25: about as many as fit into 30 minutes")
    # a validation takes half of the one pass
    short, _ = within_minutes(recipe, folder, Times(2.53, 6.0), Given(minutes=3), 1, 10)
    assert short.validations == 1
    kept, _ = within_minutes(recipe, folder, Times(3.0, 1.0), Given(epochs=160), 1, 10)
    assert (kept.epochs, kept.seconds) == (160, None)
    large, _ = choose(labelled(side=8), Given())
    tiny, lines = within_minutes(large, folder, Times(30.0, 10.0), Given(), 1, 10)
    assert tiny.size == [256, 192]
    assert "instead" in lines[0]


def test_given_values_are_checked() -> None:
    assert parse_given({"epochs": "3", "lr": "1e-3", "size": None}) == Given(epochs=3, lr=1e-3)
    for values, says in (
        ({"epochs": "1.5"}, "--epochs is 1.5"),
        ({"minutes": "nan"}, "--minutes is nan"),
        ({"batch": -1}, "--batch is -1"),
    ):
        with pytest.raises(UserError, match=says):
            parse_given(values)
    with pytest.raises(TypeError, match="colour"):
        parse_given({"colour": 1})


def test_weights_are_taken_and_random_ones_have_the_same_shape() -> None:
    trained, lines = choose(labelled(), Given())
    assert trained.backbone["pretrained"] == "bundled:tiny"
    assert any("bundled:tiny" in line for line in lines)
    random, lines = choose(labelled(), Given(weights="none"))
    assert "pretrained" not in random.backbone
    assert random.backbone == {k: v for k, v in trained.backbone.items() if k != "pretrained"}
    with pytest.raises(UserError, match="nowhere"):
        choose(labelled(), Given(weights="nowhere"))


def test_a_recipe_is_read_as_it_was_written(tmp_path: Path) -> None:
    recipe, _ = choose(labelled(), Given())
    recipe.write(tmp_path)
    read = read_recipe(tmp_path)
    # tuples become lists, which mmengine's configuration does not tell apart
    assert json.dumps(vars(read)) == json.dumps(vars(recipe))
    assert mmengine_config(read, tmp_path).model.bbox_head.num_classes == 1
    content = json.loads((tmp_path / "detector.json").read_text())
    for change in ({"epochs": "x"}, {"size": [1]}, {"class_names": None}):
        (tmp_path / "detector.json").write_text(json.dumps(content | change))
        with pytest.raises(UserError, match=next(iter(change))):
            read_recipe(tmp_path)
    with pytest.raises(UserError, match="no run of"):
        read_recipe(tmp_path / "none")


def square_picture(path: Path) -> Path:
    """A black picture of 120 x 90 px with a white rectangle from (30, 20) to (80, 60)."""
    pixels = np.zeros((90, 120, 3), np.uint8)
    pixels[20:60, 30:80] = 255
    Image.fromarray(pixels).save(path)
    return path


def annotated(path: Path) -> dict:
    return {
        "img_path": str(path),
        "gt_bboxes": HorizontalBoxes(torch.tensor([[30.0, 20, 80, 60]])),
        "gt_bboxes_labels": np.array([0]),
        "gt_ignore_flags": np.array([False]),
    }


def white(picture: np.ndarray) -> tuple[float, ...]:
    rows, columns = np.nonzero(picture[..., 0] > 185)  # 114, around the picture, is not white
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def test_evaluation_puts_the_picture_into_the_corner(tmp_path: Path) -> None:
    load = LoadOnCanvas((240, 240))
    results = load(annotated(square_picture(tmp_path / "a.png")))
    assert results["img"].shape == (240, 240, 3)
    assert results["scale_factor"] == (2.0, 2.0)
    assert results["ori_shape"] == (90, 120)
    assert results["gt_bboxes"].tensor.tolist() == [[60, 40, 160, 120]]
    assert white(results["img"]) == pytest.approx((60, 40, 160, 120), abs=1)
    assert (results["img"][185:] == GREY).all()


@pytest.mark.parametrize("size", [(120, 90), (33, 150), (1000, 701), (1, 300)])
def test_an_exported_program_sees_the_same_pixels(size: tuple[int, int]) -> None:
    pytest.importorskip("onnxruntime")
    on_canvas = runpy.run_path(str(ROOT / "examples/detect.py"))["on_canvas"]
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    spec = {"input": {"shape": [1, 3, 96, 128], "background": GREY}}
    theirs, factor = on_canvas(Image.fromarray(pixels), spec)
    ours = LoadOnCanvas((128, 96))({"img": pixels[..., ::-1]})
    assert (ours["img"][..., ::-1] == theirs[0].transpose(1, 2, 0)).all()
    assert ours["scale_factor"] == (factor, factor)


def test_boxes_stay_on_their_pixels_under_zoom(tmp_path: Path) -> None:
    path = square_picture(tmp_path / "a.png")
    load = LoadOnCanvas((128, 96), zoom=(0.6, 1.6))
    scales, cut = set(), 0
    for seed in range(60):
        np.random.seed(seed)  # noqa: NPY002 (mmcv's)
        results = load(annotated(path))
        scales.add(round(results["scale_factor"][0], 3))
        boxes = results["gt_bboxes"].tensor
        if not len(boxes):
            continue
        (box,) = boxes.tolist()
        # interpolation blurs an edge over a pixel of the picture, up to 1.7 px here
        assert white(results["img"]) == pytest.approx(box, abs=2)
        full = 50 * 40 * results["scale_factor"][0] ** 2
        left = (box[2] - box[0]) * (box[3] - box[1])
        assert results["gt_ignore_flags"].tolist() == [left < 0.4 * full]
        cut += left < 0.99 * full
    assert len(scales) > 50
    assert cut > 3


def test_a_picture_that_cannot_be_read(tmp_path: Path) -> None:
    results = annotated(tmp_path / "none.png") | {"width": 120, "height": 90}
    assert LoadOnCanvas((64, 64), zoom=(1, 1.1))(dict(results)) is None
    grey = LoadOnCanvas((64, 64))(results)
    assert grey["ori_shape"] == (90, 120)
    assert (grey["img"] == GREY).all()


def test_the_model_s_strides_fit_its_backbone() -> None:
    recipe = Recipe(
        "x",
        ["a", "b"],
        [64, 64],
        {"depths": [2, 2, 2, 2], "embed_dim": 32, "patch_size": 4, "num_heads": [1, 2, 4, 8]},
        2,
        1,
        1e-3,
    )
    model = mmengine_config(recipe, Path("run")).model
    assert model.bbox_head.anchor_generator.strides == [8, 16, 32]
    assert model.neck.in_channels == [64, 128, 256]
    assert model.backbone.out_indices == (1, 2, 3)
