"""Experts that are distributed over ranks, inside torch's tools for data-parallel training.

These tools expect that every rank has the same parameters. For distributed experts:

- DistributedDataParallel skips the parameters in its own list, which `ignore_experts` sets.
- Hooks average the experts' gradients in the backward pass, as DistributedDataParallel does for
  other parameters.
- `state_dict` has DTensors, which torch.distributed.checkpoint saves and loads on any number of
  ranks.
- What cannot be made right is refused: FSDP and ZeroRedundancyOptimizer over experts, and shared
  parameters that differ between ranks.
"""

# E experts of the layer, W ranks of its group, s ranks that share an expert (1 if E >= W)

import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from moe_core.config import ExpertShard, MoEConfig
from moe_core.experts import Experts
from moe_core.parallel.groups import AverageOverReplicas, ExpertGroup

# The parameters that have the hook of `average_in_backward`. It is no attribute: layers may share
# experts, and the copies of a model have no hooks.
_DIVIDED = WeakTensorKeyDictionary()
_LAYERS = WeakTensorKeyDictionary()  # layers of distributed experts, by parameter
# The parameters whose gradients `average_expert_gradients` averages, with their layers. If such a
# gradient is not averaged yet: the version of the parameter when it was computed.
_WATCHED = WeakTensorKeyDictionary()
_UNAVERAGED = WeakTensorKeyDictionary()
_OPTIMIZERS: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()  # that have hooks


class HasExperts(nn.Module):
    """A layer whose experts may be distributed over ranks: MoELayer."""

    config: MoEConfig
    group: ExpertGroup
    shard: ExpertShard
    router: nn.Module
    experts: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.name_in_model = ""  # for messages
        self.num_training_passes = 0  # of `after_pass`
        self.register_state_dict_post_hook(shard_state)
        self.register_load_state_dict_pre_hook(localize_state)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        super().__setstate__(state)
        self.group.calls.add(self)


def ignore_experts(model: nn.Module) -> nn.Module:
    """Exclude distributed experts from DistributedDataParallel, and return the model:
    `DistributedDataParallel(ignore_experts(model))`.

    Call it before DistributedDataParallel, accelerate's `prepare`, or a trainer that calls one of
    these. The model is the module that they get. A MoELayer, and the models of swinv2_moe, need no
    call if they are this module. Other experts stay as they are.

    It sets the list of ignored parameters that DistributedDataParallel reads from its module. The
    model itself, its parameters and its state dict do not change.
    """
    own = set()
    for name, layer in model.named_modules():
        if not isinstance(layer, HasExperts):
            continue
        layer.name_in_model = name or layer.name_in_model
        group = layer.group
        # DistributedDataParallel itself averages experts that are only replicated
        if group.size > 1 or (group.num_ranks > 1 and not group.for_torch_tools):
            own |= set(layer.experts.parameters())
    experts = {name for name, parameter in model.named_parameters() if parameter in own}
    if experts:
        # DistributedDataParallel has no public way to get the list
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        names = sorted(experts.union(ignored))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


# --- gradients


def is_averaged(layer: HasExperts) -> bool:
    """Whether the backward pass averages the gradients of the layer's experts over all ranks."""
    group = layer.group
    return group.size > 1 and group.for_torch_tools and not needs_average(layer.experts, group)


def average_in_backward(layer: HasExperts) -> None:
    """Average the gradients of the experts over all data-parallel ranks in the backward pass. Hooks
    of the user get the averages.

    The exchange sums a gradient over the group. `AverageOverReplicas` averages it over the
    replicas, and a hook of the parameter divides it by the size of the group. A layer calls this
    when it is created and in each forward pass, because parameters may have been replaced.
    """
    experts, group = layer.experts, layer.group
    if isinstance(experts, Experts):
        experts.average = None
        if group.num_replicas > 1 and is_averaged(layer):
            experts.average = partial(AverageOverReplicas.apply, group)
    owner, size = weakref.ref(layer), group.size

    def divide(grad: Tensor) -> Tensor:  # it keeps neither the layer nor its group
        layer = owner()
        return grad if layer is not None and not is_averaged(layer) else grad / size

    for parameter in experts.parameters():
        if group.size > 1 and parameter.requires_grad and parameter not in _DIVIDED:
            parameter.register_hook(divide)
            _DIVIDED[parameter] = True


def needs_average(experts: nn.Module, group: ExpertGroup) -> bool:
    """Whether `average_expert_gradients` must average the gradients of the experts.

    A module of the user's own may leave parameters unused on some replicas, so a backward pass
    cannot average over the replicas.
    """
    if not group.for_torch_tools:
        return group.num_ranks > 1
    return group.size > 1 and group.num_replicas > 1 and not isinstance(experts, Experts)


def set_averaged(parameters: Iterable[nn.Parameter]) -> None:
    """Note that these parameters have no gradients that must be averaged."""
    for parameter in parameters:
        _UNAVERAGED.pop(parameter, None)


def _watch_gradients(layer: HasExperts) -> None:
    """Note from now on which gradients of the layer's experts are not averaged yet."""
    for parameter in layer.experts.parameters():
        if parameter.requires_grad and parameter not in _WATCHED:
            _WATCHED[parameter] = weakref.ref(layer)
            parameter.register_post_accumulate_grad_hook(_note_gradient)


def _note_gradient(parameter: Tensor) -> None:
    layer = _WATCHED[parameter]()
    if layer is None or layer.group.averaged_elsewhere:
        return
    if needs_average(layer.experts, layer.group):
        version = parameter._version
        _UNAVERAGED[parameter] = version

        def check() -> None:
            if parameter._version != version:
                raise ValueError(
                    f"{_name_of(layer)}: a hook has updated an expert in the backward pass, with a"
                    f" gradient that is not averaged over {layer.group.num_ranks} ranks: update"
                    " experts after moe_core.finish_gradients(model, max_norm), or let the backward"
                    " pass average them (built-in experts, group.for_torch_tools)"
                )

        Variable._execution_engine.queue_callback(check)  # at the end of the backward pass


def _check_averaged(layer: HasExperts) -> None:
    """Warn if the experts have changed since a backward pass whose gradients are not averaged.

    It is no error, because the change may be another than an update with these gradients.
    """
    for name, parameter in layer.experts.named_parameters():
        version = _UNAVERAGED.get(parameter, parameter._version)
        if parameter.grad is not None and parameter._version != version:
            warnings.warn(
                f"{_name_of(layer)}: experts.{name} has changed since a backward pass whose"
                f" gradients are not averaged over {layer.group.num_ranks} ranks. If it was updated"
                " with them, the ranks differ: create the model again (and load its weights), and"
                " call moe_core.finish_gradients(model, max_norm) between the backward pass and the"
                " update",
                stacklevel=2,
            )
            set_averaged(layer.experts.parameters())  # one warning for each change
            return


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if an optimiser would use gradients that are not averaged."""
    for parameter in _parameters_of(optimizer):
        if parameter.grad is None or parameter not in _UNAVERAGED:
            continue
        layer = _WATCHED[parameter]()
        if layer is None:  # its experts are used without it
            continue
        names = [name for name, p in layer.experts.named_parameters() if p is parameter]
        raise ValueError(
            f"{_name_of(layer)}: the gradient of {', '.join(names)} is not averaged over"
            f" {layer.group.num_ranks} ranks: call moe_core.finish_gradients(model, max_norm)"
            " between the backward pass and the optimiser's step"
        )


# --- state dicts


class ExpertShards(DTensor):
    """The experts of all ranks, of which this rank has its own: a DTensor of `state_dict`.

    torch.distributed.checkpoint saves and loads it on any number of ranks. `torch.save` and
    safetensors, which would write this rank's experts only, are refused.
    """

    __slots__ = ()

    def _refuse(self, *_) -> NoReturn:
        raise ValueError(
            f"experts of all ranks {list(self.shape)}: torch.save and safetensors would keep this"
            " rank's only: save on all ranks with torch.distributed.checkpoint or"
            " moe_core.save_tensors"
        )

    def redistribute(self, *args, **kwargs) -> DTensor:
        """As DTensor's; `full_tensor` calls it.

        Raises:
            ValueError: each expert is split over some of the ranks. The ranks that have the same
                part of different experts have no process group of their own.
        """
        mesh = self.device_mesh
        if mesh.get_group(0).size() != mesh.size(0):
            raise ValueError(
                f"experts {list(self.shape)} are split over {mesh.size(1)} ranks each: they"
                " cannot be gathered; save them with torch.distributed.checkpoint or"
                " moe_core.save_tensors"
            )
        return super().redistribute(*args, **kwargs)

    __reduce_ex__ = untyped_storage = storage = data_ptr = _refuse  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict) -> DTensor:
        copy = self.detach().clone()
        copy.__class__ = type(self)
        assert isinstance(copy, DTensor)
        return copy


class SharedStatistics(ExpertShards):
    """A value that an optimiser keeps for all experts of a rank together, once for each of them."""

    __slots__ = ()


def _sharded(tensor: Tensor, layer: HasExperts) -> Tensor:
    """A tensor of this rank's experts as a DTensor over the group, in the same memory.

    Tensors with another first dim, of an experts module of the user's own, stay as they are.
    """
    shard = layer.shard
    if tensor.ndim < min(shard.num_parts, 2) or tensor.shape[:1] != (shard.num_experts,):
        return tensor
    return _from_local(tensor, *_layout(layer, tensor.device.type))


def _from_local(
    tensor: Tensor, mesh: DeviceMesh, placements: list[Shard], kind: type = ExpertShards
) -> DTensor:
    sharded = DTensor.from_local(tensor.detach(), mesh, placements, run_check=False)
    sharded.__class__ = kind
    return sharded


def _local(tensor: Tensor, layer: HasExperts) -> Tensor:
    """This rank's part of the result of `_sharded`. Other tensors stay as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    expected, _ = _layout(layer, local.device.type)
    if tensor.device_mesh != expected:
        raise ValueError(
            f"the state dict has the experts of {tensor.device_mesh}, the layer those of {expected}"
        )
    return local


def shard_state(layer: HasExperts, state: dict[str, Any], prefix: str, *_) -> None:
    """A state-dict hook: the tensors of distributed experts become DTensors over the group."""
    if layer.group.size == 1 or not layer.group.for_torch_tools:
        return
    for name, tensor in state.items():
        if name.startswith(f"{prefix}experts.") and not isinstance(tensor, DTensor):
            state[name] = _sharded(tensor, layer)


def localize_state(layer: HasExperts, state: dict[str, Any], prefix: str, *_) -> None:
    """A hook before loading: replace the DTensors of `shard_state` by this rank's experts.

    Raises:
        ValueError: the experts are those of other ranks.
    """
    set_averaged(layer.experts.parameters())  # a gradient of the values before
    average_in_backward(layer)  # the parameters may be new
    if layer.group.size == 1:
        return
    for name, tensor in state.items():
        if name.startswith(f"{prefix}experts."):
            state[name] = _local(tensor, layer)


def register_experts(layer: HasExperts) -> None:
    """Average gradients in the backward pass, let optimisers find the layer of its parameters, and
    watch gradients that need averages."""
    average_in_backward(layer)
    if needs_average(layer.experts, layer.group):
        _watch_gradients(layer)
    if layer.group.size > 1 and layer.group.for_torch_tools:
        for parameter in layer.experts.parameters():
            _LAYERS[parameter] = weakref.ref(layer)


def _map_moments(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    convert: Callable[[Tensor, HasExperts, nn.Parameter, Any], Tensor],
) -> dict[str, Any]:
    """A copy of an optimiser's state dict, with the tensors of distributed experts converted.

    Args:
        convert: its arguments are a tensor of the state, the layer and parameter that it belongs
            to, and what the optimiser has now in its place, or None.
    """
    parameters = _parameters_of(optimizer)
    keys = [key for group in state["param_groups"] for key in group["params"]]
    moments = dict(state["state"])
    for key, parameter in zip(keys, parameters, strict=False):
        layer = _LAYERS[parameter]() if parameter in _LAYERS else None
        if layer is None or key not in moments:
            continue
        current = optimizer.state.get(parameter, {})
        converted = dict(moments[key])
        for name, value in converted.items():
            if isinstance(value, Tensor):
                converted[name] = convert(value, layer, parameter, current.get(name))
        moments[key] = converted
    return state | {"state": moments}


def _shard_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Post-hook of an optimiser's `state_dict`: the moments of distributed experts become DTensors,
    as the weights do in `shard_state`."""
    return _map_moments(optimizer, state, _sharded_moment)


def _localize_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Pre-hook of an optimiser's `load_state_dict`: the inverse of `_shard_moments`, as
    `localize_state` is for weights."""
    return _map_moments(optimizer, state, _local_moment)


def _sharded_moment(tensor: Tensor, layer: HasExperts, parameter: nn.Parameter, _: Any) -> Tensor:
    """A tensor that an optimiser keeps for this rank's experts, as a DTensor over the group.

    Each rank has its own values, whatever their shape. A number (of steps) stays as it is. A value
    for all experts of the rank, such as Adafactor's mean over them, is repeated for each expert, so
    that other numbers of ranks can load it. Other shapes load on the same number of ranks.
    """
    if tensor.ndim == 0 or (tensor.numel() == 1 and tensor.ndim != parameter.ndim):
        return tensor
    mesh, placements = _layout(layer, tensor.device.type)
    num_experts = layer.shard.num_experts
    if tensor.ndim == parameter.ndim and tensor.shape[0] == 1 < num_experts:
        each = tensor.repeat(num_experts, *[1] * (tensor.ndim - 1))
        return _from_local(each, mesh, placements, SharedStatistics)
    if tensor.ndim != parameter.ndim or tensor.shape[0] != num_experts:
        placements = [Shard(0)] * mesh.ndim
    return _from_local(tensor, mesh, placements)


def _local_moment(
    tensor: Tensor, layer: HasExperts, parameter: nn.Parameter, current: Any
) -> Tensor:
    """The inverse of `_sharded_moment`. A value for all experts of the rank is the mean of those
    that were saved for them."""
    local = _local(tensor, layer)
    is_for_all = isinstance(current, Tensor) and current.shape != local.shape
    is_for_all = is_for_all and current.shape == (1, *local.shape[1:])
    if isinstance(tensor, SharedStatistics) or is_for_all:
        first = local[:1]
        return first + (local - first).mean(0, keepdim=True)  # exact if all are equal
    return local


def _layout(layer: HasExperts, device_type: str) -> tuple[DeviceMesh, list[Shard]]:
    """The ranks of the group as a mesh [W], or [W / s, s] if s ranks share an expert, and the dim
    of an expert tensor that is sharded over each dim of the mesh."""
    process_group, num_parts = layer.group.process_group, layer.shard.num_parts
    assert process_group is not None
    if num_parts in (1, layer.group.size):
        mesh = DeviceMesh.from_group(process_group, device_type)
        return mesh, [Shard(int(num_parts > 1))]
    ranks = torch.tensor(dist.get_process_group_ranks(process_group)).view(-1, num_parts)
    groups = [process_group, layer.group.owners(num_parts).process_group or process_group]
    names = ("experts", "parts")
    mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)
    return mesh, [Shard(0), Shard(1)]


# --- refusals


def before_pass(layer: HasExperts) -> None:
    """Average the gradients of this pass. Called in each forward pass of a layer whose experts are
    distributed or have replicas."""
    if torch.compiler.is_compiling():  # experts that only have replicas
        return
    if not torch.is_grad_enabled():
        return
    register_experts(layer)
    if layer.training:
        _check_averaged(layer)


def after_pass(layer: HasExperts) -> None:
    """Check the ranks in some of the training passes, after the pass has shown that they call the
    same layer.

    Raises:
        ValueError: weights that should be equal differ between ranks.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and layer.training):
        return
    if layer.group.size == 1 or not layer.group.for_torch_tools:
        return
    passes = layer.num_training_passes
    layer.num_training_passes += 1
    if passes and passes & (passes - 1) == 0:  # passes 2, 3, 5, 9, 17, ...
        _check_equal(layer, DistributedDataParallel._get_active_ddp_module())


def _check_ignored(parallel: nn.Module, name: str, model: nn.Module) -> None:
    """A hook of every module's assignment of a module: DistributedDataParallel gets its module
    before it overwrites the parameters of all ranks with those of its rank 0.

    Raises:
        ValueError: it would average experts that this rank trains, or overwrite frozen experts that
            differ between the ranks.
    """
    if not isinstance(parallel, DistributedDataParallel) or name != "module":
        return
    shared = dict(model.named_parameters())
    for ignored in parallel.parameters_to_ignore:
        shared.pop(ignored, None)
    for name, layer in model.named_modules():
        if not isinstance(layer, HasExperts) or layer.group.size == 1:
            continue
        layer.name_in_model = name or layer.name_in_model
        own = set(layer.experts.parameters())
        wrong = _first_own({n: p for n, p in shared.items() if p in own}, layer.group)
        if wrong is not None:
            raise ValueError(
                f"{wrong}: DistributedDataParallel would overwrite this rank's experts with those"
                " of rank 0: call DistributedDataParallel(moe_core.ignore_experts(model))"
            )


def _first_own(experts: dict[str, nn.Parameter], group: ExpertGroup) -> str | None:
    """The first of these experts that must not be taken for a copy of other ranks' experts: it is
    trained, or it is frozen and differs between the ranks of the group. This is a collective if all
    are frozen."""
    for name, parameter in experts.items():
        if parameter.requires_grad:
            return name
    difference = group.ranks.first_difference(experts)
    return None if difference is None else difference[0]


def _check_equal(layer: HasExperts, parallel: DistributedDataParallel | None) -> None:
    """Compare the router's weights over the ranks of the group. Compare experts over the replicas,
    where only the user averages them."""
    router = {n: p for n, p in layer.router.named_parameters() if not isinstance(p, DTensor)}
    difference = layer.group.ranks.first_difference(router)
    if difference is not None:
        raise ValueError(
            f"{_name_of(layer)}: the router's weights differ between the ranks of the"
            f" {layer.group}, so shared parameters were updated differently: train within"
            " DistributedDataParallel(moe_core.ignore_experts(model)) or FSDP2, clip with"
            " moe_core.clip_gradients in place of torch.nn.utils.clip_grad_norm_, and skip a step"
            " on all ranks or on none"
        )
    if isinstance(layer.experts, Experts) or parallel is None:
        return
    if layer.group.replicas.first_difference(dict(layer.experts.named_parameters())) is not None:
        raise ValueError(
            f"{_name_of(layer)}: the experts differ between replicas: call"
            " moe_core.finish_gradients(model, max_norm) once before each optimiser step"
        )


def _name_of(layer: HasExperts) -> str:
    config = layer.config
    return layer.name_in_model or (
        f"MoELayer of {config.num_experts} experts (model_dim {config.model_dim})"
    )


def _before_step(optimizer: torch.optim.Optimizer, *_) -> None:
    """Before each step of any optimiser: prepare its state dict if it has distributed experts.

    Raises:
        ValueError: it is a ZeroRedundancyOptimizer, whose step would overwrite each rank's experts
            with those of the rank that updates them; fully_shard has sharded the parameters of a
            user's own experts over ranks that have different experts; or gradients of experts are
            not averaged.
    """
    if _UNAVERAGED:
        _check_step(optimizer)
    if optimizer in _OPTIMIZERS:
        return
    parameters = _parameters_of(optimizer)
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        _check_not_sharded(set(parameters))
    if not any(parameter in _LAYERS for parameter in parameters):
        return
    is_zero = "ZeroRedundancyOptimizer" in [kind.__name__ for kind in type(optimizer).__mro__]
    if is_zero and any(_first_own(own, group) for group, own in _by_group(parameters).items()):
        raise ValueError(
            "ZeroRedundancyOptimizer would overwrite this rank's experts with those of another"
            " rank: give it the other parameters only, and update"
            " moe_core.expert_parameters(model).values() with an optimiser of their own"
        )
    optimizer.register_state_dict_post_hook(_shard_moments)
    optimizer.register_load_state_dict_pre_hook(_localize_moments)
    _OPTIMIZERS.add(optimizer)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _by_group(parameters: list[nn.Parameter]) -> dict[ExpertGroup, dict[str, nn.Parameter]]:
    """The distributed experts among the parameters, by their group and any name."""
    groups: dict[ExpertGroup, dict[str, nn.Parameter]] = {}
    for number, parameter in enumerate(parameters):
        layer = _LAYERS[parameter]() if parameter in _LAYERS else None
        if layer is not None:
            groups.setdefault(layer.group, {})[str(number)] = parameter
    return groups


def _check_not_sharded(parameters: set[nn.Parameter]) -> None:
    layers = {layer for ref in _LAYERS.values() if (layer := ref()) is not None}
    for layer in layers:
        assert layer.group.process_group is not None
        ranks = set(dist.get_process_group_ranks(layer.group.process_group))
        for name, parameter in layer.experts.named_parameters():
            if not isinstance(parameter, DTensor) or parameter not in parameters:
                continue
            if len(ranks.intersection(parameter.device_mesh.mesh.flatten().tolist())) > 1:
                raise ValueError(
                    f"experts.{name}: fully_shard has mixed the experts of {len(ranks)} ranks:"
                    " create the model again (and load its weights), and call fully_shard(module,"
                    " ignored_params=set(moe_core.expert_parameters(model).values()))"
                )


register_optimizer_step_pre_hook(_before_step)
register_module_module_registration_hook(_check_ignored)
