"""Follow the records of a running training line by line. Imports no torch.

`read_run` reads a whole run at once. This module keeps only the values that `swinv2-moe watch`
shows.
"""

import stat
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import yaml

from swinv2_moe.errors import UserError
from swinv2_moe.files import MAX_LINE, other_runs
from swinv2_moe.locks import LOCK, is_locked
from swinv2_moe.measure.run_entries import parse_entry
from swinv2_moe.tables import Position, in_words, seconds_left

_MAX_CONFIG = 1 << 16  # characters
_QUIET = 60  # after so many seconds without a new line, the run may have stopped
_RECENT = 20  # number of logged steps for the median speed: the first steps of an epoch are slow


class RunLength(NamedTuple):
    """The length of a run, from its configuration."""

    epochs: int
    max_steps: int
    rank_batch: int  # images per step on each rank


class LiveRun:
    """The run in `directory`, as far as it was written at the last `read`."""

    def __init__(self, directory: Path) -> None:
        """Find the run; nothing is read yet.

        Raises:
            UserError: the directory has no run, and no run is starting there.
        """
        self.directory = directory
        self._file = directory / "metrics.jsonl"
        if not directory.is_dir():
            raise UserError(f"{directory}: is not a run directory")
        if not self._file.exists() and not is_locked(directory):
            reason = f"holds no run (no metrics.jsonl){other_runs(directory)}"
            raise UserError(f"{directory}: {reason}")
        self._forget()

    def _forget(self) -> None:
        self._inode, self._offset = 0, 0
        self._start: dict = {}  # values at the start of the current part of the run
        self._speeds: deque[float] = deque(maxlen=_RECENT)
        self.length: RunLength | None = None
        self.losses: list[tuple[int, float]] = []  # training loss by step
        self.epochs: list[dict] = []
        self.last: dict | None = None  # the last logged step
        self.written = 0.0  # time of the last written line, in seconds since 1970

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def finished(self) -> bool:
        return (self.directory / "summary.json").exists()

    def state(self, now: float) -> str:
        """The state of the run at the time `now` (seconds since 1970): "running", "finished",
        "stopped", or "nothing new for ..." with the time since the last written line."""
        if self.finished:
            return "finished"
        silence = now - self.written
        # a run on another machine may hold a lock that is not seen here; at its end it removes it
        if silence < _QUIET and (self.directory / LOCK).exists():
            return "running"
        if not is_locked(self.directory):
            return "stopped"
        return f"nothing new for {in_words(silence)}"

    def read(self) -> None:
        """Read the lines that have been added. If the run has removed lines, read all lines again.

        Raises:
            UserError: the run cannot be read.
        """
        try:
            status = self._file.stat()
            if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait
                raise UserError(f"{self._file}: is not a file")
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._forget()
                self._inode = status.st_ino
            self.written = status.st_mtime
            with self._file.open("rb") as lines:
                lines.seek(self._offset)
                while line := lines.readline(MAX_LINE):
                    if not line.endswith(b"\n") and len(line) < MAX_LINE:  # it is being written
                        break
                    self._offset += len(line)
                    self._add(parse_entry(line) or {})
        except FileNotFoundError:  # the file does not exist yet
            return
        except OSError as error:
            raise UserError(f"{self._file}: cannot be read ({error.strerror})") from error

    def _add(self, entry: dict) -> None:
        if "environment" in entry:
            self._start = entry
            self.length = _read_length(self.directory / "config.yaml")
        elif "loss" in entry:
            self.last = entry
            self._speeds.append(entry["images_per_second"])
            if entry["loss"] is not None:
                self.losses.append((entry["step"], entry["loss"]))
        elif "val_top1" in entry:
            self.epochs.append(entry)

    # Progress

    @property
    def last_step(self) -> dict:
        """The entry of the last logged step, which there must be."""
        assert self.last is not None
        return self.last

    def position(self) -> Position | None:
        """The position in the run; None before the first logged step, or if the length of an epoch
        is not known yet."""
        if self.length is None or self.last is None:
            return None
        steps_per_epoch = int(self._start.get("steps_per_epoch") or 0)
        epoch, epoch_end = 0, 0
        if self.epochs:
            epoch, epoch_end = self.epochs[-1]["epoch"], self.epochs[-1]["step"]
            # Earlier versions did not log the length of an epoch.
            steps_per_epoch = steps_per_epoch or epoch_end // max(epoch, 1)
        if steps_per_epoch < 1:
            return None
        step = max(self.last["step"], epoch_end)
        # epochs since the last validation, of which the current one may be complete
        epoch_step = step - epoch_end
        unseen = max(0, epoch_step - 1) // steps_per_epoch
        epoch, epoch_step = epoch + unseen, epoch_step - unseen * steps_per_epoch
        epochs, max_steps, _ = self.length
        return Position(epochs, max_steps, steps_per_epoch, epoch, epoch_step, step)

    def seconds_left(self, now: float) -> float | None:
        """Seconds from `now` (since 1970) to the end of the run; None if not known yet."""
        position = self.position()
        if position is None or self.length is None:
            return None
        processes = self._start["environment"].get("processes")
        speed = median(self._speeds)
        if not isinstance(processes, int) or speed <= 0:
            return None
        seconds_per_step = self.length.rank_batch * processes / speed
        validation = 0.0
        if self.epochs:
            before = self.epochs[-2]["step"] if len(self.epochs) > 1 else 0
            training = (self.epochs[-1]["step"] - before) * seconds_per_step
            validation = max(self.epochs[-1]["seconds"] - training, 0.0)
        left = seconds_left(position, seconds_per_step, validation)
        return max(left - max(now - self.written, 0.0), 0.0)


def _read_length(file: Path) -> RunLength:
    """Read three numbers of a run's configuration, without the checks of `load_config`.

    Raises:
        UserError: the configuration does not have them.
    """
    with suppress(OSError, ValueError, yaml.YAMLError, TypeError, KeyError, RecursionError):
        with file.open() as stream:
            content = yaml.safe_load(stream.read(_MAX_CONFIG))
        train, batch_size = content["TRAIN"], content["DATA"]["BATCH_SIZE"]
        rank_batch = batch_size * train["ACCUMULATION_STEPS"]
        length = RunLength(train["EPOCHS"], train["MAX_STEPS"], rank_batch)
        if all(isinstance(number, int) for number in length):
            return length
    raise UserError(f"{file}: is not the configuration of a run")
