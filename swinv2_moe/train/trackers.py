"""The service that TRACKER names: Weights & Biases or MLflow.

Weights & Biases reads TensorBoard's files (`sync_tensorboard`). MLflow's autologging would too, but
sends each scalar while the training waits; so scalars and pictures go through its own queue. Both
measure the use of the machine. Credentials and addresses come from environment variables of the
service.
"""

import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_core.files import atomic_write
from swinv2_moe.errors import UserError, one_line, short
from swinv2_moe.files import read_json
from swinv2_moe.train.sinks import Event

_IDS = "tracker.json"  # in the run directory: the run's id in each service
_MAX_IDS_BYTES = 4096
_MAX_ERROR = 200  # characters
_WAIT_SECONDS = 60  # for W&B, when a run begins and when it ends
_PROJECT = "swinv2-moe"  # default of WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # package by extra of pyproject.toml


class Service:
    """The sink of the service `name`. An error of the service does not end the run: one line is
    printed, and what it would get is lost.

    Args:
        directory: the run directory; its tracker.json holds the run's id in the service.
        print_line: prints where the run is tracked, and the first error.
    """

    def __init__(self, directory: Path, name: str, print_line: Callable[[str], None]) -> None:
        self._name, self._print_line = name, print_line
        self._service: Any = None
        self._is_losing = False
        self._guarded(self._open, directory)

    def _open(self, directory: Path) -> None:
        ids = _read_ids(directory / _IDS)
        service = SERVICES[self._name](directory, ids.get(self._name), self._lose)
        with atomic_write(directory / _IDS) as file:
            file.write(json.dumps(ids | {self._name: service.id}).encode() + b"\n")
        self._print_line(f"TRACKER {self._name}: {service.place}")
        self._service = service

    def write(self, event: Event) -> None:
        if self._service is not None:
            self._guarded(self._service.write, event)

    def close(self, finished: bool) -> None:
        if self._service is not None:
            self._guarded(self._service.close, finished)

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
    """Import the package that TRACKER needs, if any, and check that W&B's API key is set.

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

    def write(self, event: Event) -> None:
        if event.config is not None:
            self._run.config.update(event.config, allow_val_change=True)

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

    def write(self, event: Event) -> None:
        """The configuration becomes parameters. MLflow does not change parameters: a resumed run
        keeps the first values."""
        from mlflow.entities import Metric, Param

        if event.config is not None:
            sent = self._client.get_run(self.id).data.params
            new = {key: str(value) for key, value in event.config.items() if key not in sent}
            self._client.log_batch(self.id, params=[Param(*pair) for pair in new.items()])
        if event.scalars:
            now, step = int(1000 * time.time()), event.step
            metrics = [Metric(tag, value, now, step) for tag, value in event.scalars.items()]
            self._waiting.append(self._client.log_batch(self.id, metrics, synchronous=False))
        for tag, picture in event.pictures.items():
            self._client.log_image(self.id, picture, key=tag, step=event.step, synchronous=False)

    def close(self, finished: bool) -> None:
        self._monitor.finish()
        for sent in self._waiting:
            sent.wait()
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


SERVICES: dict[str, type[Wandb] | type[MLflow]] = {"wandb": Wandb, "mlflow": MLflow}


class CallingHandler(logging.Handler):
    """Calls a function with each message."""

    def __init__(self, call: Callable[[str], object], level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.call = call

    def emit(self, record: logging.LogRecord) -> None:
        self.call(self.format(record))
