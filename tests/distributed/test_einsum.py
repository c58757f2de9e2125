"""The einsum form of a layer equals the other forms: output, loss and gradients, on one rank and
several."""

import pytest
import torch
import torch.distributed as dist
from moe_cases import all_gradients, make_layer

from moe_core import MoEConfig, MoELayer, prepared, use_einsum

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
CONFIGS = [
    {"capacity_factor": 0.0, "top_k": 2},
    {"capacity_factor": 0.6, "top_k": 2, "batch_prioritized": True},
    {"capacity_factor": 0.05, "top_k": 1},  # room for no row at all
    {"capacity_factor": 1.0, "top_k": 1, "output_bias": False, "round_to": 2},
]


def check_equal(group, num_tokens: int, config: dict) -> None:
    layer, baseline = make_layer(group=group, **config), make_layer(group=group, **config)
    use_einsum(baseline)
    generator = torch.Generator().manual_seed(num_tokens)
    x, weight = (
        torch.randn(num_tokens, 6, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    results = []
    for each in (layer, baseline):
        tokens = x.clone().requires_grad_()
        y, aux_loss = each(tokens)
        gradients = all_gradients((y * weight).sum() + 0.1 * aux_loss, tokens, each)
        results.append((y, aux_loss, gradients))
    torch.testing.assert_close(results[1], results[0], **CLOSE)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_equals_the_layer(config, num_tokens):
    check_equal(None, num_tokens, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_layer_whose_weights_are_prepared(dtype):
    """Kernels cache weights in their own dtype and memory layout, which einsums cannot read."""
    config = MoEConfig(64, 256, 4, top_k=2, capacity_factor=0.0)
    layer = MoELayer(config).eval()
    baseline = MoELayer(config).eval()
    baseline.load_state_dict(layer.state_dict())
    use_einsum(baseline)
    x = torch.randn(32, 64)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
    with prepared(layer), prepared(baseline), torch.inference_mode(), autocast:
        expected, found = layer(x)[0], baseline(x)[0]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def on_ranks(rank: int) -> None:
    for counts in ([8, 8], [9, 5], [1, 0]):
        for config in CONFIGS:
            check_equal(dist.group.WORLD, counts[rank], config)


def test_equals_the_layer_on_ranks(run_processes):
    run_processes(on_ranks, 2)


def fewer_experts_than_ranks(rank: int) -> None:
    layer = make_layer(group=dist.group.WORLD, num_experts=1)
    with pytest.raises(ValueError, match=r"num_experts \(1\) to be at least .* \(2\)"):
        use_einsum(layer)


def test_needs_whole_experts(run_processes):
    run_processes(fewer_experts_than_ranks, 2)


def test_needs_the_built_in_experts():
    layer = make_layer()
    layer.experts = torch.nn.Identity()
    with pytest.raises(ValueError, match="built-in experts"):
        use_einsum(layer)
