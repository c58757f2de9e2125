"""Compiled passes within `prepared` read the weights that an earlier pass has converted."""

import pytest
import torch

from moe_core import MoEConfig, MoELayer, prepared


class Graphs:
    """A backend of torch.compile that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.num_inputs_in_bf16: list[int] = []

    def __call__(self, graph, example_inputs):
        in_bf16 = 0
        for tensor in example_inputs:
            # packed weights are integers
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.bfloat16, torch.int16):
                in_bf16 += 1
        self.num_inputs_in_bf16.append(in_bf16)
        return graph


@pytest.fixture
def layer() -> MoELayer:
    torch.compiler.reset()
    torch.manual_seed(0)
    # torch casts weights on every CPU
    return MoELayer(MoEConfig(64, 128, 4, capacity_factor=0.0, kernels="torch")).eval()


@torch.no_grad()
def test_reads_converted_weights_and_compiles_once(layer):
    x = torch.randn(10, 64)
    graphs = Graphs()
    compiled = torch.compile(layer, backend=graphs, fullgraph=True)
    with prepared(layer), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)[0]
        for _ in range(3):
            torch.testing.assert_close(compiled(x)[0], expected, rtol=0, atol=0)
    assert graphs.num_inputs_in_bf16 == [2]  # w1 and w2; biases are added as they are


@torch.no_grad()
def test_sees_weights_that_change_after_the_context(layer):
    x = torch.randn(10, 64)
    compiled = torch.compile(layer, backend=Graphs(), fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with prepared(layer):
            layer(x)
            compiled(x)
        layer.experts.w1.mul_(2)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0], rtol=0, atol=0)
        with prepared(layer):
            expected = layer(x)[0]
            torch.testing.assert_close(compiled(x)[0], expected, rtol=0, atol=0)


@torch.no_grad()
def test_converts_in_each_pass_without_an_earlier_one(layer):
    x = torch.randn(10, 64)
    graphs = Graphs()
    compiled = torch.compile(layer, backend=graphs, fullgraph=True)
    with prepared(layer), torch.autocast("cpu", dtype=torch.bfloat16):
        first = compiled(x)[0]
        torch.testing.assert_close(first, layer(x)[0], rtol=0, atol=0)
    assert graphs.num_inputs_in_bf16 == [0]
