"""A program beside the model that it was made from, on validation images or, without any, on random
ones.

B images of a batch, C channels, S their side
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from moe_core import prepared
from swinv2_moe.config import DataConfig
from swinv2_moe.data.datasets import IGNORE, ImageDataset, collate
from swinv2_moe.data.sources import Source
from swinv2_moe.export.programs import Program

# Images [B, C, S, S] and targets [b]: the first b <= B images count, the others fill the batch.
# IGNORE: without a label
Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Comparison:
    """Over `images`, logits of both less their mean over the classes, which no probability depends
    on; an image's difference is the largest of its logits'."""

    images: int
    max_abs_difference: float
    # of 99 in 100 images it is at most this; of fewer than 100 images the largest
    p99_abs_difference: float
    max_abs_logit: float  # of the model's
    same_top1: float  # percent
    model_top1: float | None  # accuracy in percent; None: no image has a label
    program_top1: float | None


def validation_batches(config: DataConfig, source: Source, count: int, batch_size: int) -> Batches:
    """`count` images or, if it has fewer, all of the set, spread evenly over it; an unreadable one
    is blank."""
    dataset, count = ImageDataset(source, config, is_train=False), min(count, len(source))
    indices = np.linspace(0, len(source) - 1, count).round().astype(int)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, count, batch_size):
            chosen = indices[start : start + batch_size]
            batch = collate(dataset.__getitems__(np.resize(chosen, batch_size).tolist()))
            yield batch.images, batch.targets[: len(chosen)]

    return batches


def random_batches(config: DataConfig, count: int, batch_size: int) -> Batches:
    """`count` images of normal noise, of the mean and deviation of normalised ones; the same at
    every call."""
    shape = (batch_size, config.in_chans, config.img_size, config.img_size)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(config.seed)
        for start in range(0, count, batch_size):
            yield (
                torch.randn(shape, generator=generator),
                torch.full((min(batch_size, count - start),), IGNORE),
            )

    return batches


@torch.inference_mode()
def compare(
    model: nn.Module, program: Program, batches: Batches, device: torch.device
) -> Comparison:
    """Both on every batch. The model is in evaluation mode and on `device`, where the program
    expects its images."""
    rows = []  # [b, 5] of each batch: difference, largest logit, both predictions, target
    with prepared(model):
        for images, targets in batches():
            images = images.to(device)
            logits = [run(images)[: len(targets)].float().cpu() for run in (model, program)]
            wanted, found = (each - each.mean(1, keepdim=True) for each in logits)
            predictions = (each.argmax(1) for each in logits)
            columns = ((found - wanted).abs().amax(1), wanted.abs().amax(1), *predictions, targets)
            rows.append(torch.stack([column.double() for column in columns], dim=1))
    difference, logit, wanted, found, target = torch.cat(rows).T
    labelled = target != IGNORE
    return Comparison(
        images=len(target),
        max_abs_difference=float(difference.max()),
        p99_abs_difference=float(difference.quantile(0.99, interpolation="higher")),
        max_abs_logit=float(logit.max()),
        same_top1=_percent(wanted == found),
        model_top1=_percent((wanted == target)[labelled]) if labelled.any() else None,
        program_top1=_percent((found == target)[labelled]) if labelled.any() else None,
    )


def _percent(hits: Tensor) -> float:
    return 100 * float(hits.double().mean())
