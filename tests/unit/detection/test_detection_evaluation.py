"""swinv2_moe.detection.evaluation: the data sets of a configuration, and the metric that they are
measured with."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mmdet")

from faster_coco_eval import COCO as FasterCOCO
from faster_coco_eval import COCOeval_faster
from mmengine.config import Config
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from swinv2_moe.detection.evaluation import check_datasets, table_of, test_on_train_images
from swinv2_moe.detection.shapes import CLASSES, Options, make_shapes
from swinv2_moe.errors import UserError

test_on_train_images.__test__ = False  # a function that pytest would collect by its name


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("shapes")
    make_shapes(directory, Options(train=6, val=3, min_size=64, max_size=96))
    return directory


def config_of(directory: Path) -> Config:
    def loader(split: str) -> dict:
        return {
            "dataset": {
                "type": "CocoDataset",
                "data_root": str(directory),
                "ann_file": f"annotations/instances_{split}.json",
                "data_prefix": {"img": f"{split}/"},
                "metainfo": {"classes": CLASSES},
                "pipeline": [{"type": "LoadAnnotations", "with_mask": True}],
            }
        }

    metric = {
        "type": "FasterCocoMetric",
        "ann_file": str(directory / "annotations/instances_val.json"),
    }
    loaders = {
        "train_dataloader": loader("train"),
        "val_dataloader": loader("val"),
        "test_dataloader": loader("val"),
    }
    return Config(loaders | {"val_evaluator": metric, "test_evaluator": dict(metric)})


def test_checks_each_file_once(shapes: Path) -> None:
    found = check_datasets(config_of(shapes), ("train", "val", "test"))
    assert [Path(one.file).name for one in found] == ["instances_train.json", "instances_val.json"]
    assert [len(one.image_files) for one in found] == [6, 3]


def test_looks_into_data_sets_that_hold_others(shapes: Path) -> None:
    config = config_of(shapes)
    train, val = config.train_dataloader.dataset, config.val_dataloader.dataset
    config.train_dataloader.dataset = {
        "type": "RepeatDataset",
        "times": 2,
        "dataset": {"type": "ConcatDataset", "datasets": [train, val]},
    }
    assert [len(one.image_files) for one in check_datasets(config, ("train",))] == [6, 3]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda c: c.train_dataloader.dataset.update(ann_file="none.json"),
            "none.json: cannot be read",
        ),
        (
            lambda c: c.train_dataloader.dataset.update(data_prefix={"img": "val/"}),
            "3 of its 6 images are missing",
        ),
        (
            lambda c: c.train_dataloader.dataset.pop("metainfo"),
            r"no category 'person'.*\(80 such\)",
        ),
        (
            lambda c: c.val_evaluator.update(ann_file="other.json"),
            "val_evaluator.ann_file is 'other.json'",
        ),
    ],
)
def test_what_is_wrong_is_one_line(shapes: Path, damage, words: str) -> None:
    config = config_of(shapes)
    damage(config)
    with pytest.raises(UserError, match=words) as caught:
        check_datasets(config, ("train", "val"))
    assert "\n" not in str(caught.value)


def test_the_test_can_use_the_images_of_the_training(shapes: Path) -> None:
    config = config_of(shapes)
    test_on_train_images(config)
    assert [len(one.image_files) for one in check_datasets(config, ("test",))] == [6]
    assert [len(one.image_files) for one in check_datasets(config, ("val",))] == [3]


def test_table_has_percent_and_says_where_there_is_nothing() -> None:
    metrics = {
        "coco/bbox_mAP": 0.534,
        "coco/bbox_mAP_50": 0.7,
        "coco/bbox_mAP_s": -1.0,
        "coco/segm_mAP": 0.462,
    }
    table = table_of(metrics)
    cells = [list(column.cells) for column in table.columns]
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
        common["category_id"] = (
            row["category_id"] if rng.random() < 0.8 else int(rng.integers(1, 4))
        )
        boxes.append(common | {"bbox": (np.array(row["bbox"]) + shift).clip(1).tolist()})
        mask = np.roll(truth.annToMask(row), shift[:2].astype(int), (0, 1))
        masks.append(common | {"segmentation": rle.encode(np.asfortranarray(mask))})
    content["annotations"][3]["segmentation"] = rle.encode(
        np.asfortranarray(truth.annToMask(content["annotations"][3]))
    )
    content["annotations"][3]["segmentation"]["counts"] = content["annotations"][3]["segmentation"][
        "counts"
    ].decode()
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
