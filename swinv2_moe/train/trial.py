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
from yacs.config import CfgNode

from swinv2_moe.config import AllSections, all_sections
from swinv2_moe.config.checks import check_config
from swinv2_moe.data.build import Data, build_data
from swinv2_moe.data.datasets import Batch
from swinv2_moe.data.sources import Sources, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model
from swinv2_moe.ranks.environment import peak_memory
from swinv2_moe.ranks.precision import without_slow_amp
from swinv2_moe.ranks.world import World
from swinv2_moe.tables import in_words
from swinv2_moe.threads import available_cores
from swinv2_moe.train.progress import steps_per_epoch
from swinv2_moe.train.step import TrainingStep
from swinv2_moe.train.teacher import Teacher

_USED = 0.8  # share of the free memory that a step may take
_MAX_WORKERS = 8
_STEPS, _SECONDS = 20, 10.0  # limits of timing
_PEAK = Path("/proc/self/clear_refs")  # 5 sets the process's peak to what it has
_CGROUP = Path("/sys/fs/cgroup")  # of a container (cgroup v2)
_CACHED = ("active_file", "inactive_file")  # in its memory.stat
_FULL = ("allocate memory", "not enough memory", "out of memory")  # in torch's messages


def settle(
    config: CfgNode,
    largest: int,
    world: World,
    teacher: Teacher | None = None,
    elapsed: float = 0.0,
    given: Collection[str] = (),
) -> tuple[CfgNode, list[str]]:
    """The configuration with the largest batch that fits into every rank's memory, the number of
    data workers and the epochs that fit into TRAIN.MINUTES, and lines about them and the duration
    of the training. Collective.

    Args:
        largest: the largest batch to try, in pictures over all ranks, a power of two; 0:
            DATA.BATCH_SIZE is given.
        teacher: that of the training, if any. It must know the classes of the pictures.
        elapsed: seconds since the program began.
        given: keys that the user has set, which stay as they are.

    Raises:
        UserError: on every rank, if the pictures cannot be used, or one does not fit into a rank's
            memory.
    """
    sources = world.on_every_rank(lambda: _sources(config, teacher))
    config, lines = config.clone(), []
    config.defrost()
    if "DATA.NUM_WORKERS" not in given:
        cores = max(1, available_cores() // _local_ranks())
        config.DATA.NUM_WORKERS = world.agree(min(_MAX_WORKERS, cores))
        lines.append(f"  DATA.NUM_WORKERS {config.DATA.NUM_WORKERS}: one for each core, at most 8")
    if largest:
        limit = max(1, largest // world.size)
        classes = len(sources.class_names)
        found = world.on_every_rank(lambda: _try_batches(config, limit, classes, world.device))
        size = min(world.gather(found))
        config.DATA.BATCH_SIZE = size
        reason = "at least 20 steps an epoch, at most 128 pictures"
        if size < limit:
            reason = "twice as many pictures might not fit into memory"
        lines.append(f"  DATA.BATCH_SIZE {size}: {reason}")
        if size == 1 and (config.AUG.MIXUP or config.AUG.CUTMIX):
            config.AUG.MIXUP = config.AUG.CUTMIX = 0.0
            lines.append("  AUG.MIXUP 0.0, AUG.CUTMIX 0.0: one picture cannot be mixed")
    check_config(config)
    config.freeze()
    times = max(world.gather(_times(config, sources, world)))
    config, shortened = _within_minutes(config, times, world.agree(elapsed), given)
    lines += shortened
    seconds = _duration(config, times)
    beside = ""
    if teacher is not None:
        beside = ", and the time of the teacher, which is not tried"
    lines.append(f"expected duration: {in_words(seconds)}{beside}")
    _free_memory(world.device)
    return config, lines


def _sources(config: CfgNode, teacher: Teacher | None) -> Sources:
    """The pictures, with the classes that they are trained with."""
    sources = load_sources(all_sections(config).data)
    if teacher is None:
        return sources
    if config.TRAIN.DISTILL.CLASSES == "teacher":
        return teacher.relabel(sources)
    if sources.class_names != teacher.class_names:
        teacher.numbers(sources.class_names)
    return sources


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


def _try_batches(config: CfgNode, limit: int, classes: int, device: torch.device) -> int:
    """As `largest_fitting`, with steps of the configured model on noise.

    Raises:
        UserError: a batch of 1 does not fit.
    """
    sections = _sections(config, device)
    _free_memory(device)
    free, before = free_memory(device), _used_memory(device)
    step: TrainingStep | None = None

    def peak_of(size: int) -> int:
        nonlocal step
        if step is None:
            step = _step(sections, classes, device)
        channels, side = sections.model.in_chans, sections.model.img_size
        images = torch.randn(size, channels, side, side)
        step.run([Batch(images, torch.arange(size) % classes, [])], 0)
        return peak_memory(device) - before

    fitting = largest_fitting(peak_of, limit, free)
    if not fitting:
        raise UserError(
            f"a batch of 1 picture of {sections.model.img_size} px does not fit into the"
            f" {free / 2**30:.3g} GiB of free memory; try --opts TRAIN.USE_CHECKPOINT True, a"
            " smaller DATA.IMG_SIZE, or other weights (MODEL.PRETRAINED)"
        )
    return fitting


def _sections(config: CfgNode, device: torch.device) -> AllSections:
    """The sections of one rank, without compilation and graphs, without mixup, which needs an even
    batch, and without learning, which may diverge before a warm-up."""
    sections, _ = without_slow_amp(all_sections(config), World(0, 1, device))
    augment = replace(sections.train.augment, mixup=0.0, cutmix=0.0)
    train = replace(sections.train, augment=augment, compile=False, graph=False, base_lr=0.0)
    return replace(sections, train=train)


def _step(sections: AllSections, classes: int, device: torch.device) -> TrainingStep:
    model = build_model(sections.model, classes)
    step = TrainingStep(sections.train, World(0, 1, device), model, classes)
    step.wrapped.train()
    return step


def within_minutes_of(config: CfgNode, given: Collection[str], world: World) -> CfgNode:
    """The configuration without the limit TRAIN.MINUTES on a GPU, unless the user has given it."""
    if world.device.type == "cpu" or "TRAIN.MINUTES" in given:
        return config
    config = config.clone()
    config.defrost()
    config.TRAIN.MINUTES = 0.0
    config.freeze()
    return config


class _Times(NamedTuple):
    """Seconds, and steps."""

    step: float
    validation: float
    steps: int  # of an epoch


def _within_minutes(
    config: CfgNode, times: _Times, elapsed: float, given: Collection[str]
) -> tuple[CfgNode, list[str]]:
    """The configuration with fewer epochs, or steps, where those that were chosen would take longer
    than TRAIN.MINUTES."""
    left = 60 * config.TRAIN.MINUTES - elapsed
    if not config.TRAIN.MINUTES or _duration(config, times) <= left:
        return config, []
    config = config.clone()
    config.defrost()
    train, lines = config.TRAIN, []
    epoch = times.step * times.steps
    fitting = int((left - times.validation) / (epoch + times.validation / config.VAL_FREQ))
    if "TRAIN.EPOCHS" not in given:
        train.EPOCHS = max(1, min(train.EPOCHS, fitting))
        train.WARMUP_EPOCHS = min(train.WARMUP_EPOCHS, train.EPOCHS // 2)
        lines.append(f"  TRAIN.EPOCHS {train.EPOCHS}: as many as fit into TRAIN.MINUTES")
    if fitting < 1 and "TRAIN.MAX_STEPS" not in given:
        train.MAX_STEPS = max(1, int((left - times.validation) / times.step))
        lines.append(f"  TRAIN.MAX_STEPS {train.MAX_STEPS}: an epoch takes {in_words(epoch)}")
    config.freeze()
    return config, lines


def _duration(config: CfgNode, times: _Times) -> float:
    """Seconds of the training."""
    train = config.TRAIN
    steps = times.steps * train.EPOCHS
    if train.MAX_STEPS:
        steps = min(steps, train.MAX_STEPS)
    validations = math.ceil(steps / times.steps / config.VAL_FREQ) + train.PROBE
    return steps * times.step + validations * times.validation


def _times(config: CfgNode, sources: Sources, world: World) -> _Times:
    """The times of a few steps on the training's own pictures. The first step, which may compile
    kernels, does not count."""
    sections = _sections(config, world.device)
    data = world.on_every_rank(lambda: build_data(sections.data, world.rank, world.size, sources))
    accumulation = sections.train.accumulation_steps
    with closing(data):
        steps = steps_per_epoch(accumulation, len(data.train_loader))
        step = _step(sections, data.num_classes, world.device)
        seconds_per_step, waited, batch = _time_steps(step, data, accumulation)
    seconds_per_batch = max(_time_forward(step, batch), waited)
    return _Times(seconds_per_step, len(data.val_loader) * seconds_per_batch, steps)


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
