"""The noise that the kernels compute from a seed, as torch computes it."""

import math

import pytest
import torch
from ffn_cases import seeded_noise

from moe_core.ops.ffn.dropout import Dropout, draw_seed

ROWS, COLUMNS = 512, 768


def noise_of(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    """Uniform in (-1, 1)."""
    noise = seeded_noise(torch.tensor([seed]), rows, columns)
    assert noise.dtype == torch.int16
    return (noise.double() + 0.5) / 32768


def standard_errors(values: torch.Tensor, mean: float, variance: float) -> float:
    return abs(float(values.mean()) - mean) / math.sqrt(variance / values.numel())


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_it_is_uniform(seed):
    noise = noise_of(seed)
    assert standard_errors(noise, 0, 1 / 3) < 5
    assert standard_errors(noise.square(), 1 / 3, 4 / 45) < 5
    for share in (0.01, 0.1, 0.5):
        dropped = (noise * 32768 < Dropout.of(share).threshold).double()
        assert standard_errors(dropped, share, share * (1 - share)) < 5
        # each row and column by itself
        for dim, size in ((0, ROWS), (1, COLUMNS)):
            deviations = (dropped.mean(dim) - share) / math.sqrt(share * (1 - share) / size)
            assert deviations.abs().max() < 6


@pytest.mark.parametrize("step", [1, 2, 32, 64, 128])
def test_neighbours_are_independent(step):
    noise = noise_of(7)
    for pairs in (noise[step:] * noise[:-step], noise[:, step:] * noise[:, :-step]):
        assert standard_errors(pairs, 0, 1 / 9) < 5


def test_seeds_are_independent():
    for seed in (1, 2, 3, 2**16, 2**31):
        assert standard_errors(noise_of(0) * noise_of(seed), 0, 1 / 9) < 5


def test_it_does_not_depend_on_the_number_of_rows_or_columns():
    assert torch.equal(noise_of(5)[:40, :30], noise_of(5, 40, 30))


def test_seeds_follow_the_generator():
    device = torch.device("cpu")
    seeds = []
    for generator_seed in (0, 0, 1):
        torch.manual_seed(generator_seed)
        seeds.append(int(draw_seed(device)))
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(0 <= seed < 2**32 for seed in seeds)
