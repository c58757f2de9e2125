"""The optimiser, the learning-rate schedule, mixed precision and the loss scale."""

from collections.abc import Collection

import torch
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swinv2_moe.models import MoEModel
from swinv2_moe.models.weights import has_dense_twin
from swinv2_moe.ranks.parallelize import placed_like
from swinv2_moe.train.section import TrainConfig

_BETAS = (0.9, 0.999)  # of AdamW: decays of the two moments
_MOMENTUM = 0.9  # of SGD, Nesterov's


def build_optimizer(
    config: TrainConfig, model: MoEModel, learning_rate: float
) -> torch.optim.Optimizer:
    """Build the optimiser that TRAIN.OPTIMIZER names, with layer decay by depth.

    There is no weight decay for biases, 1-D parameters, and parameters that the model excludes.
    """
    groups = param_groups_layer_decay(
        model,
        weight_decay=config.weight_decay,
        no_weight_decay_list=model.no_weight_decay(),
        layer_decay=config.layer_decay,
    )
    groups = [part for group in _merge(groups) for part in _split_sharded(group)]
    options = config.optimizer
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=_MOMENTUM, nesterov=True)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=_BETAS, eps=options.eps, fused=True)


def _merge(groups: list[dict]) -> list[dict]:
    """Merge groups with the same learning rate and weight decay, so that a step launches fewer
    kernels. timm makes two groups for each layer of the model."""
    merged: dict[tuple, dict] = {}
    for group in groups:
        key = (group.get("lr_scale", 1.0), group["weight_decay"])
        if key in merged:
            merged[key]["params"] += group["params"]
        else:
            merged[key] = group | {"params": list(group["params"])}
    return list(merged.values())


def _split_sharded(group: dict) -> list[dict]:
    """Split a parameter group into sharded and other parameters: fused optimisers cannot mix the
    two."""
    sharded = [p for p in group["params"] if isinstance(p, DTensor)]
    others = [p for p in group["params"] if not isinstance(p, DTensor)]
    return [group | {"params": part} for part in (others, sharded) if part]


def build_schedule(
    config: TrainConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int, world_size: float
) -> CosineLRScheduler:
    """Linear warm-up, then half a cosine down to MIN_LR. `step_update(step)` sets the learning
    rate."""
    warmup = config.warmup_epochs * steps_per_epoch
    return CosineLRScheduler(
        optimizer,
        t_initial=config.epochs * steps_per_epoch - warmup,
        lr_min=config.scaled_rate(config.min_lr, world_size),
        warmup_t=warmup,
        warmup_lr_init=config.scaled_rate(config.warmup_lr, world_size),
        warmup_prefix=True,
        cycle_limit=1,
        t_in_epochs=False,
    )


def learning_rate_after(config: TrainConfig, training: dict) -> float:
    """The learning rate of the next step of a run with the state `training`, as in meta.json."""
    world_size = training["global_batch"] / (config.batch_size * config.accumulation_steps)
    rate = config.scaled_rate(config.base_lr, world_size)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    steps = training["steps_per_epoch"]
    schedule = build_schedule(config, optimizer, steps, world_size)
    schedule.step_update(training["epoch"] * steps + training["epoch_step"])
    return optimizer.param_groups[0]["lr"]


class DeviceStep:
    """Steps of AdamW that read on the device whether they apply, and their learning rates. So a
    CUDA graph can hold a step.

    Args:
        optimizer: fused AdamW.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group["capturable"] = True
        device = optimizer.param_groups[0]["params"][0].device
        self._rates = torch.zeros(len(optimizer.param_groups), device=device)

    def read_rates(self) -> None:
        """Copy the learning rates of the parameter groups to the device. Not in a graph."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self._rates.copy_(torch.tensor(rates))

    def __call__(self, applies: Tensor) -> None:
        """Update the weights if the bool scalar `applies` is True."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates.unbind(), strict=True):
            group["lr"] = rate
        # torch's name, which GradScaler sets, too
        self.optimizer.found_inf = (~applies).float()  # type: ignore[attr-defined]
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.found_inf  # type: ignore[attr-defined]
            for group, number in zip(groups, rates, strict=True):
                group["lr"] = number


class LossScaler:
    """Dynamic loss scale for fp16. In other dtypes the scale is 1.

    It depends only on the global gradient norm, so it is the same on all ranks. torch's GradScaler
    inspects each rank's gradients: with sharded experts, ranks would skip different steps.
    """

    INITIAL = 2.0**16
    GROWTH_INTERVAL = 2000
    SMALLEST = 2.0**-8  # an overflow at a smaller scale has another cause

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = 1.0
        if enabled:
            self.scale = self.INITIAL
        self.good_steps = 0  # since the scale last changed
        self.updates = 0

    @property
    def exhausted(self) -> bool:
        """Whether a smaller scale cannot make the gradients finite."""
        return not self.enabled or self.scale < self.SMALLEST

    def update(self, finite: bool) -> None:
        """Count a step. The scale is halved after an overflow, and doubled after GROWTH_INTERVAL
        steps without one."""
        if finite:
            self.updates += 1
        if not self.enabled:
            return
        if not finite:
            self.scale /= 2
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.GROWTH_INTERVAL:
            self.scale *= 2
            self.good_steps = 0

    def state(self) -> dict:
        """The state for a checkpoint, ready for JSON."""
        return {"scale": self.scale, "good_steps": self.good_steps, "updates": self.updates}

    def load(self, state: dict) -> None:
        self.updates = state["updates"]
        if self.enabled:
            self.scale = state["scale"]
            self.good_steps = state["good_steps"]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def optimizer_sections(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, dict[str, Tensor]]:
    """The optimiser's state: `{"optimizer/exp_avg": {parameter name: tensor}, ...}`.

    The number of updates is not included: `LossScaler` counts it (see `restore_optimizer`).
    """
    sections: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state.get(parameter, {}).items():
            if kind != "step" and tensor is not None:
                sections.setdefault(f"optimizer/{kind}", {})[name] = tensor
    return sections


def check_optimizer_sections(
    optimizer: torch.optim.Optimizer, sections: Collection[str], updates: int
) -> None:
    """Compare a checkpoint's sections with the sections that this optimiser has after `updates`
    updates.

    Raises:
        ValueError: the sections differ.
    """
    kinds = []
    if isinstance(optimizer, torch.optim.AdamW):
        kinds = ["exp_avg", "exp_avg_sq"]
    elif optimizer.defaults.get("momentum"):
        kinds = ["momentum_buffer"]
    needed = []
    if updates:
        needed = [f"optimizer/{kind}" for kind in kinds]
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
    dense_updates: int = 0,
) -> None:
    """Restore the state that `optimizer_sections` returned after `updates` updates.

    Args:
        dense_updates: number of these updates that were made before the dense model was upcycled.
            They did not update parameters without a dense twin.
    """
    is_adam = isinstance(optimizer, torch.optim.AdamW)
    for name, parameter in trained_parameters(model).items():
        state = {}
        for section, tensors in moments.items():
            kind = section.removeprefix("optimizer/")
            state[kind] = placed_like(tensors[name], parameter)
        if is_adam and state:
            own_updates = updates
            if not has_dense_twin(name):
                own_updates -= dense_updates
            state["step"] = torch.tensor(float(own_updates), device=parameter.device)
        optimizer.state[parameter] = state
