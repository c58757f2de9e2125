"""OUTPUT/events.log: when staging, initialisation, epochs and validations began and ended.

Each line is one event: ":::MLLOG " and a JSON object. The keys are those of MLCommons' package
`mlperf-logging` (https://github.com/mlcommons/logging), whose logger writes the lines. Programs
that read MLPerf logs can read this file. Epochs count from 1. eval_accuracy is the top-1 accuracy,
from 0 to 1. If a run was interrupted, each of its parts begins with its own staging, init and run
events. Only the format is MLPerf's. The results are not MLPerf results: the runs do not follow the
rules of that benchmark and were not reviewed.
"""

import logging
import re
from pathlib import Path

from swinv2_moe.errors import UserError

_ROOT = Path(__file__).resolve().parents[2]


def load_mllogger() -> type:
    """The logger class of the optional package `mlperf-logging`.

    Raises:
        UserError: the package is not installed.
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
    """Appends events to one file and writes to no other place."""

    def __init__(self, path: Path) -> None:
        # MLLogger needs a logger. The package's own logger, and one of logging's tree, would print.
        # They would also send the events of the next run in this process to this file. MLLogger
        # ignores errors of a handler; therefore the handler only collects lines, and `write` writes
        # them.
        logger, handler = logging.Logger(__name__, logging.INFO), logging.Handler()
        handler.emit = lambda record: self._lines.append(record.getMessage())
        logger.addHandler(handler)
        self._mllogger = load_mllogger()(logger, root_dir=re.escape(str(_ROOT)))
        self._lines: list[str] = []
        if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
            self._lines.append("")  # ends a line that was cut off, for example by a power cut
        self._file = path.open("a", buffering=1)

    def write(self, key: str, value: object, at: float | None, metadata: dict) -> None:
        """Write the event `key`. Keys that end in _start and _stop mark an interval.

        Args:
            at: time of the event, in seconds since 1970; None: now.

        Raises:
            OSError: the file cannot be written, for example because the disk is full.
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
