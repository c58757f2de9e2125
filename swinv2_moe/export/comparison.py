"""A program beside the model that it was made from, on validation images or, without any, on random ones.

B images of a batch, C channels, S their side
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from swinv2_moe.data.datasets import IGNORE, ImageDataset, collate
from swinv2_moe.data.sources import Source
from swinv2_moe.export.programs import Program

Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]  # images [B, C, S, S], targets [B]; IGNORE: without a label


@dataclass(frozen=True)
class Comparison:
    """Logits of both, over `images`; an image's difference is the largest of its logits'."""

    images: int
    max_abs_difference: float
    p99_abs_difference: float  # of 99 in 100 images it is at most this; of fewer than 100 images the largest
    max_abs_logit: float  # of the model's
    same_top1: float  # percent
    model_top1: float | None  # accuracy in percent; None: no image has a label
    program_top1: float | None


def validation_batches(config: CfgNode, source: Source, count: int, batch_size: int) -> Batches:
    """At least `count` images in whole batches, spread evenly over the set; an unreadable one is blank."""
    dataset = ImageDataset(source, config, is_train=False)
    indices = np.linspace(0, len(source) - 1, _whole(count, batch_size)).round().astype(int)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in indices.reshape(-1, batch_size).tolist():
            batch = collate(dataset.__getitems__(chosen))
            yield batch.images, batch.targets

    return batches


def random_batches(config: CfgNode, count: int, batch_size: int) -> Batches:
    """As many images of normal noise, of the mean and deviation of normalised ones; the same at every call."""
    shape = (batch_size, config.MODEL.SWINV2.IN_CHANS, config.DATA.IMG_SIZE, config.DATA.IMG_SIZE)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(config.SEED)
        for _ in range(_whole(count, batch_size) // batch_size):
            yield torch.randn(shape, generator=generator), torch.full((batch_size,), IGNORE)

    return batches


def _whole(count: int, batch_size: int) -> int:
    return -(-count // batch_size) * batch_size


@torch.inference_mode()
def compare(model: nn.Module, program: Program, batches: Batches, device: torch.device) -> Comparison:
    """Both on every batch. The model is in evaluation mode and on `device`, where the program expects its images."""
    rows = []  # [B, 5] of each batch: difference, largest logit, both predictions, target
    for images, targets in batches():
        images = images.to(device)
        wanted, found = (logits.float().cpu() for logits in (model(images), program(images)))
        columns = ((found - wanted).abs().amax(1), wanted.abs().amax(1), wanted.argmax(1), found.argmax(1), targets)
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
