"""The records of a run: progress bar, summary.json, config.yaml, and the events that its sinks
write."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from yacs.config import CfgNode

from moe_core import RoutingStats, moe_layers
from moe_core.files import atomic_write
from swinv2_moe.checkpoints.saver import Cost
from swinv2_moe.config import flatten
from swinv2_moe.data.build import Loader
from swinv2_moe.data.samplers import ValSampler
from swinv2_moe.files import parse_yaml
from swinv2_moe.ranks.world import World
from swinv2_moe.routing_pictures import columns, figure_pixels, pictures_figure
from swinv2_moe.tables import Bar, Console
from swinv2_moe.train.routing import sample_choices
from swinv2_moe.train.sinks import Event, EventLog, Lines, Mark, Sink, TensorBoard, plain
from swinv2_moe.train.trackers import SERVICES, CallingHandler, Service

_PICTURES = 4  # validation images whose routing the tracker shows


def _records(method: Callable) -> Callable:
    """Decorator for the writing methods of Recorder. On ranks other than the main rank, the method
    does nothing. If writing fails, for example because the disk is full, the record is lost and the
    run continues."""

    @wraps(method)
    def guarded(self: "Recorder", *args, **kwargs) -> None:
        try:
            if self.active:
                method(self, *args, **kwargs)
        except OSError as error:
            self.lose(error)

    return guarded


class Recorder:
    """Writes to a run directory and to the terminal on the main rank. On other ranks it does
    nothing."""

    def __init__(self, directory: Path, world: World, step: int, tracker: str = "") -> None:
        """Continue the records after `step`.

        A resumed run repeats the later steps. Therefore their records are removed, except from the
        event log and the service.

        Args:
            tracker: the value of TRACKER.
        """
        self.directory, self.active, self.losing = directory, world.is_main, False
        self.sinks: list[Sink] = []
        self.finished = True
        self.console = Console(quiet=not self.active)
        if not self.active:
            return
        directory.mkdir(parents=True, exist_ok=True)
        others: list[Sink] = []
        if tracker in SERVICES:  # before TensorBoard's writer, which W&B patches
            others.append(Service(directory, tracker, self.print_lines))
        if tracker == "mlperf":
            others.append(EventLog(directory / "events.log"))
        lines = Lines(directory / "metrics.jsonl", step)
        self.sinks = [lines, TensorBoard(directory, step), *others]

    @_records
    def close(self) -> None:
        with ExitStack() as stack:
            for sink in reversed(self.sinks):  # W&B reads what TensorBoard's writer has closed
                stack.callback(sink.close, self.finished)

    @_records
    def write(self, event: Event) -> None:
        """Write an event to all sinks."""
        for sink in self.sinks:
            sink.write(event)

    def print_lines(self, *lines: str) -> None:
        """Print lines at the terminal."""
        self.console.print(*lines)

    def lose(self, error: OSError) -> None:
        """Report the first record that could not be written."""
        if not self.losing:
            self.print_lines(
                f"{self.directory} cannot be written, what is recorded from now on may be lost:"
                f" {error}"
            )
        self.losing = True

    @contextmanager
    def engine_log(self) -> Iterator[None]:
        """Print moe_core's log messages (kernels, decided strategies) until the end of the
        block."""
        logger = logging.getLogger("moe_core")
        handler = CallingHandler(self.print_lines, logging.INFO)
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

    @_records
    def config(self, text: str) -> None:
        """Write the complete configuration, as YAML."""
        with atomic_write(self.directory / "config.yaml") as file:
            file.write(text.encode())
        self.write(Event(config=flatten(CfgNode(parse_yaml(text)))))

    @_records
    def begin(self, environment: dict, step: int, steps_per_epoch: int) -> None:
        """Begin a part of the run after `step`: record its environment, and remove the summary of
        an earlier part."""
        self.finished = False
        (self.directory / "summary.json").unlink(missing_ok=True)
        line = {"step": step, "steps_per_epoch": steps_per_epoch, "environment": environment}
        self.write(Event(step, line))

    @_records
    def summary(self, values: dict) -> None:
        """Write the summary of the finished run."""
        self.finished = True
        with atomic_write(self.directory / "summary.json") as file:
            file.write(f"{json.dumps(plain(values), indent=1)}\n".encode())

    def step(self, values: dict, routing: dict[str, RoutingStats]) -> None:
        """Record a logged step.

        Args:
            values: `step`, `epoch` and other values of the step.
            routing: the statistics of each MoE layer in this step.
        """
        if not self.active:
            return
        layers = {name: _load(stats) for name, stats in routing.items()}
        if layers:
            values["moe/dropped_share"] = dropped_share(routing.values())
            for key in ("entropy", "load_max"):
                values[f"moe/{key}"] = float(np.mean([layer[key] for layer in layers.values()]))
            needed = [layer["needed_factor"] for layer in layers.values()]
            values["moe/needed_factor"] = max(needed)
        line = dict(values)
        if layers:
            line["moe_layers"] = layers
        scalars = tagged("train", values)
        loads = {}
        for name, layer in layers.items():
            scalars |= tagged(name, layer)
            loads[f"{name}/expert_load"] = layer["load"]
        self.write(Event(values["step"], line, scalars=scalars, loads=loads))

    def epoch(self, values: dict, step: int) -> None:
        """Record the end of an epoch: `values` has `epoch`, `train_loss`, `val_top1`, ..."""
        self.write(Event(step, {"step": step} | values, scalars=tagged("epoch", values)))

    def strategies(self, events: list[dict], step: int) -> None:
        """Write one line for each decision of the tuners up to `step` (tuning.py)."""
        for found in events:
            event = Event(step, {"step": step, "strategy": found})
            # TensorBoard's tags allow only these characters
            layers = re.sub(r"\W+", "_", found["layers"])
            event.texts = {f"strategy/{layers}": f"{found['to']}, {found['ms']} ms"}
            self.write(event)

    def mark(self, key: str, value: object = None, at: float | None = None, **metadata) -> None:
        """Write a line to the event log, if the run has one. Arguments as of `Mark`."""
        self.write(Event(mark=Mark(key, value, at, metadata)))

    @contextmanager
    def interval(self, name: str, **metadata) -> Iterator[None]:
        """Write `<name>_start` to the event log, and `<name>_stop` at the end of the block, also
        after an exception."""
        self.mark(f"{name}_start", **metadata)
        try:
            yield
        finally:
            self.mark(f"{name}_stop", **metadata)

    def checkpoint(self, cost: Cost) -> None:
        """Record the cost of a save on the main rank."""
        values = {"stall_seconds": cost.stall, "seconds": cost.seconds, "bytes": cost.bytes}
        self.write(Event(cost.step, scalars=tagged("checkpoint", values)))

    @contextmanager
    def routing(
        self,
        model: nn.Module,
        loader: Loader[ValSampler],
        mean: Sequence[float],
        std: Sequence[float],
        step: int,
    ) -> Iterator[None]:
        """Show the routing of four images in the tracker. Put a validation of `model` on `loader`
        in the block.

        The images are the same in each validation. Beside each image, one picture for each layer
        shows the patches painted with the experts that they chose.

        The forward passes are those of the validation, with the capacity of evaluation. Dropped
        choices are not marked. Only images of the main rank are used. This does not communicate
        with other ranks.
        """
        if not self.active or not moe_layers(model):
            yield
            return
        with sample_choices(model, len(loader.sampler), _PICTURES) as sample:
            yield
        if not sample.choices:  # of a model whose tokens have no known places
            return
        choices = {name: torch.stack(ids) for name, ids in sample.choices.items()}
        pictures = columns(torch.stack(sample.images), choices, mean, std)
        num_experts = max(layer.config.num_experts for layer in moe_layers(model).values())
        figure = pictures_figure(pictures, [""] * len(sample.images), list(choices), num_experts)
        self.write(Event(step, pictures={"routing": figure_pixels(figure)}))

    def bar(self, description: str, total: int, done: int = 0) -> Bar:
        """A progress bar for one epoch."""
        return Bar(self.console, description, total, done, visible=self.active)


def dropped_share(stats: Iterable[RoutingStats]) -> float:
    """The share of the choices in one or more layers whose expert was full; 0 if there were no
    choices."""
    stats = list(stats)
    choices = torch.stack([of_layer.counts.sum() for of_layer in stats]).double()
    shares = torch.stack([of_layer.dropped_share for of_layer in stats]).double()
    return float(choices @ shares / choices.sum().clamp(min=1))


def _load(stats: RoutingStats) -> dict:
    """A layer's routing as plain numbers; load is relative to an even share, which is 1."""
    counts = stats.counts.double()
    load = (counts * len(counts) / counts.sum().clamp(min=1)).tolist()
    return {
        "dropped_share": float(stats.dropped_share),
        "entropy": float(stats.entropy),
        "load_max": max(load),
        "load_min": min(load),
        "load": [round(value, 4) for value in load],
        "needed_factor": float(stats.needed_factor),
    }


def tagged(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl, or of a layer in it, by tag.

    `step` and `epoch` are omitted, and so is `load`, a list.
    """
    numbers = {}
    for key, value in values.items():
        tag = key
        if "/" not in key:
            tag = f"{prefix}/{key}"
        if key not in ("step", "epoch", "load"):
            numbers[tag] = float(value)
    return numbers
