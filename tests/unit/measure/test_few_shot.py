"""Few-shot evaluation: draws and classifiers on made-up features, extraction against a plain loop,
two ranks as one."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.utils.data import DataLoader
from trainer_cases import QUICKSTART, SMALL

from swinv2_moe.config import data_config, load_config, model_config
from swinv2_moe.data.datasets import ImageDataset, collate
from swinv2_moe.data.samplers import ValSampler
from swinv2_moe.data.sources import Source, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure.few_shot import (
    CLASSIFIERS,
    Protocol,
    draw_shots,
    few_shot_accuracy,
    knn_accuracy,
    measure,
)
from swinv2_moe.models import build_model
from swinv2_moe.ranks.world import World, expert_group, seed_everything
from swinv2_moe.start.frozen import Features, extract_features

CLASSES, DIM = 5, 16


@given(
    counts=st.lists(st.integers(3, 9), min_size=1, max_size=6),
    shots=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=50, deadline=None)
def test_draws_have_so_many_of_each_class_and_repeat(counts, shots, seed):
    targets = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    drawn = draw_shots(targets, shots, seed)
    assert len(set(drawn.tolist())) == len(drawn)
    assert targets[drawn].tolist() == np.repeat(np.arange(len(counts)), shots).tolist()
    assert drawn.tolist() == draw_shots(targets, shots, seed).tolist()
    assert set(drawn) <= set(draw_shots(targets, 3, seed))


def test_draws_differ_and_reach_every_image():
    targets = np.repeat(np.arange(3), 4)
    draws = {tuple(draw_shots(targets, 1, seed)) for seed in range(50)}
    assert len(draws) > 20
    assert set(np.ravel(list(draws))) == set(range(12))


def test_a_class_with_fewer_images_is_named():
    with pytest.raises(ValueError, match=r"class 1 has 2 images, fewer than shots \(3\)"):
        draw_shots(np.array([0, 0, 0, 1, 1]), 3, 0)


def clusters(images: int, spread: float, seed: int) -> Features:
    """Around the same five points for every seed, far from 0 and on axes of unequal scale."""
    rng = np.random.default_rng(seed)
    centres = 10 + 3 * np.eye(CLASSES, DIM)
    targets = np.arange(images) % CLASSES
    features = (centres[targets] + spread * rng.normal(size=(images, DIM))) * np.linspace(
        0.1, 10, DIM
    )
    return Features(features.astype(np.float32), targets)


@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_separable_classes_are_all_found(classifier):
    train, val = clusters(100, 0.05, seed=0), clusters(60, 0.05, seed=1)
    assert few_shot_accuracy(train, val, 10, 3, classifier) == [100.0] * 3


@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_shuffled_labels_give_chance(classifier):
    train, val = clusters(500, 0.05, seed=0), clusters(1000, 0.05, seed=1)
    val = val._replace(targets=np.random.default_rng(2).permutation(val.targets))
    chance, deviation = 100 / CLASSES, 100 * math.sqrt(0.2 * 0.8 / 1000)
    assert few_shot_accuracy(train, val, 10, 1, classifier)[0] == pytest.approx(
        chance, abs=5 * deviation
    )
    assert knn_accuracy(train, val, 10) == pytest.approx(chance, abs=5 * deviation)


def test_more_shots_help_where_classes_overlap():
    train, val = clusters(500, 1.5, seed=0), clusters(500, 1.5, seed=1)
    few, many = (np.mean(few_shot_accuracy(train, val, shots, 5, "ridge")) for shots in (1, 50))
    assert 100 / CLASSES < few < many - 10


def test_ridge_is_the_published_least_squares():
    """In fp64: fp32 may round two classes of an image to a tie."""
    train, val = (
        split._replace(features=split.features.astype(np.float64))
        for split in (clusters(50, 1.5, seed=0), clusters(200, 1.5, seed=1))
    )
    chosen = draw_shots(train.targets, 5, 0)
    x, y = train.features[chosen], 2.0 * np.eye(CLASSES)[train.targets[chosen]] - 1
    mean, std = x.mean(0), x.std(0)
    x = (x - mean) / std
    # x has mean 0: the bias is that of y, all equal
    weights = np.linalg.solve(x.T @ x + 1024 * np.eye(DIM), x.T @ y)
    found = ((val.features - mean) / std @ weights).argmax(1)
    assert few_shot_accuracy(train, val, 5, 1, "ridge") == [
        pytest.approx(100 * np.mean(found == val.targets))
    ]


def test_votes_are_weighted_by_cosine():
    """One neighbour at cosine 1 against two at 0.8, each of which counts exp(0.2 / 0.07) = 17 times
    less."""
    train = Features(
        np.array([[5.0, 0.0], [0.8, 0.6], [8.0, -6.0]], np.float32), np.array([1, 0, 0])
    )
    val = Features(np.array([[1.0, 0.0]], np.float32), np.array([1]))
    assert knn_accuracy(train, val, 3) == 100.0


@pytest.mark.parametrize("neighbors", [1, 7, 300])
def test_neighbours_are_scikit_learns(neighbors):
    # more than are sought at a time
    train, val = clusters(300, 1.5, seed=0), clusters(200, 1.5, seed=1)
    voters = KNeighborsClassifier(
        neighbors, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
    )
    expected = 100 * voters.fit(*train).score(*val)
    assert 20 < expected < 100
    # fp32 rounds a cosine of 16 terms by up to 1e-6: one image of the 200 may be in a tie
    assert knn_accuracy(train, val, neighbors) == pytest.approx(expected, abs=100 / 200 + 0.01)


def test_measure_reports_mean_and_sample_deviation():
    train, val = clusters(100, 1.5, seed=0), clusters(100, 1.5, seed=1)
    found = measure(train, val, Protocol(shots=(5, 1, 1), draws=4, neighbors=3))
    assert list(found["few_shot"]) == ["1", "5"]
    for result in found["few_shot"].values():
        assert len(result["top1"]) == 4
        assert result["mean"] == pytest.approx(sum(result["top1"]) / 4)
        assert result["std"] == pytest.approx(
            math.sqrt(sum((x - result["mean"]) ** 2 for x in result["top1"]) / 3)
        )
    assert measure(train, val, Protocol(shots=(1,), draws=1))["few_shot"]["1"]["std"] is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"shots": (1, 0)}, "--shots is 0"),
        ({"draws": 0}, "--draws is 0"),
        ({"neighbors": -1}, "--knn is -1"),
        ({"classifier": "svm"}, "--classifier is 'svm', allowed: ridge, logistic"),
    ],
)
def test_a_protocol_that_cannot_be(wrong, text):
    with pytest.raises(UserError, match=text):
        Protocol(**wrong)


class FewDigits:
    """The first digits, one of which cannot be read."""

    unreadable = 5

    def __init__(self, source: Source, size: int) -> None:
        self.source, self.size, self.targets = source, size, source.targets[:size]

    def __len__(self) -> int:
        return self.size

    def open(self, index: int) -> Image.Image:
        if index == self.unreadable:
            raise OSError("truncated")
        return self.source.open(index)

    def name(self, index: int) -> str:
        return f"digit {index}"


def extract_digits(rank: int, size: int) -> tuple[nn.Module, ImageDataset, Features, list[str]]:
    """Of 43 digits by this rank's part of a model with experts, in training mode at first."""
    config = load_config(QUICKSTART, SMALL.split())
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD if size > 1 else None)
    seed_everything(0)
    model = build_model(model_config(config), 7, expert_group(model_config(config).experts, world))
    images = ImageDataset(
        FewDigits(load_sources(data_config(config)).val, 43), data_config(config), is_train=False
    )
    loader = DataLoader(images, 8, sampler=ValSampler(len(images), rank, size), collate_fn=collate)
    return model, images, *extract_features(model, loader, world, nullcontext)


def extract_on_rank(rank: int, size: int, expected: Features) -> None:
    _, _, found, unreadable = extract_digits(rank, size)
    assert unreadable == ["digit 5"]
    if rank:
        assert (len(found.features), len(found.targets)) == (0, 0)
    else:
        assert found.targets.tolist() == expected.targets.tolist()
        np.testing.assert_allclose(found.features, expected.features, atol=1e-5)


def test_extraction_is_a_loop_over_the_images():
    model, images, found, unreadable = extract_digits(0, 1)
    assert unreadable == ["digit 5"]
    assert not any(module.training for module in model.modules())
    kept = [index for index in range(43) if index != FewDigits.unreadable]
    assert found.targets.tolist() == [images[index].target for index in kept]
    inputs = []
    model.head.fc.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    with torch.no_grad():
        for index in kept:
            model(images[index].image[None])
    np.testing.assert_allclose(found.features, torch.cat(inputs).numpy(), atol=1e-5)
    assert found.features.std(0).min() > 1e-3  # images differ


def test_two_ranks_extract_what_one_does(run_processes):
    run_processes(extract_on_rank, 2, 2, extract_digits(0, 1)[2], seconds=120)
