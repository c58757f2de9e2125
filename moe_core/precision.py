"""The dtype in which a part of the layer computes or draws random numbers, with and without
autocast, on any device."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def expert_dtype(x: Tensor) -> torch.dtype:
    """The dtype of autocast if it is enabled, otherwise that of x."""
    device = x.device.type
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context without autocast on the device of x."""
    device = x.device.type
    if _has_autocast(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


@torch.no_grad()
def draw(tensor: Tensor, fill: Callable[[Tensor], Tensor]) -> None:
    """Fill `tensor` with values that `fill` draws in fp32, so that they do not depend on its
    dtype."""
    values = torch.empty_like(tensor, dtype=torch.float32)
    fill(values)
    tensor.copy_(values)


def _has_autocast(device: str) -> bool:
    # Not torch.amp.is_autocast_available, because torch.compile cannot trace it.
    return device != "meta"
