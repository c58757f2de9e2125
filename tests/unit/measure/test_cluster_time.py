"""The time of a run on other numbers of GPUs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moe_core.parallel import PROFILES, ParallelStrategy
from swinv2_moe.config import load_config, model_config, train_config
from swinv2_moe.errors import UserError
from swinv2_moe.measure import cluster
from swinv2_moe.measure.cluster_time import MeasuredRun, RunTimes, measured_run, strategy_of

CONFIG = Path(__file__).parents[3] / "configs/quickstart_digits.yaml"
MACHINE = PROFILES["a100-hdr"]
SECONDS = {"staging": 4.0, "start": 5.0, "data": 6.0, "training": 0.0, "validation": 8.0}
SECONDS |= {"saving": 3.0, "other": 1.0}


@pytest.fixture(scope="module")
def described() -> tuple:
    config = load_config(CONFIG)
    return cluster.describe(model_config(config)), train_config(config)


def measured(step: float, gpus: int = 1, steps: int = 100, **more) -> MeasuredRun:
    values = {"watts": None} | more
    return MeasuredRun(90.0, gpus, steps, SECONDS | {"training": steps * step}, **values)


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_the_machine_is_fitted_to_the_runs_step(described, gpus, factor):
    model, training = described
    strategy = ParallelStrategy()
    batch = 128 // gpus
    own = cluster.predict(model, training, MACHINE.slowed(factor), gpus, 2, batch, strategy)
    run = measured(own.step, gpus)
    times = RunTimes(run, model, training, 128, MACHINE, 2, strategy)
    assert times.factor == pytest.approx(factor, rel=1e-3)
    for other in (1, 2, 8):
        plan = times.predict(other)
        machine = MACHINE.slowed(factor)
        row = cluster.predict(model, training, machine, other, 2, 128 // other, strategy)
        assert plan.step.step == pytest.approx(row.step, rel=1e-3)
        assert plan.seconds["training"] == pytest.approx(100 * row.step, rel=1e-3)
        for phase in ("staging", "start", "saving", "other"):
            assert plan.seconds[phase] == SECONDS[phase]
        for phase in ("data", "validation"):
            assert plan.seconds[phase] == pytest.approx(SECONDS[phase] * gpus / other)
        assert plan.total == pytest.approx(sum(plan.seconds.values()))
        assert plan.joules is None


def test_the_runs_own_time_comes_out(described):
    model, training = described
    run = measured(0.25, watts=200.0)
    plan = RunTimes(run, model, training, 128, MACHINE, 1).predict(1)
    assert plan.total == pytest.approx(sum(run.seconds.values()), rel=1e-6)
    assert plan.joules == pytest.approx(200 * plan.total)


def test_what_cannot_be_predicted(described):
    model, training = described
    times = RunTimes(measured(0.25), model, training, 128, MACHINE, 1)
    with pytest.raises(ValueError, match="128 images a step cannot be divided over 3 GPUs"):
        times.predict(3)
    slow = replace(MACHINE, inter=replace(MACHINE.inter, latency=1.0))
    with pytest.raises(UserError, match=r"links of .* take longer than the run's step of 250 ms"):
        RunTimes(measured(0.25, gpus=4), model, training, 128, slow, 1, ParallelStrategy())


def test_the_strategy_is_that_of_the_run():
    def strategy(*opts: str) -> ParallelStrategy | None:
        return strategy_of(model_config(load_config(CONFIG, list(opts))).experts)

    assert strategy() == ParallelStrategy()
    assert strategy("MODEL.MOE.STRATEGY", "auto") is None
    fixed = strategy("MODEL.MOE.STRATEGY", "d2")
    assert fixed == ParallelStrategy(1, 2)


@pytest.fixture
def run(tmp_path) -> Path:
    """What a run leaves, as far as it is read."""
    root = tmp_path / "run"
    root.mkdir()
    shutil.copy(CONFIG, root / "config.yaml")
    step = {"step": 10, "epoch": 1, "loss": 1.0, "images_per_second": 9.0}
    (root / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    summary = {"parameters": 1, "active_macs": 1, "world_size": 2, "device": "cpu", "steps": 40}
    summary |= {"phases": SECONDS | {"training": 73.0}, "joules": 5000.0, "target_top1": 90.0}
    summary |= {"target_step": 20, "phases_to_target": SECONDS | {"training": 40.0}}
    (root / "summary.json").write_text(json.dumps(summary))
    return root


def change(run: Path, **keys: object) -> None:
    summary = json.loads((run / "summary.json").read_text()) | keys
    (run / "summary.json").write_text(json.dumps(summary))


def test_what_a_run_has_measured(run):
    found, record = measured_run(run)
    assert (found.target, found.gpus, found.steps, found.step) == (90.0, 2, 20, 2.0)
    assert found.seconds["training"] == 40.0
    assert found.watts == pytest.approx(50.0)  # 5,000 J in 100 s
    assert record.config.MODEL.TYPE
    change(run, target_top1=None, target_step=None, phases_to_target=None, joules=None)
    found, _ = measured_run(run)
    assert (found.target, found.steps, found.seconds["training"]) == (None, 40, 73.0)
    assert found.watts is None


def test_a_summary_that_does_not_say_it(run):
    written = json.loads((run / "summary.json").read_text())
    change(run, target_step=None)
    with pytest.raises(UserError, match="has not reached its target of 90% top-1"):
        measured_run(run)
    wrong = [{"target_step": "20"}, {"phases_to_target": None}]
    wrong += [{"phases_to_target": {"training": seconds}} for seconds in (-1, 0, 1e999, "1")]
    for keys in wrong:
        change(run, **written | keys)
        with pytest.raises(UserError, match="does not say where the time went"):
            measured_run(run)
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match="has not ended"):
        measured_run(run)
