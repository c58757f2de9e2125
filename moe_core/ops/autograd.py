"""Derivatives of the ops.

The ops have a first derivative in reverse mode only. For every other kind of derivative, plain
torch operations compute the op or its gradients:

1. In a torch.func transform or a level of forward-mode differentiation (`in_transform`), the
   function that calls an op calls its plain form instead.
2. In a backward pass that is differentiated again (`is_differentiated_again`), the gradients are
   those of the plain form (`plain_gradients`).

`register_backward` registers the formula that the ops of the experts' networks share. Such an op
returns its output and the hidden layer, which its backward op needs. Its arguments are the fields
of a named tuple, tensors first. The last argument says whether the hidden layer is kept.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_core.context import in_transform


def is_differentiated_again(grad: Tensor) -> bool:
    """Whether a backward pass, which received `grad`, needs gradients that have derivatives."""
    return torch.is_grad_enabled() or in_transform(grad)


def plain_gradients(
    function: Callable, inputs: Sequence, needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of a function of plain torch operations, differentiable in inputs and grads.

    Args:
        function: from `inputs` to a tuple of tensors.
        needs: for each input, whether its gradient is computed; otherwise it is None.
        grads: the gradients of the results; None means zeros.
    """
    arguments = list(inputs)
    with torch.enable_grad():
        for i, is_needed in enumerate(needs):
            if is_needed:
                arguments[i] = inputs[i].view_as(inputs[i])
        outputs = function(*arguments)
    pairs = [(out, g) for out, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [argument for argument, is_needed in zip(arguments, needs, strict=True) if is_needed]
    computed = iter(
        torch.autograd.grad(
            [out for out, _ in pairs],
            wanted,
            [grad.to(out.dtype) for out, grad in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return [next(computed) if is_needed else None for is_needed in needs]


def register_backward(
    name: str,
    inputs_type: type,
    num_tensors: int,
    num_differentiable: int,
    plain: Callable[..., Tensor],
) -> None:
    """Register `moe_core::<name>_backward` as the backward op of `moe_core::<name>`.

    Args:
        name: the name of the op.
        inputs_type: the named tuple of the op's arguments.
        num_tensors: the number of leading fields that are tensors or None.
        num_differentiable: the number of leading fields that have gradients.
        plain: the function that the op computes, of the same fields, in plain torch.
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
        if is_differentiated_again(grad):

            def function(*differentiable):
                return (plain(*differentiable, *fields[num_differentiable:]),)

            computed = plain_gradients(function, fields[:num_differentiable], needs, [grad])
            return (*computed, *gradients[num_differentiable:])
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
