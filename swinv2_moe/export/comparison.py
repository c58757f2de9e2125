"""Compare a program with the model that it was exported from, on validation or random images.

B images of a batch, C channels, S their side
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from moe_core import prepared
from swinv2_moe.data.datasets import IGNORE, ImageDataset, collate
from swinv2_moe.data.section import DataConfig
from swinv2_moe.data.sources import Source
from swinv2_moe.export.programs import Program

# Images [B, C, S, S] and targets [b]. The first b <= B images count; the others pad the batch. The
# target of an image without a label is IGNORE.
Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Comparison:
    """Differences between program and model over all images.

    Logits are compared after subtracting their mean over the classes, which does not change the
    probabilities. An image's difference is the largest of its logits' differences.
    """

    images: int
    max_abs_difference: float
    p99_abs_difference: float  # the 99th percentile, rounded up to an image's difference
    max_abs_logit: float  # of the model's
    same_top1: float  # percent
    model_top1: float | None  # accuracy in percent; None: no image has a label
    program_top1: float | None


def validation_batches(config: DataConfig, source: Source, count: int, batch_size: int) -> Batches:
    """`count` evenly spaced images of the validation set, or all if there are fewer. Unreadable
    images are blank."""
    dataset, count = ImageDataset(source, config, is_train=False), min(count, len(source))
    indices = np.linspace(0, len(source) - 1, count).round().astype(int)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, count, batch_size):
            chosen = indices[start : start + batch_size]
            batch = collate(dataset.__getitems__(np.resize(chosen, batch_size).tolist()))
            yield batch.images, batch.targets[: len(chosen)]

    return batches


def random_batches(config: DataConfig, count: int, batch_size: int) -> Batches:
    """`count` images of normal noise, with the moments of normalised images. Each call returns the
    same images."""
    shape = (batch_size, config.channels, config.img_size, config.img_size)

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
    """Run model and program on every batch.

    Args:
        model: in evaluation mode, on `device`.
        device: of the program's input.
    """
    rows = []  # [b, 5] of each batch: difference, largest logit, both predictions, target
    with prepared(model):
        for images, targets in batches():
            images = images.to(device)
            model_logits = model(images)[: len(targets)].float().cpu()
            program_logits = program(images)[: len(targets)].float().cpu()
            expected, actual = _centred(model_logits), _centred(program_logits)
            columns = [
                (actual - expected).abs().amax(1),
                expected.abs().amax(1),
                model_logits.argmax(1),
                program_logits.argmax(1),
                targets,
            ]
            rows.append(torch.stack([column.double() for column in columns], dim=1))
    difference, logit, model_top1, program_top1, target = torch.cat(rows).T
    labelled = target != IGNORE
    return Comparison(
        images=len(target),
        max_abs_difference=float(difference.max()),
        p99_abs_difference=float(difference.quantile(0.99, interpolation="higher")),
        max_abs_logit=float(logit.max()),
        same_top1=100 * float((model_top1 == program_top1).double().mean()),
        model_top1=_accuracy((model_top1 == target)[labelled]),
        program_top1=_accuracy((program_top1 == target)[labelled]),
    )


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(1, keepdim=True)


def _accuracy(hits: Tensor) -> float | None:
    """The share of hits in percent; None without images."""
    if not len(hits):
        return None
    return 100 * float(hits.double().mean())
