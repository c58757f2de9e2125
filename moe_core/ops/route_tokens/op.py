"""A linear router, the choice of experts and the cast of the tokens, in one pass over the tokens.

The results are those of `x W^T`, `ops.route` and a cast. There is only a Triton form, for tokens on
a GPU. `route_tokens_supported` returns whether it can be used.
"""

# T tokens, E experts, K top-k, M model dim

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.context import in_transform
from moe_core.ops.autograd import is_differentiated_again, plain_gradients
from moe_core.ops.backend import KERNEL_LOSSES, Request, load, select
from moe_core.ops.route.reference import route_and_sums

_MOST_EXPERTS = 64  # a program holds the logits of its tokens in registers


class RoutedTokens(NamedTuple):
    """The results of `ops.route`, and the tokens in the dtype of the experts."""

    gates: Tensor  # [T, K]
    ids: Tensor  # [T, K] int64
    probs: Tensor  # [T, E]
    sums: Tensor  # [2, E] of the loss
    inputs: Tensor  # [T, M]


def route_tokens_supported(x: Tensor, weight: Tensor, loss: str, kernels: str) -> bool:
    """Whether the kernel supports tokens x [T, M] and a router's weight [E, M]."""
    if weight.shape[0] > _MOST_EXPERTS or weight.dtype != torch.float32:
        return False
    if loss not in KERNEL_LOSSES or in_transform(x):
        return False
    return select("route_tokens", Request(kernels, x.device.type, x.dtype)) != "route.reference"


def route_tokens(
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    top_k: int,
    normalize: bool,
    loss: str,
    noise_std: float,
    loss_noise_std: float,
    dtype: torch.dtype,
) -> RoutedTokens:
    """Choose experts for tokens x [T, M] by logits `x weight^T + noise_std * noise` in fp32.

    Differentiable in x and weight.

    Args:
        weight: [E, M].
        noise: [T, E], or None.
        normalize: whether the gate values of a token sum to 1.
        loss: one of `KERNEL_LOSSES`.
        loss_noise_std: the standard deviation of the noise, for the loss.
        dtype: the dtype of the experts.
    """
    cast_to: torch.dtype | None = None
    if dtype != x.dtype:
        cast_to = dtype
    gates, ids, probs, sums, inputs, _, _ = torch.ops.moe_core.route_tokens(
        x, weight, noise, top_k, normalize, loss, noise_std, loss_noise_std, cast_to
    )
    if cast_to is None:
        inputs = x
    return RoutedTokens(gates, ids, probs, sums, inputs)


@torch.library.custom_op("moe_core::route_tokens", mutates_args=())
def _route_tokens(
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    top_k: int,
    normalize: bool,
    loss: str,
    noise_std: float,
    loss_noise_std: float,
    cast_to: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gates, ids, probs, sums, the cast tokens, and the logits with and without noise.

    The cast tokens are empty if there is no cast. The logits are empty if the loss does not read
    them.
    """
    forward = load("route_tokens.triton").forward
    return forward(x, weight, noise, top_k, normalize, loss, noise_std, loss_noise_std, cast_to)


@torch.library.custom_op("moe_core::route_tokens_backward", mutates_args=())
def _route_tokens_backward(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    probs: Tensor,
    noisy: Tensor,
    clean: Tensor,
    grad_gates: Tensor | None,
    grad_probs: Tensor | None,
    grad_sums: Tensor | None,
    grad_inputs: Tensor | None,
    normalize: bool,
    loss: str,
    loss_noise_std: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    if grad_sums is None:
        loss = "none"
    grads = (grad_gates, grad_probs, grad_sums, grad_inputs)
    backward = load("route_tokens.triton").backward
    return backward(x, weight, ids, probs, noisy, clean, grads, normalize, loss, loss_noise_std)


@_route_tokens.register_fake
def _(x, weight, noise, top_k, normalize, loss, noise_std, loss_noise_std, cast_to):
    num_tokens, num_experts = x.shape[0], weight.shape[0]
    gates = weight.new_empty(num_tokens, top_k)
    ids = weight.new_empty(num_tokens, top_k, dtype=torch.int64)
    probs = weight.new_empty(num_tokens, num_experts)
    inputs = x.new_empty(0)
    if cast_to is not None:
        inputs = x.new_empty(x.shape, dtype=cast_to)
    noisy, clean = weight.new_empty(0), weight.new_empty(0)
    if loss.startswith("load_importance"):
        noisy = torch.empty_like(probs)
        if noise is not None:
            clean = torch.empty_like(probs)
    return gates, ids, probs, weight.new_empty(2, num_experts), inputs, noisy, clean


@_route_tokens_backward.register_fake
def _(
    x, weight, ids, probs, noisy, clean, grad_gates, grad_probs, grad_sums, grad_inputs, normalize,
    loss, loss_noise_std,
):  # fmt: skip
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output) -> None:
    x, weight, noise, _, ctx.normalize, ctx.loss, ctx.noise_std, ctx.loss_noise_std, cast_to = (
        inputs
    )
    _, ids, probs, _, _, noisy, clean = output
    ctx.cast_to = cast_to
    ctx.save_for_backward(x, weight, ids, probs, noisy, clean, noise)
    ctx.mark_non_differentiable(ids, noisy, clean)
    # The gradients of unused outputs are None, so the kernel does not read zeros.
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_gates, grad_ids, grad_probs, grad_sums, grad_inputs, *unused):
    grads = (grad_gates, grad_probs, grad_sums, grad_inputs)
    *saved, noise = ctx.saved_tensors
    if is_differentiated_again(saved[0]):
        x, weight, ids, *_ = saved

        def function(x, weight):
            clean = noisy = F.linear(x.float(), weight)
            if noise is not None:
                noisy = clean + ctx.noise_std * noise
            settings = (ids.shape[1], ctx.normalize, ctx.loss, ctx.loss_noise_std)
            return *route_and_sums(noisy, clean, *settings), x.to(ctx.cast_to or x.dtype)

        computed = plain_gradients(function, (x, weight), ctx.needs_input_grad[:2], grads)
        return (*computed, None, None, None, None, None, None, None)
    grad_x, grad_weight = torch.ops.moe_core.route_tokens_backward(
        *saved, *grads, ctx.normalize, ctx.loss, ctx.loss_noise_std
    )
    return grad_x, grad_weight, None, None, None, None, None, None, None


torch.library.register_autograd("moe_core::route_tokens", _differentiate, setup_context=_save)


@register_flop_formula(torch.ops.moe_core.route_tokens)
def _flops(tokens_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    num_experts, model_dim = weight_shape
    return 2 * tokens_shape[0] * num_experts * model_dim


@register_flop_formula(torch.ops.moe_core.route_tokens_backward)
def _backward_flops(tokens_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    return 2 * _flops(tokens_shape, weight_shape)
