"""A reduce-scatter that takes longer than an all-gather, as gloo's, in the cost model."""

from dataclasses import replace

import pytest

from moe_core.parallel import PROFILES, ParallelStrategy
from moe_core.parallel.cost_model import LayerShape, layer_time

SHAPE = LayerShape(4096, 512, 2048, 8, 2, 1024.0)
SLOW_SUMS = replace(PROFILES["h100"], reduce_scatter=3.0)


def test_gradients_of_gathered_weights_take_longer():
    strategy = ParallelStrategy(0, ranks_per_node=8)
    forward_alone = replace(SHAPE, training=False)
    gather = layer_time(PROFILES["h100"], forward_alone, 8, strategy).gather
    usual = layer_time(PROFILES["h100"], SHAPE, 8, strategy).gather
    slow = layer_time(SLOW_SUMS, SHAPE, 8, strategy).gather
    assert slow - gather == pytest.approx(3 * (usual - gather))


def test_nothing_else_does():
    strategy = ParallelStrategy(1, ranks_per_node=8)
    usual = layer_time(PROFILES["h100"], SHAPE, 8, strategy)
    assert layer_time(SLOW_SUMS, SHAPE, 8, strategy) == usual
