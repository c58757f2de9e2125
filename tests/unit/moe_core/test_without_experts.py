"""What DistributedDataParallel sees of a model whose experts are spread over the ranks."""

import torch
from moe_cases import make_layer
from torch import nn

from moe_core import WithoutExperts


def test_has_the_shared_parameters_alone():
    layer = make_layer(model_dim=8, hidden_dim=16)
    norm = nn.BatchNorm1d(8).double()  # has buffers
    model = nn.ModuleList([norm, layer])
    seen = list(WithoutExperts(model).parameters())
    assert {id(parameter) for parameter in seen} == {
        id(norm.weight),
        id(norm.bias),
        id(layer.router.weight),
    }
    assert list(WithoutExperts(model).buffers()) == []


def test_calls_the_model_and_switches_its_mode():
    layer = make_layer(model_dim=8, hidden_dim=16)
    wrapped, x = WithoutExperts(layer), torch.randn(3, 8, dtype=torch.float64)
    wrapped.eval()
    assert not layer.training
    torch.testing.assert_close(wrapped(x, top_k=1), layer(x, top_k=1))
    wrapped.train()
    assert layer.training
