"""Report of a detector's run as one self-contained HTML page: average precision by class and size,
curves, and the pictures with the worst mistakes."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swinv2_moe.data.images import decode, read_file
from swinv2_moe.files import MAX_LINE, parse_json
from swinv2_moe.measure.average_precision import Detections, Match, Precision, coco_results
from swinv2_moe.measure.report import page_template
from swinv2_moe.measure.report_validation import data_url
from swinv2_moe.output import printable
from swinv2_moe.plots import COLOURS, new_figure, thin, tidy, to_svg
from swinv2_moe.predict.annotate import Box, draw_boxes

THRESHOLD = 0.3  # the lowest score of an object that is shown
_WORST = 12  # pictures that are shown
_CURVES = 6  # classes whose precision is drawn
_SHOWN_SIDE = 480  # pixels of a picture in the page
_RIGHT, _WRONG, _MISSED = "#228833", "#ee6677", "#4477aa"


class Measured(NamedTuple):
    """A detector's detections in the pictures of a COCO file, and their precision."""

    split: str
    root: str  # the folder of the pictures
    truth: dict[str, list[dict]]
    found: Mapping[int, Detections]
    result: Precision
    class_names: list[str]


def render(run: Path, measured: Measured, settings: Mapping[str, Any], note: str) -> str:
    """The page about a run.

    Args:
        settings: what the detector was trained with, with `size` and `epochs`.
        note: which checkpoint was measured.
    """
    result, names = measured.result, measured.class_names
    rows = [
        (name, f"{count:,}", ap, ap50)
        for name, (ap, ap50, count) in zip(names, result.by_class, strict=True)
    ]
    now = datetime.now(timezone.utc)
    return page_template("report_detection.html.j2").render(
        title=run.name,
        subtitle=f"{result.in_words(measured.split)}. {note}",
        facts=_facts(result, settings, run),
        panels=_panels(run, result, names),
        classes=sorted(rows, key=lambda row: -1.0 if row[2] is None else row[2]),
        areas=[(name, _percent(value)) for name, value in result.by_area.items()],
        worst=_worst(measured),
        threshold=f"{THRESHOLD:g}",
        recipe=settings,
        footer=f"Made by swinv2-moe detect report on {now:%Y-%m-%d %H:%M} UTC.",
    )


def _facts(result: Precision, settings: Mapping[str, Any], run: Path) -> dict[str, str]:
    facts = {"AP50": _with_interval(result.ap50, result.interval50)}
    facts["AP"] = _with_interval(result.ap, result.interval)
    facts["AP75"] = _percent(result.ap75)
    facts["pictures, objects"] = f"{result.pictures:,}, {result.objects:,}"
    facts["size"] = "{} x {} px".format(*settings["size"])
    steps = _log(run)
    if steps:
        last = max(entry.get("epoch", 0) for entry in steps)
        facts["epochs"] = f"{last:g} of {settings['epochs']}"
    return facts


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    if interval is None:
        return _percent(value)
    return f"{_percent(value)} ({interval[0]:.1f} to {interval[1]:.1f})"


def _log(run: Path) -> list[dict[str, float]]:
    """The numbers that mmengine logged, of all parts of the run, in order."""
    entries = []
    for file in sorted(run.glob("*/vis_data/scalars.json")):
        with open(file, "rb") as lines:
            for line in lines:
                try:
                    entry = parse_json(line[:MAX_LINE])
                except ValueError:  # the last line of a killed run
                    continue
                if isinstance(entry, dict):
                    entries.append({k: v for k, v in entry.items() if isinstance(v, int | float)})
    return entries


def _panels(run: Path, result: Precision, names: Sequence[str]) -> list[dict[str, str]]:
    entries = _log(run)
    panels = []
    losses = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    if losses:
        note = "of training, at each logged step"
        panels.append(_panel("Loss", note, [("loss", *zip(*losses, strict=True))]))
    scores = [
        (entry["step"], 100 * entry["coco/bbox_mAP"], 100 * entry["coco/bbox_mAP_50"])
        for entry in entries
        if "coco/bbox_mAP" in entry
    ]
    if scores:
        steps, ap, ap50 = zip(*scores, strict=True)
        lines = [("AP50", steps, ap50), ("AP", steps, ap)]
        panels.append(_panel("Validation", "percent, by epoch", lines))
    order = np.argsort([-count for _, _, count in result.by_class], kind="stable")
    curves = []
    for k in order[:_CURVES].tolist():
        values = result.curves[k]
        if (values > -1).any():
            curves.append((names[k], np.linspace(0, 100, 101), 100 * values))
    if curves:
        note = f"at IoU 0.5, of the {len(curves)} classes with most objects; percent"
        panels.append(_panel("Precision by recall", note, curves))
    return panels


def _panel(title: str, note: str, lines: Sequence[tuple]) -> dict[str, str]:
    figure = new_figure(4.2, 2.6)
    axes = figure.add_subplot()
    for number, (name, x, y) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(*thin(x, y), color=colour, label=printable(name), linewidth=1.5)
    if len(lines) > 1:
        axes.legend(fontsize=7, frameon=False)
    tidy(axes)
    return {"title": title, "note": note, "svg": to_svg(figure, title)}


def _worst(measured: Measured) -> list[dict]:
    """The pictures with the most mistakes at IoU 0.5, drawn: found and right, found and wrong,
    missed."""
    truth, matches = measured.truth, measured.result.matches
    names = {
        row["id"]: name for row, name in zip(truth["categories"], measured.class_names, strict=True)
    }
    files = {row["id"]: row["file_name"] for row in truth["images"]}
    found = {row["id"]: row for row in coco_results(measured.found, list(names))}
    objects = {row["id"]: row for row in truth["annotations"]}
    marked = {image: mistakes(matches[image], found, objects, names) for image in files}
    order = sorted(marked, key=lambda image: -marked[image][0])
    pictures = []
    for image in order[:_WORST]:
        cost, boxes, missed, wrong = marked[image]
        if cost <= 0:
            break
        drawn = draw_boxes(decode(read_file(Path(measured.root, files[image]))), boxes)
        drawn.thumbnail((_SHOWN_SIDE, _SHOWN_SIDE))
        shown = {"image": data_url(np.asarray(drawn)), "file": files[image]}
        pictures.append(shown | {"missed": missed, "wrong": wrong})
    return pictures


def mistakes(
    matches: Sequence[Match],
    found: Mapping[int, dict],
    objects: Mapping[int, dict],
    names: Mapping[int, str],
) -> tuple[float, list[Box], int, int]:
    """What is wrong in a picture: the scores of wrong detections and 1 for each missed object in
    all, boxes to draw, and the numbers of missed objects and wrong detections.

    Args:
        matches: of each class of the picture.
        found, objects: the detections (as of `coco_results`) and the objects by their ids.
        names: of the classes, by id.
    """
    drawn: list[Box] = []
    cost, missed, wrong = 0.0, 0, 0

    def draw(row: dict, text: str, colour: str) -> None:
        left, top, width, height = row["bbox"]
        drawn.append(Box(left, top, left + width, top + height, text, colour))

    for match in matches:
        name, hits = names[match["category_id"]], set()
        columns = (match["dtIds"], match["dtScores"], match["dtMatches"][0], match["dtIgnore"][0])
        for number, score, hit, ignored in zip(*columns, strict=True):
            if score < THRESHOLD or ignored:
                continue
            hits.add(hit)
            draw(found[number], f"{name} {score:.0%}", _RIGHT if hit else _WRONG)
            if not hit:
                wrong += 1
                cost += score
        for number, ignored in zip(match["gtIds"], match["gtIgnore"], strict=True):
            if number not in hits and not ignored:
                draw(objects[number], f"missed {name}", _MISSED)
                missed += 1
                cost += 1
    return cost, drawn, missed, wrong
