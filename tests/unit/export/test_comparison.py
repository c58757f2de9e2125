"""The images on which a program is compared with the model, and what the comparison says."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from swinv2_moe.config import data_config, load_config
from swinv2_moe.data.datasets import IGNORE
from swinv2_moe.data.sources import ImageArrays
from swinv2_moe.errors import UserError
from swinv2_moe.export.comparison import Comparison, compare, random_batches, validation_batches
from swinv2_moe.export.export import check_agreement

CPU = torch.device("cpu")


def images_of(count: int) -> ImageArrays:
    """Each of a brightness of its own, which is its target."""
    shades = np.arange(count)
    return ImageArrays(
        "shades", np.ones((count, 8, 8), np.uint8) * shades[:, None, None].astype(np.uint8), shades
    )


@pytest.fixture(scope="module")
def config():
    return load_config(
        None,
        ["DATA.IMG_SIZE", "16", "MODEL.SWINV2.PATCH_SIZE", "2", "MODEL.SWINV2.WINDOW_SIZE", "4"],
    )


@pytest.mark.parametrize(
    ("length", "count", "batch_size", "chosen"),
    [
        (5, 64, 8, [[0, 1, 2, 3, 4]]),  # no more than there are
        (10, 3, 2, [[0, 4], [9]]),  # spread over all of them
        (6, 6, 3, [[0, 1, 2], [3, 4, 5]]),
        (1, 1, 4, [[0]]),
    ],
)
def test_every_image_counts_once_and_batches_are_whole(config, length, count, batch_size, chosen):
    batches = list(validation_batches(data_config(config), images_of(length), count, batch_size)())
    assert [targets.tolist() for _, targets in batches] == chosen
    assert {images.shape for images, _ in batches} == {(batch_size, 3, 16, 16)}
    random = list(random_batches(data_config(config), count, batch_size)())
    assert sum(len(targets) for _, targets in random) == count
    assert {images.shape for images, _ in random} == {(batch_size, 3, 16, 16)}
    assert {int(target) for _, targets in random for target in targets} == {IGNORE}


def batches_of(*logits: list[list[float]], targets: list[int]):
    """Logits in the place of images, and a padding row in each batch."""
    size = len(targets) // len(logits)
    return lambda: (
        (
            torch.tensor([*rows, [9.0, 99.0, 999.0]]),
            torch.tensor(targets[size * i : size * (i + 1)]),
        )
        for i, rows in enumerate(logits)
    )


class Brighter(nn.Module):
    """A model whose logits are its images, plus a number."""

    def __init__(self, added: float = 0.0) -> None:
        super().__init__()
        self.added = added

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.added


def test_a_comparison_leaves_padding_out():
    batches = batches_of(
        [[1.0, 2.0, 6.0], [4.0, 0.0, -1.0]],
        [[0.0, 3.0, 0.0], [0.0, 3.0, 0.0]],
        targets=[2, 0, 1, IGNORE],
    )
    noise = torch.tensor([[0.5, -0.5, 0.0], [0.0, 0.0, 0.0], [7.0, 0.0, -7.0]])
    found = compare(Brighter(), lambda images: images + noise, batches, CPU)
    # [1, 2, 6] and [4, 0, -1] reach 3 from their means
    assert found == Comparison(4, 0.5, 0.5, 3.0, 100, 100, 100)


def test_a_comparison_does_not_see_what_all_classes_have_in_common():
    batches = batches_of([[1.0, 2.0, 6.0]], targets=[2])
    plain = compare(Brighter(), lambda images: images * 1.5, batches, CPU)
    moved = compare(Brighter(300), lambda images: images * 1.5 + 7, batches, CPU)
    assert moved == plain == Comparison(1, 1.5, 1.5, 3.0, 100, 100, 100)


GOOD = Comparison(200, 0.4, 0.1, 5.0, 99.5, 70.0, 69.5)


def test_a_program_that_agrees_passes():
    check_agreement("onnx", "bfloat16", GOOD)
    check_agreement("onnx", "float32", replace(GOOD, p99_abs_difference=0.004, same_top1=100.0))


@pytest.mark.parametrize(
    ("dtype", "changed", "message"),
    [
        (
            "float32",
            {},
            "logits differ from the model's by 0.1; with --dtype float32, 0.005 is allowed",
        ),
        ("int8", {"p99_abs_difference": float("nan")}, "logits differ from the model's by nan"),
        (
            "bfloat16",
            {"same_top1": 50.0},
            "has the model's top-1 in 50.0% of 200 images; 90% is needed",
        ),
    ],
)
def test_a_program_that_does_not_agree_is_refused(dtype, changed, message):
    with pytest.raises(UserError, match=r"^the onnx program.*: nothing is written$") as error:
        check_agreement("onnx", dtype, replace(GOOD, **changed))
    assert message in str(error.value)
