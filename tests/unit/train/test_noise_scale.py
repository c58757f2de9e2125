"""The gradient's noise scale, on gradients whose mean and covariance are known."""

import pytest
import torch
from torch import nn

from swinv2_moe.train.noise_scale import NoiseScale

IMAGES, WIDTH = 16, 50


def measured(mean: float, deviation: float, steps: int, every: int) -> float | None:
    """The noise scale of a gradient with these values for one image in each of WIDTH entries."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(WIDTH, 1, bias=False)
    noise = NoiseScale(every, IMAGES)
    for step in range(steps):
        values = mean + deviation * torch.randn(IMAGES, WIDTH, generator=generator)
        model.weight.grad = values.mean(dim=0, keepdim=True)
        products = noise.inner_product(model).tolist()
        noise.add(model, step, float(model.weight.grad.norm()), products)
    return noise.value


@pytest.mark.parametrize("deviation", [1.0, 4.0])
def test_it_is_the_trace_over_the_squared_mean(deviation):
    found = [measured(1.0, deviation, steps, every=2) for steps in (200, 202, 204)]
    assert sum(found) / 3 == pytest.approx(deviation**2, rel=0.3)


def test_without_noise_it_is_zero():
    assert measured(1.0, 0.0, steps=6, every=3) == pytest.approx(0, abs=1e-3)


def test_without_a_mean_gradient_it_is_not_known():
    values = [measured(0.0, 1.0, steps, every=2) for steps in range(2, 40, 2)]
    assert None in values


def test_nothing_is_measured_before_a_pair_or_without_the_key():
    assert measured(1.0, 1.0, steps=1, every=5) is None
    assert measured(1.0, 1.0, steps=20, every=0) is None


def test_a_pair_is_two_successive_steps():
    """A step without a finite gradient breaks the pair."""
    model = nn.Linear(WIDTH, 1, bias=False)
    model.weight.grad = torch.ones(1, WIDTH)
    noise = NoiseScale(2, IMAGES)
    noise.add(model, 0, 1.0, [])
    assert noise.inner_product(model).shape == (1,)
    noise.forget()
    assert noise.inner_product(model).shape == (0,)


def test_clipping_does_not_change_the_first_gradient_of_a_pair():
    model = nn.Linear(WIDTH, 1, bias=False)
    model.weight.grad = torch.ones(1, WIDTH)
    noise = NoiseScale(2, IMAGES)
    noise.add(model, 0, 1.0, [])
    model.weight.grad.mul_(0.5)
    assert noise.inner_product(model).tolist() == [0.5 * WIDTH]
