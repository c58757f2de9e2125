"""Images/s of a model with experts compared with its dense twin: the same trunk with dense FFNs.

Each combination of mode, batch size, dtype, capacity factor and compilation is measured in one
series of interleaved rounds. In each round both models and a large matrix product of the same dtype
are timed. Only times of the same series are compared.

- Training: the step of a training run (forward, both losses, backward, clipping, update, and under
  torchrun the exchange of rows and gradients), without mixup, accumulation or averaged weights. The
  learning rate is 0, which does not change the amount of work, so that every round has the same
  weights.
- bfloat16 and float16: autocast, as in training and evaluation; the weights stay in fp32.
- Images/s: of all ranks together; a round takes as long as its slowest rank.
- MFU (model FLOPs utilisation, arXiv 2204.02311, appendix B): two FLOPs for each MAC of the batch
  (models.build, without dropped choices), three times as many in training, divided by the
  FLOPs that the matrix product reached in the same round on each rank.
- CUDA graphs (`graph`): the rounds replay the kernels of each pass, and of each step as TRAIN.GRAPH
  does. First call and peak memory are measured on passes before the capture.
- Peak memory: the memory that one untimed pass needs in addition to the memory in use before it, on
  the rank with the largest value.

The images are noise on the device. With noise, new routers of a deep model distribute the tokens
about as evenly as trained, balanced routers do with photographs. Each row reports the dropped share
and the largest load.

B images of a rank and pass, W ranks
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from yacs.config import CfgNode

from moe_core import moe_layers, prepared
from moe_core.parallel import parse_strategy
from swinv2_moe.config import (
    AllSections,
    all_sections,
    flatten,
    model_config,
    train_config,
)
from swinv2_moe.config.checks import check_settings
from swinv2_moe.data.datasets import Batch
from swinv2_moe.data.section import DataConfig
from swinv2_moe.errors import UserError
from swinv2_moe.measure.configurations import PASSES, Combination, Plan
from swinv2_moe.measure.rounds import (
    capture,
    interleaved,
    machine,
    matrix_product,
    working_memory,
)
from swinv2_moe.measure.spread import Times, latencies, quartiles, ratios
from swinv2_moe.models import Complexity, MoEModel, build_model, measure_model
from swinv2_moe.models.section import ModelConfig, count_moe_layers
from swinv2_moe.output import csv_text
from swinv2_moe.ranks.agreement import check_same_start
from swinv2_moe.ranks.parallelize import local_part
from swinv2_moe.ranks.precision import build_autocast
from swinv2_moe.ranks.world import World, expert_group, open_world, seed_everything
from swinv2_moe.train.graph import STEPS_BEFORE, check_device
from swinv2_moe.train.record import dropped_share
from swinv2_moe.train.step import TrainingStep

ASSUMED_CLASSES = 1000  # if the data determine the number of classes


@dataclass(frozen=True)
class Side:
    """The measurements of one model in one series of rounds."""

    times: Times  # ms of a pass
    size: Complexity
    first_call: float  # in seconds, including compilation
    peak_memory: int | None  # in bytes; None: not available on this system
    # bytes of the parameters and, in training, of the optimiser's state, on the main rank
    held: int


@dataclass(frozen=True)
class Row:
    """One combination: the models and the matrix product in the same rounds."""

    combination: Combination
    ranks: int
    machine: str
    moe: Side
    dense: Side
    product: Times  # ms of the matrix product, which each rank computes
    product_flops: int
    dropped: float  # share of the choices in the last pass whose expert was full
    largest_load: float  # of any expert in any layer, in units of an even share
    is_graph: bool = False  # CUDA graphs were replayed

    def sides(self) -> dict[str, Side]:
        """The models by name."""
        return {"experts": self.moe, "dense": self.dense}

    def images_per_second(self, side: Side) -> list[float]:
        """Images/s of all ranks together, in each round."""
        return [1e3 * self.combination.batch_size * self.ranks / t for t in side.times]

    def ratio(self) -> list[float]:
        """Images/s with experts divided by the dense model's images/s, in each round.

        Raises:
            ValueError: the two were not timed in the same rounds.
        """
        return ratios(self.dense.times, self.moe.times)

    def mfu(self, side: Side) -> list[float]:
        """The share of the measured peak FLOPs, in each round. Raises what `ratio` raises."""
        flops = 2 * side.size.macs * PASSES[self.combination.mode] * self.combination.batch_size
        return [ratio * flops / self.product_flops for ratio in ratios(self.product, side.times)]


def measure(plan: Plan, rounds: int, warmup: int, graph: bool | None = None) -> Iterator[Row]:
    """Measure each combination of `plan`. Every rank iterates over all combinations.

    Args:
        graph: replay CUDA graphs of passes and steps. None: on one GPU, where they can be captured.

    Yields:
        On the main rank a row, as soon as it is measured; nothing on the other ranks.

    Raises:
        UserError: experts or a strategy that do not fit the ranks; a GPU whose memory is too small;
            float16 on a CPU; with `graph`, a pass that cannot be captured.
    """
    config = plan[0][1]
    with open_world(config.DEVICE, config.TIMEOUT) as world, world.named_errors("a collective"):
        measured = {
            "combinations": [str(one) for one, *_ in plan],
            "--rounds": rounds,
            "--warmup": warmup,
            "--graph": graph,
        }
        check_same_start(flatten(config) | measured, world)
        if world.size > 1 and parse_strategy(config.MODEL.MOE.STRATEGY)[0] == "auto":
            raise UserError(
                "MODEL.MOE.STRATEGY is 'auto': its trials would be timed too; name the strategy to"
                " measure"
            )
        if world.device.type == "cpu" and any(one.dtype == "float16" for one, *_ in plan):
            raise UserError("--dtypes is 'float16', which needs a GPU: a CPU emulates its products")
        if graph:
            check_graph([combination.compile for combination, *_ in plan], world)
        sizes = [measure_model(model, _classes(model)) for model in map(model_config, plan[0][1:])]
        for combination, *configs in plan:
            is_graph = _is_graph(graph, combination, configs, world)
            is_step = is_graph and combination.mode == "training"
            configs = [all_sections(_with_graph(config, is_step)) for config in configs]
            try:
                row = _measure(combination, configs, sizes, rounds, warmup, world, is_graph)
            except torch.OutOfMemoryError as error:
                raise UserError(f"{combination}: does not fit into the GPU's memory") from error
            if world.is_main:
                yield row


def check_graph(compiled: Sequence[str], world: World) -> None:
    """Check that the passes to measure can be captured.

    Args:
        compiled: whether each pass is compiled, "off" or "on".

    Raises:
        UserError: a pass cannot be captured.
    """
    if "on" in compiled:
        raise UserError("--graph captures passes that are not compiled, but --compile is 'on'")
    check_device(world, "--graph")


def _is_graph(
    asked: bool | None, combination: Combination, configs: Sequence[CfgNode], world: World
) -> bool:
    """Whether to capture this combination."""
    if asked is not None:
        return asked
    if world.size > 1 or world.device.type != "cuda" or combination.compile == "on":
        return False
    obstacles = [train_config(config).obstacle_to_graph() for config in configs]
    return combination.mode == "inference" or not any(obstacles)


def _with_graph(config: CfgNode, is_graph: bool) -> CfgNode:
    """The configuration with TRAIN.GRAPH. Raises UserError if its step cannot be captured."""
    config = config.clone()
    config.defrost()
    config.TRAIN.GRAPH = is_graph
    config.freeze()
    if is_graph:
        check_settings(config)
    return config


class Subject(NamedTuple):
    """A model and its timed function."""

    model: MoEModel
    run: Callable[[], object]  # one pass, or one step
    optimizer: torch.optim.Optimizer | None
    uncompiled: Callable[[], object] | None = None  # the same pass, of a compiled model


def _measure(
    combination: Combination,
    configs: Sequence[AllSections],
    sizes: Sequence[Complexity],
    rounds: int,
    warmup: int,
    world: World,
    is_graph: bool,
) -> Row:
    """Measure one combination. `configs` and `sizes` are those of the model with experts and of the
    dense model."""
    # frees the models of the previous combination, which DDP keeps in a reference cycle
    gc.collect()
    torch.compiler.reset()  # otherwise they would count towards dynamo's limit of recompilations
    before = machine(world.device.type)
    subjects = [prepare(combination.mode, config, world) for config in configs]
    product, flops = matrix_product(getattr(torch, combination.dtype), world.device)
    names = ("moe", "dense")
    alternatives = {name: subject.run for name, subject in zip(names, subjects, strict=True)}
    alternatives["product"] = product
    with prepared_for_inference(subjects):
        first = [_seconds(subject.run) for subject in subjects]
        memory = [world.gather(working_memory(subject.run, world.device)) for subject in subjects]
        if is_graph:
            for name, subject in zip(names, subjects, strict=True):
                alternatives[name] = _captured(subject, f"{combination}, {name}")
        times = interleaved(alternatives, rounds, warmup, world)
    peaks = [None if None in values else max(values) for values in memory]
    timed = [times[name] for name in names]
    moe, dense = map(Side, timed, sizes, first, peaks, map(_held, subjects))
    routing = world.gather(_routing(subjects[0].model))
    dropped, load = statistics.mean(share for share, _ in routing), max(load for _, load in routing)
    product_times = times["product"]
    return Row(
        combination, world.size, before, moe, dense, product_times, flops, dropped, load, is_graph
    )


def _captured(subject: Subject, name: str) -> Callable[[], object]:
    """A CUDA graph of the subject's pass. Raises UserError if the pass cannot be captured."""
    if subject.optimizer is not None:  # a step captures itself
        for _ in range(STEPS_BEFORE + 1):
            subject.run()
        return subject.run
    try:
        return capture(subject.run)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name} cannot be captured as a CUDA graph ({reason}); --no-graph measures it without"
        ) from error


@contextmanager
def prepared_for_inference(subjects: Iterable[Subject]) -> Iterator[None]:
    """`moe_core.prepared` for the subjects without an optimiser, whose weights do not change."""
    with ExitStack() as contexts:
        for subject in subjects:
            if subject.optimizer is None:
                contexts.enter_context(prepared(subject.model))
            if subject.uncompiled is not None:
                subject.uncompiled()  # computes the cached values, which the compiled passes read
        yield


def prepare(mode: str, config: AllSections, world: World) -> Subject:
    """The model of a configuration from `combinations`, and its forward pass or training step."""
    if mode == "training":
        return _training(config, world)
    return _inference(config, world)


def _inference(config: AllSections, world: World) -> Subject:
    """The forward pass of the evaluation."""
    model = _model(config, world).eval()
    images = _batch(config.data, world).images
    autocast = build_autocast(config.run.amp_enable, config.run.amp_dtype, world)

    @torch.inference_mode()
    def infer(forward: Callable) -> None:
        with autocast():
            forward(images)

    uncompiled = None
    if config.run.compile:
        uncompiled = partial(infer, model.forward)
        model.compile()
    return Subject(model, partial(infer, model), None, uncompiled)


def _training(config: AllSections, world: World) -> Subject:
    """Training steps on one batch."""
    batch = _batch(config.data, world)
    step = TrainingStep(config.train, world, _model(config, world), _classes(config.data))
    step.wrapped.train()
    numbers = itertools.count()
    return Subject(step.model, lambda: step.run([batch], next(numbers)), step.optimizer)


def _model(config: AllSections, world: World) -> MoEModel:
    seed_everything(config.run.seed)
    group = expert_group(config.model.experts, world)
    return build_model(config.model, _classes(config.model), group).to(world.device)


def _batch(config: DataConfig, world: World) -> Batch:
    seed_everything(config.seed, world.rank)
    shape = (config.batch_size, config.channels, config.img_size, config.img_size)
    images = torch.randn(shape, device=world.device)
    return Batch(images, torch.randint(_classes(config), (len(images),), device=world.device), [])


def _classes(config: DataConfig | ModelConfig) -> int:
    return config.num_classes or ASSUMED_CLASSES


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _held(subject: Subject) -> int:
    tensors: list[torch.Tensor] = list(subject.model.parameters())
    if subject.optimizer:
        for state in subject.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(local_part(tensor).nbytes for tensor in tensors)


def _routing(model: MoEModel) -> tuple[float, float]:
    """Routing in this rank's last pass: the dropped share of all choices, and the largest load of
    an expert in any layer."""
    all_stats = [layer.last_routing for layer in moe_layers(model).values()]
    stats = [of_layer for of_layer in all_stats if of_layer is not None]
    return dropped_share(stats), max(
        float(of_layer.counts.max() / of_layer.counts.float().mean()) for of_layer in stats
    )


# The report: lines for a terminal, and a CSV file


def headline(plan: Plan, ranks: int) -> str:
    """The measured model and the number of ranks."""
    config = plan[0][1]
    experts = config.MODEL.MOE.NUM_EXPERTS
    layers = count_moe_layers(config.MODEL.MOE.BLOCKS)
    processes = "1 process"
    if ranks > 1:
        processes = f"{ranks} processes"
    trunk, size = config.MODEL.NAME or config.MODEL.TYPE, config.DATA.IMG_SIZE
    return f"{trunk}, {size} px: {experts} experts in {layers} layers, beside dense; {processes}"


def protocol(row: Row, warmup: int) -> list[str]:
    """A description of the measurement, for the head of a table, in lines."""
    rounds, experts, dense = len(row.product), row.moe.size, row.dense.size
    sizes = (
        f"{experts.parameters / 1e6:,.1f}M parameters and {experts.macs / 1e6:,.0f}M MACs/image, "
        f"beside {dense.parameters / 1e6:,.1f}M and {dense.macs / 1e6:,.0f}M"
    )
    return [
        sizes,
        row.machine,
        f"medians (quartiles) of {rounds} rounds after {warmup} to warm up; percentiles are of "
        f"these {rounds} passes;",
        "MFU is of the measured peak; the weights and images are random: 'dropped' and 'largest "
        "load'",
        "show how evenly they are routed",
    ]


def columns_of(row: Row) -> dict[str, object]:
    """A row as flat columns: all figures, and the milliseconds of each round."""
    columns: dict[str, object] = {"run": row.product.run, **row.combination._asdict()}
    columns |= {"ranks": row.ranks, "rounds": len(row.product)}

    def add(name: str, values: Sequence[float]) -> None:
        low, middle, high = quartiles(values)
        columns.update({f"{name}_q1": low, name: middle, f"{name}_q3": high})

    add("moe_over_dense", row.ratio())
    for name, side in (("moe", row.moe), ("dense", row.dense)):
        add(f"{name}_images_per_second", row.images_per_second(side))
        add(f"{name}_mfu", row.mfu(side))
        columns |= {f"{name}_{which}_ms": value for which, value in latencies(side.times).items()}
        columns |= {f"{name}_parameters": side.size.parameters, f"{name}_macs": side.size.macs}
        columns |= {f"{name}_peak_bytes": side.peak_memory, f"{name}_held_bytes": side.held}
        columns |= {
            f"{name}_first_call_s": side.first_call,
            f"{name}_ms": " ".join(f"{t:.3f}" for t in side.times),
        }
    columns |= {
        "product_flops": row.product_flops,
        "product_ms": " ".join(f"{t:.3f}" for t in row.product),
    }
    return columns | {
        "dropped": row.dropped,
        "largest_load": row.largest_load,
        "machine": row.machine,
    }


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Raises:
    UserError: the file cannot be written.
    """
    records = [columns_of(row) for row in rows]
    text = csv_text([list(records[0])] + [list(values.values()) for values in records])
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error
