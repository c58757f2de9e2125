"""The options of one call of a layer, and checks of its arguments.

Arguments are checked in the same way on every rank, before the first collective.
"""

# T tokens, M model dim

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_core.balance import BalanceBias
from moe_core.config import MoEConfig
from moe_core.parallel import ParallelStrategy
from moe_core.parallel.exchange import Exchange


class CallOptions(NamedTuple):
    """The options of one call, and the layer's parts that route it. None of them is open."""

    config: MoEConfig
    top_k: int
    capacity_factor: float | Tensor
    exchange: Exchange | None  # None: the tuner chooses
    router: nn.Module
    balance: BalanceBias | None
    batch_prioritized: bool
    training: bool


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


def check_numbers(
    x: Tensor, top_k: int, capacity_factor: float | Tensor, config: MoEConfig, group_size: int
) -> None:
    """Raise ValueError for numbers that a layer over `group_size` ranks cannot use."""
    if x.shape[-1] != config.model_dim:
        raise ValueError(
            f"x has {x.shape[-1]} channels, the layer's model_dim is {config.model_dim}"
        )
    if top_k < 1:
        raise ValueError(f"top_k ({top_k}) must be at least 1")
    if isinstance(capacity_factor, Tensor):
        if group_size > 1:
            raise ValueError(
                f"capacity_factor is a tensor, over {group_size} ranks it must be a number"
            )
        return
    if capacity_factor == 0 and config.routing == "expert_choice":
        raise ValueError(
            "capacity_factor (0) must not be 0 with expert choice: it says how many tokens an"
            " expert chooses"
        )
    # torch.compile cannot trace math.isfinite of a value that changes between calls.
    if not abs(capacity_factor) < math.inf:
        raise ValueError(f"capacity_factor ({capacity_factor}) must be finite; 0 is dropless")


def check_has_capacity(capacity_factor: float | Tensor, config: MoEConfig) -> None:
    """Raise ValueError for a static exchange without a capacity."""
    is_dropless = not isinstance(capacity_factor, Tensor) and capacity_factor == 0
    if is_dropless and config.routing != "soft":
        raise ValueError(
            "capacity_factor (0) must not be 0 with exchange 'static', which sends as many rows as"
            " the capacity"
        )


def check_devices(layer: nn.Module, x: Tensor) -> None:
    """Raise ValueError if a parameter is on another device than x."""
    for name, parameter in layer.named_parameters():
        if parameter.device != x.device:
            raise ValueError(f"x is on {x.device}, the layer's {name} on {parameter.device}")


def strategy_in_evaluation(
    strategy: ParallelStrategy | str, capacity_factor: float
) -> ParallelStrategy | str:
    """The configured strategy in evaluation: without a capacity a static one counts its rows."""
    if not isinstance(strategy, ParallelStrategy) or strategy.exchange != "static":
        return strategy
    if capacity_factor != 0:
        return strategy
    return replace(strategy, exchange="counted", all_to_all="linear")
