"""Results of a run of `detect train FOLDER`: its precision, and one HTML file about it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from swinv2_moe.detection.detector import Detector
from swinv2_moe.detection.recipe import read_recipe
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import read_json
from swinv2_moe.measure.average_precision import Precision, measure
from swinv2_moe.measure.report_detection import Measured, render
from swinv2_moe.tables import number_table

_MAX_BYTES = 1 << 33


def measure_run(detector: Detector, run: Path, split: str | None = None) -> Measured:
    """The precision on a split of a run.

    Args:
        split: "train", "val" or "test"; None: test if the folder has it, otherwise val.

    Raises:
        UserError: the run has no such split.
    """
    name, truth = _truth(run, split)
    root, names = read_recipe(run).data, detector.class_names
    found = detector.on_split(truth, root)
    return Measured(name, root, truth, found, measure(truth, found), names)


def page(detector: Detector, run: Path) -> str:
    """The page about a run. Raises as `measure_run`."""
    settings = dict(vars(read_recipe(run)))
    del settings["class_names"]
    return render(run, measure_run(detector, run), settings, detector.selected)


def _truth(run: Path, split: str | None) -> tuple[str, dict[str, list[dict]]]:
    names = [split] if split else ["test", "val"]
    for name in names:
        file = run / "data" / f"{name}.json"
        if file.is_file():
            try:
                return name, read_json(file, _MAX_BYTES)
            except (OSError, ValueError) as error:
                raise UserError(f"{file}: cannot be read ({one_line(str(error))})") from error
    raise UserError(f"RUN {run}: has no pictures of {' or '.join(names)} (data/{names[0]}.json)")


def table_of_classes(result: Precision, names: Sequence[str]) -> Table:
    """A row for each class and one for all, in percent."""
    rows = []
    for name, (ap, ap50, count) in zip(names, result.by_class, strict=True):
        rows.append([name, f"{count:,}", _percent(ap), _percent(ap50)])
    if len(names) > 1:
        rows.append(["all", f"{result.objects:,}", _percent(result.ap), _percent(result.ap50)])
    return number_table(["class", "objects", "AP", "AP50"], rows)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def as_results(result: Precision, names: Sequence[str]) -> dict[str, Any]:
    """The result, ready for JSON; percent."""
    content = result._asdict()
    del content["curves"], content["matches"]
    content["by_class"] = {
        name: {"ap": ap, "ap50": ap50, "objects": count}
        for name, (ap, ap50, count) in zip(names, result.by_class, strict=True)
    }
    return content
