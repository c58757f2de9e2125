"""The services that TRACKER names: Weights & Biases, and MLflow.

Each class has the methods of `swinv2_moe.train.trackers.Tracker`. Credentials and addresses come
from the service's own environment variables.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from swinv2_moe.errors import UserError, one_line

LAST_SECONDS = 60  # time to send the remaining data when a run ends
_PROJECT = "swinv2-moe"  # default of WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # package by extra of pyproject.toml


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
    """A run of Weights & Biases. Its files are in the directory `wandb` of the run directory."""

    def __init__(self, directory: Path, run_id: str | None) -> None:
        """Continue the run `run_id`; None begins one."""
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=directory.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            settings=wandb.Settings(console="off", silent=True, finish_timeout=LAST_SECONDS),
        )
        # W&B's own step cannot decrease, but the step of a resumed run can.
        self._run.define_metric("*", step_metric="step")
        self.id = self._run.id
        self.place = self._run.dir
        if self._run.settings.mode == "online":
            self.place = self._run.url

    def config(self, values: Mapping[str, object]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def scalars(self, values: Mapping[str, object], step: int) -> None:
        if values:
            self._run.log({**values, "step": step})

    def loads(self, loads: Mapping[str, Sequence[float]], step: int) -> None:
        """Write the loads as histograms with one bar for each expert."""
        histograms: dict[str, object] = {}
        for tag, load in loads.items():
            edges = list(range(len(load) + 1))
            histograms[tag] = self._wandb.Histogram(np_histogram=(list(load), edges))
        self.scalars(histograms, step)

    def text(self, tag: str, text: str, step: int) -> None:
        self.scalars({tag: text}, step)

    def image(self, tag: str, picture: np.ndarray, step: int) -> None:
        self.scalars({tag: self._wandb.Image(Image.fromarray(picture))}, step)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=int(not finished))


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI or in the directory `mlruns` of the run directory."""

    def __init__(self, directory: Path, run_id: str | None) -> None:
        """Continue the run `run_id`; None begins one."""
        from mlflow.tracking import MlflowClient

        # Otherwise MLflow prints a line for each attempt to reach a server.
        logging.getLogger("urllib3").setLevel(logging.ERROR)
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

    def _new_run(self, name: str) -> str:
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            experiment_id = self._client.create_experiment(project)
        else:
            experiment_id = experiment.experiment_id
        return self._client.create_run(experiment_id, run_name=name).info.run_id

    def config(self, values: Mapping[str, object]) -> None:
        """Write the configuration as parameters. MLflow does not change parameters: a resumed run
        keeps the first values."""
        from mlflow.entities import Param

        sent = self._client.get_run(self.id).data.params
        params = [Param(key, str(value)) for key, value in values.items() if key not in sent]
        self._client.log_batch(self.id, params=params)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(tag, value, now, step) for tag, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def loads(self, loads: Mapping[str, Sequence[float]], step: int) -> None:
        """Write one metric for each expert."""
        values = {}
        for tag, load in loads.items():
            values |= {f"{tag}/{expert}": value for expert, value in enumerate(load)}
        self.scalars(values, step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._client.log_text(self.id, text, f"{tag}/step-{step:08d}.txt")

    def image(self, tag: str, picture: np.ndarray, step: int) -> None:
        self._client.log_image(self.id, picture, key=tag, step=step)

    def close(self, finished: bool) -> None:
        status = "KILLED"
        if finished:
            status = "FINISHED"
        self._client.set_terminated(self.id, status)


SERVICES = {"wandb": Wandb, "mlflow": MLflow}
