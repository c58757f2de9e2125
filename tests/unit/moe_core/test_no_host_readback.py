"""Nothing in a single-process step needs a value on the host: meta tensors, unbroken torch.compile,
torch.export."""

import sysconfig
from pathlib import Path

import pytest
import torch
from moe_cases import make_layer

from moe_core import MoEConfig, MoELayer

CASES = [
    {"capacity_factor": 0.0},
    {"capacity_factor": 1.25, "top_k": 2},
    {"capacity_factor": -1.0, "top_k": 2, "batch_prioritized": True, "aux_loss": "load_importance"},
    {"capacity_factor": 0.5, "router": "cosine", "batch_prioritized": True, "activation": "relu"},
]
has_python_header = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()


def gradients(function, layer, x, **call):
    x = x.detach().requires_grad_()
    y, aux = function(x, **call)
    return y, aux, *torch.autograd.grad(y.square().sum() + aux, [x, *layer.parameters()])


@pytest.mark.parametrize("config", CASES, ids=str)
def test_forward_and_backward_on_meta(config):
    dtype = torch.bfloat16
    layer = MoELayer(
        MoEConfig(6, 10, 4, gate_noise=1.0, hidden_dropout=0.1, **config), device="meta"
    ).to(dtype)
    x = torch.empty(2, 5, 6, device="meta", dtype=dtype)
    y, aux, grad_x, *rest = gradients(layer, layer, x)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert (grad_x.shape, grad_x.dtype) == (x.shape, dtype)
    assert [g.shape for g in rest] == [p.shape for p in layer.parameters()]
    assert all(value.is_meta for value in (y, aux, *rest, *layer.last_routing))


@pytest.mark.parametrize("config", CASES[1:], ids=str)
def test_compiled_without_a_break_equals_eager(config):
    torch.compiler.reset()
    layer = make_layer(dtype=torch.float32, **config)
    # the first one changes its mind, so that the number of tokens becomes a symbol
    dynamic = None if config == CASES[1] else True
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    generator = torch.Generator().manual_seed(0)
    calls = [(12, {}), (17, {})]
    if dynamic is None:
        calls += [(17, {"capacity_factor": 0.75}), (17, {"capacity_factor": 0.0})]
    for num_tokens, call in calls:
        x = torch.randn(num_tokens, 6, generator=generator)
        outcome, counts = gradients(compiled, layer, x, **call), layer.last_routing.counts
        torch.testing.assert_close(outcome, gradients(layer, layer, x, **call))
        assert torch.equal(counts, layer.last_routing.counts)
    with torch.compiler.set_stance("fail_on_recompile"):  # by now the number of tokens is a symbol
        gradients(compiled, layer, torch.randn(23, 6))


@pytest.mark.skipif(
    not has_python_header, reason="torch.compile's CPU kernels need Python.h (python3-dev)"
)
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_compiled_by_inductor_equals_eager():
    torch.compiler.reset()
    layer = make_layer(dtype=torch.float32, top_k=2, capacity_factor=1.25)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, layer, x), gradients(layer, layer, x))


def test_checkpointed_layer_keeps_its_loss_and_gradients():
    layer = make_layer(gate_noise=1.0, hidden_dropout=0.5)
    x = torch.randn(12, 6, dtype=torch.float64)

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    outcomes = []
    for function in (layer, checkpointed):
        torch.manual_seed(0)
        outcomes.append(gradients(function, layer, x))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


@pytest.mark.parametrize("config", CASES, ids=str)
def test_exported_layer_equals_eager(config):
    layer = make_layer(dtype=torch.float32, **config).eval()
    x = torch.randn(3, 4, 6)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    for batch_size in (3, 5):
        x = torch.randn(batch_size, 4, 6)
        torch.testing.assert_close(program.module()(x), layer(x))
