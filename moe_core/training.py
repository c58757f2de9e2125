"""Sharded experts in a training loop: their parameters, the average and the norm of gradients, and
the decisions on their strategies."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_core.layer import MoELayer
from moe_core.parallel import Tuner


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Every MoE layer of the model by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that belong to this rank's experts, by name."""
    return {
        f"{layer_name}.experts.{name}" if layer_name else f"experts.{name}": parameter
        for layer_name, layer in moe_layers(model).items()
        for name, parameter in layer.experts.named_parameters()
    }


class WithoutExperts(nn.Module):
    """A model as DistributedDataParallel is to see it:
    `DistributedDataParallel(WithoutExperts(model))`.

    It calls the model. Its parameters are the shared ones alone, since each rank has other experts.
    It has no buffers, so each rank keeps those of its model. The model is not a submodule: names
    and state dicts are those of the model itself.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        experts = set(expert_parameters(model).values())
        self.shared = nn.ParameterList(p for p in model.parameters() if p not in experts)
        self._model = [model]  # in a list, so that it is not registered

    def forward(self, *args, **kwargs):
        return self._model[0](*args, **kwargs)

    def train(self, mode: bool = True) -> "WithoutExperts":
        self._model[0].train(mode)
        return super().train(mode)


@torch.no_grad()
def average_expert_gradients(model: nn.Module) -> None:
    """Make expert gradients those of the mean loss of all data-parallel ranks, as
    DistributedDataParallel's are.

    Within a group the exchange's backward has already summed them over the ranks; replicas are
    summed here, and both sums become means. Every rank calls this, once per optimiser step.
    """
    waits = []
    for layer in moe_layers(model).values():
        group = layer.group
        num_ranks = group.size * group.num_replicas
        if num_ranks == 1:
            continue
        for parameter in layer.experts.parameters():
            if parameter.grad is None:
                if group.num_replicas == 1 or not parameter.requires_grad:
                    continue
                parameter.grad = torch.zeros_like(parameter)  # another replica may have used it
            parameter.grad.div_(num_ranks)
            if group.num_replicas > 1:
                operation = "sum of expert gradients over replicas"
                waits.append(group.replicas.start_all_reduce(parameter.grad, operation))
    for wait in waits:
        wait()


def strategy_decisions(model: nn.Module) -> list[dict]:
    """The decisions of the tuners of the model's layers, as JSON values; empty without tuners."""
    return [decision for tuner in _tuners(model) for decision in tuner.state_dict()]


def load_strategy_decisions(model: nn.Module, decisions: list[dict]) -> None:
    """Load the result of `strategy_decisions`, in place of trials.

    Raises:
        ValueError: a strategy that is not valid, or an all-to-all that is not registered.
    """
    for tuner in _tuners(model):
        tuner.load_state_dict(decisions)


def _tuners(model: nn.Module) -> set[Tuner]:
    tuned = set()
    for layer in moe_layers(model).values():
        if layer.strategy == "auto" and layer.group.size > 1:
            tuned.add(Tuner.of(layer.group))
    return tuned


@torch.no_grad()
def global_grad_norm(model: nn.Module) -> Tensor:
    """The 2-norm of the whole model's gradient: shared parts once, or all their shards where they
    are DTensors (FSDP2), a layer's experts from all ranks of its group."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    groups = [layer.group for layer in moe_layers(model).values()]
    expert_ranks = {group.process_group: group.ranks for group in groups}
    for process_group, gradients in _gradients_by_group(model).items():
        part = _squared_norm(gradients, device)
        # replicas have the same gradients: one group's count
        if process_group is not None and process_group.size() > 1:
            if process_group in expert_ranks:
                expert_ranks[process_group].all_reduce(part, "gradient norm")
            else:
                dist.all_reduce(part, group=process_group)
        total = total + part
    return total.sqrt()


def _gradients_by_group(model: nn.Module) -> dict[dist.ProcessGroup | None, list[Tensor]]:
    """This rank's gradients by the ranks that hold the rest; None: nobody does. The order is the
    same on all ranks, and so are the groups, also where a gradient is missing."""
    owners = {}
    for layer in moe_layers(model).values():
        for parameter in layer.experts.parameters():
            owners[parameter] = layer.group.process_group
    gradients: dict[dist.ProcessGroup | None, list[Tensor]] = {}
    for parameter in model.parameters():
        group = owners.get(parameter)
        if isinstance(parameter, DTensor):
            group = parameter.device_mesh.get_group()
        of_group = gradients.setdefault(group, [])
        if parameter.grad is not None:
            of_group.append(_local(parameter.grad))
    return gradients


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def _squared_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(gradients).float() ** 2


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm` (0: leave them); returns
    the norm before."""
    norm = global_grad_norm(model)
    gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    if max_norm > 0 and gradients:
        # a norm that is not finite leaves them: scaling by it would spread the NaN to every
        # gradient
        factor = max_norm / (norm.nan_to_num(0.0, 0.0) + 1e-6)
        is_on_host = not norm.is_cuda
        if is_on_host and factor >= 1:
            return norm
        torch._foreach_mul_(gradients, factor.clamp(max=1.0))  # reads nothing back from a GPU
    return norm
