"""A linear router, its choice and the cast of the tokens in one Triton kernel, against the layer's
plain path.

`TestKernels` runs on a CUDA device, or in Triton's interpreter as a test below starts it.
"""

# T tokens, E experts, K top-k, M model dim

import re

import pytest
import torch
from torch import nn
from triton_cases import INTERPRETED, compile_launches, run_interpreted

from moe_core import MoEConfig, MoELayer
from moe_core.ops import route_tokens_supported
from moe_core.router import LinearRouter, route, route_in_one_pass, router_logits

DEVICE = "cpu" if INTERPRETED else "cuda"
LOSSES = ("none", "gshard", "load_importance", "load_importance_tutel")
# T, E, K, M: several blocks; one of each; the most experts; no token
SIZES = [(70, 6, 2, 100), (1, 1, 1, 1), (40, 64, 3, 64), (33, 8, 1, 130), (0, 4, 2, 16)]


def tokens_of(num_tokens: int, model_dim: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, model_dim, generator=generator)
    return x.to(DEVICE, dtype).requires_grad_()


def router_of(config: MoEConfig) -> LinearRouter:
    torch.manual_seed(1)
    return LinearRouter(config).to(DEVICE)


def outcome(function, x: torch.Tensor, router: nn.Module) -> list[torch.Tensor]:
    """Choices, gate values, loss, probabilities and inputs, and the gradients of all of them."""
    torch.manual_seed(2)  # the noise is torch's own
    routing, inputs = function()
    generator = torch.Generator().manual_seed(3)
    total = routing.aux_loss * 0.7
    for values in (routing.gates, routing.probs, inputs):
        weights = torch.randn(values.shape, generator=generator).to(DEVICE)
        total = total + (values * weights).sum()
    gradients = torch.autograd.grad(total, [x, router.weight])
    return [routing.expert_ids, routing.gates, routing.aux_loss, routing.probs, inputs, *gradients]


def compare(config: MoEConfig, top_k: int, x: torch.Tensor, half: torch.dtype | None) -> None:
    """The kernel against torch, in training; under autocast to `half`."""
    router = router_of(config)

    def fused():
        with torch.autocast(DEVICE, half, enabled=half is not None):
            routed = route_in_one_pass(x, router, config, top_k, True, None, True)
        assert routed is not None
        return routed

    def plain():
        logits = router_logits(router, x, config, True)
        return route(logits, config, top_k, True), x.to(half or x.dtype)

    got, expected = outcome(fused, x, router), outcome(plain, x, router)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    assert torch.equal(got[0], expected[0])
    tolerance = {"rtol": 2e-4, "atol": 2e-5}
    if x.dtype != torch.float32 or half is not None:
        tolerance = {"rtol": 1e-2, "atol": 1e-2}  # gradients of halves are added in fp32 here
    torch.testing.assert_close(got[1:4], expected[1:4], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[4:], expected[4:], **tolerance)


@pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs by a test below"
)
class TestKernels:
    @pytest.mark.parametrize("noise", [0.0, 1.0])
    @pytest.mark.parametrize("loss", LOSSES)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_equals_torch(self, sizes, loss, noise):
        num_tokens, num_experts, top_k, model_dim = sizes
        if loss == "load_importance_tutel" and noise == 0:
            pytest.skip("this loss needs noise")
        config = MoEConfig(
            model_dim, 4, num_experts, aux_loss=loss, gate_noise=noise, kernels="triton"
        )
        compare(config, top_k, tokens_of(num_tokens, model_dim), None)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_casts_the_tokens(self, dtype):
        config = MoEConfig(48, 4, 5, kernels="triton")
        compare(config, 2, tokens_of(50, 48, dtype), torch.float16)

    def test_is_a_correct_operator(self):
        x, weight = tokens_of(20, 16), torch.randn(4, 16, device=DEVICE, requires_grad=True)
        noise = torch.randn(20, 4, device=DEVICE)
        operator = torch.ops.moe_core.route_tokens
        for loss in ("gshard", "load_importance"):
            options = (2, True, loss, 0.25, 0.25, torch.float16)
            checks = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(operator, (x, weight, noise, *options), test_utils=checks)

    def test_the_layer_takes_it(self):
        """And gives what it gives without it."""
        results = []
        for kernels in ("triton", "torch"):
            torch.manual_seed(0)
            layer = MoELayer(MoEConfig(16, 32, 4, kernels=kernels, gate_noise=1.0)).to(DEVICE)
            x = tokens_of(30, 16)
            torch.manual_seed(1)
            y, aux_loss = layer(x)
            (gradient,) = torch.autograd.grad(y.sum() + aux_loss, layer.router.weight)
            results.append((y, aux_loss, gradient))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "options",
        [
            {"router": "cosine"},
            {"input_jitter": 0.1},
            {"gate_activation": "sigmoid"},
            {"balance": "bias"},
            {"z_loss_weight": 0.1},
            {"num_experts": 65},
            {"kernels": "torch"},
        ],
        ids=str,
    )
    def test_what_it_does_not_compute(self, options):
        config = MoEConfig(**{"num_experts": 4, "kernels": "triton"} | options, **SHAPE)
        layer = MoELayer(config).to(DEVICE)
        x = tokens_of(6, 16)
        assert route_in_one_pass(x, layer.router, config, 1, True, None, True) is None

    def test_hooks_of_the_router_run(self):
        """As those that record its logits."""
        config = MoEConfig(num_experts=4, kernels="triton", **SHAPE)
        layer = MoELayer(config).to(DEVICE)
        seen = []
        layer.router.register_forward_hook(lambda *values: seen.append(values[2].shape))
        layer(tokens_of(6, 16))
        assert seen == [(6, 4)]


SHAPE = {"model_dim": 16, "hidden_dim": 8}


@pytest.mark.skipif(INTERPRETED, reason="it starts the interpreter")
def test_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__)


def test_not_on_a_cpu():
    x, weight = torch.zeros(3, 16), torch.zeros(4, 16)
    assert not route_tokens_supported(x, weight, "gshard", "auto")


@pytest.mark.skipif(INTERPRETED, reason="compiles, which the interpreter does not")
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_without_a_gpu(architecture, monkeypatch):
    pytest.importorskip("triton")
    from moe_core.ops.route_tokens import triton as kernels

    compiled = compile_launches(monkeypatch, architecture)
    x, weight = torch.zeros(40, 64), torch.zeros(8, 64)
    noise = torch.zeros(40, 8)
    options = (2, True, "load_importance", 0.1, 0.1)
    gates, ids, probs, sums, inputs, noisy, clean = kernels.forward(
        x, weight, noise, *options, torch.bfloat16
    )
    grads = (gates, None, sums, inputs)
    kernels.backward(x, weight, ids, probs, noisy, clean, grads, True, "load_importance", 0.1)
    assert len(compiled) == 2
    assert not any(re.search(r"\b(atom|red)\.", kernel.asm["ptx"]) for kernel in compiled.values())
