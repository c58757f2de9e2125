"""A model's predictions for pictures, and as files: CSV for spreadsheets, JSON for programs."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swinv2_moe.output import csv_text, printable

TOP_K = 3  # classes of a prediction
BATCH_SIZE = 32  # pictures per forward pass


@dataclass(frozen=True)
class ClassProbability:
    """A class and its probability, 0 to 1."""

    class_name: str
    index: int
    probability: float

    @property
    def label(self) -> str:
        """The name to show: in English if the class is named by a WordNet id, as ImageNet's are."""
        from swinv2_moe.data.classes import english_name  # imports timm

        return english_name(self.class_name)


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of a picture, or the reason why it could not be read.

    Attributes:
        file: path of the picture; "" for an image in memory.
        top: K classes, the most probable first; empty if the picture could not be read.
        error: the reason why the picture could not be read; None if it could be read.
        unused: what of the picture's file is not used, such as further pages; "" if nothing.
        is_unlike: the picture is unlike those of the training, so that none of the classes may be
            right; None if the checkpoint does not know. Some 4% of good pictures are marked.
    """

    file: str
    top: tuple[ClassProbability, ...] = ()
    error: str | None = None
    unused: str = ""
    is_unlike: bool | None = None

    @property
    def best(self) -> ClassProbability:
        """The most probable class.

        Raises:
            ValueError: the picture could not be read.
        """
        if self.error is not None:
            raise ValueError(f"{self.file or 'image'}: cannot be read ({self.error})")
        return self.top[0]

    @property
    def class_name(self) -> str:
        """Name of the most probable class; raises as `best`."""
        return self.best.class_name

    @property
    def index(self) -> int:
        """Index of the most probable class; raises as `best`."""
        return self.best.index

    @property
    def probability(self) -> float:
        """Probability of the most probable class, 0 to 1; raises as `best`."""
        return self.best.probability


def as_csv(predictions: Sequence[Prediction]) -> str:
    """A line for each picture: file, class, index, probability, class_2, ..., error. Before the
    error stands unlike_training (yes, no), if the checkpoint knows."""
    top_k = max((len(prediction.top) for prediction in predictions), default=0)
    header = ["file"]
    for rank in range(1, top_k + 1):
        suffix = ""
        if rank > 1:
            suffix = f"_{rank}"
        header += [f"{title}{suffix}" for title in ("class", "index", "probability")]
    knows = any(prediction.is_unlike is not None for prediction in predictions)
    last = ["unlike_training", "error"] if knows else ["error"]
    rows: list[list[object]] = [[*header, *last]]
    for prediction in predictions:
        row: list[object] = [str(prediction.file)]
        for guess in prediction.top:
            row += [guess.class_name, guess.index, f"{guess.probability:.6f}"]
        row += [""] * (len(header) - len(row))
        if knows:
            row.append({None: "", False: "no", True: "yes"}[prediction.is_unlike])
        rows.append([*row, prediction.error or ""])
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
