"""What a model says of every image: by the definition, against a plain loop, and the same on any
number of ranks."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from run_cases import ALONE
from torch import nn
from torch.utils.data import DataLoader
from trainer_cases import QUICKSTART, SMALL
from yacs.config import CfgNode

from swinv2_moe.config import data_config, load_config, model_config
from swinv2_moe.data.build import evaluation_loader
from swinv2_moe.data.datasets import Batch
from swinv2_moe.data.sources import ImageArrays, load_sources
from swinv2_moe.measure.accuracy import accuracy_of
from swinv2_moe.models import build_model
from swinv2_moe.ranks.world import World, expert_group, seed_everything
from swinv2_moe.train.evaluation import Predictions, evaluate, predict


@pytest.fixture(autouse=True, scope="module")
def few_digits():
    """All of them: the processes of the ranks have all."""


# Images and batch size: neither 2 nor 3 ranks divide the first two, and of two images the third
# rank has none.
SIZES = [(43, 7), (25, 8), (2, 5)]
BROKEN = 5


class FirstDigits(ImageArrays):
    """The digits of the validation set up to a size; one of them cannot be read."""

    def open(self, index: int) -> Image.Image:
        if index == BROKEN:
            raise OSError("truncated")
        return super().open(index)


def small_config(*opts: str) -> CfgNode:
    return load_config(QUICKSTART, [*SMALL.split(), "MODEL.MOE.NUM_EXPERTS", "6", *opts])


def make_loader(
    config: CfgNode, size: int, batch: int, rank: int = 0, ranks: int = 1, shuffle: bool = False
) -> DataLoader:
    section = replace(data_config(config), batch_size=batch)
    val = load_sources(section).val
    source = FirstDigits(val.label, val.images[:size], val.targets[:size])
    return evaluation_loader(section, source, rank, ranks, shuffle)


def make_model(config: CfgNode, world: World = ALONE) -> nn.Module:
    """In training mode; the experts' part of the result is as large as the trunk's."""
    seed_everything(0)
    model = build_model(model_config(config), 10, expert_group(model_config(config).experts, world))
    for name, parameter in model.named_parameters():
        if name.endswith("norm2.weight"):  # 0 at first
            nn.init.ones_(parameter)
    return model


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_by_the_definition(data):
    """Logits of few values, so that many are equal, in batches, some without a target."""
    images, classes = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    logits = data.draw(
        arrays(np.float32, (images, classes), elements=st.sampled_from([-3.0, 0.0, 0.5, 2.0]))
    )
    targets = data.draw(arrays(np.int64, images, elements=st.integers(-1, classes - 1)))
    batches = zip(*(torch.from_numpy(part).split(5) for part in (logits, targets)), strict=True)
    found, _ = predict(nn.Identity(), [Batch(*batch, []) for batch in batches], ALONE, nullcontext)
    counted = targets >= 0
    logits, targets = logits[counted].astype(np.float64), targets[counted]
    order = np.argsort(-logits, axis=1, kind="stable")
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert found.targets.tolist() == targets.tolist()
    assert found.predicted.tolist() == order[:, 0].tolist()
    assert found.ranks.tolist() == [
        row.tolist().index(target) for row, target in zip(order, targets, strict=True)
    ]
    np.testing.assert_allclose(found.confidence, probabilities.max(1), rtol=1e-5)
    np.testing.assert_allclose(
        found.losses, -np.log(probabilities[np.arange(len(targets)), targets]), rtol=1e-4
    )


def test_image_by_image():
    """In the order of the data set, without the broken image, and the model back in training."""
    config = small_config()
    model, loader = make_model(config), make_loader(config, 43, 7)
    frozen = model.norm.eval()
    found, unreadable = predict(model, loader, ALONE, nullcontext)
    assert unreadable == [f"digits[{BROKEN}]"]
    assert all(module.training == (module is not frozen) for module in model.modules())
    model.eval()
    samples = [loader.dataset[i] for i in range(43) if i != BROKEN]
    with torch.no_grad():
        logits = torch.cat([model(sample.image[None]) for sample in samples])
    assert found.targets.tolist() == [sample.target for sample in samples]
    assert found.predicted.tolist() == logits.argmax(1).tolist()
    assert len(set(found.predicted.tolist())) > 1  # images differ
    np.testing.assert_allclose(found.confidence, logits.softmax(1).amax(1), atol=1e-5)


def test_a_permutation_changes_no_prediction_where_nothing_is_dropped():
    """Results are in the order of the data set, and the broken image is left out."""
    config = small_config()
    model, loader = make_model(config), make_loader(config, 43, 7, shuffle=True)
    order = loader.sampler.order
    found, unreadable = predict(model, loader, ALONE, nullcontext, order=order)
    expected, _ = predict(model, make_loader(config, 43, 7), ALONE, nullcontext)
    assert unreadable == [f"digits[{BROKEN}]"]
    assert order.tolist() != sorted(order)
    for name in ("targets", "predicted", "ranks"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)


def test_the_sums_of_training_are_those_of_the_predictions():
    config = small_config()
    model = make_model(config)
    found, _ = predict(model, make_loader(config, 43, 7), ALONE, nullcontext)
    sums = evaluate(model, make_loader(config, 43, 7), ALONE, nullcontext)
    assert (sums.images, sums.unreadable) == (42, [f"digits[{BROKEN}]"])
    assert sums.top1 == pytest.approx(100 * (found.ranks == 0).mean())
    assert sums.top5 == pytest.approx(100 * (found.ranks < 5).mean())
    assert sums.loss == pytest.approx(found.losses.mean(), rel=1e-5)  # fp32: 42 * 6e-8
    measured = accuracy_of(found, list("0123456789"))
    assert sums.balanced == pytest.approx(measured["balanced_accuracy"])
    assert sums.balanced != pytest.approx(sums.top1)


def on_rank(rank: int, ranks: int, expected: list[Predictions], limited: Predictions) -> None:
    world = World(rank, ranks, torch.device("cpu"), dist.group.WORLD)
    config = small_config()
    model = make_model(config, world)
    for (size, batch), alone in zip(SIZES, expected, strict=True):
        found, unreadable = predict(
            model, make_loader(config, size, batch, rank, ranks), world, nullcontext
        )
        assert unreadable == [f"digits[{BROKEN}]"] * (size > BROKEN)
        if rank:
            assert [len(column) for column in found] == [0] * len(found)
            continue
        for name in ("targets", "predicted", "ranks"):
            assert getattr(found, name).tolist() == getattr(alone, name).tolist(), (size, name)
        for name in ("confidence", "losses"):
            np.testing.assert_allclose(getattr(found, name), getattr(alone, name), rtol=1e-4)
    shuffled = make_loader(config, *SIZES[0], rank, ranks, shuffle=True)
    order = shuffled.sampler.order
    found, _ = predict(model, shuffled, world, nullcontext, order=order)
    if not rank:
        assert found.predicted.tolist() == expected[0].predicted.tolist()
    config = small_config("MODEL.MOE.EVAL_CAPACITY_FACTOR", "0.5")
    model = make_model(config, world)
    found, _ = predict(model, make_loader(config, *SIZES[0], rank, ranks), world, nullcontext)
    if not rank:  # which tokens are dropped depends on the ranks, which images count does not
        assert found.targets.tolist() == limited.targets.tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_says_the_same_of_every_image(ranks, run_processes):
    config = small_config()
    model = make_model(config)
    expected = [predict(model, make_loader(config, *size), ALONE, nullcontext)[0] for size in SIZES]
    assert [len(found.targets) for found in expected] == [42, 24, 2]
    config = small_config("MODEL.MOE.EVAL_CAPACITY_FACTOR", "0.5")
    limited = predict(make_model(config), make_loader(config, *SIZES[0]), ALONE, nullcontext)[0]
    assert not np.allclose(limited.losses, expected[0].losses, rtol=1e-4)
    run_processes(on_rank, ranks, ranks, expected, limited)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 20.0])
def test_the_temperature_of_the_lowest_loss(scale):
    """Of labels drawn from softmax(z), logits `scale` * z have the temperature `scale`, within the
    noise of 4,000 labels; beyond the range it is the end of the range."""
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 5, generator=random)
    targets = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]

    class Scaled(nn.Module):
        def forward(self, images):
            return scale * images

    batches = [
        Batch(*part, []) for part in zip(logits.split(1000), targets.split(1000), strict=True)
    ]
    found = evaluate(Scaled(), batches, ALONE, nullcontext)
    # the standard error of log T is about 0.02 here
    assert found.temperature == pytest.approx(min(scale, 4.0), rel=0.1)
    ten = [Batch(batches[0].images[:10], batches[0].targets[:10], [])]
    few = evaluate(Scaled(), ten, ALONE, nullcontext)
    assert 4.0**-0.25 <= few.temperature <= 4.0**0.25  # of 10 images with a prior of 30
    lowest = found.temperature ** (4030 / 4000)  # without the prior
    losses = [
        float(nn.functional.cross_entropy(scale * logits / at, targets)) for at in (lowest, 1)
    ]
    # a parabola through points a quarter of an octave apart
    assert found.calibrated == pytest.approx(losses[0], abs=2e-3)
    assert found.loss == pytest.approx(losses[1], rel=1e-5)
    assert found.score("calibrated") == -found.calibrated
