"""The layer against the plain-torch specification in fp64: output, loss and every gradient."""

import math

import pytest
import torch
from moe_cases import assert_equal_to_plain, make_layer, plain_forward
from torch import nn
from torch.func import functional_call

from moe_core import MoEConfig, MoELayer


def tokens(num: int = 13, dim: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("capacity_factor", [0.0, 1.25, 0.5, -1.0])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_layer_equals_plain_torch(top_k, capacity_factor):
    for batch_prioritized in (True, False):
        for options in ({"normalize_gates": False}, {"router": "cosine"}):
            options |= {"top_k": top_k, "batch_prioritized": batch_prioritized}
            layer = make_layer(capacity_factor=capacity_factor, **options)
            assert_equal_to_plain(layer, tokens())


@pytest.mark.parametrize(
    ("config", "call"),
    [
        ({"top_k": 2}, {}),
        ({"num_experts": 1}, {}),
        ({"num_experts": 1, "router": "cosine", "capacity_factor": 0.5}, {}),
        ({"num_experts": 3, "top_k": 3, "capacity_factor": 0.0}, {}),
        ({"activation": "relu"}, {}),
        ({"activation": "silu"}, {"top_k": 3}),
        ({"capacity_factor": 0.01}, {}),  # room for no row at all
        ({"model_dim": 1, "hidden_dim": 1}, {}),
        # empty experts
        (
            {"model_dim": 8, "hidden_dim": 16, "num_experts": 40},
            {"top_k": 2, "capacity_factor": 0.0},
        ),
    ],
    ids=str,
)
def test_layer_equals_plain_torch_at_the_edges(config, call):
    layer = make_layer(**config)
    assert_equal_to_plain(layer, tokens(dim=layer.config.model_dim), **call)


@pytest.mark.parametrize("capacity_factor", [0.0, 1.0])
@pytest.mark.parametrize("batch_prioritized", [True, False])
def test_all_tokens_to_one_expert(capacity_factor, batch_prioritized):
    layer = make_layer(capacity_factor=capacity_factor, batch_prioritized=batch_prioritized)
    x = tokens().abs()
    with torch.no_grad():
        layer.router.weight.abs_()[[0, 1, 3]] *= -1
    assert_equal_to_plain(layer, x)
    kept = 13 if capacity_factor == 0 else 4
    assert layer.last_routing.counts.tolist() == [0, 0, 13, 0]
    assert layer.last_routing.dropped_share.item() == pytest.approx(1 - kept / 13)


def test_cosine_temperature_is_capped():
    layer, hot = make_layer(router="cosine"), make_layer(router="cosine")
    with torch.no_grad():
        layer.router.temperature.fill_(math.log(100))
        hot.router.temperature.fill_(9.0)
    torch.testing.assert_close(hot(tokens()), layer(tokens()))
    assert_equal_to_plain(hot, tokens())


def test_non_contiguous_and_many_dimensional_input():
    layer = make_layer(top_k=2)
    x = tokens(24, 12).view(2, 3, 4, 12).transpose(0, 2)[..., ::2]
    y, _ = layer(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y.reshape(-1, 6), plain_forward(layer, x.reshape(-1, 6))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stride_0_output_gradient(dtype):
    layer = make_layer(dtype=dtype, model_dim=16, hidden_dim=32, top_k=2)
    x = tokens(dim=16).to(dtype).requires_grad_()
    inputs = [x, layer.experts.w1, layer.experts.b2]
    found, expected = (  # the gradient of a sum is an expanded 1
        torch.autograd.grad(y.sum(), inputs) for y in (layer(x)[0], plain_forward(layer, x)[0])
    )
    bound = {}
    if dtype == torch.float32:  # eps 6e-8: sums of at most 32 terms, in four products
        bound = {"rtol": 1e-5, "atol": 2e-5}
    torch.testing.assert_close(found, expected, **bound)


@pytest.mark.parametrize(
    ("capacity_factor", "aux_loss"), [(0.0, "gshard"), (1.25, "load_importance"), (-1.0, "none")]
)
def test_zero_tokens(capacity_factor, aux_loss):
    options = {"aux_loss": aux_loss, "batch_prioritized": True, "top_k": 2, "gate_noise": 1.0}
    layer = make_layer(capacity_factor=capacity_factor, **options)
    x = torch.zeros(3, 0, 6, dtype=torch.float64, requires_grad=True)
    y, aux = layer(x)
    (y.sum() + aux).backward()
    assert y.shape == x.shape
    assert aux == 0
    assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in layer.parameters())
    assert layer.last_routing.dropped_share == 0
    assert layer.last_routing.entropy == 0


@pytest.mark.parametrize(
    "config",
    [
        {"capacity_factor": 0.5, "top_k": 2, "batch_prioritized": True},
        {"capacity_factor": -1.0, "top_k": 3, "router": "cosine", "aux_loss": "load_importance"},
        {"capacity_factor": 0.0, "bias": False, "num_experts": 1},
        {"capacity_factor": 1.0, "output_bias": False, "activation": "silu"},
    ],
    ids=str,
)
def test_gradcheck_of_the_whole_layer(config):
    layer = make_layer(**{"model_dim": 3, "hidden_dim": 4, "num_experts": 3, **config})
    names = [name for name, _ in layer.named_parameters()]

    def forward(x, *parameters):
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (tokens(5, 3), *(p.detach().clone() for p in layer.parameters()))
    assert torch.autograd.gradcheck(forward, [i.requires_grad_() for i in inputs], fast_mode=True)


# Rounding of the inputs, of the hidden values and of the outputs, each half an ulp of the largest
# value.
LOW_PRECISION = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("mode", ["input", "all", "autocast"])
@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("top_k", [1, 2])
def test_low_precision_stays_close_to_fp64(top_k, dtype, mode):
    layer = make_layer(model_dim=24, hidden_dim=40, top_k=top_k)
    x = tokens(40, 24).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p.to(dtype))  # the comparison is of the arithmetic, not of rounded weights
    truth_x = x.double().requires_grad_()
    truth, truth_aux = layer(truth_x)
    expected = torch.autograd.grad(truth.square().sum() + truth_aux, [truth_x, *layer.parameters()])
    layer.to(dtype if mode == "all" else torch.float32)
    x = (x.float() if mode == "autocast" else x).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=mode == "autocast"):
        y, aux = layer(x)
    assert (y.dtype, aux.dtype) == (x.dtype, torch.float32)
    gradients = torch.autograd.grad(y.square().sum() + aux, [x, *layer.parameters()])
    tolerance = LOW_PRECISION[dtype]
    for got, want in zip((y, *gradients), (truth, *expected), strict=True):
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max()
    assert all(g.dtype == p.dtype for g, p in zip(gradients[1:], layer.parameters(), strict=True))


class PoisonedExperts(nn.Module):
    """Writes NaN into rows past the last expert's, in the output and in the gradient of the
    rows."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, rows, offsets):
        unused = (torch.arange(len(rows)) >= offsets[-1]).unsqueeze(1)
        assert unused.any()
        if rows.requires_grad:
            rows = rows * 1
            rows.register_hook(lambda grad: grad.masked_fill(unused, float("nan")))
        return self.experts(rows, offsets).masked_fill(unused, 0) + torch.where(
            unused, float("nan"), 0.0
        )


@pytest.mark.parametrize("top_k", [1, 2])
def test_rows_past_the_last_expert_never_leak(top_k):
    layer = make_layer(top_k=top_k, capacity_factor=1.0)
    x = tokens(21).abs()
    with torch.no_grad():
        layer.router.weight[3] -= 9  # nobody's choice: its room stays empty while others drop
    expected_y, expected_aux = plain_forward(layer, x.requires_grad_())
    expected = torch.autograd.grad(
        expected_y.square().sum() + expected_aux, [x, *layer.parameters()]
    )
    layer.experts = PoisonedExperts(layer.experts)
    y, aux = layer(x)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum() + aux, [x, *layer.parameters()]), expected
    )


def test_replaced_router_and_experts():
    class Doubling(nn.Module):
        def forward(self, rows, offsets):
            return 2 * rows

    router = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    layer = MoELayer(
        MoEConfig(6, 10, 4, top_k=2, capacity_factor=0.0), router=router, experts=Doubling()
    )
    x = tokens().float()
    torch.testing.assert_close(layer(x)[0], 2 * x)  # normalised gates of both copies sum to 1
    layer(x)[1].backward()
    assert all(p.grad.abs().sum() > 0 for p in router.parameters())
