"""Weights of experts that are cast once for several passes, under Triton's interpreter."""

# T tokens, M model dim

import copy

import pytest
import torch
from triton_cases import INTERPRETED, run_interpreted

from moe_core import MoEConfig, MoELayer, cast_ahead
from moe_core.experts import Experts


def make_layer(kernels: str = "triton", **options) -> MoELayer:
    torch.manual_seed(0)
    config = MoEConfig(8, 16, num_experts=4, capacity_factor=1.25, kernels=kernels, **options)
    return MoELayer(config)


def train(layer: MoELayer, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of two accumulated batches, computed in float16."""
    for x in batches:
        with torch.autocast("cpu", torch.float16):
            y, aux_loss = layer(x)
        (y.float().square().sum() + aux_loss).backward()
    return [parameter.grad for parameter in layer.parameters()]


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(280)
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__)


def test_torch_forms_cast_nothing():
    layer = make_layer("torch")
    with cast_ahead(layer, torch.bfloat16):
        assert layer.experts._casts is None


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
class TestKernels:
    @pytest.mark.parametrize("num_shared_experts", [0, 1])
    def test_gradients_are_the_same(self, num_shared_experts):
        layer = make_layer(num_shared_experts=num_shared_experts)
        twin = copy.deepcopy(layer)
        batches = [torch.randn(12, 8) for _ in range(2)]
        expected = train(twin, batches)
        with cast_ahead(layer, torch.float16):
            gradients = train(layer, batches)
        for gradient, other in zip(gradients, expected, strict=True):
            assert torch.equal(gradient, other)

    def test_weights_are_cast_once(self):
        layer = make_layer()
        x = torch.randn(12, 8)
        with cast_ahead(layer, torch.float16):
            with torch.no_grad():
                layer.experts.w1.zero_()  # not seen: the context promises that this does not happen
                layer.experts.b1.zero_()
            with torch.autocast("cpu", torch.float16):
                earlier, _ = layer(x)
        with torch.autocast("cpu", torch.float16):
            later, _ = layer(x)
        assert not torch.equal(earlier, later)

    def test_another_dtype_is_cast_in_the_pass(self):
        layer = make_layer()
        x = torch.randn(12, 8)
        expected, _ = layer(x)
        with cast_ahead(layer, torch.float16):
            y, _ = layer(x)  # in fp32
        assert torch.equal(y, expected)

    def test_the_context_ends_with_an_error(self):
        layer = make_layer()
        with pytest.raises(RuntimeError, match="stop"), cast_ahead(layer, torch.float16):
            raise RuntimeError("stop")
        casts = [m._casts for m in layer.modules() if isinstance(m, Experts)]
        assert casts == [None]

    def test_compiled(self):
        layer = make_layer()
        x = torch.randn(12, 8)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", torch.float16):
            expected, _ = layer(x)
            with cast_ahead(layer, torch.float16):
                first, _ = compiled(x)
            with torch.no_grad():
                layer.experts.w1.mul_(2)
            with cast_ahead(layer, torch.float16):
                second, _ = compiled(x)
            changed, _ = layer(x)
        assert torch.equal(first, expected)
        assert torch.equal(second, changed)
