"""The autograd formula that the ops of the experts' networks share.

Such an op returns its output and the hidden layer, which its backward op needs. Its arguments are
the fields of a named tuple, tensors first. The last argument says whether the hidden layer is kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def register_backward(
    name: str, inputs_type: type, num_tensors: int, num_differentiable: int
) -> None:
    """Register `moe_core::<name>_backward` as the backward op of `moe_core::<name>`.

    Args:
        name: the name of the op.
        inputs_type: the named tuple of the op's arguments.
        num_tensors: the number of leading fields that are tensors or None.
        num_differentiable: the number of leading fields that have gradients.
    """
    num_arguments = len(inputs_type._fields) + 1  # type: ignore[attr-defined]

    def save(ctx, inputs, output):
        fields = inputs[:-1]
        hidden = output[1]
        ctx.save_for_backward(*fields[:num_tensors], hidden)
        ctx.settings = fields[num_tensors:]
        ctx.mark_non_differentiable(hidden)
        # Otherwise autograd would allocate zeros for the gradient of the hidden layer.
        ctx.set_materialize_grads(False)

    def differentiate(ctx, grad, grad_hidden):
        gradients: list[Tensor | None] = [None] * num_arguments
        if grad is None:
            return tuple(gradients)
        saved = ctx.saved_tensors  # activation checkpointing allows one access
        fields = saved[:-1] + ctx.settings
        needs = list(ctx.needs_input_grad[:num_differentiable])
        backward = getattr(torch.ops.moe_core, f"{name}_backward")
        computed = backward(grad, saved[-1], needs, *fields)
        for i, is_needed in enumerate(needs):
            if is_needed:
                gradients[i] = computed[i]
        return tuple(gradients)

    torch.library.register_autograd(f"moe_core::{name}", differentiate, setup_context=save)


def empty_gradients(grad: Tensor, tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """The gradients that the backward op's fake kernel returns.

    A gradient that is needed has the shape of its tensor. The others have no elements.
    """
    gradients = []
    for tensor, is_needed in zip(tensors, needs, strict=True):
        if is_needed:
            gradients.append(tensor.new_empty(tensor.shape))
        else:
            gradients.append(grad.new_empty(0))
    return gradients
