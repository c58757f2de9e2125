"""The auxiliary losses in `KERNEL_LOSSES`, computed from their sums per expert.

The formulas are those of moe_core.losses. On a GPU each pass is one kernel launch. The torch
operations of moe_core.losses would be ten launches.
"""

# E experts

import torch
from torch import Tensor

from moe_core.ops.autograd import is_differentiated_again, plain_gradients
from moe_core.ops.backend import load
from moe_core.registry import LOSSES


def loss_of_sums(loss: str, sums: Tensor, num_tokens: int | Tensor) -> Tensor:
    """The loss, a scalar, from its sums [2, E] over `num_tokens` tokens; differentiable in sums.

    Args:
        loss: one of `KERNEL_LOSSES`.
        num_tokens: a number, or a scalar tensor if the sums are over several ranks.
    """
    total = None
    if isinstance(num_tokens, Tensor):
        total, num_tokens = num_tokens.detach(), 0
    return torch.ops.moe_core.loss_of_sums(sums, total, num_tokens, loss)


@torch.library.custom_op("moe_core::loss_of_sums", mutates_args=())
def _loss_of_sums(sums: Tensor, total: Tensor | None, num_tokens: int, loss: str) -> Tensor:
    return load("route.loss_triton").loss_of_sums(sums, total, num_tokens, loss)


@torch.library.custom_op("moe_core::loss_of_sums_backward", mutates_args=())
def _loss_of_sums_backward(
    grad: Tensor, sums: Tensor, total: Tensor | None, num_tokens: int, loss: str
) -> Tensor:
    differentiate = load("route.loss_triton").loss_of_sums_backward
    return differentiate(grad, sums, total, num_tokens, loss)


@_loss_of_sums.register_fake
def _(sums, total, num_tokens, loss):
    return sums.new_empty(())


@_loss_of_sums_backward.register_fake
def _(grad, sums, total, num_tokens, loss):
    return sums.new_empty(sums.shape)


def _save(ctx, inputs, output) -> None:
    sums, total, ctx.num_tokens, ctx.loss = inputs
    ctx.save_for_backward(sums, total)


def _differentiate(ctx, grad):
    sums, total = ctx.saved_tensors
    if is_differentiated_again(grad):

        def function(sums):
            return (LOSSES[ctx.loss]().value(sums, ctx.num_tokens if total is None else total),)

        return (*plain_gradients(function, (sums,), (True,), [grad]), None, None, None)
    grad_sums = torch.ops.moe_core.loss_of_sums_backward(
        grad, sums, total, ctx.num_tokens, ctx.loss
    )
    return grad_sums, None, None, None


torch.library.register_autograd("moe_core::loss_of_sums", _differentiate, setup_context=_save)
