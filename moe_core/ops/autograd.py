"""The autograd formula that the ops of the experts' networks share.

Such an op returns its output and the hidden layer, which its backward op needs. Its arguments are
the fields of a named tuple, tensors first, and at the end whether the hidden layer is kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def register_backward(
    name: str, inputs_type: type, num_tensors: int, num_differentiable: int
) -> None:
    """Let `moe_core::<name>_backward` give the gradients of the op `moe_core::<name>`.

    Args:
        name: of the op.
        inputs_type: the named tuple of its arguments.
        num_tensors: how many of them, from the first, are tensors or None.
        num_differentiable: how many of these, from the first, have gradients.
    """
    num_arguments = len(inputs_type._fields) + 1  # type: ignore[attr-defined]

    def save(ctx, inputs, output):
        fields = inputs[:-1]
        hidden = output[1]
        ctx.save_for_backward(*fields[:num_tensors], hidden)
        ctx.settings = fields[num_tensors:]
        ctx.mark_non_differentiable(hidden)
        # Otherwise zeros as large as the hidden layer would be made for its gradient.
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
    """What the backward op returns under fake tensors: like each tensor whose gradient is needed,
    empty for the others."""
    gradients = []
    for tensor, is_needed in zip(tensors, needs, strict=True):
        if is_needed:
            gradients.append(tensor.new_empty(tensor.shape))
        else:
            gradients.append(grad.new_empty(0))
    return gradients
