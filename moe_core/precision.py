"""Which dtype a part of the layer computes in, under autocast or not, on any device (meta has no autocast)."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def expert_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else that of x."""
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which autocast leaves operations on x's device alone."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
