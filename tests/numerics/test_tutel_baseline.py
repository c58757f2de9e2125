"""The losses of Tutel's own baseline (tests/test_baseline.json of its repository), reproduced step
by step.

Setup: M = H = 2048, two ReLU experts in one process, capacity factor 1 (so top-1 drops tokens), SGD
at 1e-5 on the mean over the batch of `nll(log_softmax(sum over M of y), 0)`; the auxiliary loss is
not added.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_core import MoEConfig, MoELayer
from moe_core.compat.tutel import moe
from moe_core.tutel import to_tutel

DIM, NUM_EXPERTS, TOKENS_PER_SAMPLE = 2048, 2, 1024

# top_k, dtype, batch size: losses of steps 0, 1, 2 and of step 99
BASELINE = [
    pytest.param(1, torch.float32, 16, [22.07648, 21.38795, 20.73026], 0.1093098, id="top1-fp32"),
    pytest.param(2, torch.float32, 16, [24.08013, 23.29283, 22.53414], 0.0485257, id="top2-fp32"),
    pytest.param(2, torch.float64, 1, [27.448386, 16.627041, 7.467061], 0.0014873, id="top2-fp64"),
]


def baseline_layer(top_k: int, dtype: torch.dtype) -> MoELayer:
    """The layer with the weights that Tutel's initialisation order gives on rank 0."""
    config = MoEConfig(
        DIM, DIM, NUM_EXPERTS, top_k=top_k, capacity_factor=1.0, activation="relu", aux_loss="none"
    )
    layer = MoELayer(config, device="meta").to_empty(device="cpu").to(dtype)
    experts, weights = layer.experts, layer.router.weight
    with torch.no_grad():
        torch.manual_seed(1)
        for e in range(NUM_EXPERTS):
            first, second = nn.Linear(DIM, DIM, dtype=dtype), nn.Linear(DIM, DIM, dtype=dtype)
            experts.w1[e], experts.b1[e] = first.weight, first.bias
            experts.w2[e], experts.b2[e] = second.weight.t(), second.bias
        torch.manual_seed(1)
        weights.copy_(nn.Linear(DIM, NUM_EXPERTS, bias=False, dtype=dtype).weight)
    return layer


def compat_layer(top_k: int, dtype: torch.dtype) -> nn.Module:
    """The same by moe_core.compat.tutel."""
    layer = moe.moe_layer(
        {"type": "top", "k": top_k},
        DIM,
        {"type": "ffn", "num_experts_per_device": NUM_EXPERTS, "hidden_size_per_expert": DIM},
    ).to(dtype)
    layer.load_state_dict(to_tutel(baseline_layer(top_k, dtype).state_dict())[0])
    return layer


def losses(
    top_k: int, dtype: torch.dtype, batch_size: int, steps: int, make_layer=baseline_layer
) -> list[float]:
    layer = make_layer(top_k, dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-5)
    torch.manual_seed(0)
    x = torch.randn(batch_size, TOKENS_PER_SAMPLE, DIM).to(dtype)
    target = torch.zeros(batch_size, dtype=torch.long)
    history = []
    for step in range(steps):
        with torch.set_grad_enabled(step + 1 < steps):
            y = layer(x)
            if isinstance(y, tuple):
                y = y[0]  # of y, aux_loss
            loss = F.nll_loss(F.log_softmax(y.sum(2), dim=1), target)
        history.append(loss.item())
        if step + 1 < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return history


@pytest.mark.parametrize("make_layer", [baseline_layer, compat_layer])
def test_first_losses_equal_the_baseline(make_layer):
    """Before and after a step in fp64. The rest takes minutes; `test_tutel_losses` drops tokens."""
    top_k, dtype, batch_size, first, _ = BASELINE[2].values
    found = losses(top_k, dtype, batch_size, 2, make_layer)
    assert found == pytest.approx(first[:2], abs=5e-4)  # the digits that Tutel's file has


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("top_k", "dtype", "batch_size", "first", "last"), BASELINE)
def test_hundredth_loss_equals_the_baseline(top_k, dtype, batch_size, first, last):
    history = losses(top_k, dtype, batch_size, steps=100)
    print(f"losses of steps 0, 1, 2, 99: {[*history[:3], history[-1]]}")
    assert [*history[:3], history[-1]] == pytest.approx([*first, last], abs=5e-4)
