"""A roofline of a training step: how close each phase is to the limits of this machine (doi
10.1145/1498765.1498785).

swinv2_moe.measure.phases divides a step into phases, times them by torch's profiler, and counts
their work. Peaks are measured: the product of two large matrices in the step's dtype, a copy of
more memory than a cache holds, an all-to-all of large messages, and reading and writing a file in
the output directory. The roof of a phase is the time that its most limiting resource would take at
its peak rate. Each round runs a step with the profiler, a step without it, and the peaks. The step
uses one batch, no mixup, no averaged weights, and a learning rate of 0.
"""

import itertools
import logging
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from yacs.config import CfgNode

from moe_core.files import fsync
from moe_core.parallel import ExpertGroup, all_to_all
from swinv2_moe.config import AllSections, all_sections, flatten, resolve_batch_size, run_config
from swinv2_moe.data.build import Data, build_data
from swinv2_moe.data.datasets import Batch
from swinv2_moe.errors import UserError
from swinv2_moe.measure import phases
from swinv2_moe.measure.phases import PHASES, Work
from swinv2_moe.measure.rounds import interleaved, machine, matrix_product
from swinv2_moe.measure.spread import Times, ratios
from swinv2_moe.models import build_model
from swinv2_moe.plots import COLOURS, new_figure, save_png, tidy
from swinv2_moe.train.agreement import check_same_start
from swinv2_moe.train.distributed import World, expert_group, open_world, seed_everything
from swinv2_moe.train.optim import without_slow_amp
from swinv2_moe.train.progress import steps_per_epoch
from swinv2_moe.train.section import TrainConfig
from swinv2_moe.train.step import TrainingStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_log = logging.getLogger(__name__)
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
        """The limiting resource, and its share of the roof; "" and 0 without counted work."""
        return max(self.shares().items(), key=lambda pair: pair[1], default=("", 0.0))

    def rate(self, resource: str) -> float:
        """The median rate of a resource, in FLOP/s or bytes/s."""
        amount = getattr(self.work, resource)
        if not amount:  # "other" may take no time
            return 0.0
        return 1e3 * amount / statistics.median(self.times)


@dataclass(frozen=True)
class Roofline:
    title: str
    machine: str
    # without phases that take no time: a dense model has no router, a single rank no exchange
    phases: dict[str, Phase]
    # "written": writing to the disk, for the checkpoint; "disk": reading from it
    peaks: dict[str, Peak]
    step: Times  # of the whole step
    stall: float  # seconds that training waits for the last checkpoint
    warmup: int

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
        step = {"run": self.step.run, "ms": self.step}
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
        sections, amp_note = without_slow_amp(sections, world)
        for line in amp_note * world.is_main:
            _log.warning("%s", line)
        images = world.on_every_rank(lambda: build_data(sections.data, world.rank, world.size))
        step = _step(sections, images, world)
        before = machine(world.device.type)
        with closing(images), scratch(output, world) as directory:
            probes = _probes(step, directory / f"file-{world.rank}")
            batches = phases.endless(images)
            run_step = _run_of(step, next(batches))
            work = phases.count(step.model, run_step)
            data = phases.data(batches)
            profiled: list[dict[str, float]] = []

            def run_profiled() -> None:
                profiled.append(phases.milliseconds(step.model, run_step, world.device.type))

            runs = {"data": data.run, "step": run_step, "profiled": run_profiled}
            for name, probe in probes.items():
                if name != "written":
                    runs[f"peak {name}"] = probe.run
            times = interleaved(runs, rounds, warmup, world)
            times |= _phase_times(profiled[warmup:], times["step"], world)
            policy = sections.checkpoint
            with phases.checkpoint(step, policy, directory / "checkpoints") as (save, costs):
                runs = {"checkpoint": save.run, "peak written": probes["written"].run}
                times |= interleaved(runs, _SAVES, 0, world)
    if not world.is_main:
        return None
    peaks = {
        name: Peak(probe.what, probe.amount, times[f"peak {name}"])
        for name, probe in probes.items()
    }
    work |= {"data": data.work, "checkpoint": save.work}
    resources = {name: peak for name, peak in peaks.items() if name != "written"}
    measured = {}
    for name in PHASES:
        # under load the operators may take longer than the step without the profiler
        if name == "other" or (name in times and min(times[name]) > 0):
            measured[name] = Phase(work.get(name, Work()), times[name], resources)
    measured["checkpoint"] = replace(measured["checkpoint"], peaks={"disk": peaks["written"]})
    title = _title(sections, world.size)
    return Roofline(title, before, measured, peaks, times["step"], costs[-1].stall, warmup)


def _step(sections: AllSections, images: Data, world: World) -> TrainingStep:
    """The measured step.

    Raises:
        UserError: the epoch has no whole step.
    """
    # the profiler names no part of a graph
    train, experts = replace(sections.train, graph=False), sections.model.experts
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
        f"{model.title}, {model.experts.num_experts} experts, {data.img_size} px,"
        f" {_dtype(sections.train)}:"
        f" {data.batch_size} images of {data.path or data.dataset} a step on {where}"
    )


def _dtype(config: TrainConfig) -> str:
    if config.amp_enable:
        return config.amp_dtype
    return "float32"


def _run_of(step: TrainingStep, batch: Batch) -> Callable[[], object]:
    """A function that runs a step on the batch, on the device. The first step was run before: it
    creates the moments and DDP's final buckets."""
    device = step.world.device
    batch = Batch(batch.images.to(device), batch.targets.to(device), [])
    numbers = itertools.count()

    def run_step() -> None:
        step.run([batch], next(numbers))

    run_step()
    return run_step


def _phase_times(profiled: list[dict[str, float]], step: Times, world: World) -> dict[str, Times]:
    """The time of each phase in each round, of the slowest rank; "other" is what is left of the
    step without the profiler."""
    rounds_of_ranks = world.gather(profiled)
    names = [name for name in PHASES if any(name in found for found in profiled)]
    times = {}
    for name in names:
        slowest = [
            max(found.get(name, 0.0) for found in round_of_ranks)
            for round_of_ranks in zip(*rounds_of_ranks, strict=True)
        ]
        times[name] = Times(slowest, step.run)
    of_step = [times[name] for name in names if name != "exchange"]
    rests = [ms - sum(of_round) for ms, *of_round in zip(step, *of_step, strict=True)]
    times["other"] = Times([max(rest, 0.0) for rest in rests], step.run)
    return times


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
    name = ""
    if world.is_main:
        name = tempfile.mkdtemp(prefix=".roofline-", dir=output)
    directory = Path(world.agree(name))
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


# The figure


def draw(roofline: Roofline, path: Path) -> None:
    """Write a PNG: the phases that compute FLOPs under the roof, and each phase's shares of the
    step and of its roof.

    Raises:
        UserError: the file cannot be written.
    """
    figure = new_figure(12, 5.2)
    roof, bars = figure.subplots(1, 2, width_ratios=[1.25, 1])
    _draw_roof(roof, roofline)
    _draw_shares(bars, roofline)
    figure.suptitle(roofline.title, fontsize=10)
    save_png(figure, path)


def _draw_roof(axes: "Axes", roofline: Roofline) -> None:
    peak, bandwidth = roofline.peaks["flops"].rate, roofline.peaks["memory"].rate
    points = {name: phase for name, phase in roofline.phases.items() if phase.work.flops}
    intensities = [phase.work.flops / phase.work.memory for phase in points.values()]
    corner = peak / bandwidth
    low, high = min([*intensities, corner]) / 3, max([*intensities, corner]) * 10
    corners = [low, corner, high]
    axes.plot(corners, [min(peak, bandwidth * x) / 1e9 for x in corners], color="0.3", label="roof")
    text: dict[str, Any] = {"textcoords": "offset points", "ha": "right"}
    axes.annotate(f"{peak / 1e9:,.0f} GFLOP/s", (high, peak / 1e9), (0, 4), **text)
    middle = math.sqrt(low * corner)
    place = (middle, bandwidth * middle / 1e9)
    axes.annotate(f"{bandwidth / 1e9:,.1f} GB/s", place, (-8, 6), **text)
    for i, (intensity, name) in enumerate(sorted(zip(intensities, points, strict=True))):
        rate = points[name].rate("flops") / 1e9
        colour = COLOURS[PHASES.index(name) % len(COLOURS)]
        axes.plot(intensity, rate, "o", color=colour)
        offset = (0, 7)
        if i % 2:  # alternately above and below the point, since neighbours may be close
            offset = (0, -14)
        text = {"textcoords": "offset points", "ha": "center", "color": colour}
        axes.annotate(name, (intensity, rate), offset, **text)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of memory", ylabel="GFLOP/s")
    tidy(axes)


def _draw_shares(axes: "Axes", roofline: Roofline) -> None:
    names = list(reversed(roofline.phases))
    bounds = [roofline.phases[name].bound() for name in names]
    of_step = [roofline.share_of_step(name) or 0 for name in names]
    of_roof = [share for _, share in bounds]
    _draw_bars(axes, of_step, 0.2, "of the step's time", COLOURS[0])
    _draw_bars(axes, of_roof, -0.2, "of its roof", COLOURS[5])
    labels = [f"{name}\n({resource})" for name, (resource, _) in zip(names, bounds, strict=True)]
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.set_xlabel("%; in brackets what bounds it")
    axes.set_xlim(0, 1.15 * axes.get_xlim()[1])
    tidy(axes)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", alpha=0.3)
    # above the bars
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))


def _draw_bars(
    axes: "Axes", shares: Sequence[float], offset: float, label: str, colour: str
) -> None:
    """Horizontal bars, one for each phase, shifted up by `offset`. A share of 0 has no number."""
    places = [i + offset for i in range(len(shares))]
    bars = axes.barh(places, [100 * share for share in shares], 0.38, color=colour, label=label)
    texts = [f"{share:.1%}" if share else "" for share in shares]
    axes.bar_label(bars, texts, padding=3, fontsize=8)
