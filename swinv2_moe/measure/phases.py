"""The phases of a training step as separate, repeatable tasks, with their FLOPs and bytes counted.

The input of each phase is recorded from one real batch. Each phase runs forward and backward:

- data: this process reads, decodes and augments a batch. In a run, DATA.NUM_WORKERS processes share
  this work.
- trunk: the model with each MoE layer replaced by the identity, and the loss.
- router: logits, choice, auxiliary loss and the plan of rows. A layer of width 1 runs behind the
  real router, which gets the real tokens.
- dispatch: tokens to rows, and rows back to tokens.
- experts: their products and activations.
- exchange: the collectives of a step one after the other, for any strategy: rows, numbers of rows
  and expert weights, then the all-reduce of the shared gradients. A real step hides a part of the
  exchange behind other work.
- optimiser: the gradients' norm and clipping, and the update.
- checkpoint: a whole save, until it is on the disk. Training waits only for a part of it.

Counted on one rank:

- FLOPs and memory: as in `swinv2_moe.measure.work`. FLOPs of dispatch and optimiser are computed by
  formulas.
- Exchange: bytes sent to other ranks. An all-reduce of n bytes counts as 2 n (W - 1) / W.
- Disk: bytes read for a batch's images (from a cache or not), and the size of the checkpoint's
  files.

T tokens, M model dim, W ranks
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_core import (
    MoELayer,
    average_expert_gradients,
    clip_gradients,
    expert_parameters,
    moe_layers,
)
from moe_core.parallel import record_exchanges, replay
from swinv2_moe.config import CheckpointConfig
from swinv2_moe.data import Batch, Data
from swinv2_moe.measure.work import Task, Work, counted, operator_name
from swinv2_moe.models import MoEMlp
from swinv2_moe.train.meta import describe
from swinv2_moe.train.saver import Cost, Saver
from swinv2_moe.train.step import TrainingStep

_MOVES = ("moe_core::dispatch_rows", "moe_core::combine_rows")
# FLOPs for each element of a row: forward, weight and add; backward, weight, and multiply and add
# for the gate
_COMBINE_FLOPS = 5
# FLOPs and bytes per parameter in fp32. AdamW: decay 1, moments 3 and 4, denominator 3, update 3;
# it reads parameter, gradient and both moments, and writes all but the gradient. SGD with
# Nesterov's momentum: 2 each for decay, momentum, look-ahead and update; one moment less. Then the
# square and sum of the norm, and the product of clipping.
_UPDATE = {"adamw": (14, 28), "sgd": (8, 20)}
_NORM, _CLIPPING = (2, 4), (1, 8)


def _not_a_leaf(tensor: Tensor) -> Tensor:
    """A view of `tensor`. FlopCounterMode's module hooks fail under autograd.grad if a module's
    input is a leaf (torch 2.11)."""
    return tensor.view_as(tensor)


# Inputs of the MoE layers, recorded from one batch


@dataclass
class Call:
    """The inputs of one MoE layer in a forward pass."""

    layer: MoELayer
    x: Tensor  # [..., M]
    options: dict
    chunks: list["Chunk"] = field(default_factory=list)


class Chunk(NamedTuple):
    """The inputs of the experts: sorted rows, and weights if they were gathered from other
    ranks."""

    rows: Tensor  # [N, M]
    offsets: Tensor
    weights: tuple[Tensor | None, ...] | None  # ExpertWeights


class _Moves(TorchDispatchMode):
    """Records the calls of the operators that move rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if operator_name(func) in _MOVES:
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


Moves = list[tuple[Callable, tuple]]  # operators and their arguments


def watch(step: TrainingStep, images: Tensor) -> tuple[list[Call], Moves]:
    """Run one forward pass and record the inputs of each MoE layer, and the operators that moved
    its rows with their arguments."""
    calls: list[Call] = []

    def layer_begins(layer: MoELayer, args: tuple, options: dict) -> None:
        calls.append(Call(layer, args[0].detach(), options))

    def experts_begin(experts: nn.Module, args: tuple, options: dict) -> None:
        rows, offsets = args
        # here `rows` are tokens, because dispatch is a part of the experts' op
        if options.get("plan") is not None:
            plan = options["plan"]
            rows = rows.index_select(0, plan.choices // plan.slots.shape[1])
        weights = None
        if options.get("weights") is not None:  # gathered by a collective
            gathered = options["weights"]()
            weights = gathered._make(_detached(tensor) for tensor in gathered)
        # without the undefined rows past the end
        rows = rows[: int(offsets[-1])].detach().clone()
        calls[-1].chunks.append(Chunk(rows, offsets, weights))

    hooks = []
    for layer in moe_layers(step.model).values():
        hooks.append(layer.register_forward_pre_hook(layer_begins, with_kwargs=True))
        hooks.append(layer.experts.register_forward_pre_hook(experts_begin, with_kwargs=True))
    with _Moves() as moves, step.autocast():
        step.model.forward_with_aux(images)
    for hook in hooks:
        hook.remove()
    return calls, moves.calls


@contextmanager
def without_experts(model: nn.Module) -> Iterator[None]:
    """A context in which each MoE layer is replaced by the identity."""
    children = (
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
    )
    places = [place for place in children if isinstance(place[2], MoEMlp)]
    for parent, name, _ in places:
        setattr(parent, name, nn.Identity())
    try:
        yield
    finally:
        for parent, name, child in places:
            setattr(parent, name, child)


# The phases


def data(batches: Iterator[Batch]) -> Task:
    """Read the loader's next batch."""
    first = []
    read = bytes_read(lambda: first.append(next(batches)))
    work = Work(memory=float(first[0].images.nbytes), disk=float(read))
    return Task(lambda: next(batches), work)


def endless(images: Data) -> Iterator[Batch]:
    """The batches of the training set, epoch after epoch."""
    for epoch in itertools.count():
        images.set_epoch(epoch)
        yield from images.train_loader


def bytes_read(work: Callable[[], object]) -> int:
    """The bytes that this process reads while `work` runs, as Linux counts them; 0 on other
    systems."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    if not Path("/proc/self/io").exists():
        work()
        return 0
    overhead = -so_far() + so_far()  # reading the counter is counted too
    before = so_far()
    work()
    return max(so_far() - before - overhead, 0)


def trunk(step: TrainingStep, batch: Batch) -> Task:
    """Forward pass, cross-entropy and backward pass of the trunk."""
    model, smoothing = step.model, step.config.label_smoothing
    with without_experts(model):
        parameters = list(model.parameters())

    def run() -> None:
        with without_experts(model), step.autocast():
            logits = model(batch.images)
        loss = F.cross_entropy(logits.float(), batch.targets, label_smoothing=smoothing)
        torch.autograd.grad(loss, parameters)

    return counted(run)


class _Behind(nn.Module):
    """A router whose input is replaced by the given tokens [T, M]."""

    def __init__(self, router: nn.Module, tokens: Tensor) -> None:
        super().__init__()
        self.router, self.tokens = router, tokens

    def forward(self, x: Tensor) -> Tensor:
        return self.router(_not_a_leaf(self.tokens).to(x.dtype))


class _Unchanged(nn.Module):
    """Experts that return their input."""

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return rows


def router(step: TrainingStep, calls: Sequence[Call]) -> Task:
    """The logits, and all operations of the layers that do not depend on the width of a token."""
    weight = step.config.aux_loss_weight
    prepared = []
    for call in calls:
        tokens = call.x.reshape(-1, call.layer.config.model_dim).detach().requires_grad_()
        narrow = replace(call.layer.config, model_dim=1, hidden_dim=1)
        alone = MoELayer(narrow, router=_Behind(call.layer.router, tokens), experts=_Unchanged())
        x = tokens.new_zeros(len(tokens), 1).requires_grad_()
        prepared.append((alone, x, call.options, [tokens, *call.layer.router.parameters()]))

    def run() -> None:
        for alone, x, options, inputs in prepared:
            with step.autocast():
                y, aux_loss = alone(_not_a_leaf(x), **options)
            torch.autograd.grad(y.sum() + weight * aux_loss, inputs)

    return counted(run)


def dispatch(moves: Moves) -> Task:
    """Call the recorded operators again with their arguments, forward and backward."""
    prepared = []
    for operator, given in moves:
        args = []
        for arg in given:
            if isinstance(arg, Tensor):
                arg = arg.detach().requires_grad_(arg.is_floating_point())
            args.append(arg)
        inputs = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        prepared.append((operator, args, inputs, torch.ones_like(operator(*args))))

    def run() -> None:
        for operator, args, inputs, grad in prepared:
            torch.autograd.grad(operator(*args), inputs, grad)

    combined = sum(
        args[0].numel() for operator, args in moves if operator_name(operator) == _MOVES[1]
    )
    return Task(run, replace(counted(run).work, flops=float(_COMBINE_FLOPS * combined)))


def experts(step: TrainingStep, calls: Sequence[Call]) -> Task:
    """The experts' networks on the recorded rows, forward and backward."""
    prepared = []
    for call in calls:
        for chunk in call.chunks:
            chunk.rows.requires_grad_()
            prepared.append((call.layer.experts, chunk, torch.ones_like(chunk.rows)))

    def run() -> None:
        for network, chunk, grad in prepared:
            inputs = [chunk.rows, *network.parameters()]
            options = {}
            if chunk.weights is not None:
                weights = chunk.weights
                inputs = [chunk.rows] + [weight for weight in weights if weight is not None]
                options["weights"] = lambda weights=weights: weights
            with step.autocast():
                out = network(_not_a_leaf(chunk.rows), chunk.offsets, **options)
            torch.autograd.grad(out, inputs, grad)

    return counted(run)


def _detached(weight: Tensor | None) -> Tensor | None:
    if weight is None:
        return None
    return weight.detach().requires_grad_()


def exchange(step: TrainingStep, calls: Sequence[Call], batch: Batch) -> Task:
    """The collectives of a step with several ranks."""
    model, world = step.model, step.world
    num_expert_parameters = sum(p.numel() for p in expert_parameters(model).values())
    num_parameters = sum(p.numel() for p in model.parameters())
    shared = torch.zeros(num_parameters - num_expert_parameters, device=world.device)
    sent = _reduced(shared, world.size)
    if not calls:
        return Task(lambda: world.sum(shared), Work(exchange=sent))
    group = calls[0].layer.group
    with record_exchanges(group) as exchanges:
        step.run([batch], 0)
    num_replicated = 0
    if group.num_replicas > 1:
        num_replicated = num_expert_parameters
    replicated = torch.zeros(num_replicated, device=world.device)
    sent += sum(call.sent_bytes for call in exchanges)
    sent += _reduced(replicated, group.num_replicas)

    def run() -> None:
        replay(exchanges)
        world.sum(shared)
        if len(replicated):
            group.replicas.all_reduce(replicated, "expert gradients")

    return Task(run, Work(exchange=sent))


def _reduced(gradients: Tensor, ranks: int) -> float:
    return 2 * gradients.nbytes * (ranks - 1) / ranks


def optimiser(step: TrainingStep, batch: Batch) -> Task:
    """Norm, clipping and update with the gradients of the batch."""
    loss, _ = step.loss(batch)
    loss.backward()
    average_expert_gradients(step.model)
    gradients = {p: p.grad for p in step.model.parameters() if p.grad is not None}
    step.optimizer.zero_grad(set_to_none=True)
    max_norm = step.config.clip_grad
    parts = [_UPDATE[step.config.optimizer.name], _NORM]
    if max_norm:
        parts.append(_CLIPPING)
    num_parameters = sum(p.numel() for p in gradients)
    flops = num_parameters * sum(flops for flops, _ in parts)
    moved = num_parameters * sum(moved for _, moved in parts)

    def run() -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        clip_gradients(step.model, max_norm)
        step.optimizer.step()
        step.optimizer.zero_grad(set_to_none=True)

    return Task(run, Work(float(flops), float(moved)))


@contextmanager
def checkpoint(
    step: TrainingStep, policy: CheckpointConfig, directory: Path
) -> Iterator[tuple[Task, list[Cost]]]:
    """Save checkpoints into `directory`, without a configuration and a run's state.

    Yields:
        A task that saves a checkpoint, and a list that receives the cost of each save on this rank.
        The first save was done before; the task's work is counted from it.

    Raises:
        UserError: the last save failed.
    """
    costs: list[Cost] = []
    saver = Saver(
        directory,
        step.world,
        policy,
        say=lambda text: None,
        report=costs.append,
    )
    meta = describe(step.model, step=0, config="", class_names=[])

    def run() -> None:
        saver.save(step.model, step.state(), meta)
        saver.wait()

    run()
    saver.close()
    # memory: the tensors are copied, then read to be written
    yield Task(run, Work(memory=2.0 * costs[0].bytes, disk=float(costs[0].bytes))), costs
    saver.close()
