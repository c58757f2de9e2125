"""Destinations of a run's records besides metrics.jsonl: TensorBoard, the service that TRACKER
names, and the event log.

Weights & Biases reads TensorBoard's files (`sync_tensorboard`). MLflow's autologging would too, but
sends each scalar while the training waits; so scalars and pictures go through its own queue. Both
measure the use of the machine. Credentials and addresses come from environment variables of the
service.

OUTPUT/events.log says when staging, initialisation, epochs and validations began and ended. Each
line is one event: ":::MLLOG " and a JSON object. The keys are those of MLCommons' package
`mlperf-logging` (https://github.com/mlcommons/logging), whose logger writes the lines. Programs
that read MLPerf logs can read this file. Epochs count from 1. eval_accuracy is the top-1 accuracy,
from 0 to 1. If a run was interrupted, each of its parts begins with its own staging, init and run
events. Only the format is MLPerf's. The results are not MLPerf results: the runs do not follow the
rules of that benchmark and were not reviewed.
"""

import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from moe_core.files import atomic_write
from swinv2_moe.errors import UserError, one_line, short
from swinv2_moe.files import read_json

_IDS = "tracker.json"  # in the run directory: the run's id in each service
_MAX_IDS_BYTES = 4096
_FLUSH_SECONDS = 10
_MAX_ERROR = 200  # characters
_WAIT_SECONDS = 60  # for W&B, when a run begins and when it ends
_PROJECT = "swinv2-moe"  # default of WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # package by extra of pyproject.toml
_ROOT = Path(__file__).resolve().parents[2]


def tagged(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
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


class Tracker:
    """Event files in the directory `tensorboard` of a run, and the service that imports them.

    SummaryWriter writes in a thread. If the thread fails, later calls raise its OSError. An error
    of the service does not end the run: one line is printed, and what it would get is lost.
    """

    def __init__(
        self, directory: Path, step: int, name: str, print_line: Callable[[str], None]
    ) -> None:
        """Continue after `step`. Readers of the files ignore events of later steps that were
        written before.

        Args:
            name: the value of TRACKER.
            print_line: prints where the run is tracked, and the first error of the service.
        """
        self._name, self._print_line = name, print_line
        self._service: Any = None
        self._is_losing = False
        if name:
            self._guarded(self._open, directory)  # before the writer, which W&B patches
        self._writer = SummaryWriter(
            str(directory / "tensorboard"), purge_step=step + 1, flush_secs=_FLUSH_SECONDS
        )

    def _open(self, directory: Path) -> None:
        ids = _read_ids(directory / _IDS)
        service = SERVICES[self._name](directory, ids.get(self._name), self._lose)
        with atomic_write(directory / _IDS) as file:
            file.write(json.dumps(ids | {self._name: service.id}).encode() + b"\n")
        self._print_line(f"TRACKER {self._name}: {service.place}")
        self._service = service

    def _tell(self, method: str, *arguments: object) -> None:
        if hasattr(self._service, method):
            self._guarded(getattr(self._service, method), *arguments)

    def _guarded(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, reason: str) -> None:
        """Print the first error of the service."""
        if not self._is_losing:
            line = f"{one_line(reason)[:_MAX_ERROR]}; the run continues, records there may be lost"
            self._print_line(f"TRACKER {self._name}: {line}")
        self._is_losing = True

    def config(self, values: Mapping[str, object]) -> None:
        """Send the configuration, by key, to the service; config.yaml is in the run directory."""
        self._tell("config", dict(values))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers, by tag such as train/loss."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._tell("scalars", dict(values), step)

    def loads(self, loads: Mapping[str, Sequence[float]], step: int) -> None:
        """Write the load of each expert of a layer, by tag, as a histogram with one bar for each
        expert, numbered along the axis; 1 is an even share."""
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
        """Write a line of text."""
        self._writer.add_text(tag, text, step)

    def image(self, tag: str, picture: np.ndarray, step: int) -> None:
        """Write a picture, uint8 [height, width, 3]."""
        self._writer.add_image(tag, picture, step, dataformats="HWC")
        self._tell("image", tag, picture, step)

    def close(self, finished: bool) -> None:
        """`finished`: the run has ended; False: only this process ends."""
        self._writer.close()
        self._tell("close", finished)


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


def check_tracker(name: str) -> None:
    """Import the package that TRACKER needs, and check that W&B's API key is set. "" needs neither.

    Raises:
        UserError: the package or the key is missing.
    """
    try:
        if name == "wandb":
            _check_wandb()
        elif name == "mlflow":
            # Otherwise MLflow reports usage data to its developers.
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            from mlflow.tracking import MlflowClient  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"TRACKER {name} needs the {name} extra, the package {_PACKAGES[name]}: pip install -e"
            f" '.[{name}]' ({error})"
        ) from error


def _check_wandb() -> None:
    # `import wandb` alone would also find the directory of that name that W&B creates in a run's
    # working directory.
    from wandb import login, setup

    try:
        mode = setup().settings.mode
        # Without a key, wandb.init would ask for one in the middle of the training.
        has_key = mode not in ("online", "run") or login(verify=False, prompt=False)
    except Exception as error:
        raise UserError(f"TRACKER wandb: {one_line(str(error))}") from error
    if not has_key:
        raise UserError(
            "TRACKER wandb has no API key: `wandb login` saves one, WANDB_API_KEY holds one, and"
            " WANDB_MODE=offline needs none"
        )


class Wandb:
    """A run of Weights & Biases. Its files are in the directory `wandb` of the run directory. All
    but the configuration it reads from TensorBoard's files."""

    def __init__(self, directory: Path, run_id: str | None, lose: Callable[[str], None]) -> None:
        """Continue the run `run_id`; None begins one. `lose` reports what goes wrong later."""
        import wandb
        from wandb.integration.tensorboard import unpatch

        self._unpatch = unpatch
        unpatch()  # an earlier run of this process may have failed to
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=directory.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            sync_tensorboard=True,
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=_WAIT_SECONDS,
                finish_timeout=_WAIT_SECONDS,
            ),
        )
        self.id = self._run.id
        self.place = self._run.dir
        if self._run.settings.mode == "online" and self._run.url:
            self.place = self._run.url

    def config(self, values: dict[str, object]) -> None:
        self._run.config.update(values, allow_val_change=True)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=int(not finished))
        self._unpatch()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI or in the directory `mlruns` of the run directory."""

    def __init__(self, directory: Path, run_id: str | None, lose: Callable[[str], None]) -> None:
        """Continue the run `run_id`; None begins one. `lose` reports what goes wrong later."""
        # Otherwise MLflow prints a line for each attempt to reach a server, and tries for minutes.
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS", "5")
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").handlers = [CallingHandler(lose, logging.ERROR)]
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self.place = uri or str(directory / "mlruns")
        if not uri:
            uri = (directory / "mlruns").resolve().as_uri()
            # By default MLflow 3 refuses to write to files instead of a database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
        self.id = run_id or self._new_run(directory.resolve().name)
        self._waiting: deque = deque(maxlen=1000)
        resumes = run_id is not None
        self._monitor = SystemMetricsMonitor(self.id, resume_logging=resumes, tracking_uri=uri)
        self._monitor.start()

    def _new_run(self, name: str) -> str:
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            experiment_id = self._client.create_experiment(project)
        else:
            experiment_id = experiment.experiment_id
        return self._client.create_run(experiment_id, run_name=name).info.run_id

    def config(self, values: dict[str, object]) -> None:
        """Write the configuration as parameters. MLflow does not change parameters: a resumed run
        keeps the first values."""
        from mlflow.entities import Param

        sent = self._client.get_run(self.id).data.params
        params = [Param(key, str(value)) for key, value in values.items() if key not in sent]
        self._client.log_batch(self.id, params=params)

    def scalars(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(tag, value, now, step) for tag, value in values.items()]
        self._waiting.append(self._client.log_batch(self.id, metrics, synchronous=False))

    def image(self, tag: str, picture: np.ndarray, step: int) -> None:
        self._client.log_image(self.id, picture, key=tag, step=step, synchronous=False)

    def close(self, finished: bool) -> None:
        self._monitor.finish()
        for sent in self._waiting:
            sent.wait()
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


SERVICES: dict[str, type[Wandb] | type[MLflow]] = {"wandb": Wandb, "mlflow": MLflow}


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


class CallingHandler(logging.Handler):
    """Calls a function with each message."""

    def __init__(self, call: Callable[[str], object], level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.call = call

    def emit(self, record: logging.LogRecord) -> None:
        self.call(self.format(record))


class EventLog:
    """Appends events to one file and writes to no other place."""

    def __init__(self, path: Path) -> None:
        # MLLogger needs a logger. The package's own logger, and one of logging's tree, would print.
        # They would also send the events of the next run in this process to this file. MLLogger
        # ignores errors of a handler; therefore the handler only collects lines, and `write` writes
        # them.
        self._lines: list[str] = []
        logger = logging.Logger(__name__, logging.INFO)
        logger.addHandler(CallingHandler(lambda line: self._lines.append(line)))
        self._mllogger = load_mllogger()(logger, root_dir=re.escape(str(_ROOT)))
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
