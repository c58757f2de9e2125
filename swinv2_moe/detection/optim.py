"""Parameter groups and the optimiser step of a detector."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.model import is_model_wrapper
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from moe_core import average_expert_gradients, clip_gradients
from swinv2_moe.errors import UserError
from swinv2_moe.train.optim import LossScaler

_DTYPES = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parameter_groups(
    detector: nn.Module, lr: float, weight_decay: float, layer_decay: float = 1.0
) -> list[dict]:
    """The trained parameters, grouped by learning rate and weight decay: two groups for each rate.

    Neck, heads and the outputs' norms learn at `lr`, the backbone's last block at `lr *
    layer_decay`, and so on down, as timm counts layers (BEiT's rule, arXiv 2106.08254). No weight
    decay on 1-D parameters, biases, position networks, temperatures and cosine routers.
    """
    trunk = detector.backbone.trunk
    own = param_groups_layer_decay(
        trunk,
        weight_decay=weight_decay,
        no_weight_decay_list=trunk.no_weight_decay(),
        layer_decay=layer_decay,
    )
    in_trunk = {
        p: (group["lr_scale"] * layer_decay, group["weight_decay"])
        for group in own
        for p in group["params"]
    }
    groups: dict[tuple, dict] = {}
    for p in detector.parameters():
        if p.requires_grad:
            scale, decay = in_trunk.get(p, (1.0, weight_decay if p.ndim > 1 else 0.0))
            group = groups.setdefault(
                (scale, decay), {"params": [], "lr": lr * scale, "weight_decay": decay}
            )
            group["params"].append(p)
    return list(groups.values())


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """A MoEOptimWrapper from `optimizer` (lr and weight_decay included) and
    `paramwise_cfg=dict(layer_decay=...)`.

    Not mmengine's own: of its `custom_keys` the longest match alone counts, so that a key for a
    layer's rate puts weight decay back on the norms in it.
    """

    def __call__(self, model: nn.Module) -> OptimWrapper:
        model = model.module if is_model_wrapper(model) else model
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
    """Steps that leave replicas equal to the bit, wherever the experts are, in fp32 or mixed
    precision.

    The gradient norm is the whole model's and the same on all ranks: mmengine's is each rank's own,
    which with sharded experts differs. fp16's loss scale follows from that norm alone, for the same
    reason.

    Args:
        dtype: of autocast in backbone and neck, "bfloat16" or "float16"; None: fp32.
        clip_grad: `dict(max_norm=...)`; None: no clipping.

    Raises:
        UserError: other values; in a step, a gradient that is not finite and not fp16's overflow.
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
        self.max_norm = clip_grad["max_norm"] if clip_grad else 0.0
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
        super().backward(loss * self.scaler.scale if self.scaler.enabled else loss, **kwargs)

    def step(self, **kwargs) -> None:
        average_expert_gradients(self.model)
        self.scaler.unscale([p.grad for p in self.model.parameters() if p.grad is not None])
        norm = float(clip_gradients(self.model, self.max_norm))
        self.message_hub.update_scalar("train/grad_norm", norm)
        finite = norm < float("inf")  # False for NaN too
        if not finite and self.scaler.exhausted:
            raise UserError(f"the gradient norm is {norm}: nothing was changed in this step")
        if finite:
            self.optimizer.step(**kwargs)
        self.scaler.update(finite)

    def state_dict(self) -> dict:
        return {**super().state_dict(), "loss_scaler": self.scaler.state()}

    def load_state_dict(self, state_dict: dict) -> None:
        state_dict = dict(state_dict)
        if "loss_scaler" in state_dict:
            self.scaler.load(state_dict.pop("loss_scaler"))
        super().load_state_dict(state_dict)
