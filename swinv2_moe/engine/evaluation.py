"""Accuracy of a model on a loader, over all ranks."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from swinv2_moe.engine.distributed import World


class Accuracy(NamedTuple):
    """Percentages and mean cross-entropy over `images` labelled images."""

    top1: float
    top5: float
    loss: float
    images: int
    unreadable: list[str]


@torch.inference_mode()
def evaluate(
    model: nn.Module, loader, world: World, autocast, after_batch: Callable[[], None] = lambda: None
) -> Accuracy:
    """Every image counts once, whatever the number of ranks; targets of -1 (padding, unreadable images) do not count.

    The model is in evaluation mode during the call, and every module back in its own mode afterwards, also when
    `after_batch` raises. Every rank calls this.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return _evaluate(model, loader, world, autocast, after_batch)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _evaluate(model: nn.Module, loader, world: World, autocast, after_batch: Callable[[], None]) -> Accuracy:
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)
    unreadable: list[str] = []
    for images, targets, bad in loader:
        images, targets = images.to(world.device, non_blocking=True), targets.to(world.device, non_blocking=True)
        with autocast():
            logits = model(images)
        totals += _count(logits.float(), targets)
        unreadable += bad
        after_batch()
    top1, top5, loss, count = world.sum(totals).tolist()
    share = 1 / max(count, 1)
    return Accuracy(100 * top1 * share, 100 * top5 * share, loss * share, int(count), unreadable)


def _count(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[top-1 hits, top-5 hits, summed loss, labelled images] of a batch."""
    logits, targets = logits[targets >= 0], targets[targets >= 0]
    best = logits.topk(min(5, logits.shape[1])).indices
    hits = best == targets.unsqueeze(1)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return torch.stack([hits[:, 0].sum(), hits.any(1).sum(), loss, torch.tensor(len(targets), device=logits.device)])
