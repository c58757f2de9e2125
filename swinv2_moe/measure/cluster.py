"""Predict step time and memory of a configured model on any number of GPUs, without a GPU.

moe_core's cost model predicts the time of the MoE layers. All layers have the same strategy (r, d,
all-to-all algorithm): the one with the smallest total time. This module adds the trunk's matrix
products, its other operations (proportional to its activations), the all-reduce of its gradients,
which overlaps with the backward pass, and the memory traffic of the optimiser.
docs/explanation/planner.md has the formulas, the assumptions and
the errors against published figures.
"""

# W GPUs, g of them on each of N nodes

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from moe_core import MoEConfig, expert_parameters, moe_layers
from moe_core.parallel import (
    PROFILES,
    Link,
    Machine,
    ParallelStrategy,
    calibrate,
    cost_model,
    largest_group,
)
from swinv2_moe.errors import UserError
from swinv2_moe.files import read_json, write_json
from swinv2_moe.forms import NON_NEGATIVE_NUMBER, POSITIVE_NUMBER, form, or_null, record
from swinv2_moe.models.build import build_model, count
from swinv2_moe.models.section import ModelConfig
from swinv2_moe.ranks.world import open_world
from swinv2_moe.train.section import TrainConfig

Made = TypeVar("Made", Link, Machine)

LARGEST = 4096  # GPUs
ASSUMED_CLASSES = 1000  # if the data determine the number of classes
# Operations other than matrix products (norms, softmax, window shifts, launches, waiting) are
# modelled as memory traffic: so many reads or writes per step of each activation that autograd
# keeps. The number is fitted to dense SwinV2-B's 291 images/s on an A100 (arXiv 2206.03382).
ACTIVATION_PASSES = 67
STATE_BYTES = 16  # per parameter: the fp32 value, its gradient and AdamW's two moments
UPDATE_BYTES = 28  # per parameter: a step reads all four and writes three
BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default
_NOTHING = cost_model.LayerTime(0, 0, 0, 0, 0, 0)
_MAX_BYTES = 1 << 16
_MAX_NAME = 80  # characters
_NAME = form(
    f"a printable name of 1 to {_MAX_NAME} characters",
    lambda value: isinstance(value, str) and value.isprintable() and 0 < len(value) <= _MAX_NAME,
)
# Earlier versions have neither delay nor reduce_scatter.
_LINK = record(
    {"latency": POSITIVE_NUMBER, "bandwidth": POSITIVE_NUMBER}, {"delay": NON_NEGATIVE_NUMBER}
)
_PROFILE = record(
    {
        "name": _NAME,
        "intra": _LINK,
        "inter": _LINK,
        "flops": POSITIVE_NUMBER,
        "flops_fp32": POSITIVE_NUMBER,
        "memory_bandwidth": POSITIVE_NUMBER,
        "kernel_overhead": POSITIVE_NUMBER,
        "memory": or_null(POSITIVE_NUMBER),  # null: not known
    },
    {"reduce_scatter": POSITIVE_NUMBER},
)


class LayerKind(NamedTuple):
    """MoE layers of the same configuration and number of tokens."""

    config: MoEConfig
    tokens: int  # tokens per image
    num_layers: int


@dataclass(frozen=True)
class Model:
    """Properties of a model for a prediction; counts are per image."""

    trunk_parameters: int  # all but the experts
    expert_parameters: int  # over all ranks
    trunk_macs: int
    activations: int  # elements that autograd keeps without recomputation
    kept: int  # elements that autograd keeps with the configured recomputation
    layers: tuple["LayerKind", ...]
    expert_parallel_size: int  # GPUs that share the experts; 0: as many as possible
    blocks: int  # number of parts in which a sharded trunk is gathered


@dataclass(frozen=True)
class StepPrediction:
    """One row of the plan."""

    gpus: int
    nodes: int
    strategy: ParallelStrategy | None  # None: nothing is exchanged
    # seconds of an optimiser step that do not overlap with others, by activity
    parts: dict[str, float]
    images: int  # of a step, over all GPUs
    memory: float  # bytes on a GPU

    @property
    def step(self) -> float:
        return sum(self.parts.values())

    @property
    def exchange_share(self) -> float:
        return self.parts["all-to-all"] / self.step


def count_model(config: ModelConfig) -> Model:
    """Count the configured model on the meta device, which needs no memory and takes a few
    seconds."""
    classes = config.num_classes or ASSUMED_CLASSES
    with torch.device("meta"):
        model = build_model(config, classes)
    size, channels = config.img_size, config.in_chans
    experts = sum(p.numel() for p in expert_parameters(model).values())
    layers = _layers(model, torch.empty(1, channels, size, size, device="meta"))
    kept = _saved_elements_per_image(model, size, channels)
    model.set_grad_checkpointing(False)
    activations = _saved_elements_per_image(model, size, channels)
    of_layers = sum(map(_saved_by_layers, layers))
    if kept == activations:  # nothing is computed again
        kept += of_layers
    activations += of_layers
    parameters, macs = count(model, size, channels)
    for moe, tokens, num_layers in layers:
        choices = tokens * min(moe.top_k, moe.num_experts)
        macs -= num_layers * choices * moe.num_expert_weights * moe.model_dim * moe.hidden_dim
    return Model(
        trunk_parameters=parameters - experts,
        expert_parameters=experts,
        trunk_macs=macs,
        activations=activations,
        kept=kept,
        layers=layers,
        expert_parallel_size=config.experts.expert_parallel_size,
        blocks=max(1, sum(len(stage) for stage in model.block_stages())),
    )


@torch.no_grad()
def _layers(model: nn.Module, image: torch.Tensor) -> tuple[LayerKind, ...]:
    counts: Counter = Counter()  # by configuration and tokens

    def record(layer: nn.Module, args: tuple) -> None:
        counts[layer.config, math.prod(args[0].shape[:-1])] += 1

    hooks = [layer.register_forward_pre_hook(record) for layer in moe_layers(model).values()]
    model(image)
    for hook in hooks:
        hook.remove()
    return tuple(LayerKind(moe, tokens, number) for (moe, tokens), number in counts.items())


def _saved_by_layers(kind: LayerKind) -> int:
    """Elements that autograd keeps for one image in MoE layers, without recomputation.

    Counted by formula, because the meta device takes the plain form, which keeps more than kernels:
    tokens, the experts' rows and outputs, the hidden layer before the activation (of gated experts
    both products), the noise of dropout, and the router's logits and probabilities.
    """
    moe, tokens, num_layers = kind
    choices = tokens * min(moe.top_k, moe.num_experts)
    hidden_layers = moe.num_expert_weights - 1
    if moe.hidden_dropout:
        hidden_layers += 1
    rows = choices * (2 * moe.model_dim + hidden_layers * moe.hidden_dim)
    return num_layers * (rows + tokens * (moe.model_dim + 4 * moe.num_experts))


def _saved_elements_per_image(model: nn.Module, size: int, channels: int) -> int:
    """Elements that autograd keeps for one image outside of MoE layers.

    Computed as the difference between two images and one image. This excludes elements that do not
    depend on the images, such as copies of weights.
    """
    one_image = torch.empty(1, channels, size, size, device="meta")
    two_images = torch.empty(2, channels, size, size, device="meta")
    return _saved_elements(model, two_images) - _saved_elements(model, one_image)


def _saved_elements(model: nn.Module, images: torch.Tensor) -> int:
    """Elements of distinct tensors, except parameters, that autograd keeps for one forward pass,
    outside of MoE layers."""
    parameters = {p.untyped_storage() for p in model.parameters()}
    saved = {}
    running: list[nn.Module] = []  # the MoE layer that runs, if any

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not running:
            saved[tensor.untyped_storage()] = tensor
        return tensor

    hooks = []
    for layer in moe_layers(model).values():
        hooks.append(layer.register_forward_pre_hook(lambda layer, _: running.append(layer)))
        hooks.append(layer.register_forward_hook(lambda *_: running.clear()))
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images)
    for hook in hooks:
        hook.remove()
    elements = 0
    for storage, tensor in saved.items():
        if storage not in parameters:
            elements += storage.nbytes() // tensor.element_size()
    return elements


def scales(gpus_per_node: int, gpus: int) -> list[int]:
    """1, 2, 4, ... inside a node, then a node times 1, 2, 4, ... up to 4,096 GPUs; and `gpus`."""
    sizes = {gpus}
    for unit, most in ((1, gpus_per_node - 1), (gpus_per_node, LARGEST)):
        while unit <= most:
            sizes.add(unit)
            unit *= 2
    return sorted(sizes)


def predict_step(
    model: Model,
    config: TrainConfig,
    machine: Machine,
    gpus: int,
    gpus_per_node: int,
    batch_size: int,
    strategy: ParallelStrategy | None = None,
) -> StepPrediction:
    """Predict one optimiser step with `batch_size` images per GPU and forward pass.

    Args:
        strategy: strategy of the MoE layers; None: the fastest.

    Raises:
        ValueError: this number of GPUs cannot share the experts.
    """
    size = 4
    if config.amp_enable:
        size = 2
    repeats = config.accumulation_steps
    # GPUs that share one copy of the experts
    group = min(model.expert_parallel_size, gpus)
    if not group:
        num_experts = max([moe.num_experts for moe, _, _ in model.layers], default=1)
        group = largest_group(num_experts, gpus)
    if gpus % group:
        raise ValueError(
            f"the number of GPUs ({gpus}) must be a multiple of MODEL.MOE.EXPERT_PARALLEL_SIZE"
            f" ({group})"
        )
    for moe, _, _ in model.layers:
        moe.shard(0, group)
    shapes = [
        (cost_model.LayerShape.of(moe, batch_size * tokens, size), num_layers)
        for moe, tokens, num_layers in model.layers
    ]
    strategy, layers = _best(machine, shapes, group, gpus_per_node, strategy)
    trunk = _trunk_seconds(machine, model, config, batch_size, size)
    gpu_experts = model.expert_parameters / group
    gpu_trunk = float(model.trunk_parameters)
    if config.shard_trunk:
        gpu_trunk /= gpus
    gradients = _exposed_gradients(machine, model, config.shard_trunk, gpus, gpus_per_node, trunk)
    if group < gpus and gpu_experts:  # after the backward pass, between the groups
        near = min(max(gpus_per_node // group, 1), gpus // group)
        gradients += _all_reduce(machine, 4 * gpu_experts, near, gpus // group // near)
    gpu_parameters = gpu_trunk + gpu_experts
    parts = {
        "trunk": repeats * trunk,
        "experts": repeats * layers.experts,
        "routing, dispatch": repeats * (layers.routing + layers.dispatch),
        "all-to-all": repeats * layers.exposed_exchange,
        "weight gather": repeats * layers.gather,
        "gradient all-reduce": gradients,
        "optimiser": gpu_parameters * UPDATE_BYTES / machine.memory_bandwidth,
    }
    memory = gpu_parameters * STATE_BYTES
    if size < 4:
        memory += gpu_parameters * size  # a copy in the dtype of the matrix products
    if config.shard_trunk:
        memory += 4 * model.trunk_parameters / model.blocks  # the gathered block
    elif gpus > 1:
        memory += 4 * model.trunk_parameters  # DistributedDataParallel's buckets
    memory += model.kept * batch_size * size + _strategy_bytes(shapes, group, strategy)
    nodes, images = math.ceil(gpus / gpus_per_node), repeats * batch_size * gpus
    return StepPrediction(gpus, nodes, strategy, parts, images, memory)


def _trunk_seconds(
    machine: Machine, model: Model, config: TrainConfig, batch_size: int, element_size: int
) -> float:
    """Seconds of a forward and a backward pass without the MoE layers."""
    products = 6 * model.trunk_macs * batch_size / machine.rate(element_size)
    passes = ACTIVATION_PASSES * model.activations * batch_size
    seconds = products + passes * element_size / machine.memory_bandwidth
    if config.use_checkpoint:
        seconds *= 4 / 3  # recomputation runs the forward pass twice
    return seconds


def _best(
    machine: Machine,
    shapes: Sequence[tuple[cost_model.LayerShape, int]],
    gpus: int,
    gpus_per_node: int,
    given: ParallelStrategy | None = None,
) -> tuple[ParallelStrategy | None, cost_model.LayerTime]:
    """The given strategy, or else the strategy with the smallest total time over all layers; and
    the total time."""
    if not shapes:
        return None, _NOTHING
    nodes = math.ceil(gpus / gpus_per_node)
    totals = []
    strategies = cost_model.candidates(shapes[0][0].num_experts, gpus, nodes)
    if given is not None and gpus > 1:
        strategies = [given]
    for strategy in strategies:
        total = _NOTHING
        for shape, num_layers in shapes:
            time = cost_model.layer_time(machine, shape, gpus, strategy)
            total = total.plus(time, num_layers)
        totals.append((strategy, total))
    strategy, total = min(totals, key=lambda pair: pair[1].total)
    if gpus == 1:
        return None, total
    return strategy, total


def _exposed_gradients(
    machine: Machine, model: Model, shards: bool, gpus: int, gpus_per_node: int, trunk: float
) -> float:
    """Seconds in which the trunk's gradients are exchanged that do not overlap with its passes.

    They are all-reduced in buckets, in fp32, beside the backward pass. Of a sharded trunk each
    block is gathered for both passes, and its gradients are scattered: one and a half times the
    traffic of an all-reduce. At least the last bucket or block does not overlap.
    """
    traffic, parts, overlapped = 1.0, math.ceil(4 * model.trunk_parameters / BUCKET_BYTES), 2 / 3
    if shards:
        traffic, parts, overlapped = 1.5, model.blocks, 1.0
    near = min(gpus, gpus_per_node)
    part_bytes = 4 * model.trunk_parameters / parts
    part = traffic * _all_reduce(machine, part_bytes, near, math.ceil(gpus / near))
    return max(parts * part - overlapped * trunk, part)


def _all_reduce(machine: Machine, num_bytes: float, near: int, nodes: int) -> float:
    """Seconds of an all-reduce over `near` GPUs in each of `nodes` nodes.

    The model, as in NCCL's trees: first a sum inside each node, then between nodes. A GPU's network
    link carries 1/near of the bytes.
    """
    near_steps = 2 * math.log2(near)
    far_steps = 2 * math.log2(nodes)
    inside = machine.intra.seconds(near_steps, 2 * num_bytes * (near - 1) / near, near_steps)
    between = 2 * num_bytes / near * (nodes - 1) / nodes
    return inside + machine.inter.seconds(far_steps, between, far_steps)


def _strategy_bytes(
    shapes: Sequence[tuple[cost_model.LayerShape, int]],
    gpus: int,
    strategy: ParallelStrategy | None,
) -> float:
    """Bytes kept for the backward pass with this strategy: gathered weights, and copies of rows."""
    if strategy is None:
        return 0.0
    total = 0.0
    for shape, num_layers in shapes:
        gathered = cost_model.volume(shape, gpus, strategy).weights.elements
        rows = shape.num_experts * shape.rows_per_expert * shape.model_dim
        copies = 2 * max(strategy.r - 1, 0) * rows
        total += num_layers * (gathered + copies) * shape.element_size
    return total


def machine_named(profile: str) -> Machine:
    """The machine of a named profile, this machine (`here`), or the machine in a file of
    `save_profile`.

    Under torchrun, `here` also measures the links between the ranks; all ranks call this. A single
    process cannot measure links, so they are those of an A100 cluster.

    Raises:
        UserError: a file that is not a profile.
    """
    if profile in PROFILES:
        return PROFILES[profile]
    if profile != "here":
        return load_profile(profile)
    with open_world() as world:
        if world.group is not None:
            ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
            return calibrate(world.group, ranks_per_node, world.device)
        machine = calibrate(None, 1, world.device)
    links = PROFILES["a100-hdr"]
    return replace(machine, intra=links.intra, inter=links.inter)


# The machine in a file


def save_profile(machine: Machine, path: str | Path) -> None:
    """Write a machine as JSON, in the units of `moe_core.parallel.Machine`.

    Raises:
        UserError: the file cannot be written.
    """
    memory = None if math.isinf(machine.memory) else machine.memory
    write_json(path, asdict(machine) | {"memory": memory})


def load_profile(path: str | Path) -> Machine:
    """Read a machine from a file of `save_profile`.

    Raises:
        UserError: the file cannot be read, or has an invalid value.
    """
    try:
        content = read_json(path, _MAX_BYTES)
        _PROFILE(content, "the profile")
    except OSError as error:
        raise UserError(f"--profile {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"--profile {path}: {error}") from error
    if content["memory"] is None:
        content["memory"] = math.inf
    links = {name: _made(Link, content[name]) for name in ("intra", "inter")}
    return _made(Machine, content | links)


def _made(kind: type[Made], content: dict[str, Any]) -> Made:
    """An object of a dataclass from its fields; further names are left out."""
    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: content[name] for name in known if name in content})
