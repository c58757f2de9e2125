"""A roofline of a training step: how close each phase is to the limits of this machine (doi
10.1145/1498765.1498785).

swinv2_moe.measure.phases defines the phases and counts their work. Peaks are measured: the product
of two large matrices in the step's dtype, a copy of more memory than a cache holds, an all-to-all
of large messages, and reading and writing a file in the output directory. The roof of a phase is
the time that its most limiting resource would take at its peak rate. Phases and peaks are timed in
the same interleaved rounds. The rounds also time a whole step, to compare it with the sum of the
phases. The step uses one batch, no mixup, no averaged weights, and a learning rate of 0.
"""

import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from yacs.config import CfgNode

from moe_core.files import fsync
from moe_core.parallel import ExpertGroup, all_to_all
from swinv2_moe.config import (
    AllSections,
    TrainConfig,
    all_sections,
    flatten,
    resolve_batch_size,
    run_config,
)
from swinv2_moe.data import Batch, Data, build_data
from swinv2_moe.errors import UserError
from swinv2_moe.measure import phases
from swinv2_moe.measure.rounds import interleaved, machine, matrix_product
from swinv2_moe.measure.spread import Times, ratios, summed
from swinv2_moe.measure.work import Task, Work
from swinv2_moe.models import build_model
from swinv2_moe.train.agreement import check_same_start
from swinv2_moe.train.distributed import World, expert_group, open_world, seed_everything
from swinv2_moe.train.progress import steps_per_epoch
from swinv2_moe.train.step import TrainingStep

PHASES = ("data", "trunk", "router", "dispatch", "experts", "exchange", "optimiser", "checkpoint")
OF_THE_STEP = PHASES[1:-1]

_SAVES = 3
_FILE = 128 * 2**20  # size of the file that is written and read
_COPY = 256 * 2**20  # size of the copy
_MESSAGES = {"cpu": 2**22, "cuda": 2**26}  # bytes of a rank's data in the all-to-all


@dataclass(frozen=True)
class Peak:
    """A measured peak: `amount` FLOPs or bytes took each of `times`."""

    what: str
    amount: float
    times: Times

    @property
    def rate(self) -> float:
        """The median rate, in FLOP/s or bytes/s."""
        return 1e3 * self.amount / statistics.median(self.times)


@dataclass(frozen=True)
class Phase:
    """The work and times of a phase, and the peaks of the resources that it uses."""

    work: Work
    times: Times
    peaks: dict[str, Peak]  # by the names of Work's fields

    def shares(self) -> dict[str, float]:
        """The share of the roof by resource: the time that the resource would take at its peak,
        divided by the phase's time. Medians of the rounds.

        Raises:
            ValueError: a peak was timed in other rounds.
        """
        work = {
            name: amount
            for name, amount in asdict(self.work).items()
            if amount and name in self.peaks
        }
        return {
            name: statistics.median(ratios(self.peaks[name].times, self.times))
            * amount
            / self.peaks[name].amount
            for name, amount in work.items()
        }

    def bound(self) -> tuple[str, float]:
        """The limiting resource, and its share of the roof."""
        return max(self.shares().items(), key=lambda pair: pair[1])

    def rate(self, resource: str) -> float:
        """The median rate of a resource, in FLOP/s or bytes/s."""
        return 1e3 * getattr(self.work, resource) / statistics.median(self.times)


@dataclass(frozen=True)
class Roofline:
    title: str
    machine: str
    # without phases that do not exist: a dense model has no router, a single rank no exchange
    phases: dict[str, Phase]
    # "written": writing to the disk, for the checkpoint; "disk": reading from it
    peaks: dict[str, Peak]
    step: Times  # of the whole step
    stall: float  # seconds that training waits for the last checkpoint
    warmup: int

    def accounted(self) -> list[float]:
        """The sum of a step's phases, divided by the time of the whole step, in each round."""
        return ratios(
            summed([phase.times for name, phase in self.phases.items() if name in OF_THE_STEP]),
            self.step,
        )

    def share_of_step(self, name: str) -> float | None:
        """The median time of a phase, divided by the time of a step. Also for data, although other
        processes do that work in parallel. None for the checkpoint."""
        if name == "checkpoint":
            return None
        return statistics.median(ratios(self.phases[name].times, self.step))

    def record(self) -> dict:
        """All values, ready for JSON; times in ms, one for each round."""
        phases = {}
        for name, phase in self.phases.items():
            bound, share = phase.bound()
            phases[name] = asdict(phase.work) | {
                "run": phase.times.run,
                "ms": phase.times,
                "bound_by": bound,
            }
            phases[name] |= {"share_of_roof": share, "share_of_step": self.share_of_step(name)}
        peaks = {
            name: {
                "what": peak.what,
                "per_second": peak.rate,
                "run": peak.times.run,
                "ms": peak.times,
            }
            for name, peak in self.peaks.items()
        }
        step = {"run": self.step.run, "ms": self.step, "accounted": self.accounted()}
        facts = {"title": self.title, "machine": self.machine, "warmup": self.warmup, "step": step}
        return facts | {"phases": phases, "peaks": peaks, "checkpoint_stall_seconds": self.stall}


def measure(config: CfgNode, output: Path, rounds: int, warmup: int) -> Roofline | None:
    """Measure a training step of `config`. Checkpoints and files are written below `output` and
    removed. Every rank calls this.

    Returns:
        On the main rank, its own work and the slowest rank's times; None on the other ranks.

    Raises:
        UserError: the data cannot be used, the strategy cannot be measured, or the disk cannot be
            written to.
    """
    run = run_config(config)
    with open_world(run.device, run.timeout) as world, world.named_errors("a collective"):
        options = {"--output": str(output), "--rounds": rounds, "--warmup": warmup}
        check_same_start(flatten(config) | options, world)
        sections = all_sections(resolve_batch_size(config, world.size))
        images = world.everywhere(lambda: build_data(sections.data, world.rank, world.size))
        step = _step(sections, images, world)
        before = machine(world.device.type)
        with scratch(output, world) as directory:
            probes = _probes(step, directory / f"file-{world.rank}")
            tasks, run_step = _tasks(step, images)
            runs = {name: task.run for name, task in tasks.items()} | {"step": run_step}
            for name, probe in probes.items():
                if name != "written":
                    runs[f"peak {name}"] = probe.run
            times = interleaved(runs, rounds, warmup, world)
            policy = sections.checkpoint
            with phases.checkpoint(step, policy, directory / "checkpoints") as (task, costs):
                tasks["checkpoint"] = task
                runs = {"checkpoint": task.run, "peak written": probes["written"].run}
                times |= interleaved(runs, _SAVES, 0, world)
    if not world.is_main:
        return None
    peaks = {
        name: Peak(probe.what, probe.amount, times[f"peak {name}"])
        for name, probe in probes.items()
    }
    resources = {name: peak for name, peak in peaks.items() if name != "written"}
    measured = {}
    for name in PHASES:
        if name == "checkpoint":
            measured[name] = Phase(tasks[name].work, times[name], {"disk": peaks["written"]})
        elif name in tasks:
            measured[name] = Phase(tasks[name].work, times[name], resources)
    title = _title(sections, world.size)
    return Roofline(title, before, measured, peaks, times["step"], costs[-1].stall, warmup)


def _step(sections: AllSections, images: Data, world: World) -> TrainingStep:
    """The measured step.

    Raises:
        UserError: the epoch has no whole step.
    """
    train, experts = sections.train, sections.model.experts
    seed_everything(sections.run.seed)
    model = build_model(sections.model, images.num_classes, expert_group(experts, world))
    steps_per_epoch(train.accumulation_steps, len(images.train_loader))
    step = TrainingStep(train, world, model, images.num_classes)
    step.wrapped.train()
    return step


def _title(sections: AllSections, num_ranks: int) -> str:
    model, data = sections.model, sections.data
    where = "one rank"
    if num_ranks > 1:
        where = f"each of {num_ranks} ranks"
    return (
        f"{model.type}, {model.experts.num_experts} experts, {data.img_size} px,"
        f" {_dtype(sections.train)}:"
        f" {data.batch_size} images of {data.path or data.dataset} a step on {where}"
    )


def _dtype(config: TrainConfig) -> str:
    if config.amp_enable:
        return config.amp_dtype
    return "float32"


def _tasks(step: TrainingStep, images: Data) -> tuple[dict[str, Task], Callable[[], object]]:
    """The phases of one batch, except the checkpoint, and the whole step."""
    batches = phases.endless(images)
    first = next(batches)
    device = step.world.device
    batch = Batch(first.images.to(device), first.targets.to(device), [])
    numbers = itertools.count()

    def run_step() -> None:
        step.run([batch], next(numbers))

    run_step()  # the first step creates the moments and DDP's final buckets
    calls, moves = phases.watch(step, batch.images)
    tasks = {"data": phases.data(batches), "trunk": phases.trunk(step, batch)}
    if calls:
        tasks["router"] = phases.router(step, calls)
        tasks["dispatch"] = phases.dispatch(moves)
        tasks["experts"] = phases.experts(step, calls)
    if step.world.size > 1:
        tasks["exchange"] = phases.exchange(step, calls, batch)
    tasks["optimiser"] = phases.optimiser(step, batch)
    return tasks, run_step


class Probe(NamedTuple):
    """A task at a limit of the machine: `amount` FLOPs or bytes in each call."""

    what: str
    amount: float
    run: Callable[[], object]


def _probes(step: TrainingStep, file: Path) -> dict[str, Probe]:
    world, dtype = step.world, _dtype(step.config)
    product, flops = matrix_product(getattr(torch, dtype), world.device)
    source = torch.ones(_COPY // 4, device=world.device)
    target = torch.zeros_like(source)
    write_file(file, _FILE)
    where = f"{_FILE >> 20} MiB in {file.parent.parent}"
    probes = {
        "flops": Probe(f"matrix product, {dtype}", flops, product),
        # counted twice: read and written
        "memory": Probe(f"copy of {_COPY >> 20} MiB", 2 * _COPY, lambda: target.copy_(source)),
        "disk": Probe(f"reading {where}", _FILE, partial(read_file, file)),
        "written": Probe(f"writing {where}, with fsync", _FILE, partial(write_file, file, _FILE)),
    }
    if world.size > 1:
        group, size = ExpertGroup(world.group), _MESSAGES[world.device.type]
        message = torch.zeros(world.size, size // 4 // world.size, device=world.device)
        sent = message.nbytes * (world.size - 1) / world.size
        what = f"all-to-all of {size >> 20} MiB a rank"
        probes["exchange"] = Probe(what, sent, lambda: all_to_all(message, group))
    return probes


@contextmanager
def scratch(output: Path, world: World) -> Iterator[Path]:
    """A new directory in `output`, the same on all ranks, removed at the end of the block."""
    directory = Path(
        world.agree(tempfile.mkdtemp(prefix=".roofline-", dir=output) if world.is_main else None)
    )
    try:
        yield directory
    finally:
        if world.is_main:
            shutil.rmtree(directory, ignore_errors=True)


def write_file(path: Path, size: int) -> None:
    """Write a file and wait until it is on the disk. Raises UserError if that fails."""
    block = os.urandom(2**20)  # random bytes, because a file system may compress zeros
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(size // len(block)):
                file.write(block)
        fsync(path)
    except OSError as error:
        raise UserError(f"--output {path.parent}: cannot be written ({error.strerror})") from error


def read_file(path: Path) -> None:
    """Read a file from the disk. The system is first asked to drop its cached pages of the file,
    which Linux does."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(2**20):
            pass
