"""What surrounds a computation: autocast, derivatives and transforms, a running backward pass."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def expert_dtype(x: Tensor) -> torch.dtype:
    """The dtype of autocast if it is enabled, otherwise that of x."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context without autocast on the device of x."""
    device = x.device.type
    # Not torch.amp.is_autocast_available, because torch.compile cannot trace it.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def requiring_gradient(tokens: Tensor) -> Tensor:
    """Tokens that require a gradient where gradients are enabled: either all ranks or none must run
    the backward pass."""
    if torch.is_grad_enabled() and not tokens.requires_grad:
        return tokens.detach().requires_grad_()
    return tokens


@torch.no_grad()
def draw(tensor: Tensor, fill: Callable[[Tensor], Tensor]) -> None:
    """Fill `tensor` with values that `fill` draws in fp32, so that they do not depend on its
    dtype."""
    values = torch.empty_like(tensor, dtype=torch.float32)
    fill(values)
    tensor.copy_(values)


def in_transform(tensor: Tensor) -> bool:
    """Whether a torch.func transform or a level of forward-mode differentiation is active.

    Args:
        tensor: any tensor.
    """
    # Within a level, the primal is a new view also if the tensor has no tangent.
    return torch._C._are_functorch_transforms_active() or unpack_dual(tensor).primal is not tensor


def first_derivative_only(backward: Callable) -> Callable:
    """Decorator of an autograd function's backward that refuses to be differentiated again.

    torch's `once_differentiable` refuses it too, without the layer's name.
    """

    @functools.wraps(backward)
    def run(ctx, *grads):
        if torch.is_grad_enabled():
            raise ValueError(
                "a MoELayer over several ranks has no second derivatives (create_graph=True): use a"
                " layer with group=None"
            )
        return backward(ctx, *grads)

    return run


def in_backward() -> bool:
    """Whether a backward pass is running, for example one that recomputes activations."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1
