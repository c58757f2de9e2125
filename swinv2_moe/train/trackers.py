"""Destinations of a run's curves besides metrics.jsonl: TensorBoard, and the service that TRACKER
names."""

import json
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from moe_core.files import atomic_write
from swinv2_moe.errors import one_line, short
from swinv2_moe.files import read_json
from swinv2_moe.train.tracker_services import LAST_SECONDS, SERVICES

_IDS = "tracker.json"  # in the run directory: the run's id in each service
_MAX_IDS_BYTES = 4096
_FLUSH_SECONDS = 10
# maximum number of calls in the queue of a slow service; further calls are dropped
_MAX_WAITING = 1000
_MAX_ERROR = 200  # characters
_GOES_ON = "; the run goes on, records there may be lost"


class Tracker(Protocol):
    """Interface of a tracker. Steps are optimiser steps. A tag is a name such as train/loss."""

    def config(self, values: Mapping[str, object]) -> None:
        """Write the configuration, by key."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers, by tag."""

    def loads(self, loads: Mapping[str, Sequence[float]], step: int) -> None:
        """Write the load of each expert of a layer, by tag; 1 is an even share."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Write a line of text."""

    def image(self, tag: str, picture: np.ndarray, step: int) -> None:
        """Write a picture, uint8 [height, width, 3]."""

    def close(self, finished: bool) -> None:
        """Close the tracker. `finished`: the run has ended; False: only this process ends."""


def tagged(prefix: str, values: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl, or of a layer in it, by tag.

    `step` and `epoch` are omitted, and so is `load`, which is written by `loads`.
    """
    numbers = {}
    for key, value in values.items():
        tag = key
        if "/" not in key:
            tag = f"{prefix}/{key}"
        if key not in ("step", "epoch", "load"):
            numbers[tag] = float(value)
    return numbers


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

    def config(self, values: Mapping[str, object]) -> None:
        """Write nothing: config.yaml is in the same run directory."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def loads(self, loads: Mapping[str, Sequence[float]], step: int) -> None:
        """Write the loads as histograms with one bar for each expert, numbered along the axis."""
        for tag, load in loads.items():
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

    def text(self, tag: str, text: str, step: int) -> None:
        self._writer.add_text(tag, text, step)

    def image(self, tag: str, picture: np.ndarray, step: int) -> None:
        self._writer.add_image(tag, picture, step, dataformats="HWC")

    def close(self, finished: bool) -> None:
        self._writer.close()


class Background:
    """A tracker whose calls run in a separate thread, in order.

    Training does not wait for the service. An error of the service does not end the run: `say` gets
    one line, and the data are lost.
    """

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], say: Callable[[str], None]
    ) -> None:
        self._name = name
        self._say = say
        self._is_losing = False
        self._calls: queue.Queue = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(
            target=self._work, args=(open_tracker,), name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def config(self, values: Mapping[str, object]) -> None:
        self._add("config", values)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._add("scalars", values, step)

    def loads(self, loads: Mapping[str, Sequence[float]], step: int) -> None:
        self._add("loads", loads, step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._add("text", tag, text, step)

    def image(self, tag: str, picture: np.ndarray, step: int) -> None:
        self._add("image", tag, picture, step)

    def close(self, finished: bool) -> None:
        """Wait for the remaining calls, for a limited time."""
        try:
            self._calls.put(("close", finished), timeout=LAST_SECONDS)
        except queue.Full:
            return  # a line has already reported the error
        self._thread.join(LAST_SECONDS)
        if self._thread.is_alive():
            self._lose(f"the last records did not arrive in {LAST_SECONDS} s")

    def _add(self, method: str, *arguments) -> None:
        try:
            self._calls.put_nowait((method, *arguments))
        except queue.Full:
            self._lose(f"{_MAX_WAITING} records wait for it{_GOES_ON}")

    def _work(self, open_tracker: Callable[[], Tracker]) -> None:
        """Open the tracker and run the calls. The last call closes it."""
        tracker = None
        try:
            tracker = open_tracker()
        except Exception as error:
            self._lose(_described(error) + _GOES_ON)
        method = ""
        while method != "close":
            method, *arguments = self._calls.get()
            if tracker is None:
                continue
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:
                self._lose(_described(error) + _GOES_ON)

    def _lose(self, reason: str) -> None:
        if not self._is_losing:
            self._say(f"TRACKER {self._name}: {reason}")
        self._is_losing = True


def open_trackers(
    directory: Path, step: int, name: str, say: Callable[[str], None]
) -> list[Tracker]:
    """The trackers of the run in `directory`, which continues after `step`.

    Args:
        name: the value of TRACKER.
        say: called with a line that says where the run is tracked, and with a line about the first
            error.
    """
    trackers: list[Tracker] = [TensorBoard(directory, step)]
    if not name:
        return trackers

    def open_service() -> Tracker:
        ids = _read_ids(directory / _IDS)
        service = SERVICES[name](directory, ids.get(name))
        with atomic_write(directory / _IDS) as file:
            file.write(json.dumps(ids | {name: service.id}).encode() + b"\n")
        say(f"TRACKER {name}: {service.place}")
        return service

    return trackers + [Background(name, open_service, say)]


def _read_ids(file: Path) -> dict[str, str]:
    """The run's id in each service that has tracked it.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        ids = read_json(file, _MAX_IDS_BYTES)
    except FileNotFoundError:
        return {}
    if not isinstance(ids, dict) or not all(map(_is_id, ids.values())):
        raise ValueError(f"{file} is {short(ids)}, it must hold ids of runs")
    return ids


def _is_id(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w-]{1,128}", value) is not None


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(str(error))[:_MAX_ERROR]}"
