"""The report of a run: its first lines, warnings, its last lines and summary.json."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_core import moe_layers
from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.checkpoints.meta import split_warning
from swinv2_moe.config import Change
from swinv2_moe.data.prepare.staging import Staging
from swinv2_moe.errors import short
from swinv2_moe.models import Complexity
from swinv2_moe.ranks.world import World
from swinv2_moe.start.known import accuracy_in_words
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.progress import Progress, accounted_share
from swinv2_moe.train.record import Recorder

# Range of a schedule's highest learning rate. Published recipes are well within it. There is no
# warning for 0.
_USUAL_LEARNING_RATES = {
    "adamw": (1e-8, 0.1),
    "sgd": (1e-6, 10.0),
}


def headline(trainer: Trainer, size: Complexity, source: Checkpoint | None) -> list[str]:
    """The model, the data and the processes; for a resumed run, its starting point."""
    config, data, world = trainer.config.model, trainer.data, trainer.world
    num_layers = len(moe_layers(trainer.step.model))
    experts = "dense"
    if num_layers:
        experts = f"{config.experts.num_experts} experts in {num_layers} layers"
    processes = "processes"
    if world.size == 1:
        processes = "process"
    lines = [
        f"{config.title} ({experts}): {size.parameters / 1e6:.2f}M parameters,"
        f" {size.macs / 1e6:,.1f}M MACs/image;"
        f" {data.train_size:,} + {data.val_size:,} images, {data.num_classes} classes;"
        f" {world.size} {processes} on {_device_name(world)}"
    ]
    if trainer.distillation is not None:
        lines.append(trainer.distillation.headline())
    if source is not None:
        lines += _resume_lines(trainer, source)
    return lines


def _resume_lines(trainer: Trainer, source: Checkpoint) -> list[str]:
    progress = trainer.progress
    lines = [f"skipped: {problem}" for problem in source.skipped]
    lines.append(
        f"resuming from {source.directory}, step {progress.step} (epoch {progress.epoch} done)"
    )
    lines += change_lines(trainer)
    if trainer.config.data.val_split:
        data = trainer.data
        warning = split_warning(source.meta["training"], data.train_size, data.val_size)
        if warning:
            lines.append(warning)
    if progress.to_target.target and "time_to_target" not in source.meta["training"]:
        lines.append(
            "the checkpoint does not have the duration of the run: the time to the target counts"
            " from now"
        )
    return lines


_EFFECTS = {
    "training": "training goes on with the changed value",
    "rate": "the schedule of the learning rate has changed",
    "accuracy": "accuracies until now were measured otherwise, and the best one is chosen anew",
    "start": "no effect, it says what a run starts from, and this one goes on",
}


def change_lines(trainer: Trainer) -> list[str]:
    """A line for each key that has changed since the checkpoint, and the learning rates before and
    after."""
    progress, lines = trainer.progress, []
    for change in trainer.changes:
        is_now = "has left" if change.now is None else f"is {short(change.now)}"
        was_and_is = f"{change.key} was {short(change.before)} and {is_now}"
        line = f"{was_and_is}: {_effect(change, progress)}"
        if change.affects == "accuracy":
            line = f"warning: {line}"
        lines.append(line)
    if trainer.rates is None or progress.steps_done:
        return lines
    before, now = trainer.rates
    if any(one.affects == "rate" for one in trainer.changes) or not math.isclose(
        before, now, rel_tol=1e-2
    ):
        lines.append(
            f"learning rate of the next step: {before:.2e} before, {now:.2e} now. It is that of a"
            f" run which began with the new values, after {progress.epochs_done:.3g} of its"
            f" {progress.epochs} epochs"
        )
    return lines


def _effect(change: Change, progress: Progress) -> str:
    """What a changed key does to a run that goes on."""
    done = {"TRAIN.EPOCHS": progress.epoch, "TRAIN.MAX_STEPS": progress.step}.get(change.key)
    if done is not None:
        limits: list[Any] = [
            count or math.inf for count in (change.before, change.now)
        ]  # 0: no limit
        if limits[1] <= done < limits[0]:
            return f"{done} are done, so the run ends here"
    if progress.finished and change.affects != "start":
        return "no effect, all steps are done; TRAIN.EPOCHS or TRAIN.MAX_STEPS continue the run"
    return _EFFECTS[change.affects]


def start_warnings(trainer: Trainer) -> list[str]:
    """Warnings before the first step that a run will probably fail to learn, one line each."""
    train, given, data = trainer.config.train, trainer.config.data, trainer.data
    lines = []
    rate, name = trainer.step.learning_rate, train.optimizer.name
    low, high = _USUAL_LEARNING_RATES[name]
    if rate and not low <= rate <= high:
        lines.append(
            f"the learning rate reaches {rate:g} (TRAIN.BASE_LR is {train.base_lr:g}, for 512"
            f" images a step), {name} usually trains with {low:g} to {high:g}"
        )
    for key, values in (("MEAN", given.mean), ("STD", given.std)):
        if max(map(abs, values)) > 1:
            lines.append(
                f"DATA.{key} is {list(values)}: pixels are from 0 to 1; divide it by 255 if it is"
                " for pixels of 0 to 255"
            )
    targets = np.asarray(data.train_loader.dataset.source.targets)
    if (targets == targets[0]).all():
        place = f"DATA.PATH {given.path}" if given.path else f"DATA.DATASET {given.dataset}"
        if given.dataset == "list":
            place = f"DATA.TRAIN_LIST {given.train_list}"
        lines.append(
            f"{place}: all {len(targets):,} training images are of one class"
            f" ({data.class_names[targets[0]]!r}), there is nothing to learn"
        )
    return lines


def closing_lines(trainer: Trainer, summary: dict, root: Path) -> list[str]:
    """Speed, accuracy and output directories of a finished run.

    Args:
        summary: what `summarize` returns.
        root: the run directory.
    """
    progress = trainer.progress
    lines = []
    unreadable = trainer.unreadable.summary()
    if unreadable:
        lines.append(unreadable)
    if summary["images_per_second"]:
        lines.append(
            f"{summary['images_per_second']:,.0f} images/s in training,"
            f" {summary['data_wait_share']:.1%} of the time waiting for data"
        )
    if summary["staging_seconds"] is not None:
        rate = summary["staging_bytes_per_second"]
        speed = ""
        if rate:
            speed = f" ({rate / 1e6:,.1f} MB/s)"
        lines.append(f"staging the data took {summary['staging_seconds']:,.1f} s{speed}")
    if progress.to_target.target:
        lines.append(str(progress.to_target))
    if summary["time_to_solution"] is not None:
        phases = summary["phases_to_target"]
        parts = ", ".join(
            f"{name} {seconds:,.1f}" for name, seconds in phases.items() if seconds >= 0.05
        )
        lines.append(
            f"time to solution {summary['time_to_solution']:,.1f} s: {parts};"
            f" {accounted_share(phases):.1%} accounted for"
        )
    if trainer.config.train.probe:
        lines.append(result_line(progress.best_top1, progress.best_epoch, trainer.data.val_size))
    lines.append(
        f"final top-1 {progress.last_top1:.2f}%, best {progress.best_top1:.2f}%;"
        f" checkpoints in {root / 'checkpoints'}, TensorBoard logs in {root / 'tensorboard'}"
    )
    return lines


def result_line(top1: float, epoch: int, images: int) -> str:
    """Which model is the best one, and how well its accuracy is known.

    Args:
        top1: percent of the `images` held-out images.
        epoch: complete epochs; 0: before training.
    """
    model = f"the model after epoch {epoch}"
    if not epoch:
        model = "the classifier on the frozen network, which training did not improve"
    return f"result: {model}: {accuracy_in_words(round(top1 * images / 100), images)}"


def summarize(trainer: Trainer, size: Complexity, staging: Staging | None, seconds: float) -> dict:
    """The content of summary.json. Every rank calls this.

    Args:
        seconds: duration of this part of the run, start-up included.
    """
    progress, world = trainer.progress, trainer.world
    summary: dict[str, object] = {
        "val_top1": progress.last_top1,
        "best_val_top1": progress.best_top1,
        "best_epoch": progress.best_epoch,
        "ended": progress.ended or None,
        "epochs": progress.epoch,
        "steps": progress.step,
        "images_per_second": trainer.throughput.images_per_second,
        "data_wait_share": trainer.data_wait_share(),
        "seconds": seconds,
        "target_top1": progress.to_target.target or None,
        "seconds_to_target": None,
        "target_epoch": None,
        "target_step": None,
        "staging_seconds": None,
        "staging_bytes_per_second": None,
        "phases": with_staging(progress.to_target.phases.seconds(), staging),
        "joules": trainer.joules,
        "time_to_solution": None,
        "phases_to_target": None,
        "joules_to_target": None,
        "parameters": size.parameters,
        "active_macs": size.macs,
        "world_size": world.size,
        "device": _device_name(world),
        "torch": torch.__version__,
        "unreadable_images": len(trainer.unreadable.paths),
        "skipped_steps": progress.skipped,
    }
    if trainer.distillation is not None:
        summary |= trainer.distillation.facts()
    reached = progress.to_target.reached
    if reached is not None:
        summary["seconds_to_target"] = reached.seconds
        summary["target_epoch"] = reached.epoch
        summary["target_step"] = reached.step
        summary["joules_to_target"] = reached.joules
        if reached.phases:
            phases = with_staging(reached.phases, staging)
            summary["phases_to_target"] = phases
            summary["time_to_solution"] = sum(phases.values())
    if staging is not None:
        summary["staging_seconds"] = staging.seconds
        summary["staging_bytes_per_second"] = staging.rate
    return summary


def with_staging(seconds: dict[str, float], staging: Staging | None) -> dict[str, float]:
    """The seconds of each phase, preceded by those of staging the data."""
    if staging is None:
        return seconds
    return {"staging": staging.seconds} | seconds


def _device_name(world: World) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return "cpu"


@contextmanager
def run_events(
    recorder: Recorder, trainer: Trainer, began: float, staging: Staging | None
) -> Iterator[None]:
    """Write the events of this part of a run to the event log.

    Before the block: the starting point of the run, since `began` (in seconds since 1970). Around
    the block: the training. It ends with success when it reaches the target or, without a target,
    when the run has ended.
    """
    if trainer.progress.finished:  # finished before this part
        yield
        return
    if staging is not None:
        recorder.mark("staging_start", at=staging.started)
        recorder.mark("staging_stop", at=staging.started + staging.seconds, bytes=staging.bytes)
    recorder.mark("cache_clear", False, at=began)  # no command here empties the system's caches
    recorder.mark("init_start", at=began)
    recorder.mark("seed", trainer.config.run.seed)
    recorder.mark("global_batch_size", trainer.progress.global_batch)
    recorder.mark("train_samples", trainer.data.train_size)
    recorder.mark("eval_samples", trainer.data.val_size)
    recorder.mark("opt_base_learning_rate", trainer.step.learning_rate)
    recorder.mark("init_stop")
    recorder.mark("run_start")
    try:
        yield
    finally:
        progress = trainer.progress
        succeeded = progress.finished
        if progress.to_target.target:
            succeeded = progress.to_target.reached is not None
        status = "aborted"
        if succeeded:
            status = "success"
        recorder.mark("run_stop", status=status)
        reached = progress.to_target.reached
        if progress.finished and reached is not None and reached.phases:
            phases = with_staging(reached.phases, staging)
            stats = {"time_to_solution": sum(phases.values()), "phases": phases}
            recorder.mark("tracked_stats", stats)
