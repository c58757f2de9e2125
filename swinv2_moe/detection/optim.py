"""Parameter groups and the optimiser step of a detector."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.dist import all_gather_object
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from moe_core import cpu_computes_in, finish_gradients
from swinv2_moe.errors import UserError
from swinv2_moe.ranks.precision import off_because_slow
from swinv2_moe.train.optim import LossScaler

_DTYPES = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parameter_groups(
    detector: nn.Module, lr: float, weight_decay: float, layer_decay: float = 1.0
) -> list[dict]:
    """The trained parameters, grouped by learning rate and weight decay: two groups for each rate.

    The learning rate of neck, heads and output norms is `lr`. That of the backbone's last block is
    `lr * layer_decay`, and so on towards the input, as timm counts layers (BEiT, arXiv 2106.08254).
    1-D parameters, biases, position networks, temperatures and cosine routers have no weight decay.
    """
    backbone: Any = detector.backbone
    trunk = backbone.trunk
    trunk_groups = param_groups_layer_decay(
        trunk,
        weight_decay=weight_decay,
        no_weight_decay_list=trunk.no_weight_decay(),
        layer_decay=layer_decay,
    )
    trunk_options = {}  # scale of the learning rate, and weight decay, by parameter
    for group in trunk_groups:
        for p in group["params"]:
            trunk_options[p] = (group["lr_scale"] * layer_decay, group["weight_decay"])
    groups: dict[tuple, dict] = {}
    for p in detector.parameters():
        if not p.requires_grad:
            continue
        default = (1.0, weight_decay if p.ndim > 1 else 0.0)
        scale, decay = trunk_options.get(p, default)
        new_group = {"params": [], "lr": lr * scale, "weight_decay": decay}
        groups.setdefault((scale, decay), new_group)["params"].append(p)
    return list(groups.values())


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """Builds a MoEOptimWrapper with layer-wise learning rates.

    The configuration is `optimizer` (with lr and weight_decay) and
    `paramwise_cfg=dict(layer_decay=...)`. mmengine's constructor cannot be used: only the longest
    match of its `custom_keys` counts, so that a key for a layer's learning rate enables weight
    decay on the layer's norms.
    """

    def __call__(self, model: Any) -> OptimWrapper:
        if is_model_wrapper(model):
            model = model.module
        optimizer, paramwise = dict(self.optimizer_cfg), dict(self.paramwise_cfg or {})
        layer_decay = paramwise.pop("layer_decay", 1.0)
        if paramwise:
            raise UserError(
                f"optim_wrapper.paramwise_cfg knows layer_decay alone, not {', '.join(paramwise)}"
            )
        lr, weight_decay = optimizer["lr"], optimizer.get("weight_decay", 0.0)
        optimizer["params"] = parameter_groups(model, lr, weight_decay, layer_decay)
        return OPTIM_WRAPPERS.build(
            dict(self.optim_wrapper_cfg),
            default_args={"optimizer": OPTIMIZERS.build(optimizer), "model": model},
        )


@OPTIM_WRAPPERS.register_module()
class MoEOptimWrapper(OptimWrapper):
    """Optimiser wrapper for detectors with sharded or replicated experts, in fp32 or autocast.

    After a step, replicated parameters are bitwise equal on all ranks. Therefore the gradient norm
    and fp16's loss scale are those of the complete model, the same on all ranks. mmengine's norm is
    that of each rank, which differs for sharded experts.

    Args:
        dtype: autocast dtype of backbone and neck, "bfloat16" or "float16"; None: fp32. On a CPU
            of any process without instructions for the dtype it becomes None, with a warning.
        clip_grad: `dict(max_norm=...)`; None: no clipping.

    Raises:
        UserError: unsupported values; in a step, a gradient norm that is not finite, except for an
            overflow of fp16.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        accumulative_counts: int = 1,
        clip_grad: dict | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(optimizer, accumulative_counts)
        if dtype not in _DTYPES:
            raise UserError(
                f"optim_wrapper.dtype ({dtype!r}) must be None, 'bfloat16' or 'float16'"
            )
        if clip_grad is not None and set(clip_grad) != {"max_norm"}:
            raise UserError(
                f"optim_wrapper.clip_grad ({dict(clip_grad)}) must be dict(max_norm=...)"
            )
        self.model = model
        self.max_norm = 0.0
        if clip_grad:
            self.max_norm = clip_grad["max_norm"]
        if dtype is not None and next(model.parameters()).device.type == "cpu":
            dtype = _unless_slow(dtype)
        self.dtype, self.scaler = _DTYPES[dtype], LossScaler(dtype == "float16")

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        device = next(model.parameters()).device.type
        with (
            super().optim_context(model),
            torch.autocast(device, self.dtype, enabled=self.dtype is not None),
        ):
            yield

    def backward(self, loss: Tensor, **kwargs) -> None:
        if self.scaler.enabled:
            loss = loss * self.scaler.scale
        super().backward(loss, **kwargs)

    def step(self, **kwargs) -> None:
        norm = float(finish_gradients(self.model, self.max_norm, scale=self.scaler.scale))
        self.message_hub.update_scalar("train/grad_norm", norm)
        finite = norm < float("inf")  # False for NaN too
        if not finite and self.scaler.exhausted:
            raise UserError(f"the gradient norm is {norm}: nothing was changed in this step")
        if finite:
            self.optimizer.step(**kwargs)
        self.scaler.update(finite)

    def state_dict(self) -> dict:
        return super().state_dict() | {"loss_scaler": self.scaler.state()}

    def load_state_dict(self, state_dict: dict) -> None:
        state_dict = dict(state_dict)
        if "loss_scaler" in state_dict:
            self.scaler.load(state_dict.pop("loss_scaler"))
        super().load_state_dict(state_dict)


def _unless_slow(dtype: str) -> str | None:
    """The dtype; None, with a warning, if the CPU of a process has no instructions for it."""
    if all(all_gather_object(cpu_computes_in(dtype))):
        return dtype
    line = f"optim_wrapper.dtype is {dtype}: {off_because_slow(dtype)}"
    print_log(line, logger="current", level=logging.WARNING)
    return None
