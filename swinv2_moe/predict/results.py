"""Predictions as files: CSV for spreadsheets, JSON for programs."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from swinv2_moe.output import csv_text, printable
from swinv2_moe.predict.prediction import Prediction


def as_csv(predictions: Sequence[Prediction]) -> str:
    """A line for each picture: file, class, index, probability, class_2, ..., error."""
    top_k = max((len(prediction.top) for prediction in predictions), default=0)
    header = ["file"]
    for rank in range(1, top_k + 1):
        suffix = ""
        if rank > 1:
            suffix = f"_{rank}"
        header += [f"{title}{suffix}" for title in ("class", "index", "probability")]
    rows: list[list[object]] = [header + ["error"]]
    for prediction in predictions:
        row: list[object] = [str(prediction.file)]
        for guess in prediction.top:
            row += [guess.class_name, guess.index, f"{guess.probability:.6f}"]
        row += [""] * (len(header) - len(row))
        rows.append(row + [prediction.error or ""])
    return csv_text(rows)


def as_json(predictions: Sequence[Prediction], facts: dict) -> str:
    """An object: `facts`, and "predictions" with "file", "top" and "error" of each picture."""
    records = []
    for prediction in predictions:
        record = asdict(prediction) | {"file": printable(prediction.file)}
        records.append(record)
    return json.dumps(facts | {"predictions": records}, indent=1) + "\n"


def shared_folder(files: Sequence[Path]) -> tuple[Path, list[str]]:
    """The absolute path of the folder that contains all files, and the files' paths relative to
    it."""
    paths = [os.path.abspath(file) for file in files]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    return Path(folder), [os.path.relpath(path, folder) for path in paths]
