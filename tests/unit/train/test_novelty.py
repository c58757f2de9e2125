"""Which pictures are unlike those held out: the threshold on others of the same kind, numbers in
meta.json, and what the classifier sees."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from swinv2_moe.checkpoints.novelty import novelty_of, num_features, read_novelty, with_features
from swinv2_moe.errors import UserError


def pictures(count: int, seed: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Features [count, 32] of 5 classes, and the logits of a classifier that knows them."""
    classes = 3 * np.random.default_rng(0).normal(size=(5, 32))
    numbers = np.random.default_rng(seed)
    features = classes[numbers.integers(5, size=count)] + numbers.normal(size=(count, 32)) + shift
    return features, features @ classes.T / 10


@pytest.mark.parametrize("count", [40, 200])
def test_five_percent_of_others_are_marked_and_strange_ones_are(count):
    found = novelty_of(*pictures(count, 1))
    share = found.is_unlike(*pictures(4000, 2)).mean()
    # the 95% quantile of `count` pictures; each fold's statistics lack a tenth of them
    assert 0 < share < 0.05 + 3 * (0.05 * 0.95 / count) ** 0.5
    assert found.is_unlike(*pictures(500, 3, shift=4.0)).mean() > 0.95
    blank = np.zeros((1, 32)), np.zeros((1, 5))
    assert found.is_unlike(*blank).all()  # no class at all


def test_the_numbers_of_a_checkpoint_decide_the_same():
    found = novelty_of(*pictures(100, 1))
    meta = json.loads(json.dumps({"novelty": found.state()}))
    read = read_novelty(meta, 32, "checkpoint x")
    features, logits = pictures(300, 2, shift=1.0)
    same = read.is_unlike(features, logits) == found.is_unlike(features, logits)
    assert same.mean() > 0.98  # five digits of each number are kept
    assert read_novelty({}, 32, "checkpoint x") is None
    with pytest.raises(UserError, match="checkpoint x: its novelty is not that of 33 features"):
        read_novelty(meta, 33, "checkpoint x")


def test_few_pictures_or_broken_numbers_say_nothing():
    features, logits = pictures(30, 1)
    assert novelty_of(features[:19], logits[:19]) is None
    features[0, 0] = np.nan
    assert novelty_of(features, logits) is None


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def classifier_names(self) -> tuple[str, str]:
        return "head.weight", "head.bias"

    def forward(self, images):
        return self.head(self.body(images))


def test_features_are_what_the_classifier_sees():
    model, images = Small(), torch.randn(5, 6)
    outputs = with_features(model, images)
    assert num_features(model) == 4
    torch.testing.assert_close(outputs, torch.cat([model(images), model.body(images)], 1))
    assert not model.head._forward_pre_hooks
