"""Average precision of detections, as COCO defines it, with an interval; and what was missed.

I pictures, K classes, T thresholds of IoU (0.50, 0.55, ..., 0.95), D detections, G objects
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pycocotools.mask
from faster_coco_eval import COCO, COCOeval_faster

THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0, 1, 101)
_AREAS = ("all", "small", "medium", "large")  # below 32² px, below 96² px, from there on
_REPLICATES = 200  # of the bootstrap
_FEW = 2  # pictures without which there is no interval


class Detections(NamedTuple):
    """The objects found in a picture, in pixels of the upright picture."""

    boxes: np.ndarray  # float32 [D, 4]: left, top, right, bottom
    scores: np.ndarray  # float32 [D], 0 to 1
    labels: np.ndarray  # int64 [D]


class Precision(NamedTuple):
    """Average precisions in percent; None where there are no objects.

    Attributes:
        interval, interval50: where 95% of the AP and AP50 of resampled pictures lie; None: there
            are too few pictures.
        by_class: AP, AP50 and the number of objects, by the number of the class.
        by_area: AP of "small", "medium" and "large" objects.
        curves: precision at 101 recalls and IoU 0.5, float [K, 101]; -1 without objects.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    interval: tuple[float, float] | None
    interval50: tuple[float, float] | None
    by_class: list[tuple[float | None, float | None, int]]
    by_area: dict[str, float | None]
    curves: np.ndarray
    pictures: int
    objects: int

    def in_words(self, where: str) -> str:
        """The result in one line."""
        parts = []
        for name, value, interval in (
            ("AP50", self.ap50, self.interval50),
            ("AP", self.ap, self.interval),
        ):
            text = f"{name} -" if value is None else f"{name} {value:.1f}%"
            if interval:
                text += f" ({interval[0]:.1f} to {interval[1]:.1f})"
            parts.append(text)
        return (
            f"{', '.join(parts)}: {self.pictures:,} pictures of {where}, {self.objects:,} objects"
        )


def coco_results(found: Mapping[int, Detections], ids: Sequence[int]) -> list[dict[str, Any]]:
    """Detections by id of the picture in the form of COCO's results.

    Args:
        ids: of the categories, by label.
    """
    rows = []
    for image_id, one in found.items():
        for (left, top, right, bottom), score, label in zip(
            *map(np.ndarray.tolist, one), strict=True
        ):
            box = [left, top, right - left, bottom - top]
            row = {"image_id": image_id, "category_id": ids[label], "bbox": box, "score": score}
            rows.append(row)
    return rows


def measure(truth: dict[str, list[dict]], found: Mapping[int, Detections]) -> Precision:
    """Compare detections with the objects of a COCO file.

    Args:
        truth: the file's content; labels are the positions of its categories.
        found: detections by id of the picture, at most 100 each.
    """
    ids = [row["id"] for row in truth["categories"]]
    precision = _library_precision(truth, coco_results(found, ids), ids)  # [T, 101, K, areas]
    objects = [row for row in truth["annotations"] if not row["iscrowd"]]
    label_of = {number: label for label, number in enumerate(ids)}
    labels = np.array([label_of[row["category_id"]] for row in objects], int)
    counts = np.bincount(labels, minlength=len(ids))
    ap, ap50 = _bootstrap(truth, found)
    by_class = [
        (_mean(precision[:, :, k, 0]), _mean(precision[0, :, k, 0]), int(counts[k]))
        for k in range(len(ids))
    ]
    return Precision(
        ap=_mean(precision[..., 0]),
        ap50=_mean(precision[0, ..., 0]),
        ap75=_mean(precision[5, ..., 0]),
        interval=ap,
        interval50=ap50,
        by_class=by_class,
        by_area={name: _mean(precision[..., i]) for i, name in enumerate(_AREAS) if i},
        curves=precision[0, :, :, 0].T,
        pictures=len(truth["images"]),
        objects=len(objects),
    )


def _mean(values: np.ndarray) -> float | None:
    """The mean in percent of what is defined."""
    defined = values[values > -1]
    return 100 * float(defined.mean()) if len(defined) else None


def _library_precision(truth: dict, rows: list[dict], ids: Sequence[int]) -> np.ndarray:
    reference = COCO()
    reference.dataset = truth
    reference.createIndex()
    if not rows:
        objects = {row["category_id"] for row in truth["annotations"] if not row["iscrowd"]}
        nothing = np.full((len(THRESHOLDS), len(_RECALLS), len(ids), len(_AREAS)), -1.0)
        nothing[:, :, [number in objects for number in ids], 0] = 0
        return nothing
    evaluation = COCOeval_faster(
        reference, reference.loadRes(rows), "bbox", print_function=lambda *_: None
    )
    evaluation.params.catIds = list(ids)
    evaluation.evaluate()
    evaluation.accumulate()
    return np.asarray(evaluation.eval["precision"])[..., -1]


class Match(NamedTuple):
    """Detections of a class in a picture, the highest score first, beside its objects."""

    scores: np.ndarray  # float [D]
    object_of: np.ndarray  # int [T, D]: the object that each one finds; -1: none
    ignored: np.ndarray  # bool [T, D]: neither right nor wrong, as in a crowd
    order: np.ndarray  # int [D]: their places among the picture's detections


def match(found: Detections, boxes: np.ndarray, is_crowd: np.ndarray, chosen: np.ndarray) -> Match:
    """COCO's matching: each detection finds the free object with the largest IoU.

    Args:
        boxes: objects of the class, float [G, 4]: left, top, width, height.
        is_crowd: bool [G].
        chosen: places of the detections of the class.
    """
    order = chosen[np.argsort(-found.scores[chosen], kind="stable")]
    sides = found.boxes[order].astype(float)
    sides[:, 2:] -= sides[:, :2]
    object_of = np.full((len(THRESHOLDS), len(order)), -1)
    ignored = np.zeros(object_of.shape, bool)
    if not len(boxes) or not len(order):
        return Match(found.scores[order], object_of, ignored, order)
    ious = np.asarray(pycocotools.mask.iou(sides, boxes.astype(float), is_crowd.astype(np.uint8)))
    free = np.ones((len(THRESHOLDS), len(boxes)), bool)
    rows = np.arange(len(THRESHOLDS))
    for d in range(len(order)):
        enough = ious[d][None] >= np.minimum(THRESHOLDS, 1 - 1e-10)[:, None]  # [T, G]
        usual = np.where(enough & free & ~is_crowd, ious[d][None], -1.0)
        best = usual.argmax(1)
        hits = usual[rows, best] >= 0
        object_of[hits, d] = best[hits]
        free[rows[hits], best[hits]] = False
        ignored[:, d] = ~hits & (enough & is_crowd).any(1)
    return Match(found.scores[order], object_of, ignored, order)


def objects_of(truth: dict[str, list[dict]]) -> dict[int, tuple[np.ndarray, ...]]:
    """Boxes [G, 4] (left, top, width, height), labels [G] and crowds [G] by id of the picture."""
    number = {row["id"]: label for label, row in enumerate(truth["categories"])}
    rows: dict[int, list[dict]] = {row["id"]: [] for row in truth["images"]}
    for row in truth["annotations"]:
        rows[row["image_id"]].append(row)
    return {
        image: (
            np.array([row["bbox"] for row in some], float).reshape(-1, 4),
            np.array([number[row["category_id"]] for row in some], int),
            np.array([row["iscrowd"] for row in some], bool),
        )
        for image, some in rows.items()
    }


def _bootstrap(
    truth: dict[str, list[dict]], found: Mapping[int, Detections]
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Intervals of AP and AP50: pictures are drawn again with replacement."""
    count = len(truth["images"])
    if count < _FEW:
        return None, None
    generator = np.random.default_rng(0)
    weights = generator.multinomial(count, np.full(count, 1 / count), _REPLICATES)
    values = weighted_precision(truth, found, weights)  # [B, T]
    intervals = []
    for some in (values.mean(1), values[:, 0]):
        low, high = np.nanpercentile(100 * some, [2.5, 97.5]).tolist()
        intervals.append((low, high))
    return intervals[0], intervals[1]


def weighted_precision(
    truth: dict[str, list[dict]], found: Mapping[int, Detections], weights: np.ndarray
) -> np.ndarray:
    """The average precision over the classes, if each picture came so many times: float [B, T];
    NaN without objects.

    Args:
        weights: whole numbers [B, I].
    """
    objects = objects_of(truth)
    num_classes = len(truth["categories"])
    matches: list[list[Match]] = [[] for _ in range(num_classes)]
    pictures: list[list[np.ndarray]] = [[] for _ in range(num_classes)]
    counts = np.zeros((num_classes, len(objects)))
    for number, (image, (boxes, labels, crowds)) in enumerate(objects.items()):
        np.add.at(counts[:, number], labels[~crowds], 1)
        one = found.get(image)
        for label in np.unique(one.labels).tolist() if one is not None else ():
            assert one is not None
            chosen, mine = np.flatnonzero(one.labels == label), labels == label
            matches[label].append(match(one, boxes[mine], crowds[mine], chosen))
            pictures[label].append(np.full(len(chosen), number))
    values = [
        _class_precision(matches[label], pictures[label], weights @ counts[label], weights)
        for label in range(num_classes)
    ]
    stacked = np.stack(values)  # [K, B, T]
    defined = np.isfinite(stacked).sum(0)
    sums = np.nansum(stacked, axis=0)
    return np.divide(sums, defined, out=np.full(sums.shape, np.nan), where=defined > 0)


def _class_precision(
    matches: Sequence[Match],
    pictures: Sequence[np.ndarray],
    totals: np.ndarray,
    weights: np.ndarray,
) -> np.ndarray:
    """As `weighted_precision`, of one class."""
    values = np.where(totals[:, None] > 0, 0.0, np.nan) * np.ones(len(THRESHOLDS))
    if not matches:
        return values
    scores = np.concatenate([one.scores for one in matches])
    order = np.argsort(-scores, kind="mergesort")
    of = np.concatenate(pictures)[order]
    hit = np.concatenate([one.object_of for one in matches], 1)[:, order] >= 0
    ignored = np.concatenate([one.ignored for one in matches], 1)[:, order]
    for b in np.flatnonzero(totals > 0):
        times = weights[b][of]
        right = np.cumsum(hit * times, 1)
        wrong = np.cumsum((~hit & ~ignored) * times, 1)
        precision = right / np.maximum(right + wrong, np.spacing(1))
        precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
        recall = right / totals[b]
        for t in range(len(THRESHOLDS)):
            places = np.searchsorted(recall[t], _RECALLS, side="left")
            reached = places < recall.shape[1]
            values[b, t] = precision[t, places[reached]].sum() / len(_RECALLS)
    return values
