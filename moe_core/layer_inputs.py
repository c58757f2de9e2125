"""Checks and views of a layer's arguments."""

# B images, N tokens of an image, T tokens, M model dim

import math

import torch
from torch import Tensor, nn

from moe_core.config import MoEConfig
from moe_core.context import expert_dtype


def as_images(x: Tensor) -> Tensor:
    """x [B, ..., M] -> tokens by image [B, N, M]. x [T, M] and x [M] are one image."""
    if x.dim() < 3:
        return x.reshape(1, -1, x.shape[-1])
    return x.flatten(1, -2)


def check_tensors(x: Tensor, mask: Tensor | None) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, not {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError("x is 0-d, its last dim must be the layer's model_dim")
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}, it must be floating-point")
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a tensor, not {type(mask).__name__}")
    if mask.is_floating_point():  # an additive mask keeps the positions that are 0
        raise ValueError(f"mask has dtype {mask.dtype}, it must be bool")
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"mask has shape {list(mask.shape)}, the tokens of x {list(x.shape[:-1])}")


def expert_input(tokens: Tensor, group_size: int) -> Tensor:
    """The tokens in the dtype of the experts.

    Over several ranks the result requires a gradient even if the tokens do not, because either all
    ranks or none must run the backward pass.
    """
    tokens = tokens.to(expert_dtype(tokens))
    if group_size > 1 and torch.is_grad_enabled() and not tokens.requires_grad:
        return tokens.detach().requires_grad_()
    return tokens


def positions_of(mask: Tensor, count: int | None) -> Tensor:
    """The indices [count] at which `mask` [T] is True, in ascending order.

    Raises:
        ValueError: `count` is not their number. This is checked on a CPU only, since reading the
            number would wait for a GPU.
    """
    if count is None:
        return mask.nonzero().squeeze(1)
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        actual = int(mask.count_nonzero())
        if actual != count:
            raise ValueError(f"num_tokens is {count}, mask has {actual} True values")
    return mask.nonzero_static(size=count).squeeze(1)


def check_slots(logits: Tensor, config: MoEConfig) -> None:
    """Raise ValueError unless a router of Soft MoE has returned a logit for each slot."""
    num_slots = config.num_experts * config.slots_per_expert
    if config.slots_per_expert < 1 or logits.ndim != 2 or logits.shape[1] != num_slots:
        raise ValueError(
            f"the router returned logits of shape {list(logits.shape)}, not [T, {num_slots}]:"
            f" slots_per_expert ({config.slots_per_expert}) of each of {config.num_experts} experts"
        )


def check_devices(layer: nn.Module, x: Tensor) -> None:
    """Raise ValueError if a parameter is on another device than x."""
    for name, parameter in layer.named_parameters():
        if parameter.device != x.device:
            raise ValueError(f"x is on {x.device}, the layer's {name} on {parameter.device}")


def check_output_norm(output_norm: nn.Module | None, config: MoEConfig) -> None:
    """Raise ValueError for a norm that the layer's kind of routing does not support."""
    if output_norm is not None and config.routing != "token_choice":
        raise ValueError(
            f"output_norm needs tokens that choose experts, not router {config.router!r}"
        )


def check_exchange(exchange: str, capacity_factor: float | Tensor, config: MoEConfig) -> None:
    """Raise ValueError for a static exchange without a capacity."""
    needs_capacity = exchange == "static" and config.routing != "soft"
    if needs_capacity and is_dropless(capacity_factor):
        raise ValueError(
            "capacity_factor (0) must not be 0 with exchange 'static', which sends as many rows as"
            " the capacity"
        )


def is_dropless(capacity_factor: float | Tensor) -> bool:
    return not isinstance(capacity_factor, Tensor) and capacity_factor == 0


def check_capacity_factor(
    capacity_factor: float | Tensor, config: MoEConfig, group_size: int
) -> None:
    """Raise ValueError for a capacity factor that a layer over `group_size` ranks cannot use."""
    if is_dropless(capacity_factor) and config.routing == "expert_choice":
        raise ValueError(
            "capacity_factor (0) must not be 0 with expert choice: it says how many tokens an"
            " expert chooses"
        )
    if not isinstance(capacity_factor, Tensor):
        # torch.compile cannot trace math.isfinite of a value that changes between calls.
        if not abs(capacity_factor) < math.inf:
            raise ValueError(f"capacity_factor ({capacity_factor}) must be finite; 0 is dropless")
        return
    if group_size > 1:
        raise ValueError(
            f"capacity_factor is a tensor, over {group_size} ranks it must be a number"
        )
