"""Activations of the experts, and their gradients where a kernel computes them itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.registry import ACTIVATIONS, register_activation

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
    """Replace `grad`, the gradient of the activation of z, by the gradient of z, in place."""
    if name in _GRADS_IN_PLACE:
        return _GRADS_IN_PLACE[name](grad, z)
    vjp = torch.func.vjp(ACTIVATIONS[name], z)[1]
    return grad.copy_(vjp(grad)[0])
