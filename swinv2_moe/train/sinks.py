"""Where a run's records go: metrics.jsonl, TensorBoard, and a log of events in MLPerf's format.

Each sink takes every `Event` and writes the parts of it that it knows. `trackers.Service` is one,
too.

With TRACKER mlperf, OUTPUT/events.log says when staging, initialisation, epochs and validations
began and ended. Each line is one event: ":::MLLOG " and a JSON object, with the keys of MLCommons'
package `mlperf-logging` (https://github.com/mlcommons/logging). Programs that read MLPerf logs can
read this file. Epochs count from 1. eval_accuracy is the top-1 accuracy, from 0 to 1. If a run was
interrupted, each of its parts begins with its own staging, init and run events. Only the format is
MLPerf's. The results are not MLPerf results: the runs do not follow the rules of that benchmark and
were not reviewed.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from moe_core.files import atomic_write
from swinv2_moe.files import MAX_LINE

_FLUSH_SECONDS = 10
_KINDS = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}  # of a mark, by the end of its key


class Mark(NamedTuple):
    """A moment for events.log. Keys that end in _start and _stop mark an interval."""

    key: str
    value: object = None
    at: float | None = None  # seconds since 1970; None: now
    metadata: dict[str, object] = {}  # noqa: RUF012 - never changed


@dataclass
class Event:
    """What is recorded at one moment of a run."""

    step: int = 0
    line: dict[str, Any] | None = None  # of metrics.jsonl
    config: dict[str, object] | None = None  # every key
    scalars: Mapping[str, float] = field(default_factory=dict)  # by tag, such as train/loss
    # by tag: the load of each expert of a layer; 1 is an even share
    loads: Mapping[str, Sequence[float]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)  # by tag
    # by tag: uint8 [height, width, 3]
    pictures: Mapping[str, np.ndarray] = field(default_factory=dict)
    mark: Mark | None = None


class Sink(Protocol):
    """One destination of records."""

    def write(self, event: Event) -> None:
        """Write what this sink knows of an event.

        Raises:
            OSError: it cannot be written, for example because the disk is full.
        """

    def close(self, finished: bool) -> None:
        """`finished`: the run has ended; False: only this process ends."""


class Lines:
    """metrics.jsonl."""

    def __init__(self, file: Path, step: int) -> None:
        """Continue after `step`. Lines of later steps, which a resumed run repeats, are removed,
        and so are incomplete ones."""
        _forget_after(file, step)
        self._file = file.open("a", buffering=1)

    def write(self, event: Event) -> None:
        if event.line is not None:
            self._file.write(json.dumps(plain(event.line)) + "\n")

    def close(self, finished: bool) -> None:
        self._file.close()


class TensorBoard:
    """Event files in the directory `tensorboard` of a run.

    SummaryWriter writes in a thread. If the thread fails, later calls raise its OSError.
    """

    def __init__(self, directory: Path, step: int) -> None:
        """Continue after `step`. Readers of the files ignore events of later steps that were
        written before."""
        self._writer = SummaryWriter(
            str(directory / "tensorboard"), purge_step=step + 1, flush_secs=_FLUSH_SECONDS
        )

    def write(self, event: Event) -> None:
        for tag, value in event.scalars.items():
            self._writer.add_scalar(tag, value, event.step)
        for tag, load in event.loads.items():
            self._add_load(tag, load, event.step)
        for tag, text in event.texts.items():
            self._writer.add_text(tag, text, event.step)
        for tag, picture in event.pictures.items():
            self._writer.add_image(tag, picture, event.step, dataformats="HWC")

    def _add_load(self, tag: str, load: Sequence[float], step: int) -> None:
        """A histogram with one bar for each expert, numbered along the axis."""
        counts = np.asarray(load, dtype=np.float64)
        ids = np.arange(len(counts), dtype=np.float64)
        self._writer.add_histogram_raw(
            tag,
            min=0.0,
            max=float(len(counts)),
            num=float(counts.sum()),
            sum=float((counts * ids).sum()),
            sum_squares=float((counts * ids**2).sum()),
            bucket_limits=(ids + 1).tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def close(self, finished: bool) -> None:
        self._writer.close()


class EventLog:
    """events.log."""

    def __init__(self, file: Path) -> None:
        is_cut_off = file.exists() and file.read_bytes()[-1:] not in (b"", b"\n")
        self._file = file.open("a", buffering=1)
        if is_cut_off:  # for example by a power cut
            self._file.write("\n")

    def write(self, event: Event) -> None:
        mark = event.mark
        if mark is None:
            return
        seconds = time.time() if mark.at is None else mark.at
        entry = {
            "namespace": "",
            "time_ms": int(1000 * seconds),
            "event_type": _KINDS.get(mark.key.rpartition("_")[2], "POINT_IN_TIME"),
            "key": mark.key,
            "value": mark.value,
            # readers of the format expect the place of the call
            "metadata": {"file": "swinv2_moe/train/sinks.py", "lineno": 1} | mark.metadata,
        }
        self._file.write(f":::MLLOG {json.dumps(entry)}\n")

    def close(self, finished: bool) -> None:
        self._file.close()


def plain(value: object) -> object:
    """The value for JSON. NaN, which JSON does not have, becomes null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _forget_after(metrics: Path, step: int) -> None:
    if metrics.is_file():
        with metrics.open("rb") as lines, atomic_write(metrics) as kept:
            while line := lines.readline(MAX_LINE):
                if _step(line) <= step:
                    kept.write(line.rstrip(b"\n") + b"\n")


def _step(line: bytes) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf
    if isinstance(step, int):
        return step
    return math.inf
