"""A norm between the experts and their gate value."""

# T tokens, E experts, K top-k, M model dim

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core import MoEConfig, MoELayer
from moe_core.export import StandardMoE

SIZES = {"model_dim": 8, "hidden_dim": 12, "num_experts": 4, "capacity_factor": 0.0}


def make(**options) -> tuple[MoELayer, nn.LayerNorm]:
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(**SIZES | {"kernels": "torch"} | options)).double()
    norm = nn.LayerNorm(8).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return layer, norm


def reference(layer: MoELayer, norm: nn.Module, x: Tensor) -> Tensor:
    """One token after the other, in plain torch."""
    config = layer.config
    logits = x @ layer.router.weight.t()
    if config.gate_activation == "sigmoid":
        scores = logits.sigmoid()
        undecided = config.top_k / 2
    else:
        scores = logits.softmax(1)
        undecided = config.top_k / config.num_experts
    experts = layer.experts
    rows = []
    for token, token_scores in zip(x, scores, strict=True):
        gates, ids = token_scores.topk(config.top_k)
        mean = torch.zeros_like(token)
        for gate, expert in zip(gates, ids, strict=True):
            hidden = F.gelu(experts.w1[expert] @ token + experts.b1[expert])
            result = hidden @ experts.w2[expert] + experts.b2[expert]
            mean = mean + gate / gates.sum() * result
        rows.append(norm(mean) * gates.sum() / undecided)
    y = torch.stack(rows)
    if layer.shared is not None:
        y = y + norm(layer.shared(x))
    return y


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 2, "normalize_gates": False},
        {"top_k": 1, "gate_activation": "sigmoid", "num_shared_experts": 1},
        {"top_k": 2, "gate_activation": "sigmoid"},
    ],
    ids=str,
)
def test_equals_plain_torch(options):
    layer, norm = make(**options)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(15, 8, dtype=torch.float64)
    inputs = [x, *layer.parameters(), *norm.parameters()]

    y, _ = layer(x, output_norm=norm)
    gradients = torch.autograd.grad((y.view(15, 8) * weights).sum(), inputs)
    expected = reference(layer, norm, x.view(15, 8))
    expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)

    torch.testing.assert_close(y.view(15, 8), expected)
    torch.testing.assert_close(gradients, expected_gradients)


def router_gradient(y: Tensor, layer: MoELayer) -> float:
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((y * weights).sum(), [layer.router.weight])
    return gradient.norm().item()


def test_the_task_reaches_the_router_of_one_choice():
    """Behind the gate value the norm removes it, but for its epsilon."""
    layer, norm = make(top_k=1)
    x = torch.randn(64, 8, dtype=torch.float64)
    before_gate = router_gradient(layer(x, output_norm=norm)[0], layer)
    behind_gate = router_gradient(norm(layer(x)[0]), layer)
    assert behind_gate < 0.05 * before_gate


def test_mask():
    layer, norm = make()
    x = torch.randn(6, 8, dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, False, True])
    y, _ = layer(x, mask=mask, output_norm=norm)
    expected, _ = layer(x[mask], output_norm=norm)
    torch.testing.assert_close(y[mask], expected)
    assert (y[~mask] == 0).all()


def test_exported_form():
    layer, norm = make(top_k=2, eval_capacity_factor=1.0, num_shared_experts=1)
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    layer.eval()
    with torch.no_grad():
        expected, _ = layer(x, output_norm=norm)
        y = StandardMoE(layer)(x, output_norm=norm)
    torch.testing.assert_close(y, expected)


def test_refused_where_experts_choose():
    layer, norm = make(router="expert_choice", capacity_factor=1.0)
    with pytest.raises(ValueError, match="output_norm needs tokens that choose experts"):
        layer(torch.randn(4, 8, dtype=torch.float64), output_norm=norm)
