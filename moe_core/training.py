"""What a training loop calls for models with experts.

>>> with step(model, torch.bfloat16):
...     with torch.autocast("cuda", torch.bfloat16):
...         loss = model(batch)
...     loss.backward()
>>> norm = finish_gradients(model, max_norm=1.0)
>>> optimizer.step()

Their parts can be called by themselves. Other functions list the parameters of experts and save the
tuners' decisions.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from moe_core.balance import update_balance
from moe_core.experts import Experts
from moe_core.layer import MoELayer
from moe_core.parallel import ExpertGroup, ParallelStrategy, Tuner
from moe_core.parallel.gather import weights_ahead
from moe_core.registry import ALL_TO_ALLS
from moe_core.torch_tools import is_averaged, set_averaged

_log = logging.getLogger("moe_core")


def compile_ahead(model: nn.Module, passes: Callable[[nn.Module], object]) -> int:
    """Compile the kernels of a model on a GPU before its first step, on all cores. Otherwise they
    are compiled when they are first launched, one after the other, which can take minutes once on a
    machine.

    >>> compile_ahead(model, lambda copy: copy(torch.zeros_like(batch)).sum().backward())

    Random numbers, weights and gradients stay as they are.

    Args:
        passes: computes forward and backward passes of the copy of the model that it gets, on
            tensors of its own in the shapes of a step, on the current GPU and without collectives.
            It runs without the kernels, so values are meaningless, and tensors that it passes in
            become zeros. An error in it leaves out the rest, with a line in the log.

    Returns:
        The number of kernels, compiled now or found in Triton's cache. 0 where Triton is missing or
        of another version than 3.6.
    """
    try:
        from moe_core.ops import launch  # imports Triton
    except ImportError:
        return 0

    def work() -> None:
        try:
            passes(copy.deepcopy(model))
        except Exception as error:
            reason = str(error).partition("\n")[0]
            _log.info(
                "moe_core kernels: not all are compiled ahead: %s: %s", type(error).__name__, reason
            )

    addresses = set()  # a copy may still run the model itself, for example through a closure
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor.numel():
            addresses.add(tensor.untyped_storage().data_ptr())
    gradients = [parameter.grad for parameter in model.parameters()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    start = time.perf_counter()
    with torch.random.fork_rng(devices):
        number = launch.compile_ahead(work, protected=addresses)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    seconds = time.perf_counter() - start
    if seconds >= 1:
        _log.info("moe_core kernels: %d compiled or read in %.0f s", number, seconds)
    return number


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """The MoE layers of the model, by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of this rank's experts, by name."""
    return {
        f"{layer_name}.experts.{name}" if layer_name else f"experts.{name}": parameter
        for layer_name, layer in moe_layers(model).items()
        for name, parameter in layer.experts.named_parameters()
    }


@contextmanager
def step(
    model: nn.Module, dtype: torch.dtype | None = None, *, equal_tokens: bool = False
) -> Iterator[None]:
    """Context for the forward and backward passes of one optimiser step. No weight changes in it.

    Weights are then cast once for all passes (`cast_ahead`), and with r = 0 gathered one layer
    ahead (`gather_ahead`). It changes no result. Call `finish_gradients` after it.

    Args:
        dtype: of autocast in the forward passes; None: they do not use autocast.
        equal_tokens: the caller guarantees that all ranks have equally many tokens in each call, as
            in `equal_tokens`.
    """
    with ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(cast_ahead(model, dtype))
        if equal_tokens:
            stack.enter_context(_promised_equal_tokens(model))
        stack.enter_context(gather_ahead(model, dtype))
        yield


@torch.no_grad()
def finish_gradients(
    model: nn.Module,
    max_norm: float = 0.0,
    *,
    scale: float = 1.0,
    balance: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Complete the gradients of an optimiser step: after its backward passes, before its update.

    It averages the gradients of experts over the ranks where no backward pass has done so
    (`average_expert_gradients`), divides all gradients by `scale`, clips them (`clip_gradients`)
    and updates the biases of layers with `balance="bias"` (`update_balance`). If the norm is not
    finite, nothing is clipped and no bias changes: skip the update, which is the same decision on
    all ranks.

    This is a collective. Every rank calls it once per optimiser step.

    Args:
        max_norm: the largest norm of the gradients of the complete model; 0: no clipping.
        scale: the factor by which the losses were multiplied.
        balance: False: the caller updates the biases itself.
        process_group: all data-parallel ranks; None: the world, if torch.distributed is used.

    Returns:
        The norm before clipping, a scalar. On a GPU the host does not wait for it.
    """
    average_expert_gradients(model)
    gradients = _gradients(model)
    if scale != 1.0 and gradients:
        torch._foreach_mul_(gradients, 1 / scale)
    norm = clip_gradients(model, max_norm)
    if balance:
        update_balance(model, process_group, applies=torch.isfinite(norm))
    return norm


@contextmanager
def equal_tokens(model: nn.Module) -> Iterator[None]:
    """Context in which the caller guarantees that all ranks have equally many tokens in each call.

    It covers the MoE layers of `model` and the ranks of their expert groups. The number of tokens
    is then known without communication. Results are the same.

    Without this context a static exchange, gathered weights (r = 0) and the strategy "auto" need
    one collective per call. Except with r = 0, the host waits for its result.

    If the guarantee is broken, ranks use different capacities. A static exchange and "auto" then
    fail or wait until the timeout. With r = 0 the ranks drop tokens by different limits. A static
    exchange has then no message in which ranks compare the layers that they call: a difference is
    noticed in the next message of the group.

    >>> with equal_tokens(model):
    ...     model(batch)  # every rank has the same number of images, all of the same size
    """
    with _promised_equal_tokens(model):
        yield


@contextmanager
def _promised_equal_tokens(model: nn.Module) -> Iterator[None]:
    groups = {layer.group for layer in moe_layers(model).values()}
    promised = [group for group in groups if not group.has_equal_tokens]
    for group in promised:
        group.has_equal_tokens = True
    try:
        yield
    finally:
        for group in promised:
            group.has_equal_tokens = False


@contextmanager
def cast_ahead(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context in which the weights of the experts of `model` do not change.

    If kernels compute in another dtype than that of the parameters, each weight is cast to `dtype`
    once for all forward and backward passes in the context: accumulated batches, recomputed
    activations, chunks of rows. Outside of the context every pass casts the weights. Results are
    the same. Gathered weights (r = 0) are cast in each pass.

    Weights must not be changed in the context, for example by an optimiser: later passes would
    still use the previous values.

    >>> with cast_ahead(model, torch.bfloat16):
    ...     for batch in batches:
    ...         with torch.autocast("cuda", torch.bfloat16):
    ...             loss = model(batch)
    ...         loss.backward()
    >>> optimizer.step()
    """
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, Experts):
                stack.enter_context(module.cast_ahead(dtype))
        yield


@contextmanager
def gather_ahead(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Context for forward passes that call each MoE layer of `model` once, in the order of
    `moe_layers`.

    It affects layers with gathered weights (r = 0). The gather of a layer's weights starts before
    the previous layer is computed, and the reduction of their gradients overlaps with the backward
    pass. Results are the same. Outside of the context a layer waits for its weights.

    Enter the context within autocast, or name its `dtype`. The parameters are read before the hooks
    of their modules run. If layers are called in another order, weights are gathered twice.

    >>> with gather_ahead(model):
    ...     outputs = model(batch)
    """
    gathering: dict[ExpertGroup, list[Experts]] = {}
    for layer in moe_layers(model).values():
        strategy = layer.chosen_strategy
        if isinstance(layer.strategy, ParallelStrategy):
            strategy = layer.strategy
        if strategy is None or strategy.r != 0 or not layer.group.comm_stream.concurrent:
            continue
        if ALL_TO_ALLS[strategy.all_to_all].through_memory:
            continue  # copies by the CPU gain nothing from running at the same time
        assert isinstance(layer.experts, Experts), "r = 0 needs the built-in experts"
        gathering.setdefault(layer.group, []).append(layer.experts)
    with ExitStack() as stack:
        for group, layers in gathering.items():
            stack.enter_context(weights_ahead(layers, group, dtype))
        yield


@torch.no_grad()
def average_expert_gradients(model: nn.Module) -> None:
    """Average expert gradients over all data-parallel ranks, as DistributedDataParallel does for
    the shared parameters.

    It is needed where `ExpertGroup.for_torch_tools` is False: the exchange has then only summed
    them over the ranks of an expert group. This function sums them over the replicas and divides by
    the number of ranks. Every rank must call it once per optimiser step. Gradients that a backward
    pass has averaged stay as they are.
    """
    waits = []
    averaged: set[nn.Parameter] = set()  # layers may have the same experts
    for layer in moe_layers(model).values():
        group = layer.group
        if group.num_ranks == 1 or is_averaged(layer):
            continue
        for parameter in layer.experts.parameters():
            if parameter in averaged:
                continue
            averaged.add(parameter)
            set_averaged([parameter])
            if parameter.grad is None:
                if group.num_replicas == 1 or not parameter.requires_grad:
                    continue
                parameter.grad = torch.zeros_like(parameter)  # a replica may have a gradient
            parameter.grad.div_(group.num_ranks)
            if group.num_replicas > 1:
                operation = "sum of expert gradients over replicas"
                waits.append(group.replicas.start_all_reduce(parameter.grad, operation))
    for wait in waits:
        wait()


def strategy_decisions(model: nn.Module) -> list[dict]:
    """The decisions of the model's tuners as JSON values; an empty list without tuners."""
    return [decision for tuner in strategy_tuners(model) for decision in tuner.state_dict()]


def load_strategy_decisions(model: nn.Module, decisions: list[dict]) -> None:
    """Load the result of `strategy_decisions`. Layer shapes that it contains need no trials.

    Raises:
        ValueError: a strategy that is not valid, or an all-to-all that is not registered.
    """
    for tuner in strategy_tuners(model):
        tuner.load_state_dict(decisions)


def strategy_tuners(model: nn.Module) -> list[Tuner]:
    """The tuners of the layers with strategy "auto" over several ranks, in the order of layers."""
    tuners: dict[Tuner, None] = {}
    for layer in moe_layers(model).values():
        if layer.strategy == "auto" and layer.group.size > 1:
            tuners[Tuner.of(layer.group)] = None
    return list(tuners)


@torch.no_grad()
def global_grad_norm(model: nn.Module) -> Tensor:
    """The 2-norm of the gradient of the complete model.

    Shared parameters count once; the shards of DTensors (FSDP2) are summed over their mesh. Experts
    are summed over the ranks of their expert group.
    """

    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    groups = [layer.group for layer in moe_layers(model).values()]
    expert_calls = {group.process_group: group.calls for group in groups}
    for process_group, parameters in _parameters_by_group(model).items():
        part = torch.zeros((), device=device)
        gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        if gradients:
            part = _squared_norm(gradients)
        # Replicas have equal gradients, so only one expert group is summed.
        if process_group is not None and process_group.size() > 1:
            if process_group in expert_calls:
                calls = expert_calls[process_group]
                summed = calls.ranks.all_reduce(calls.with_history(part), "gradient norm")
                part = calls.without_history(summed, part)
            else:
                dist.all_reduce(part, group=process_group)
        total = total + part
    return total.sqrt()


def _squared_norm(gradients: list[Tensor]) -> Tensor:
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        # a norm in fp16 overflows at 65,504
        gradients = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    return get_total_norm(gradients).float() ** 2


def _parameters_by_group(model: nn.Module) -> dict[dist.ProcessGroup | None, list[nn.Parameter]]:
    """This rank's parameters, by the process group over which they are sharded; None: replicated.

    The process groups and their order are the same on all ranks.
    """
    owners = {}
    for layer in moe_layers(model).values():
        for parameter in layer.experts.parameters():
            owners[parameter] = layer.group.process_group
    by_group: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        group = owners.get(parameter)
        if isinstance(parameter, DTensor):
            group = parameter.device_mesh.get_group()
        by_group.setdefault(group, []).append(parameter)
    return by_group


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor. Other tensors stay as they are."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm` (0: no clipping).

    If the norm is not finite, no gradient changes. On a GPU the gradients are multiplied even if
    the norm is small enough, because the host does not wait for the norm. See also `clip_to_norm`.

    Returns:
        The norm before clipping.
    """
    norm = global_grad_norm(model)
    if max_norm <= 0:
        return norm
    known: float | Tensor = norm
    if not norm.is_cuda:
        with suppress(RuntimeError):  # in FakeTensorMode no tensor has a value
            known = float(norm)
    clip_to_norm(model, max_norm, known)
    return norm


@torch.no_grad()
def clip_to_norm(model: nn.Module, max_norm: float, norm: float | Tensor) -> None:
    """Scale gradients in place to `max_norm` (0: no clipping) if their norm exceeds it.

    If the norm is not finite, no gradient changes.

    Args:
        norm: the result of `global_grad_norm`. As a number, for a training loop that reads it in
            any case: gradients are read and written only in steps that clip. As a tensor: they are
            multiplied in every step, and the host does not wait for the norm.
    """
    if max_norm <= 0:
        return
    if isinstance(norm, Tensor):
        scale = max_norm / (norm.nan_to_num(0.0, 0.0) + 1e-6)
        torch._foreach_mul_(_gradients(model), scale.clamp(max=1.0))
        return
    if not math.isfinite(norm):
        return
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        torch._foreach_mul_(_gradients(model), factor)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
