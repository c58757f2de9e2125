"""swinv2_moe.detection.datasets: the data sets of a configuration, and the metric that they are
measured with."""

import contextlib
import copy
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

pytest.importorskip("mmdet")

from faster_coco_eval import COCO as FasterCOCO
from faster_coco_eval import COCOeval_faster
from mmdet.evaluation import CocoMetric, FasterCocoMetric
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from shapes_cases import CLASSES, Options, make_shapes

from swinv2_moe.detection.datasets import (
    check_datasets,
    metainfo,
    table_of,
    test_on_train_images,
    use_ground_truth,
)
from swinv2_moe.detection.runner import MoERunner
from swinv2_moe.errors import UserError

test_on_train_images.__test__ = False  # a function that pytest would collect by its name


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("shapes")
    make_shapes(directory, Options(train=6, val=3, min_size=64, max_size=96))
    return directory


def config_of(directory: Path) -> Config:
    def loader(split: str) -> dict:
        dataset = {"type": "CocoDataset", "data_root": str(directory)}
        dataset["ann_file"] = f"annotations/instances_{split}.json"
        dataset["data_prefix"] = {"img": f"{split}/"}
        dataset["metainfo"] = {"classes": CLASSES}
        dataset["pipeline"] = [{"type": "LoadAnnotations", "with_mask": True}]
        return {"dataset": dataset}

    metric = {"type": "FasterCocoMetric"}
    metric["ann_file"] = str(directory / "annotations/instances_val.json")
    splits = {"train": "train", "val": "val", "test": "val"}
    loaders = {f"{part}_dataloader": loader(split) for part, split in splits.items()}
    return Config(loaders | {"val_evaluator": metric, "test_evaluator": dict(metric)})


def test_checks_each_file_once(shapes: Path) -> None:
    found = check_datasets(config_of(shapes), ("train", "val", "test"))
    assert [Path(one.file).name for one in found] == ["instances_train.json", "instances_val.json"]
    assert [len(one.image_files) for one in found] == [6, 3]


def test_looks_into_data_sets_that_hold_others(shapes: Path) -> None:
    config = config_of(shapes)
    train, val = config.train_dataloader.dataset, config.val_dataloader.dataset
    both = {"type": "ConcatDataset", "datasets": [train, val]}
    config.train_dataloader.dataset = {"type": "RepeatDataset", "times": 2, "dataset": both}
    assert [len(one.image_files) for one in check_datasets(config, ("train",))] == [6, 3]


def test_classes_and_colours_are_those_that_the_data_set_reads(shapes: Path, tmp_path) -> None:
    config = config_of(shapes)
    dataset = config.test_dataloader.dataset
    found = []
    (tmp_path / "names.txt").write_text("circle\nsquare\n")
    dataset.pop("metainfo")
    for given in (None, {"classes": ("square", "circle")}, {"classes": f"{tmp_path}/names.txt"}):
        if given:
            dataset.metainfo = given
        read = DATASETS.build(copy.deepcopy(dataset | {"pipeline": [], "lazy_init": True})).metainfo
        found.append(metainfo(dataset))
        assert found[-1] == {key: read[key] for key in ("classes", "palette")}
    assert [len(meta["classes"]) for meta in found] == [80, 2, 2]
    assert len(found[1]["palette"]) == 80


@pytest.mark.parametrize("classes", ["cat", 3, (1, 2)])
def test_classes_that_are_no_names(shapes: Path, classes) -> None:
    config = config_of(shapes)
    config.train_dataloader.dataset.metainfo = {"classes": classes}
    with pytest.raises(UserError, match=r"metainfo.classes .* must be names, as \('cat', 'dog'\)"):
        check_datasets(config, ("train",))


@pytest.mark.parametrize("crowds", [False, True])
def test_training_on_negatives_or_crowds_alone(shapes: Path, tmp_path, crowds) -> None:
    """Refused alone. Beside a file with objects, images without any are trained on if the
    configuration does not leave them out; the message names the key."""
    shutil.copytree(shapes, tmp_path / "none")
    file = tmp_path / "none/annotations/instances_train.json"
    content = json.loads(file.read_text())
    rows = [row | {"iscrowd": 1} for row in content["annotations"] if crowds]
    file.write_text(json.dumps(content | {"annotations": rows}))
    config, none = config_of(shapes), config_of(tmp_path / "none").train_dataloader.dataset
    objects = config.train_dataloader.dataset
    none.filter_cfg = {"filter_empty_gt": True}
    config.train_dataloader.dataset = none
    with pytest.raises(
        UserError, match=rf"no object .* to learn \({len(rows)} crowds, .*: train on"
    ):
        check_datasets(config, ("train",))
    config.train_dataloader.dataset = {"type": "ConcatDataset", "datasets": [objects, none]}
    if not crowds:
        with pytest.raises(UserError, match=r"filter_cfg.filter_empty_gt .* set it to False"):
            check_datasets(config, ("train",))
        none = config.train_dataloader.dataset.datasets[1]
        none.filter_cfg.filter_empty_gt = False
    found = check_datasets(config, ("train",))
    assert [annotations.objects_of_classes > 0 for annotations in found] == [True, False]


WRONG = {
    "none.json: cannot be read": lambda c: c.train_dataloader.dataset.update(ann_file="none.json"),
    "3 of its 6 images are missing": lambda c: c.train_dataloader.dataset.update(
        data_prefix={"img": "val/"}
    ),
    r"no category 'person'.*\(80 such\)": lambda c: c.train_dataloader.dataset.pop("metainfo"),
    "val_evaluator.ann_file is 'other.json'": lambda c: c.val_evaluator.update(
        ann_file="other.json"
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_one_line(shapes: Path, words: str) -> None:
    config = config_of(shapes)
    WRONG[words](config)
    with pytest.raises(UserError, match=words) as caught:
        check_datasets(config, ("train", "val"))
    assert "\n" not in str(caught.value)


def test_the_test_can_use_the_images_of_the_training(shapes: Path) -> None:
    config = config_of(shapes)
    test_on_train_images(config)
    assert [len(one.image_files) for one in check_datasets(config, ("test",))] == [6]
    assert [len(one.image_files) for one in check_datasets(config, ("val",))] == [3]


def test_table_has_percent_and_says_where_there_is_nothing() -> None:
    metrics = {"coco/bbox_mAP": 0.534, "coco/bbox_mAP_50": 0.7, "coco/bbox_mAP_s": -1.0}
    table = table_of(metrics | {"coco/segm_mAP": 0.462})
    cells = [list(map(str, column.cells)) for column in table.columns]
    assert cells[0] == ["boxes", "masks"]
    assert (cells[1], cells[2], cells[4]) == (["53.4", "46.2"], ["70.0", "-"], ["-", "-"])


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_faster_coco_eval_equals_pycocotools(shapes: Path, kind: str) -> None:
    """Every precision and recall of moved, rescored, doubled and misnamed ground truth; one object
    a crowd."""
    file = shapes / "annotations/instances_train.json"
    content = json.loads(file.read_text())
    content["annotations"][3]["iscrowd"] = 1
    crowded = shapes / "crowded.json"
    rng, boxes, masks = np.random.default_rng(0), [], []
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(file))
    for row in content["annotations"] * 4:
        shift = rng.normal(0, 3, 4)
        common = {"image_id": row["image_id"], "score": float(rng.random())}
        misnamed = rng.random() >= 0.8
        common["category_id"] = int(rng.integers(1, 4)) if misnamed else row["category_id"]
        boxes.append(common | {"bbox": (np.array(row["bbox"]) + shift).clip(1).tolist()})
        mask = np.roll(truth.annToMask(row), shift[:2].astype(int), (0, 1))
        masks.append(common | {"segmentation": rle.encode(np.asfortranarray(mask))})
    mask = np.asfortranarray(truth.annToMask(content["annotations"][3]))
    encoded = rle.encode(mask)
    encoded["counts"] = encoded["counts"].decode()
    content["annotations"][3]["segmentation"] = encoded
    crowded.write_text(json.dumps(content))
    found = []
    for data, evaluation in ((COCO, COCOeval), (FasterCOCO, COCOeval_faster)):
        with contextlib.redirect_stdout(io.StringIO()):
            truth = data(str(crowded))
            detections = truth.loadRes([dict(one) for one in (boxes if kind == "bbox" else masks)])
            run = evaluation(truth, detections, kind)
            run.evaluate()
            run.accumulate()
        found.append((run.eval["precision"], run.eval["recall"]))
    (precision, recall), (faster_precision, faster_recall) = found
    assert 0.05 < precision[precision > -1].mean() < 0.95
    np.testing.assert_allclose(faster_precision, precision, rtol=0, atol=1e-12)
    np.testing.assert_allclose(faster_recall, recall, rtol=0, atol=1e-12)


# Two classes and three images, each with a perfect detection of class `IMAGES[i]`.
IMAGES = ["cat", "dog", "cat"]


def perfect(file: Path, kind: type, model_classes, first_id: int = 1, detect: bool = True) -> dict:
    """Metrics of perfect detections by a model of `model_classes` on a file in which cat is 3 and
    dog is 8."""
    categories = {"cat": 3, "dog": 8}
    polygon = [[10, 10, 30, 10, 30, 25, 10, 25]]
    mask = rle.merge(rle.frPyObjects(polygon, 48, 64))
    sizes = {"width": 64, "height": 48}
    rows = [
        {"id": first_id + i, "image_id": i, "category_id": categories[name], "iscrowd": 0}
        | {"bbox": [10, 10, 20, 15], "area": 300, "segmentation": polygon}
        for i, name in enumerate(IMAGES)
    ]
    content = {
        "images": [{"id": i, "file_name": f"{i}.png"} | sizes for i in range(3)],
        "annotations": rows,
        "categories": [{"id": number, "name": name} for name, number in categories.items()],
    }
    file.write_text(json.dumps(content))
    metric = kind(ann_file=str(file), metric=["bbox", "segm"], classwise=True)
    use_ground_truth(metric)
    metric.dataset_meta = {"classes": model_classes}
    for i, name in enumerate(IMAGES):
        found = slice(0, int(detect and name in model_classes))
        instances = {
            "bboxes": torch.tensor([[10.0, 10, 30, 25]])[found],
            "scores": torch.tensor([0.9])[found],
            "labels": torch.tensor([*map(model_classes.index, [name][found])], dtype=torch.long),
            "masks": [dict(mask)][found],
        }
        sample = {"img_id": i, "ori_shape": (48, 64), "pred_instances": instances}
        metric.process({}, [sample])
    return metric.evaluate(3)


@pytest.fixture(params=[CocoMetric, FasterCocoMetric])
def kind(request) -> type:
    return request.param


@pytest.mark.parametrize("first_id", [1, 0, -5])
def test_perfect_detections_score_1_whatever_the_ids(tmp_path: Path, kind, first_id: int) -> None:
    metrics = perfect(tmp_path / "a.json", kind, ("cat", "dog"), first_id)
    assert (metrics["coco/bbox_mAP"], metrics["coco/segm_mAP"]) == (1, 1)


@pytest.mark.parametrize("model_classes", [("dog", "cat"), ("cow", "dog", "cat"), ("dog",)])
def test_labels_are_the_models_by_name(tmp_path: Path, kind, model_classes) -> None:
    metrics = perfect(tmp_path / "a.json", kind, model_classes)
    assert (metrics["coco/bbox_mAP"], metrics["coco/segm_mAP"]) == (1, 1)
    assert metrics["coco/dog_precision"] == 1


def test_no_detections_are_an_ap_of_0(tmp_path: Path, kind, monkeypatch) -> None:
    lines = []
    monkeypatch.setattr(MMLogger, "warning", lambda logger, text: lines.append(text))
    metrics = perfect(tmp_path / "a.json", kind, ("cat", "dog"), detect=False)
    assert lines == ["no detections in 3 images: the average precision is 0"] * 2
    names, *cells = [list(map(str, column.cells)) for column in table_of(metrics).columns]
    assert names == ["boxes", "masks"]
    # an object of 300 px² is small: there are no others
    assert cells == [["0.0", "0.0"]] * 4 + [["-", "-"]] * 2
    assert metrics["coco/cat_precision"] == 0


def test_a_data_sets_labels_are_the_models_by_name(shapes: Path) -> None:
    init_default_scope("mmdet")
    config = config_of(shapes).train_dataloader
    config.update(batch_size=1, num_workers=0, sampler={"type": "DefaultSampler"})
    labels = []
    for classes in (CLASSES, CLASSES[::-1]):
        config.dataset.metainfo = {"classes": classes}
        dataset = MoERunner.build_dataloader(config, seed=0).dataset
        rows = [dataset.get_data_info(i)["instances"] for i in range(len(dataset))]
        labels.append([classes[row["bbox_label"]] for instances in rows for row in instances])
    assert labels[0] == labels[1]
    assert len(set(labels[0])) > 1


def test_classes_that_a_file_lacks(shapes: Path) -> None:
    """Tests leave them out and name them; a training needs all."""
    config = config_of(shapes)
    for split in ("train", "test"):
        config[f"{split}_dataloader"].dataset.metainfo.classes = ("square", "star", "circle")
    [found] = check_datasets(config, ["test"])
    assert (found.missing_classes, found.unknown_classes) == (["star"], ["triangle"])
    with pytest.raises(UserError, match="has no category 'star', a class of the model"):
        check_datasets(config, ["train"])


def test_masks_are_checked_for_a_metric_of_masks(shapes: Path, tmp_path: Path) -> None:
    config = config_of(shapes)
    content = json.loads((shapes / "annotations/instances_val.json").read_text())
    content["annotations"][0]["segmentation"] = [[1, 2]]
    file = str(tmp_path / "a.json")
    Path(file).write_text(json.dumps(content))
    config.test_dataloader.dataset.update(ann_file=file, pipeline=[])
    config.test_evaluator.ann_file = file
    assert check_datasets(config, ["test"])
    config.test_evaluator.metric = ["bbox", "segm"]
    with pytest.raises(UserError, match="has 2 numbers"):
        check_datasets(config, ["test"])


def test_sizes_follow_the_pipelines_orientation(shapes: Path, tmp_path: Path) -> None:
    shutil.copytree(shapes, tmp_path / "turned")
    config, exif = config_of(tmp_path / "turned"), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    file = tmp_path / "turned/val/000000.png"
    with Image.open(file) as image:
        image.save(file, exif=exif)
    with pytest.raises(UserError, match="set color_type='color_ignore_orientation' in LoadImage"):
        check_datasets(config, ["test"])
    load = {"type": "LoadImageFromFile", "color_type": "color_ignore_orientation"}
    config.test_dataloader.dataset.pipeline.insert(0, load)
    assert check_datasets(config, ["test"])
