"""TRACKER: the curves in MLflow and W&B, beside TensorBoard, and what happens when those fail."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from run_cases import ALONE, LAYERS

from swinv2_moe.config import flatten
from swinv2_moe.errors import UserError
from swinv2_moe.ranks.environment import describe_environment
from swinv2_moe.ranks.world import World
from swinv2_moe.train import arrival, trackers
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.record import Recorder, tagged
from swinv2_moe.train.run import train
from swinv2_moe.train.sinks import Event
from swinv2_moe.train.trackers import Service, check_tracker

LAYER = LAYERS[0]


@pytest.fixture
def mlflow(monkeypatch):
    """A function: the MLflow client of a run's own store."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    tracking = pytest.importorskip("mlflow.tracking", reason="needs the mlflow extra")
    return lambda run: tracking.MlflowClient(tracking_uri=(run / "mlruns").as_uri())


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """The package, offline, without the settings of this user."""
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_BASE_URL", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb = pytest.importorskip("wandb", reason="needs the wandb extra")
    wandb.teardown()
    yield wandb
    wandb.teardown()


@pytest.fixture
def service(monkeypatch):
    """`service(failing="scalars")`: a service in place of MLflow, which keeps what it was told, and
    raises where an event has these, or in the method of this name."""

    def use(failing=""):
        told = []

        class Service:
            id = "some-id"
            place = "somewhere"

            def __init__(self, directory, run_id, lose):
                self._tell("__init__", run_id)

            def write(self, event):
                for name in ("config", "scalars", "pictures"):
                    if getattr(event, name):
                        self._tell(name, getattr(event, name), event.step)

            def close(self, finished):
                self._tell("close", finished)

            def _tell(self, method, *arguments):
                if method == failing:
                    raise ConnectionError(f"no answer to {method}\nwhatsoever")
                told.append((method, *arguments))

        monkeypatch.setitem(trackers.SERVICES, "mlflow", Service)
        return told

    return use


def test_credentials_of_a_service_are_not_shown(tmp_path, monkeypatch, capsys):
    class Service:
        id, place = "id", "https://user:secret@host:5000/?token=secret"

        def __init__(self, directory, run_id, lose):
            pass

        def write(self, event):
            raise ConnectionError(f"proxy 'http://user:secret@proxy' to {self.place} is down")

        def close(self, finished):
            pass

    monkeypatch.setitem(trackers.SERVICES, "mlflow", Service)
    recorder = Recorder(tmp_path, ALONE, 0, tracker="mlflow")
    recorder.epoch({"epoch": 1, "train_loss": 1.0}, 1)
    recorder.close()
    said = capsys.readouterr().out
    assert "TRACKER mlflow: https://***@host:5000/?token=***\n" in said
    assert "proxy 'http://***@proxy' to https://***@host" in said
    assert "secret" not in said
    monkeypatch.setattr(sys, "argv", ["train", "--data", "http://user:secret@host/data"])
    recorded = json.dumps(describe_environment(ALONE))
    assert "http://***@host/data" in recorded
    assert "secret" not in recorded


def stop_after(step):
    """A `Trainer.train_step` in whose step a signal arrives."""
    train_step = Trainer.train_step

    def stopping(self, batches):
        result = train_step(self, batches)
        if self.progress.step == step:
            self.stop.received = "SIGTERM"
        return result

    return stopping


def train_in_two_parts(config, monkeypatch):
    """Train until step 7, then to the end; a generator that yields between the two."""
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", stop_after(7))
        assert train(config) is None
    yield
    assert train(config, "auto")["steps"] == 10


def test_mlflow_holds_what_metrics_jsonl_does(
    mlflow, tmp_path, make_config, read_metrics, monkeypatch, capsys
):
    root = tmp_path / "mine"
    config = make_config(root, {"TRACKER": "mlflow"})
    parts = train_in_two_parts(config, monkeypatch)
    next(parts)
    run_id = json.loads((root / "tracker.json").read_text())["mlflow"]
    assert mlflow(root).get_run(run_id).info.status == "KILLED"
    assert not list(parts)
    client = mlflow(root)
    experiment = client.get_experiment_by_name("swinv2-moe")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (run_id, "mine", "FINISHED")
    assert run.data.params == {key: str(value) for key, value in flatten(config).items()}
    said = capsys.readouterr().out
    assert said.count("TRACKER mlflow") == said.count(f"TRACKER mlflow: {root / 'mlruns'}") == 2

    def curve(tag):
        return [(point.step, point.value) for point in client.get_metric_history(run_id, tag)]

    steps, epochs = read_metrics(root)
    for key in ("loss", "aux_loss", "lr", "images_per_second"):
        assert curve(f"train/{key}") == [(line["step"], line[key]) for line in steps]
    loads = [(line["step"], line["moe_layers"][LAYER]["load_max"]) for line in steps]
    assert curve(f"{LAYER}/load_max") == loads
    for key in ("val_top1", "val_loss"):
        assert curve(f"epoch/{key}") == [(line["step"], line[key]) for line in epochs]
    images = [file.path for file in client.list_artifacts(run_id, "images")]
    assert sum(name.endswith(".png") for name in images) == 2  # after each epoch


def test_wandb_offline_and_resumed(wandb, tmp_path, make_config, monkeypatch, capsys):
    root = tmp_path / "mine"
    parts = train_in_two_parts(make_config(root, {"TRACKER": "wandb"}), monkeypatch)
    next(parts)
    run_id = json.loads((root / "tracker.json").read_text())["wandb"]
    assert not list(parts)
    wandb.teardown()  # as at the end of a process: the last file is complete
    assert json.loads((root / "tracker.json").read_text()) == {"wandb": run_id}
    files = sorted((root / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    for file in files:
        content = file.read_bytes()
        for name in ("swinv2-moe", "mine", "train/loss", f"{LAYER}/expert_load", "TRAIN.EPOCHS"):
            assert name.encode() in content
        assert b"epoch/val_top1" in content
        assert list(file.parent.glob("files/media/images/*.png"))
    assert capsys.readouterr().out.count("TRACKER wandb") == 2


def test_wandb_without_a_key_is_refused(wandb, monkeypatch):
    check_tracker("wandb")
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(UserError, match="TRACKER wandb has no API key: `wandb login`"):
        check_tracker("wandb")
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(UserError, match=r"TRACKER wandb: .*onlin") as caught:
        check_tracker("wandb")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("wandb", "wandb", "wandb"), ("mlflow", "mlflow.tracking", "mlflow-skinny")],
)
def test_without_the_package(name, module, package, tmp_path, make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(arrival, "build_data", None)  # the check comes first
    expected = f"TRACKER {name} needs the {name} extra, the package {package}: pip install"
    with pytest.raises(UserError, match=expected) as caught:
        train(make_config(tmp_path / "run", {"TRACKER": name}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("failing", ["__init__", "config", "scalars", "close"])
def test_a_service_that_fails_ends_no_run(failing, service, tmp_path, capsys):
    service(failing)
    recorder = Recorder(tmp_path, ALONE, 0, tracker="mlflow")
    recorder.config("SEED: 1")
    for step in (1, 2):
        recorder.step({"step": step, "epoch": 1, "loss": 1.0}, {})
    recorder.summary({})
    recorder.close()
    said = capsys.readouterr()
    line = f"TRACKER mlflow: ConnectionError: no answer to {failing} whatsoever; the run continues"
    assert said.out.count("ConnectionError") == said.out.count(line) == 1
    assert not said.err
    assert (tmp_path / "summary.json").exists()


def test_other_records_go_on(service, tmp_path, capsys):
    """After an error, and in the run that goes on."""
    told = service("pictures")
    recorder = Recorder(tmp_path, ALONE, 0, tracker="mlflow")
    recorder.begin({}, 0, steps_per_epoch=5)
    recorder.write(Event(1, pictures={"routing": np.zeros((4, 4, 3), np.uint8)}))
    recorder.step({"step": 1, "epoch": 1, "loss": torch.tensor(2.0), "moe/entropy": 0.5}, {})
    recorder.close()
    scalars = {"train/loss": 2.0, "moe/entropy": 0.5}
    assert told == [("__init__", None), ("scalars", scalars, 1), ("close", False)]
    told.clear()
    recorder = Recorder(tmp_path, ALONE, 1, tracker="mlflow")
    recorder.summary({})
    recorder.close()
    assert told == [("__init__", "some-id"), ("close", True)]
    assert capsys.readouterr().out.count("no answer to pictures") == 1


def test_a_server_that_ends_is_one_line(mlflow, tmp_path, monkeypatch, capsys):
    """And the training does not wait for it."""
    mlflow(tmp_path)  # skips without the package
    recorder = Recorder(tmp_path, ALONE, 0, tracker="mlflow")
    shutil.rmtree(tmp_path / "mlruns")
    (tmp_path / "mlruns").touch()
    for step in (1, 2):
        recorder.step({"step": step, "epoch": 1, "loss": 1.0}, {})
    recorder.close()
    said = capsys.readouterr().out
    assert said.count("TRACKER mlflow: ") == 2  # the place, then the error
    assert "; the run continues, records there may be lost" in said


def test_a_damaged_id_is_no_other_run(service, tmp_path):
    told, file = service(), tmp_path / "tracker.json"
    for text in ("", "[]", '{"mlflow": 3}', '{"mlflow": "../../x"}'):
        said = []
        file.write_text(text)
        Service(tmp_path, "mlflow", said.append).close(True)
        (line,) = said
        assert "TRACKER mlflow: " in line
        assert told == []
        assert file.read_text() == text


def test_ids_of_other_services_are_kept(service, tmp_path):
    service()
    (tmp_path / "tracker.json").write_text('{"wandb": "abc"}')
    Service(tmp_path, "mlflow", print).close(True)
    ids = json.loads((tmp_path / "tracker.json").read_text())
    assert ids == {"wandb": "abc", "mlflow": "some-id"}


def test_only_the_main_rank_tracks(service, tmp_path):
    told = service()
    recorder = Recorder(tmp_path, World(1, 2, torch.device("cpu")), 0, tracker="mlflow")
    recorder.step({"step": 1, "epoch": 1, "loss": 1.0}, {})
    recorder.close()
    assert told == []


def test_no_service_unless_asked_for(tmp_path):
    Recorder(tmp_path, ALONE, 0).close()
    assert not (tmp_path / "tracker.json").exists()
    check_tracker("")


def test_tags():
    values = {"step": 1, "epoch": 1, "loss": 2, "moe/entropy": 0.5, "load": [1, 1]}
    assert tagged("train", values) == {"train/loss": 2.0, "moe/entropy": 0.5}


def test_every_service_has_an_extra():
    assert trackers.SERVICES.keys() == trackers._PACKAGES.keys()
