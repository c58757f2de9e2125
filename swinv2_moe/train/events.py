"""OUTPUT/events.log: when staging, initialisation, epochs and validations began and ended.

A line an event, ":::MLLOG " and a JSON object, with the keys and through the logger of MLCommons'
`mlperf-logging` package (https://github.com/mlcommons/logging), so that what reads such logs reads
these; epochs count from 1, eval_accuracy is top-1 from 0 to 1. Each part of a run that was
interrupted begins with its own staging, init and run. A common format is all it is, never an MLPerf
result: no run here follows that benchmark's rules or was reviewed.
"""

import logging
import math
import re
from pathlib import Path
from typing import NamedTuple

from swinv2_moe.errors import UserError, short
from swinv2_moe.files import read_json

_MAX_STAGING_BYTES = 4096  # of staging.json
_ROOT = Path(__file__).resolve().parents[2]


def load_mllogger() -> type:
    """The logger of the package, which is optional.

    Raises:
        UserError: it is missing.
    """
    try:
        from mlperf_logging.mllog.mllog import MLLogger
    except ImportError as error:
        raise UserError(
            "EVENT_LOG True needs the mlperf extra, the package mlperf-logging: pip install -e"
            f" '.[mlperf]' ({error})"
        ) from error
    return MLLogger


class EventLog:
    """Appends events to one file, and writes nowhere else."""

    def __init__(self, path: Path) -> None:
        # Neither the package's own logger nor one of logging's tree: those print, and what the next
        # run in this process logs would come here too. Lines are collected and written by `write`:
        # MLLogger swallows a handler's errors.
        logger, handler = logging.Logger(__name__, logging.INFO), logging.Handler()
        handler.emit = lambda record: self._lines.append(record.getMessage())
        logger.addHandler(handler)
        self._mllogger = load_mllogger()(logger, root_dir=re.escape(str(_ROOT)))
        self._lines: list[str] = []
        if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
            self._lines.append("")  # ends a line that was cut off, by a power cut for example
        self._file = path.open("a", buffering=1)

    def write(self, key: str, value: object, at: float | None, metadata: dict) -> None:
        """The event `key`; those called ..._start and ..._stop bound an interval.

        Args:
            at: when it was, in seconds since 1970; None: now.

        Raises:
            OSError: a full disk, say.
        """
        log = self._mllogger.event
        if key.endswith("_start"):
            log = self._mllogger.start
        elif key.endswith("_stop"):
            log = self._mllogger.end
        milliseconds = None
        if at is not None:
            milliseconds = int(at * 1000)
        log(key, value, metadata, time_ms=milliseconds)
        lines = self._lines
        self._lines = []
        self._file.write("".join(f"{line}\n" for line in lines))

    def close(self) -> None:
        self._file.close()


class Staging(NamedTuple):
    """What staging left in staging.json: when it copied the data to this disk, and how."""

    started: float  # seconds since 1970
    seconds: float
    bytes: int
    overlapped: bool = False  # training read the data meanwhile

    @property
    def rate(self) -> float | None:
        """Bytes/s; None if it took no time that was measured."""
        if self.seconds:
            return self.bytes / self.seconds
        return None


def read_staging(data_path: str) -> Staging | None:
    """The record beside the data; None where there is none.

    Raises:
        UserError: it cannot be read.
    """
    if not data_path:
        return None
    path = Path(data_path).expanduser() / "staging.json"
    try:
        content = read_json(path, _MAX_STAGING_BYTES)
        overlapped = content.get("overlapped", False) is True
        staging = Staging(
            float(content["started"]), float(content["seconds"]), int(content["bytes"]), overlapped
        )
        if not all(math.isfinite(number) and number >= 0 for number in staging):
            raise ValueError(short(content))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path} is not what data/stage.py writes ({type(error).__name__}: {error})"
        ) from error
    return staging
