"""Which dtype a part of the layer computes in, under autocast or not, on any device."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def expert_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else that of x."""
    device = x.device.type
    on = _has_autocast(device) and torch.is_autocast_enabled(device)
    if on:
        return torch.get_autocast_dtype(device)
    return x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which autocast leaves operations on x's device alone."""
    device = x.device.type
    if _has_autocast(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _has_autocast(device: str) -> bool:
    # torch.amp.is_autocast_available would say it, but torch.compile cannot trace that
    return device != "meta"
