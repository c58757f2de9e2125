"""COCO files as MoERunner trains and evaluates on them."""

from collections.abc import Iterator, Sequence

from mmdet.datasets import CocoDataset
from mmdet.datasets.api_wrappers import COCO
from mmdet.evaluation import CocoMetric
from mmdet.registry import DATASETS
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger


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


def dataset_class(part: ConfigDict) -> type | None:
    """The class that a part of a configuration names, if it names a data set."""
    kind = part.get("type")
    if isinstance(kind, str):
        kind = DATASETS.get(kind)
    if isinstance(kind, type):
        return kind
    return None


def class_names(dataset: ConfigDict) -> tuple[str, ...]:
    """The classes of a COCO data set, in the order of their labels."""
    kind = dataset_class(dataset)
    return tuple(dataset.get("metainfo", {}).get("classes") or kind.METAINFO["classes"])
