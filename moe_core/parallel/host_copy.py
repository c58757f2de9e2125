"""Asynchronous copies from a device to the host."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def start_host_copy(tables: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start to copy integer tables of one dtype to the host, in one transfer.

    Returns:
        A function that waits and returns the copies. On a CPU it returns the tables themselves.
    """
    if not tables[0].is_cuda:
        return lambda: list(tables)
    flat = torch.cat([table.flatten() for table in tables])
    pinned = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
    pinned.copy_(flat, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[Tensor]:
        copied.synchronize()
        parts = pinned.split([table.numel() for table in tables])
        return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]

    return wait
