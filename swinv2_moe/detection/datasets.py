"""COCO data sets of a configuration: their classes, checks before training, and results of a test.

The metric is mmdetection's FasterCocoMetric. faster-coco-eval agrees with pycocotools to the last
bits of every precision and is several times faster (docs/log.md).
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmdet.datasets import CocoDataset
from mmdet.datasets.api_wrappers import COCO
from mmdet.evaluation import CocoMetric
from mmdet.registry import DATASETS
from mmengine.config import Config, ConfigDict
from mmengine.logging import MMLogger
from rich.table import Table

from swinv2_moe.detection.annotations import Annotations, check_annotations
from swinv2_moe.errors import UserError, one_line, short
from swinv2_moe.tables import number_table

SPLITS = ("train", "val", "test")
_COLUMNS = ("mAP", "mAP_50", "mAP_75", "mAP_s", "mAP_m", "mAP_l")


class GroundTruth(COCO):
    """mmdetection's reader of a COCO file, with three changes.

    1. Annotations get the ids 1, 2, ... if an id is less than 1: an evaluation takes 0 for no
       match.
    2. `getCatIds` returns ids in the order of the names. mmdetection takes their positions for
       labels, and pycocotools returns them in the file's order. A class that the file does not have
       gets an id of its own, without objects; an average precision leaves it out.
    3. No detections have an average precision of 0, and a warning says so. mmdetection returns no
       results for them.
    """

    def createIndex(self) -> None:
        rows = self.dataset.get("annotations", [])
        if any(row["id"] < 1 for row in rows):
            for number, row in enumerate(rows, 1):
                row["id"] = number
        super().createIndex()

    def getCatIds(
        self,
        catNms: str | Sequence[str] = (),
        supNms: str | Sequence[str] = (),
        catIds: int | Sequence[int] = (),
    ) -> list[int]:
        if not catNms or supNms or catIds:
            return super().getCatIds(catNms, supNms, catIds)
        if isinstance(catNms, str):
            catNms = [catNms]
        ids = {row["name"]: row["id"] for row in self.dataset["categories"]}
        for name in catNms:
            if name not in ids:
                ids[name] = 1 + max(self.cats)
                self.cats[ids[name]] = {"id": ids[name], "name": name}
                self.dataset["categories"].append(self.cats[ids[name]])
        return [ids[name] for name in catNms]

    def loadRes(self, resFile: list[dict]) -> COCO:
        if len(resFile) > 0:
            return super().loadRes(resFile)
        MMLogger.get_current_instance().warning(
            f"no detections in {len(self.imgs):,} images: the average precision is 0"
        )
        detections = COCO()
        detections.dataset = self.dataset | {"annotations": []}
        detections.createIndex()
        return detections


def use_ground_truth(metric: object) -> None:
    """Make a metric read its annotation file as `GroundTruth`, if it reads a COCO file."""
    # mmdetection has no option for the class
    if isinstance(metric, CocoMetric) and type(metric._coco_api) is COCO:
        metric._coco_api.__class__ = GroundTruth
        metric._coco_api.createIndex()


def coco_datasets(part: ConfigDict | None) -> Iterator[ConfigDict]:
    """The COCO data sets of a data loader, also inside wrappers that repeat or concatenate them."""
    if part is None:
        return
    wrapped = list(part.get("datasets", ()))
    if "dataset" in part:
        wrapped.append(part.dataset)
    for inner in wrapped:
        yield from coco_datasets(inner)
    if (kind := dataset_class(part)) and issubclass(kind, CocoDataset):
        yield part


def dataset_class(part: ConfigDict) -> Any:
    """The class that a part of a configuration names; None if it names no data set."""
    kind = part.get("type")
    if isinstance(kind, str):
        kind = DATASETS.get(kind)
    if isinstance(kind, type):
        return kind
    return None


def metainfo(dataset: ConfigDict) -> dict:
    """`classes` and `palette` of a COCO data set, as it reads them: its own, then those of its
    class. A text is the name of a file with a value in each line.

    Raises:
        UserError: a file that cannot be read, or `classes` that are no names.
    """
    try:
        meta = dataset_class(dataset)._load_metainfo(dataset.get("metainfo"))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"metainfo of the data set: cannot be read ({one_line(str(error))})"
        ) from error
    names = meta["classes"]
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"metainfo.classes of the data set is {short(names)}: it must be names, as ('cat',"
            " 'dog'), or a file with a name in each line"
        )
    return meta


def class_names(dataset: ConfigDict) -> tuple[str, ...]:
    """The classes of a COCO data set, in the order of their labels."""
    return tuple(metainfo(dataset)["classes"])


def check_datasets(config: Config, splits: Sequence[str]) -> list[Annotations]:
    """Check every COCO data set of the given SPLITS; each annotation file once.

    Raises:
        UserError: as `check_annotations`; a metric has another annotation file than the data set;
            or a training without images or without objects.
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
                    f"{place[0]}: has no category {missing}, a class of the model"
                    " (metainfo.classes of the data set)"
                )
        if split == "train":
            _check_objects(datasets, [checked[_paths(dataset)] for dataset in datasets])
        else:
            _check_metric(config, split, [_paths(dataset)[0] for dataset in datasets])
    return list(checked.values())


def _check_dataset(dataset: ConfigDict, masks: bool) -> Annotations:
    file, images = _paths(dataset)
    # False for a data set with its own reader of annotation files
    by_runner = issubclass(GroundTruth, dataset_class(dataset).COCOAPI)
    return check_annotations(
        file, images, class_names(dataset), masks, by_runner=by_runner, turned=_turned(dataset)
    )


def _check_objects(datasets: list[ConfigDict], found: list[Annotations]) -> None:
    """Raise UserError for a data set whose images are all left out, or a training without
    objects."""
    if found and not any(annotations.objects_of_classes for annotations in found):
        crowds = sum(annotations.crowd_boxes for annotations in found)
        raise UserError(
            f"{', '.join(annotations.file for annotations in found)}: no object of the model's"
            f" classes to learn ({crowds:,} crowds, which training ignores): train on another file,"
            " or together with one (ConcatDataset); iscrowd is 0 for single objects"
        )
    for dataset, annotations in zip(datasets, found, strict=True):
        skips_negatives = (dataset.get("filter_cfg") or {}).get("filter_empty_gt", False)
        if skips_negatives and not annotations.images_of_classes:
            raise UserError(
                f"{annotations.file}: no image has objects of the model's classes, and"
                " filter_cfg.filter_empty_gt leaves such images out; set it to False to train on"
                " them, or remove the data set"
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
