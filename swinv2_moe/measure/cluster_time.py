"""Predict the time to a target accuracy on any number of GPUs, from a run that has reached it.

The number of steps is the run's, since the number of images per step stays the same. The planner
predicts the time of a step. Its machine is scaled in speed so that the prediction for the run's own
GPUs equals the measured step. The other phases are those of the run: data and validation are
divided over the GPUs, start and saving stay the same.
"""

# W GPUs, g of them on each of N nodes

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from moe_core.parallel import Machine, ParallelStrategy
from swinv2_moe.config import all_sections
from swinv2_moe.errors import UserError
from swinv2_moe.measure import cluster
from swinv2_moe.measure.run_record import RunRecord, read_run
from swinv2_moe.models.build import configured_strategy
from swinv2_moe.models.section import ExpertsConfig
from swinv2_moe.train.section import TrainConfig

_SHARED = ("data", "validation")  # phases whose images are divided over the GPUs
_FACTORS = (1e-4, 1e4)  # limits of the factor between the machine and its profile
_FIT_STEPS = 60


@dataclass(frozen=True)
class MeasuredRun:
    """The times that a run measured until its target or, without a target, until its end."""

    target: float | None  # top-1, percent
    gpus: int
    steps: int  # optimiser steps
    seconds: dict[str, float]  # by phase, as `PHASES` of training, and perhaps "staging"
    watts: float | None  # of all machines; None: not known

    @property
    def step(self) -> float:
        """Seconds of an optimiser step."""
        return self.seconds["training"] / self.steps


@dataclass(frozen=True)
class RunTime:
    """The predicted time on one number of GPUs."""

    step: cluster.Prediction
    seconds: dict[str, float]  # by phase
    joules: float | None

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def measured_run(directory: Path) -> tuple[MeasuredRun, RunRecord]:
    """The measurements of the run in `directory`, and its record.

    Raises:
        UserError: the run has not ended, missed its target, or is from a version that measured no
            phases.
    """
    run = read_run(directory)
    summary = run.summary
    if summary is None:
        raise UserError(f"--run {directory}: has not ended, it has no summary.json")
    target = summary.get("target_top1")
    seconds, steps = summary.get("phases"), summary.get("steps")
    if target:
        seconds, steps = summary.get("phases_to_target"), summary.get("target_step")
        if not steps:
            raise UserError(f"--run {directory}: has not reached its target of {target:g}% top-1")
    if not _is_table(seconds) or not isinstance(steps, int) or steps < 1:
        raise UserError(f"--run {directory}: its summary.json does not say where the time went")
    watts = None
    joules, joules_seconds = summary.get("joules"), summary.get("phases")
    if isinstance(joules, int | float) and _is_table(joules_seconds):
        watts = joules / sum(joules_seconds.values())
    measured = MeasuredRun(target, summary["world_size"], steps, seconds, watts)
    return measured, run


def _is_table(seconds: object) -> TypeGuard[dict[str, float]]:
    """Whether `seconds` is a table of the seconds of phases, including training."""
    if not isinstance(seconds, dict) or "training" not in seconds:
        return False
    numbers = seconds.values()
    if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
        return False
    return math.isfinite(sum(numbers)) and seconds["training"] > 0


class RunTimes:
    """Predicts times from one run.

    Args:
        images: images per optimiser step, over all GPUs.
        strategy: strategy of the MoE layers; None: the fastest.

    Raises:
        ValueError: the run's GPUs cannot share its experts.
        UserError: the links of `machine` alone take longer than a step of the run.
    """

    def __init__(
        self,
        measured: MeasuredRun,
        model: cluster.Model,
        training: TrainConfig,
        images: int,
        machine: Machine,
        gpus_per_node: int,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        self.measured = measured
        self.model = model
        self.training = training
        self.images = images
        self.gpus_per_node = gpus_per_node
        self.strategy = strategy
        self.machine = machine
        self.factor = self._fit()  # factor on the machine's times

    def predict(self, gpus: int) -> RunTime:
        """Predict the time on `gpus` GPUs.

        Raises:
            ValueError: a number of GPUs that does not divide the images, or cannot share the
                experts.
        """
        measured = self.measured
        row = self._step(gpus, self.factor)
        seconds = dict(measured.seconds)
        seconds["training"] = measured.steps * row.step
        for phase in _SHARED:
            if phase in seconds:
                seconds[phase] *= measured.gpus / gpus
        joules = None
        if measured.watts is not None:
            joules = measured.watts * gpus / measured.gpus * sum(seconds.values())
        return RunTime(row, seconds, joules)

    def _step(self, gpus: int, factor: float) -> cluster.Prediction:
        whole, rest = divmod(self.images, gpus * self.training.accumulation_steps)
        if rest:
            raise ValueError(f"{self.images} images a step cannot be divided over {gpus} GPUs")
        return cluster.predict(
            self.model,
            self.training,
            self.machine.slowed(factor),
            gpus,
            self.gpus_per_node,
            whole,
            self.strategy,
        )

    def _fit(self) -> float:
        """The factor on the machine's times with which the prediction equals the run's own step."""
        measured = self.measured
        low, high = _FACTORS
        if self._step(measured.gpus, low).step > measured.step:
            raise UserError(
                f"the links of {self.machine.name} alone take longer than the run's step of"
                f" {1e3 * measured.step:,.0f} ms: take the profile of the machine that it ran on"
            )
        for _ in range(_FIT_STEPS):
            middle = math.sqrt(low * high)
            if self._step(measured.gpus, middle).step < measured.step:
                low = middle
            else:
                high = middle
        return high


def times_of_run(directory: Path, machine: Machine, gpus_per_node: int) -> RunTimes:
    """The times of the run in `directory`, with the strategy that the run used.

    Raises:
        UserError: see `measured_run` and `RunTimes`; also if the run's GPUs cannot share its
            experts.
    """
    measured, run = measured_run(directory)
    sections = all_sections(run.config)
    training, model = sections.train, cluster.describe(sections.model)
    images = training.batch_size * training.accumulation_steps * measured.gpus
    strategy = strategy_of(sections.model.experts)
    try:
        return RunTimes(measured, model, training, images, machine, gpus_per_node, strategy)
    except ValueError as error:
        raise UserError(f"--run {directory}: {error}") from error


def strategy_of(experts: ExpertsConfig) -> ParallelStrategy | None:
    """The strategy that a run of this configuration uses; None: a tuner chooses the fastest."""
    strategy = configured_strategy(experts)
    if isinstance(strategy, str):
        return None
    return strategy


def phases_of(times: Sequence[RunTime]) -> list[str]:
    """The phases that take time."""
    return [phase for phase in times[0].seconds if any(time.seconds[phase] for time in times)]
