"""Optimiser, learning-rate schedule and loss scale of a configuration."""

from collections.abc import Collection

import torch
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swinv2_moe.config import TrainConfig
from swinv2_moe.models import MoEModel
from swinv2_moe.train.parallelize import placed_like

_REFERENCE_BATCH = 512  # images a step for which TRAIN.BASE_LR is given


def build_optimizer(
    config: TrainConfig, model: MoEModel, learning_rate: float
) -> torch.optim.Optimizer:
    """AdamW or SGD; no weight decay on biases, 1-D parameters and the model's exceptions; layer
    decay by depth."""
    groups = param_groups_layer_decay(
        model,
        weight_decay=config.weight_decay,
        no_weight_decay_list=model.no_weight_decay(),
        layer_decay=config.layer_decay,
    )
    groups = [part for group in groups for part in _sharded_apart(group)]
    options = config.optimizer
    if options.name == "sgd":
        return torch.optim.SGD(
            groups, lr=learning_rate, momentum=options.momentum, nesterov=options.momentum > 0
        )
    return torch.optim.AdamW(
        groups, lr=learning_rate, betas=options.betas, eps=options.eps, fused=True
    )


def _sharded_apart(group: dict) -> list[dict]:
    """A parameter group as one or two: the fused optimisers cannot mix sharded parameters and
    others."""
    sharded = [p for p in group["params"] if isinstance(p, DTensor)]
    whole = [p for p in group["params"] if not isinstance(p, DTensor)]
    return [group | {"params": part} for part in (whole, sharded) if part]


def scaled_learning_rate(config: TrainConfig, per_512: float, world_size: int) -> float:
    """A learning rate of the configuration for the run's global batch."""
    batch = config.batch_size * config.accumulation_steps * world_size
    return per_512 * batch / _REFERENCE_BATCH


def build_schedule(
    config: TrainConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int, world_size: int
) -> CosineLRScheduler:
    """Linear warm-up, then half a cosine down to MIN_LR; a function of the step alone
    (`step_update(step)`)."""
    warmup = config.warmup_epochs * steps_per_epoch
    return CosineLRScheduler(
        optimizer,
        t_initial=config.epochs * steps_per_epoch - warmup,
        lr_min=scaled_learning_rate(config, config.min_lr, world_size),
        warmup_t=warmup,
        warmup_lr_init=scaled_learning_rate(config, config.warmup_lr, world_size),
        warmup_prefix=True,
        cycle_limit=1,
        t_in_epochs=False,
    )


class LossScaler:
    """Dynamic loss scale for fp16; elsewhere the scale is 1 and the first gradient that is not
    finite ends the run.

    Its only input is the global gradient norm, so all ranks agree: torch's GradScaler looks at each
    rank's own gradients, and with sharded experts ranks would skip different steps.
    """

    GROWTH_INTERVAL = 2000
    SMALLEST = 2.0**-8  # below it overflow is not what makes gradients infinite

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = 2.0**16 if enabled else 1.0
        self.good_steps = self.updates = 0  # since the last change of scale; in all

    @property
    def exhausted(self) -> bool:
        """Whether a gradient that is not finite cannot be put down to the scale."""
        return not self.enabled or self.scale < self.SMALLEST

    @torch.no_grad()
    def unscale(self, gradients: list[Tensor]) -> None:
        if self.enabled and gradients:
            # one list takes only one kind
            local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
            torch._foreach_mul_(local, 1 / self.scale)

    def update(self, finite: bool) -> None:
        """Count a step: halve the scale after an overflow, double it after GROWTH_INTERVAL good
        steps."""
        self.updates += finite
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps == self.GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0

    def state(self) -> dict:
        return {"scale": self.scale, "good_steps": self.good_steps, "updates": self.updates}

    def load(self, state: dict) -> None:
        self.updates = state["updates"]
        if self.enabled:
            self.scale, self.good_steps = state["scale"], state["good_steps"]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, those that are not frozen."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def optimizer_sections(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, dict[str, Tensor]]:
    """`{"optimizer/exp_avg": {parameter name: tensor}, ...}` of the trained parameters; all have
    had the same number of updates, which the loss scaler counts."""
    sections: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state.get(parameter, {}).items():
            if kind != "step" and tensor is not None:
                sections.setdefault(f"optimizer/{kind}", {})[name] = tensor
    return sections


def check_optimizer_sections(
    optimizer: torch.optim.Optimizer, sections: Collection[str], updates: int
) -> None:
    """Whether these are the sections that this optimiser has after so many updates.

    Raises:
        ValueError: they are another optimiser's.
    """
    kinds = ["momentum_buffer"] if optimizer.defaults.get("momentum") else []
    kinds = ["exp_avg", "exp_avg_sq"] if isinstance(optimizer, torch.optim.AdamW) else kinds
    needed = [f"optimizer/{kind}" for kind in kinds] if updates else []
    if sorted(sections) != needed:
        raise ValueError(
            f"it holds {', '.join(sorted(sections)) or 'no optimiser state'}, TRAIN.OPTIMIZER.NAME"
            f" {type(optimizer).__name__.lower()!r} needs {', '.join(needed) or 'none'}"
        )


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    moments: dict[str, dict[str, Tensor]],
    updates: int,
) -> None:
    """Put back what `optimizer_sections` gave, after `updates` optimiser steps."""
    is_adam = isinstance(optimizer, torch.optim.AdamW)
    for name, parameter in trained_parameters(model).items():
        state = {
            kind.split("/")[1]: placed_like(tensors[name], parameter)
            for kind, tensors in moments.items()
        }
        if is_adam and state:
            state["step"] = torch.tensor(float(updates), device=parameter.device)
        optimizer.state[parameter] = state
