"""Steps on a model that is thrown away: how many pictures fit into memory, and how long a training
will take.

Each rank tries alone, with all experts, so that no rank waits for one whose memory is full.
"""

import gc
import itertools
import math
import os
import resource
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from swinv2_moe.config import AllSections
from swinv2_moe.data.build import Data, build_data
from swinv2_moe.data.datasets import Batch
from swinv2_moe.data.sources import Sources
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model
from swinv2_moe.ranks.environment import peak_memory
from swinv2_moe.ranks.world import World
from swinv2_moe.start.defaults import Decision
from swinv2_moe.tables import in_words
from swinv2_moe.threads import available_cores
from swinv2_moe.train.progress import steps_per_epoch
from swinv2_moe.train.step import TrainingStep

_USED = 0.8  # share of the free memory that a step may take
_MAX_WORKERS = 8
_STEPS, _SECONDS = 20, 10.0  # limits of timing
_PEAK = Path("/proc/self/clear_refs")  # 5 sets the process's peak to what it has
_CGROUP = Path("/sys/fs/cgroup")  # of a container (cgroup v2)
_CACHED = ("active_file", "inactive_file")  # in its memory.stat
_FULL = ("allocate memory", "not enough memory", "out of memory")  # in torch's messages


class Times(NamedTuple):
    """Seconds, and steps."""

    step: float
    validation: float
    steps: int  # of an epoch


def decide_workers(world: World, given: Collection[str]) -> list[Decision]:
    """The number of data workers, unless the user has set it. Collective."""
    if "DATA.NUM_WORKERS" in given:
        return []
    cores = max(1, available_cores() // _local_ranks())
    workers = {"DATA.NUM_WORKERS": world.agree(min(_MAX_WORKERS, cores))}
    return [Decision(workers, "one for each core, at most 8")]


class Trial:
    """Steps of a configuration on models that are thrown away, without compilation and graphs,
    without mixup, which needs an even batch, and without learning, which may diverge before a
    warm-up.

    Args:
        sources: the pictures, with the classes that they are trained with.
    """

    def __init__(self, sections: AllSections, sources: Sources, world: World) -> None:
        self.data, self.model = sections.data, sections.model
        self.sources, self.world = sources, world
        self.val_freq, self.augment = sections.run.val_freq, sections.train.augment
        augment = replace(self.augment, mixup=0.0, cutmix=0.0)
        self.train = replace(
            sections.train, augment=augment, compile=False, graph=False, base_lr=0.0
        )

    def decide_batch(self, largest: int) -> list[Decision]:
        """The largest batch that fits into every rank's memory. Collective.

        Args:
            largest: the largest batch to try, in pictures over all ranks, a power of two; 0:
                DATA.BATCH_SIZE is given.

        Raises:
            UserError: on every rank, if one picture does not fit into a rank's memory.
        """
        if not largest:
            return []
        limit = max(1, largest // self.world.size)
        found = self.world.on_every_rank(lambda: self._largest_batch(limit))
        size = min(self.world.gather(found))
        reason = "a power of two from 8 to 128, with 20 steps an epoch if the pictures are enough"
        if size < limit:
            reason = "twice as many pictures might not fit into memory"
        decisions = [Decision({"DATA.BATCH_SIZE": size}, reason)]
        if size == 1 and (self.augment.mixup or self.augment.cutmix):
            alone = {"AUG.MIXUP": 0.0, "AUG.CUTMIX": 0.0}
            decisions.append(Decision(alone, "one picture cannot be mixed"))
        return decisions

    def _largest_batch(self, limit: int) -> int:
        """As `largest_fitting`, with steps of the configured model on noise.

        Raises:
            UserError: a batch of 1 does not fit.
        """
        device, classes = self.world.device, len(self.sources.class_names)
        channels, side = self.model.in_chans, self.model.img_size
        _free_memory(device)
        free, before = free_memory(device), _used_memory(device)
        step: TrainingStep | None = None

        def peak_of(size: int) -> int:
            nonlocal step
            if step is None:
                step = self.step(classes)
            images = torch.randn(size, channels, side, side)
            step.run([Batch(images, torch.arange(size) % classes, [])], 0)
            return peak_memory(device) - before

        fitting = largest_fitting(peak_of, limit, free)
        if not fitting:
            raise UserError(
                f"a batch of 1 picture of {side} px does not fit into the {free / 2**30:.3g} GiB of"
                " free memory; try --opts TRAIN.USE_CHECKPOINT True, a smaller DATA.IMG_SIZE, or"
                " other weights (MODEL.PRETRAINED)"
            )
        return fitting

    def step(self, classes: int) -> TrainingStep:
        """A step of this rank alone."""
        model = build_model(self.model, classes)
        step = TrainingStep(self.train, World(0, 1, self.world.device), model, classes)
        step.train()
        return step

    def times(self) -> Times:
        """The times of the slowest rank, by a few steps on the training's own pictures; the first
        one, which may compile kernels, does not count. Collective.

        Raises:
            UserError: on every rank, if the pictures cannot be used.
        """
        world, accumulation = self.world, self.train.accumulation_steps
        data = world.on_every_rank(
            lambda: build_data(self.data, world.rank, world.size, self.sources)
        )
        with closing(data):
            steps = steps_per_epoch(accumulation, len(data.train_loader))
            step = self.step(data.num_classes)
            seconds_per_step, waited, batch = _time_steps(step, data, accumulation)
        seconds_per_batch = max(_time_forward(step, batch), waited)
        seconds = len(data.val_loader) * seconds_per_batch
        times = max(world.gather(Times(seconds_per_step, seconds, steps)))
        del step
        _free_memory(world.device)
        return times

    def decide_length(
        self, times: Times, elapsed: float, given: Collection[str] = ()
    ) -> tuple[list[Decision], float]:
        """The epochs, or steps, that fit into TRAIN.MINUTES, and the seconds that they take.

        Args:
            elapsed: seconds since the program began.
            given: keys that the user has set, which stay as they are.
        """
        train, decisions, again = self.train, [], 1.0
        if train.on_all:  # the same on all pictures, without validations
            again += 1 / (1 - self.data.val_split)
        plan = _Plan(train.epochs, train.warmup_epochs, train.max_steps, self.val_freq)
        left, shorter = (60 * train.minutes - elapsed) / again, plan
        if train.minutes and plan.seconds(times, train.probe) > left:
            shorter = plan.within(left, times, given)
        if shorter.epochs != plan.epochs:
            epochs = {"TRAIN.EPOCHS": shorter.epochs, "TRAIN.WARMUP_EPOCHS": shorter.warmup_epochs}
            decisions.append(Decision(epochs, "as many as fit into TRAIN.MINUTES"))
        if shorter.max_steps != plan.max_steps:
            epoch = in_words(times.step * times.steps)
            steps = {"TRAIN.MAX_STEPS": shorter.max_steps}
            decisions.append(Decision(steps, f"an epoch takes {epoch}"))
        return decisions, shorter.seconds(times, train.probe) * again


class _Plan(NamedTuple):
    """How long a training is."""

    epochs: int
    warmup_epochs: int
    max_steps: int  # 0: no limit
    val_freq: int

    def seconds(self, times: Times, probe: bool) -> float:
        """The duration, with a validation before the first step after a probe."""
        steps = times.steps * self.epochs
        if self.max_steps:
            steps = min(steps, self.max_steps)
        validations = math.ceil(steps / times.steps / self.val_freq) + probe
        return steps * times.step + validations * times.validation

    def within(self, left: float, times: Times, given: Collection[str]) -> "_Plan":
        """With as many epochs, or steps, as take `left` seconds."""
        plan, epoch = self, times.step * times.steps
        left -= times.validation
        fitting = int(left / (epoch + times.validation / self.val_freq))
        if "TRAIN.EPOCHS" not in given:
            epochs = max(1, min(self.epochs, fitting))
            plan = plan._replace(epochs=epochs, warmup_epochs=min(self.warmup_epochs, epochs // 2))
        if fitting < 1 and "TRAIN.MAX_STEPS" not in given:
            plan = plan._replace(max_steps=max(1, int(left / times.step)))
        return plan


def largest_fitting(peak_of: Callable[[int], int], limit: int, free: int) -> int:
    """The largest power of two up to `limit` whose memory fits, found by trying 1, 2, 4, ...; 0 if
    a batch of 1 does not fit.

    Args:
        peak_of: runs a step of so many pictures, and returns the bytes that it took. It raises a
            MemoryError or torch's errors if memory is full.
        free: bytes of free memory.
    """
    fitting = 0
    size = 1
    while size <= limit:
        try:
            peak = peak_of(size)
        except (RuntimeError, MemoryError) as error:
            is_full = isinstance(error, MemoryError) or any(words in str(error) for words in _FULL)
            if not is_full:
                raise
            break
        if peak > _USED * free:
            break
        fitting = size
        size *= 2
        if 2 * peak > _USED * free:  # the next one would take up to twice as much
            break
    return fitting


def _time_steps(step: TrainingStep, data: Data, accumulation: int) -> tuple[float, float, Batch]:
    """Mean seconds of a step and of waiting for a batch, and a batch."""
    data.set_epoch(0)
    batches = iter(data.train_loader)
    count, waited = 0, 0.0
    began = started = time.perf_counter()
    for number in range(_STEPS):
        asked = time.perf_counter()
        accumulated = list(itertools.islice(batches, accumulation))
        if len(accumulated) < accumulation:
            break
        last = accumulated[-1]
        waited += time.perf_counter() - asked
        step.run(accumulated, number)
        count += 1
        now = time.perf_counter()
        if number == 0 and len(data.train_loader) >= 2 * accumulation:
            count, waited, began = 0, 0.0, now
        elif now - started > _SECONDS:
            break
    seconds = time.perf_counter() - began
    return seconds / count, waited / count / accumulation, last


@torch.inference_mode()
def _time_forward(step: TrainingStep, batch: Batch) -> float:
    """Seconds of a batch in evaluation."""
    step.model.eval()
    images = batch.images.to(step.world.device)
    for _ in range(2):  # the first pass may compile kernels
        began = time.perf_counter()
        with step.autocast():
            step.model(images).cpu()  # waits for the device
    return time.perf_counter() - began


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take: of the GPU, or its share of what the machine, the
    container and the limit of `ulimit -v` have left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [psutil.virtual_memory().available]
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        free.append(_free_memory_of_container())
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        free.append(limit - psutil.Process().memory_info().vms)
    return max(0, min(free)) // _local_ranks()


def _local_ranks() -> int:
    """The number of ranks on this machine, which share its cores and memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _free_memory_of_container() -> int:
    """Bytes below the limit of the container. Files in the system's cache do not count, since it
    gives their memory back."""
    most, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    fields = map(str.split, (_CGROUP / "memory.stat").read_text().splitlines())
    return most - used + sum(int(size) for name, size in fields if name in _CACHED)


def _used_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def _free_memory(device: torch.device) -> None:
    """Return what is not used any more, and measure peaks anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # only Linux has it
        _PEAK.write_text("5")
