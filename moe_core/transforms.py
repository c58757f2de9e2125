"""Kinds of derivatives: which one is computed, and which ones collectives refuse."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


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
