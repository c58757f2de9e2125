"""What a training loop has to know about sharded experts: which parameters, how to average, the global norm, and what
their strategies have been found to be."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_core.layer import MoELayer
from moe_core.parallel import Tuner


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Every MoE layer of the model by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that belong to this rank's experts, by name: to be left out of DistributedDataParallel."""
    return {
        f"{layer_name}.experts.{name}" if layer_name else f"experts.{name}": parameter
        for layer_name, layer in moe_layers(model).items()
        for name, parameter in layer.experts.named_parameters()
    }


@torch.no_grad()
def average_expert_gradients(model: nn.Module) -> None:
    """Make expert gradients those of the mean loss of all data-parallel ranks, as DistributedDataParallel's are.

    Within a group the exchange's backward has already summed them over the ranks; replicas are summed here, and both
    sums become means. Every rank calls this, once per optimiser step.
    """
    pending = []
    for layer in moe_layers(model).values():
        group = layer.group
        for parameter in layer.experts.parameters():
            if parameter.grad is None:
                continue
            parameter.grad.div_(group.size * group.num_replicas)
            if group.num_replicas > 1:
                pending.append((group, dist.all_reduce(parameter.grad, group=group.replicas, async_op=True)))
    for group, work in pending:
        with group.named_errors("sum of expert gradients over replicas"):
            work.wait()


def strategy_decisions(model: nn.Module) -> list[dict]:
    """What the tuners of the model's layers have decided, as JSON takes it; empty where none is at work."""
    return [decision for tuner in _tuners(model) for decision in tuner.state_dict()]


def load_strategy_decisions(model: nn.Module, decisions: list[dict]) -> None:
    """Take over what `strategy_decisions` gave, in place of trials."""
    for tuner in _tuners(model):
        tuner.load_state_dict(decisions)


def _tuners(model: nn.Module) -> set[Tuner]:
    layers = moe_layers(model).values()
    return {Tuner.of(layer.group) for layer in layers if layer.strategy == "auto" and layer.group.size > 1}


@torch.no_grad()
def global_grad_norm(model: nn.Module) -> Tensor:
    """The 2-norm of the whole model's gradient: shared parts once, a layer's experts from all ranks of its group."""
    experts = expert_parameters(model)
    shared = [p.grad for name, p in model.named_parameters() if name not in experts and p.grad is not None]
    owned = {}  # by group
    for layer in moe_layers(model).values():
        gradients = [p.grad for p in layer.experts.parameters() if p.grad is not None]
        owned.setdefault(layer.group.process_group, []).extend(gradients)
    device = next(model.parameters()).device
    total = _squared_norm(shared, device)
    for group, gradients in owned.items():
        part = _squared_norm(gradients, device)
        if group is not None and group.size() > 1:  # replicas have the same gradients: one group's count
            dist.all_reduce(part, group=group)
        total = total + part
    return total.sqrt()


def _squared_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(gradients).float() ** 2


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm` (0: leave them); returns the norm before."""
    norm = global_grad_norm(model)
    if max_norm > 0:
        parameters = [p for p in model.parameters() if p.grad is not None]
        # a norm that is not finite leaves them: scaling by it would spread the NaN to every gradient
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.nan_to_num(0.0, 0.0))
    return norm
