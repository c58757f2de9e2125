"""Average precision of detections, as COCO defines it, with an interval; and what was missed.

I pictures, K classes, T thresholds of IoU (0.50, 0.55, ..., 0.95), D detections, G objects
"""

import contextlib
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

_AREAS = ("all", "small", "medium", "large")  # below 32² px, below 96² px, from there on
_REPLICATES = 200  # of the bootstrap
_FEW = 2  # pictures without which there is no interval

Match = dict[
    str, Any
]  # an entry of COCOeval.evalImgs: a class in a picture, of objects of any size


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
        matches: by the id of the picture, what is in it or was found there.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    interval: tuple[float, float] | None
    interval50: tuple[float, float] | None
    by_class: list[tuple[float | None, float | None, int]]
    by_area: dict[str, float | None]
    curves: np.ndarray
    matches: dict[int, list[Match]]
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
    rows: list[dict[str, Any]] = []
    for image_id, one in found.items():
        for (left, top, right, bottom), score, label in zip(
            *map(np.ndarray.tolist, one), strict=True
        ):
            width, height = right - left, bottom - top
            row = {"id": len(rows) + 1, "image_id": image_id, "category_id": ids[label]}
            row |= {"bbox": [left, top, width, height], "area": width * height, "score": score}
            rows.append(row)
    return rows


def measure(truth: dict[str, list[dict]], found: Mapping[int, Detections]) -> Precision:
    """Compare detections with the objects of a COCO file.

    Args:
        truth: the file's content; labels are the positions of its categories.
        found: detections by id of the picture, at most 100 each.
    """
    precision, matches = _evaluated(truth, found)  # [T, 101, K, areas], [K][I]
    objects = _objects(matches)  # [K, I]
    ap, ap50 = _bootstrap(matches)
    by_class = [
        (_mean(precision[:, :, k, 0]), _mean(precision[0, :, k, 0]), int(count))
        for k, count in enumerate(objects.sum(1))
    ]
    by_picture: dict[int, list[Match]] = {row["id"]: [] for row in truth["images"]}
    for match in filter(None, itertools.chain.from_iterable(matches)):
        by_picture[match["image_id"]].append(match)
    return Precision(
        ap=_mean(precision[..., 0]),
        ap50=_mean(precision[0, ..., 0]),
        ap75=_mean(precision[5, ..., 0]),
        interval=ap,
        interval50=ap50,
        by_class=by_class,
        by_area={name: _mean(precision[..., i]) for i, name in enumerate(_AREAS) if i},
        curves=precision[0, :, :, 0].T,
        matches=by_picture,
        pictures=len(truth["images"]),
        objects=int(objects.sum()),
    )


def _mean(values: np.ndarray) -> float | None:
    """The mean in percent of what is defined."""
    defined = values[values > -1]
    return 100 * float(defined.mean()) if len(defined) else None


def _evaluated(
    truth: dict[str, list[dict]], found: Mapping[int, Detections]
) -> tuple[np.ndarray, list[list[Match | None]]]:
    """Precision [T, 101, K, areas] and, for each class and picture, what matches; None where
    neither objects nor detections are."""
    ids = [row["id"] for row in truth["categories"]]
    both = [COCO(), COCO()]
    annotations = ([dict(row) for row in truth["annotations"]], coco_results(found, ids))
    with contextlib.redirect_stdout(io.StringIO()):  # the library reports its progress
        for content, rows in zip(both, annotations, strict=True):
            content.dataset = truth | {"annotations": rows}
            content.createIndex()
        evaluation = COCOeval(*both, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    pictures = len(truth["images"])
    entries = evaluation.evalImgs  # by class, area and picture
    step = len(_AREAS) * pictures
    order = np.argsort(np.argsort(ids))  # the library's classes are in the order of their ids
    matches = [entries[k * step : k * step + pictures] for k in order]
    return evaluation.eval["precision"][..., -1][:, :, order], matches


def _objects(matches: Sequence[Sequence[Match | None]]) -> np.ndarray:
    """The number of objects that are no crowds, by class and picture [K, I]."""
    return np.array(
        [
            [0 if one is None else int((one["gtIgnore"] == 0).sum()) for one in row]
            for row in matches
        ]
    )


def _bootstrap(
    matches: Sequence[Sequence[Match | None]],
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Intervals of AP and AP50: pictures are drawn again with replacement."""
    count = len(matches[0])
    if count < _FEW:
        return None, None
    generator = np.random.default_rng(0)
    weights = generator.multinomial(count, np.full(count, 1 / count), _REPLICATES)
    values = weighted_precision(matches, weights)  # [B, T]
    intervals = []
    for some in (values.mean(1), values[:, 0]):
        low, high = np.nanpercentile(100 * some, [2.5, 97.5]).tolist()
        intervals.append((low, high))
    return intervals[0], intervals[1]


def weighted_precision(
    matches: Sequence[Sequence[Match | None]], weights: np.ndarray
) -> np.ndarray:
    """The average precision over the classes, if each picture came so many times: float [B, T];
    NaN without objects.

    Args:
        matches: of each class and picture.
        weights: whole numbers [B, I].
    """
    totals = _objects(matches) @ weights.T  # [K, B]
    values = [_class_precision(*pair, weights) for pair in zip(matches, totals, strict=True)]
    stacked = np.stack(values)  # [K, B, T]
    defined = np.isfinite(stacked).sum(0)
    sums = np.nansum(stacked, axis=0)
    return np.divide(sums, defined, out=np.full(sums.shape, np.nan), where=defined > 0)


def _class_precision(
    matches: Sequence[Match | None], totals: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """As `weighted_precision`, of one class."""
    thresholds, recalls = COCOeval().params.iouThrs, COCOeval().params.recThrs
    values = np.where(totals[:, None] > 0, 0.0, np.nan) * np.ones(len(thresholds))
    there = [(number, match) for number, match in enumerate(matches) if match is not None]
    if not any(match["dtIds"] for _, match in there):
        return values
    order = np.argsort(-np.concatenate([match["dtScores"] for _, match in there]), kind="mergesort")
    of = np.repeat([number for number, _ in there], [len(match["dtIds"]) for _, match in there])
    counts = np.concatenate([~match["dtIgnore"] for _, match in there], 1)[:, order]  # [T, D]
    hit = np.concatenate([match["dtMatches"] > 0 for _, match in there], 1)[:, order] & counts
    for b in np.flatnonzero(totals > 0):
        times = weights[b][of[order]]
        right = np.cumsum(hit * times, 1)
        wrong = np.cumsum((counts & ~hit) * times, 1)
        precision = right / np.maximum(right + wrong, np.spacing(1))
        precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
        recall = right / totals[b]
        for t in range(len(thresholds)):
            places = np.searchsorted(recall[t], recalls, side="left")
            reached = places < recall.shape[1]
            values[b, t] = precision[t, places[reached]].sum() / len(recalls)
    return values
