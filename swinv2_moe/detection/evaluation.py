"""Check the data sets of a configuration before training, and show the results of a test.

The metric is mmdetection's FasterCocoMetric. faster-coco-eval agrees with pycocotools to the last
bits of every precision and is several times faster (docs/results.md).
"""

import os
from collections.abc import Sequence
from pathlib import Path

from mmengine.config import Config, ConfigDict
from rich.table import Table

from swinv2_moe.detection.annotations import Annotations, check_annotations
from swinv2_moe.detection.ground_truth import (
    GroundTruth,
    class_names,
    coco_datasets,
    dataset_class,
)
from swinv2_moe.errors import UserError, short
from swinv2_moe.tables import number_table

SPLITS = ("train", "val", "test")
_COLUMNS = ("mAP", "mAP_50", "mAP_75", "mAP_s", "mAP_m", "mAP_l")


def check_datasets(config: Config, splits: Sequence[str]) -> list[Annotations]:
    """Check every COCO data set of the given SPLITS; each annotation file once.

    Raises:
        UserError: as `check_annotations`; or a metric has another annotation file than the data
            set.
    """
    checked: dict[tuple[str, str], Annotations] = {}
    for split in splits:
        datasets = list(coco_datasets(config.get(f"{split}_dataloader")))
        for dataset in datasets:
            place = _paths(dataset)
            if place not in checked:
                checked[place] = _check_dataset(dataset, _has_masks(config, split, dataset))
            if split == "train" and checked[place].missing_classes:
                missing = ", ".join(map(short, checked[place].missing_classes))
                raise UserError(
                    f"{place[0]}: has no category {missing}, which the model is to learn;"
                    " metainfo.classes of the data set are the model's classes"
                )
        if split != "train":
            _check_metric(config, split, [_paths(dataset)[0] for dataset in datasets])
    return list(checked.values())


def _check_dataset(dataset: ConfigDict, masks: bool) -> Annotations:
    file, images = _paths(dataset)
    # False for a data set with its own reader of annotation files
    by_runner = issubclass(GroundTruth, dataset_class(dataset).COCOAPI)
    return check_annotations(
        file, images, class_names(dataset), masks, by_runner=by_runner, turned=_turned(dataset)
    )


def test_on_train_images(config: Config) -> None:
    """Make the configuration's test use the images (and annotations) of its training."""
    dataset = next(coco_datasets(config.train_dataloader), None)
    if dataset is None:
        raise UserError(f"{config.filename}: its training has no COCO data set")
    places = {
        key: dataset[key] for key in ("data_root", "ann_file", "data_prefix") if key in dataset
    }
    config.test_dataloader.dataset.update(places)
    config.test_evaluator.ann_file = _paths(dataset)[0]


def _paths(dataset: ConfigDict) -> tuple[str, str]:
    """The annotation file and the directory of the images, as mmengine's BaseDataset joins them."""
    root = dataset.get("data_root") or ""
    images = dataset.get("data_prefix", {}).get("img", "")
    return os.path.join(root, dataset.ann_file), os.path.join(root, images)


def _has_masks(config: Config, split: str, dataset: ConfigDict) -> bool:
    """Whether masks are loaded, or evaluated."""
    metric = config.get(f"{split}_evaluator") or {}
    if split != "train" and isinstance(metric, dict) and "segm" in metric.get("metric", ()):
        return True
    return any(step.get("with_mask", False) for step in dataset.get("pipeline", ()))


def _turned(dataset: ConfigDict) -> bool:
    """Whether the data set's images are turned according to their EXIF orientation."""
    color_type = "color"
    for step in dataset.get("pipeline", ()):
        color_type = step.get("color_type", color_type)
    return color_type in ("color", "grayscale")


def _check_metric(config: Config, split: str, files: list[str]) -> None:
    metric = config.get(f"{split}_evaluator") or {}
    file = None
    if isinstance(metric, dict):
        file = metric.get("ann_file")
    if file and files and Path(file) not in map(Path, files):
        raise UserError(
            f"{split}_evaluator.ann_file is {file!r}, but the images are those of {files[0]!r}"
        )


def table_of(metrics: dict[str, float]) -> Table:
    """A row for boxes and one for masks, in percent.

    AP is the mean over IoU 0.50 to 0.95, also for small, medium and large objects. "-": there are
    none.
    """
    rows = []
    for kind, name in (("bbox", "boxes"), ("segm", "masks")):
        values = [metrics.get(f"coco/{kind}_{column}") for column in _COLUMNS]
        if values[0] is not None:
            rows.append([name] + [_percent(value) for value in values])
    columns = ["", "AP", "AP50", "AP75", "AP small", "AP medium", "AP large"]
    return number_table(columns, rows)


def _percent(value: float | None) -> str:
    if value is None or value < 0:
        return "-"
    return f"{100 * value:.1f}"
