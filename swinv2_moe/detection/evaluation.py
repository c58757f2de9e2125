"""Check the data sets of a configuration before training, and show the results of a test.

The metric is mmdetection's FasterCocoMetric. faster-coco-eval agrees with pycocotools to the last
bits of every precision and is several times faster (docs/results.md).
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS
from mmengine.config import Config, ConfigDict
from rich.table import Table

from swinv2_moe.detection.annotations import Annotations, check_annotations
from swinv2_moe.errors import UserError
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
        datasets = list(_coco_datasets(config.get(f"{split}_dataloader")))
        for dataset in datasets:
            file, images = _paths(dataset)
            if (file, images) not in checked:
                checked[file, images] = check_annotations(
                    file, images, _classes(dataset), _masks(dataset)
                )
        if split != "train":
            _check_metric(config, split, [_paths(dataset)[0] for dataset in datasets])
    return list(checked.values())


def test_on_train_images(config: Config) -> None:
    """Make the configuration's test use the images (and annotations) of its training."""
    dataset = next(_coco_datasets(config.train_dataloader), None)
    if dataset is None:
        raise UserError(f"{config.filename}: its training has no COCO data set")
    places = {
        key: dataset[key] for key in ("data_root", "ann_file", "data_prefix") if key in dataset
    }
    config.test_dataloader.dataset.update(places)
    config.test_evaluator.ann_file = _paths(dataset)[0]


def _coco_datasets(part: ConfigDict | None) -> Iterator[ConfigDict]:
    """The COCO data sets of a data loader, also inside wrappers that repeat or concatenate them."""
    if part is None:
        return
    wrapped = list(part.get("datasets", ()))
    if "dataset" in part:
        wrapped.append(part.dataset)
    for inner in wrapped:
        yield from _coco_datasets(inner)
    kind = part.get("type")
    if isinstance(kind, str):
        kind = DATASETS.get(kind)
    if isinstance(kind, type) and issubclass(kind, CocoDataset):
        yield part


def _paths(dataset: ConfigDict) -> tuple[str, str]:
    """The annotation file and the directory of the images, as mmengine's BaseDataset joins them."""
    root = dataset.get("data_root") or ""
    images = dataset.get("data_prefix", {}).get("img", "")
    return os.path.join(root, dataset.ann_file), os.path.join(root, images)


def _classes(dataset: ConfigDict) -> tuple[str, ...]:
    kind = DATASETS.get(dataset.type)
    return tuple(dataset.get("metainfo", {}).get("classes") or kind.METAINFO["classes"])


def _masks(dataset: ConfigDict) -> bool:
    return any(step.get("with_mask", False) for step in dataset.get("pipeline", ()))


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
