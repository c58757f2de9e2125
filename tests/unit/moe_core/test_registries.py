"""Routers, losses and activations from outside of the package run wherever the built-in ones do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_core import (
    AuxiliaryLoss,
    MoEConfig,
    MoELayer,
    prepared,
    register_activation,
    register_loss,
    register_router,
)
from moe_core.registry import ACTIVATIONS, LOSSES, ROUTERS, Registry

SHAPE = {"model_dim": 32, "hidden_dim": 64, "num_experts": 4}


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch):
    for registry in (ROUTERS, LOSSES, ACTIVATIONS):
        monkeypatch.setattr(registry, "_values", dict(registry))


class TwoLayerRouter(nn.Module):
    def __init__(self, config: MoEConfig, device=None) -> None:
        super().__init__()
        self.first = nn.Linear(config.model_dim, 8, device=device)
        self.second = nn.Linear(8, config.num_experts, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(tokens).tanh())


class ZLoss(AuxiliaryLoss):
    """arXiv 2202.08906, equation 5, by expert and without its square: sums that are not two."""

    def sums(self, scores):
        return (scores.logits.logsumexp(1, keepdim=True) * scores.probs).sum(0, keepdim=True)

    def value(self, sums, num_tokens):
        return sums.sum() / num_tokens


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_nothing_but_outside_parts(kernels, dtype):
    """Its output and every gradient are those of plain operations."""
    register_router("two_layers")(TwoLayerRouter)
    register_loss("z")(ZLoss)
    register_activation("squared_relu")(squared_relu)
    torch.manual_seed(0)
    names = {"router": "two_layers", "aux_loss": "z", "activation": "squared_relu"}
    layer = MoELayer(MoEConfig(**SHAPE, **names, capacity_factor=0.0, kernels=kernels))
    x = torch.randn(10, 32, dtype=torch.float32).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y, aux_loss = layer(x)
    (y.float().square().sum() + aux_loss).backward()
    found = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}

    layer.zero_grad()
    other = x.detach().float().requires_grad_()
    logits = layer.router(other)
    probs = logits.softmax(1)
    gates, ids = probs.max(1)
    experts = layer.experts
    rows = []
    for token, expert in zip(other, ids, strict=True):
        hidden = squared_relu(experts.w1[expert] @ token + experts.b1[expert])
        rows.append(hidden @ experts.w2[expert] + experts.b2[expert])
    expected = gates[:, None] * torch.stack(rows)
    loss = (logits.logsumexp(1, keepdim=True) * probs).sum() / 10
    (expected.square().sum() + loss).backward()
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(y.float(), expected, **close)
    torch.testing.assert_close(aux_loss, loss, **close)
    for name, gradient in {**dict(layer.named_parameters()), "x": other}.items():
        torch.testing.assert_close(
            found[name].float(), gradient.grad, **close, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_outside_parts_are_prepared_and_compiled():
    register_router("two_layers")(TwoLayerRouter)
    register_loss("z")(ZLoss)
    register_activation("squared_relu")(squared_relu)
    config = MoEConfig(
        **SHAPE, router="two_layers", aux_loss="z", activation="squared_relu", hidden_dropout=0.0
    )
    layer, x = MoELayer(config).eval(), torch.randn(10, 32)
    with torch.no_grad():
        y, aux_loss = layer(x)
        with prepared(layer):
            torch.testing.assert_close(layer(x), (y, aux_loss))
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), (y, aux_loss))


def test_a_name_is_registered_once():
    register_activation("mine")(squared_relu)
    already = "is registered already"
    with pytest.raises(ValueError, match=rf"^activation 'mine' {already}: .*squared_relu$"):
        register_activation("mine")
    with pytest.raises(ValueError, match=rf"^router 'linear' {already}: .*router.LinearRouter$"):
        register_router("linear")
    for name in ("", None, 3):
        with pytest.raises(ValueError, match="which is not a name"):
            register_loss(name)


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("router", "cosin", r"linear, cosine, expert_choice, soft; did you mean 'cosine'\?$"),
        ("activation", "gelo", r"gelu, gelu_tanh, quick_gelu, relu, silu; did you mean 'gelu'\?$"),
        ("aux_loss", "zzz", r"gshard, load_importance, .*none$"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(field, value, known):
    with pytest.raises(ValueError, match=rf"^{field} \('{value}'\) must be one of {known}"):
        MoEConfig(**SHAPE, **{field: value})


def test_a_router_of_the_wrong_shape_is_named():
    @register_router("narrow")
    class Narrow(TwoLayerRouter):
        def forward(self, tokens):
            return super().forward(tokens)[:, :-1]

    with pytest.raises(
        ValueError, match=r"^the router returned logits of shape \[10, 3\], not \[T, 4\]$"
    ):
        MoELayer(MoEConfig(**SHAPE, router="narrow"))(torch.randn(10, 32))


@pytest.mark.parametrize(
    ("part", "shape"), [("sums", r"\[4\], not \[n, 4\]"), ("value", r"\[1\], not a scalar")]
)
def test_a_loss_of_the_wrong_shape_is_named(part, shape):
    @register_loss("wrong")
    class Wrong(ZLoss):
        def sums(self, scores):
            return super().sums(scores)[0] if part == "sums" else super().sums(scores)

        def value(self, sums, num_tokens):
            return super().value(sums, num_tokens).view(1)

    with pytest.raises(ValueError, match=f"aux_loss 'wrong' returned .*{shape}"):
        MoELayer(MoEConfig(**SHAPE, aux_loss="wrong"))(torch.randn(10, 32))


def test_a_registry_is_a_mapping_in_order():
    registry = Registry("kind")
    registry.register("b")(1)
    registry.register("a")(2)
    assert dict(registry) == {"b": 1, "a": 2}
    assert "c" not in registry
