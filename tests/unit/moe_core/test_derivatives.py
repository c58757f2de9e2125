"""Every kind of derivative and torch.func transform of a layer, against its gradient or itself.
`test_triton_ffn` has the second derivatives of the Triton kernels."""

# T tokens, N rows, M model dim, H hidden dim

import copy

import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call, grad, jacfwd, jvp, vmap

from moe_core import MoEConfig, MoELayer, prepared
from moe_core.ops.native import library

KINDS = {
    "dropless": {"capacity_factor": 0.0},
    "drops": {"capacity_factor": 0.5, "bias": False},
    "gated": {"gated": True, "activation": "silu", "num_shared_experts": 1},
    "sigmoid": {"gate_activation": "sigmoid", "z_loss_weight": 0.1, "aux_loss": "load_importance"},
    "cosine": {"router": "cosine"},
    "expert_choice": {"router": "expert_choice"},
    "soft": {"router": "soft", "slots_per_expert": 2},
}


def make_layer(kind: str, **changes) -> MoELayer:
    torch.manual_seed(0)
    config = MoEConfig(6, 5, 3, top_k=2, **(KINDS[kind] | changes))
    return MoELayer(config).double()


def loss_of(layer: MoELayer, x: Tensor, parameters: dict | None = None) -> Tensor:
    y, aux_loss = functional_call(layer, parameters or {}, (x,))
    return (y * y.detach().cos()).sum() + aux_loss  # no gradient that is symmetric


def random(*shape: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(shape[0]))


@pytest.mark.parametrize("kind", KINDS)
class TestLayer:
    def test_forward_mode(self, kind):
        layer, x, v = make_layer(kind), random(7, 6).requires_grad_(), random(7, 6)
        loss_of(layer, x).backward()
        x, slope = x.detach(), (x.grad * v).sum()
        for requires_grad in (True, False):
            layer.requires_grad_(requires_grad)
            with dual_level():
                tangent = unpack_dual(loss_of(layer, make_dual(x, v))).tangent
            torch.testing.assert_close(tangent, slope)
            with torch.no_grad(), prepared(layer):
                torch.testing.assert_close(jvp(lambda x: loss_of(layer, x), (x,), (v,))[1], slope)
        assert layer.last_routing is None, "its tensors are those of a transform"
        jacobian = jacfwd(lambda x: loss_of(layer, x))(x)
        torch.testing.assert_close((jacobian * v).sum(), slope)

    def test_functional_gradients_of_parameters(self, kind):
        """Of a batch and, with vmap, of every sample."""
        layer, samples = make_layer(kind), random(2, 7, 6)
        parameters = {name: p.detach() for name, p in layer.named_parameters()}

        def loss(parameters, x):
            return loss_of(layer, x, parameters)

        per_sample = vmap(grad(loss), (None, 0))(parameters, samples)
        for i, x in enumerate(samples):
            layer.zero_grad()
            loss_of(layer, x).backward()
            gradients = grad(loss)(parameters, x)
            for name, parameter in layer.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad)
                torch.testing.assert_close(per_sample[name][i], parameter.grad)

    def test_vmap(self, kind):
        layer, samples = make_layer(kind), random(3, 7, 6)
        expected = torch.stack([layer(x)[0] for x in samples])
        torch.testing.assert_close(vmap(lambda x: layer(x)[0])(samples), expected)

    def test_second_derivatives(self, kind):
        """A gradient penalty, against the forward derivative of the gradient."""
        layer, x = make_layer(kind), random(7, 6).requires_grad_()
        parameters = {name: p.detach() for name, p in layer.named_parameters()}
        vectors = {name: random(*p.shape) for name, p in parameters.items()}
        gradients = torch.autograd.grad(loss_of(layer, x), layer.parameters(), create_graph=True)
        named = dict(zip(parameters, gradients, strict=True))
        sum((g * vectors[name]).sum() for name, g in named.items()).backward()

        def gradient(x):
            return grad(lambda p: loss_of(layer, x, p))(parameters)

        jacobian = vmap(lambda v: jvp(gradient, (x.detach(),), (v,))[1])(
            torch.eye(42).double().view(42, 7, 6)
        )
        expected = sum((jacobian[name] * v).flatten(1).sum(1) for name, v in vectors.items())
        torch.testing.assert_close(x.grad.flatten(), expected)


def test_batched_gradients():
    """A vectorised Jacobian runs the backward pass on a batch of gradients."""
    layer, x = make_layer("dropless"), random(3, 6)
    jacobians = [
        torch.autograd.functional.jacobian(lambda x: layer(x)[0], x, vectorize=vectorize)
        for vectorize in (False, True)
    ]
    torch.testing.assert_close(*jacobians)


def test_a_transform_with_nothing_but_constants():
    """Parameters need gradients outside of the transform."""
    layer, x = make_layer("dropless"), random(7, 6)
    y = jvp(lambda z: z + layer(x)[0], (x,), (x,))[0]
    torch.testing.assert_close(y, x + layer(x)[0])


def test_compiled_transforms():
    layer, x, v = make_layer("dropless"), random(7, 6), random(7, 6)
    layer.requires_grad_(False)

    def slope(x, v):
        return jvp(lambda x: loss_of(layer, x), (x,), (v,))[1]

    expected = slope(x, v)
    torch.testing.assert_close(
        torch.compile(slope, backend="aot_eager", fullgraph=True)(x, v), expected
    )
    compiled = torch.compile(lambda x: loss_of(layer, x), backend="aot_eager")
    compiled(x)
    torch.testing.assert_close(jvp(compiled, (x,), (v,))[1], expected)
    with dual_level():
        torch.testing.assert_close(unpack_dual(compiled(make_dual(x, v))).tangent, expected)


def test_dropout_of_a_kernel_has_first_derivatives_alone():
    layer, x = make_layer("dropless", hidden_dropout=0.5), random(7, 6).requires_grad_()
    torch.autograd.grad(loss_of(layer, x), x, create_graph=True)  # fp64, not a kernel
    if library.chosen() is not None:
        loss = loss_of(copy.deepcopy(layer).float(), x.float())
        with pytest.raises(ValueError, match=r"hidden_dropout \(0.5\) must be 0 for second deriv"):
            torch.autograd.grad(loss, x, create_graph=True)
    with dual_level():
        y = layer(make_dual(x.detach(), x.detach()))[0]
        assert unpack_dual(y).tangent.isfinite().all()


def test_counting_of_loads_is_refused():
    layer, x = make_layer("dropless", balance="bias"), random(7, 6)
    with pytest.raises(
        ValueError, match="balance 'bias' counts its choices in training: call eval"
    ):
        jvp(lambda x: layer(x)[0], (x,), (x,))
    layer.eval()
    assert jvp(lambda x: layer(x)[0], (x,), (x,))[1].ne(0).any()
