"""Train models with MoELayer under DeepSpeed's ZeRO-1 and ZeRO-2.

>>> group = make_expert_groups(expert_parallel_size=2)
>>> model = Net(MoELayer(config, group))
>>> mark_experts(model)
>>> engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)

DeepSpeed recognises experts by attributes of their parameters and by its own MoE module (deepspeed
0.19: moe/utils.py, runtime/engine.py). It sums the experts' gradients over the replicas and divides
them by the number of all ranks. So do not call `average_expert_gradients`.

- ZeRO-3 is not supported, because it splits parameters that the kernels need whole. DeepSpeed
  refuses ZeRO-3 with its MoE module, or fails in the first pass.
- Set `gradient_clipping` to 0.0 (DeepSpeed's default is 1.0). DeepSpeed's norm includes only the
  experts of one rank, so each rank would clip by another factor.
- DeepSpeed's checkpoints can only store experts of its own layers. Saving or loading with
  DeepSpeed's engine raises an error. Use `moe_core.checkpoint` instead.
"""

from collections.abc import Iterator

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from moe_core.training import moe_layers

_MARKER = "deepspeed_experts_marker"


class ExpertsMarker(MoE):
    """A module without parameters that tells DeepSpeed's engine that the model has experts.

    Args:
        num_experts: the number of experts of a layer, over all ranks of its expert group.
        size: the number of ranks of an expert group.
    """

    def __init__(self, num_experts: int, size: int) -> None:
        nn.Module.__init__(self)  # MoE.__init__ would create a layer
        self.num_experts = num_experts
        self.size = size

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Create DeepSpeed's process groups for experts. DeepSpeed's engine calls this."""
        if use_data_before_expert_parallel_:
            raise ValueError(
                "use_data_before_expert_parallel_ is True: the ranks of an expert group must be"
                " consecutive"
            )
        if group_name(self.size) not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(self.size)

    @property
    def expert_group_name(self) -> str:
        """DeepSpeed reads this attribute when it saves or loads the experts of its layers.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "DeepSpeed's checkpoints cannot hold the experts of MoELayer; save them with"
            " moe_core.checkpoint"
        )


def group_name(size: int) -> str:
    """DeepSpeed's name for the expert groups of `size` ranks."""
    return f"ep_size_{size}"


def mark_experts(model: nn.Module) -> None:
    """Prepare a model for `deepspeed.initialize`. Every rank calls this first.

    If no experts are distributed over ranks, nothing changes: DeepSpeed averages all gradients.

    Raises:
        ValueError: the expert groups of layers differ in size, or their ranks are not consecutive.
    """
    layers = list(moe_layers(model).values())
    sizes = {layer.group.size for layer in layers}
    if sizes <= {1}:
        return
    if len(sizes) > 1:
        listed = ", ".join(map(str, sorted(sizes)))
        raise ValueError(
            f"expert groups of {listed} ranks in one model: DeepSpeed supports one size"
        )
    (size,) = sizes
    for layer in layers:
        _check_consecutive(layer.group.process_group)
        layer.group.for_torch_tools = False
        layer.group.averaged_elsewhere = True  # by DeepSpeed
    for parameter in _expert_parameters(layers):
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.group_name = group_name(size)  # type: ignore[attr-defined]
    model.add_module(_MARKER, ExpertsMarker(layers[0].config.num_experts, size))


def _check_consecutive(group: dist.ProcessGroup | None) -> None:
    assert group is not None
    ranks = dist.get_process_group_ranks(group)
    first = ranks[0]
    if ranks != list(range(first, first + len(ranks))) or first % len(ranks):
        raise ValueError(f"expert group of ranks {ranks}: DeepSpeed needs consecutive ranks")


def _expert_parameters(layers: list) -> Iterator[nn.Parameter]:
    for layer in layers:
        yield from layer.experts.parameters()
