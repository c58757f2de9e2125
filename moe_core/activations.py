"""Activations of the experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.registry import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    register_activation,
    register_gated_activation,
)


@register_activation("gelu")
def gelu(x: Tensor) -> Tensor:
    """Exact GELU."""
    return F.gelu(x)


@register_activation("gelu_tanh")
def gelu_tanh(x: Tensor) -> Tensor:
    """GELU, approximated by tanh."""
    return F.gelu(x, approximate="tanh")


@register_activation("quick_gelu")
def quick_gelu(x: Tensor) -> Tensor:
    """`x sigmoid(1.702 x)`, another approximation of GELU.

    Source: arXiv 1606.08415, section 2.
    """
    return x * torch.sigmoid(1.702 * x)


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
