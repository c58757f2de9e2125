"""Activations of the experts, and their gradients where a kernel computes them itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.registry import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    register_activation,
    register_gated_activation,
)

_aten = torch.ops.aten


@register_activation("gelu")
def gelu(x: Tensor) -> Tensor:
    """Exact GELU."""
    return F.gelu(x)


@register_activation("relu")
def relu(x: Tensor) -> Tensor:
    return F.relu(x)


@register_activation("silu")
def silu(x: Tensor) -> Tensor:
    return F.silu(x)


@register_gated_activation("clamped_swiglu")
def clamped_swiglu(z: Tensor, u: Tensor) -> Tensor:
    """`z' sigmoid(1.702 z') (u' + 1)` with z' = min(z, 7) and u' = u limited to -7 to 7.

    Source: gpt-oss, https://github.com/openai/gpt-oss.
    """
    z = z.clamp(max=7.0)
    u = u.clamp(-7.0, 7.0)
    return z * torch.sigmoid(1.702 * z) * (u + 1)


# Built-in activations, for which torch has operations with an output argument.
_IN_PLACE = {
    "gelu": lambda z, out: _aten.gelu.out(z, out=out),
    "relu": lambda z, out: torch.clamp_min(z, 0, out=out),
    "silu": lambda z, out: _aten.silu.out(z, out=out),
}
_GRADS_IN_PLACE = {
    "gelu": lambda grad, z: _aten.gelu_backward.grad_input(grad, z, grad_input=grad),
    "relu": lambda grad, z: _aten.threshold_backward.grad_input(grad, z, 0, grad_input=grad),
    "silu": lambda grad, z: _aten.silu_backward.grad_input(grad, z, grad_input=grad),
}


def activate(name: str, z: Tensor, out: Tensor) -> Tensor:
    """Write the activation of z into `out`, which may be z itself."""
    if name in _IN_PLACE:
        return _IN_PLACE[name](z, out)
    return out.copy_(ACTIVATIONS[name](z))


def activation_grad(name: str, grad: Tensor, z: Tensor) -> Tensor:
    """Overwrite `grad`, the gradient of the activation's result, with the gradient of z."""
    if name in _GRADS_IN_PLACE:
        return _GRADS_IN_PLACE[name](grad, z)
    vjp = torch.func.vjp(ACTIVATIONS[name], z)[1]
    return grad.copy_(vjp(grad)[0])


def hidden_layer(name: str, z: Tensor, u: Tensor | None = None) -> Tensor:
    """The hidden layer: `act(z)`, or for gated experts `act(z) * u` or a gated activation of z, u.

    Args:
        name: a name in ACTIVATIONS or GATED_ACTIVATIONS.
        z: `x w1^T + b1`.
        u: `x w3^T + b3`; None: the experts are not gated.
    """
    if name in GATED_ACTIVATIONS:
        return GATED_ACTIVATIONS[name](z, u)
    if u is None:
        return ACTIVATIONS[name](z)
    return ACTIVATIONS[name](z) * u


def activate_gated(name: str, z: Tensor, u: Tensor, out: Tensor) -> Tensor:
    """Write `hidden_layer(name, z, u)` into `out`, which may be z."""
    if name in GATED_ACTIVATIONS:
        return out.copy_(GATED_ACTIVATIONS[name](z, u))
    return activate(name, z, out).mul_(u)


def gated_grads(name: str, grad: Tensor, z: Tensor, u: Tensor, grad_u: Tensor) -> None:
    """Compute the gradients of z and u from `grad`, the gradient of `hidden_layer(name, z, u)`.

    The gradient of z overwrites `grad`. The gradient of u is written to `grad_u`.
    """
    if name in GATED_ACTIVATIONS:
        grad_z, of_u = torch.func.vjp(GATED_ACTIVATIONS[name], z, u)[1](grad)
        grad.copy_(grad_z)
        grad_u.copy_(of_u)
        return
    activate(name, z, grad_u).mul_(grad)
    activation_grad(name, grad.mul_(u), z)
