"""Window attention with a position bias: everything between the two projections.

It is a torch.library op on CUDA devices in half precision, with the kernels of
`triton_window_attention`, and on CPUs in fp32 and bf16, with those of `cpp_window_attention`. They
do not store normalised queries and keys, the sum of bias and mask for each window, or the gradient
of the bias for each window. scaled_dot_product_attention, which runs elsewhere, needs a tensor for
each of these.
"""

# B images, W windows of an image, N tokens of a window, h heads, D channels of a head

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.context import in_transform
from moe_core.ops.autograd import (
    is_differentiated_again,
    op,
    plain_gradients,
)
from moe_core.ops.backend import is_interpreted
from moe_core.ops.native.library import chosen
from swinv2_moe.models import cpp_window_attention

_log = logging.getLogger(__name__)


def window_attention(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool
) -> Tensor:
    """`softmax(scale * q @ k^T + bias + mask) @ v` for each window and head.

    On CUDA devices in bf16, fp16 or fp32, on CPUs in bf16 or fp32. Matrix products accumulate in
    fp32.

    Args:
        qkv: [B*W, N, 3, h, D]; on CUDA devices D of 16, 32 or 64.
        bias: [h, N, N].
        mask: [W, N, N], -inf for pairs of tokens that do not attend to each other; None: no mask.
            It gets no gradient.
        scale: [h] fp32.
        cosine: normalise queries and keys to unit length (arXiv 2111.09883, section 3).

    Returns:
        [B*W, N, h*D]. Results and gradients are the same in every run, bit by bit.

    Raises:
        ValueError: shapes that do not match each other.
    """
    windows, tokens, _, heads, _ = qkv.shape
    if bias.shape != (heads, tokens, tokens) or scale.shape != (heads,):
        raise ValueError(
            f"bias {list(bias.shape)} and scale {list(scale.shape)} do not fit qkv"
            f" {list(qkv.shape)}"
        )
    if mask is not None and (mask.shape[1:] != bias.shape[1:] or windows % len(mask)):
        raise ValueError(
            f"mask {list(mask.shape)} does not fit the windows of qkv {list(qkv.shape)}"
        )
    return _window_attention(qkv, bias, mask, scale, cosine)[0]


def runs(qkv: Tensor) -> bool:
    """Whether the op supports qkv [B*W, N, 3, h, D] here.

    False in a program that is saved, which must run without this project, and where the op has no
    derivatives (`moe_core.ops.autograd`).
    """
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or in_transform(qkv):
        return False
    if qkv.is_cuda:
        is_half = qkv.dtype in (torch.bfloat16, torch.float16)
        is_small = qkv.shape[1] <= 256 and qkv.shape[-1] in (16, 32, 64)
        return is_half and is_small and _triton_runs()
    return qkv.is_cpu and qkv.dtype in (torch.bfloat16, torch.float32) and _cpp_runs()


# Constants for torch.compile, which cannot trace imports and logging. torch 2.14 would trace what
# `functools.cache` wraps, so the constants are functions without it.
@torch.compiler.assume_constant_result
def _triton_runs() -> bool:
    return _triton_starts()


@torch.compiler.assume_constant_result
def _cpp_runs() -> bool:
    return chosen() is not None


@functools.cache
def _triton_starts() -> bool:
    try:
        import triton

        triton.runtime.driver.active.get_current_device()  # compiles Triton's launcher
    except Exception as error:  # scaled_dot_product_attention runs instead
        _log.warning(
            "window attention by torch, since Triton cannot run: %s: %s",
            type(error).__name__,
            error,
        )
        return False
    return True


def _kernels(qkv: Tensor):
    if qkv.is_cpu and not is_interpreted():
        return cpp_window_attention
    from swinv2_moe.models import triton_window_attention  # here, since it imports Triton

    return triton_window_attention


def plain_attention(
    qkv: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: Tensor,
    cosine: bool,
    dropout: float = 0.0,
) -> Tensor:
    """As `window_attention`, in plain torch, for any kind of derivative and torch.func transform.

    Args:
        dropout: the share of the attention weights that become 0.
    """
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.to(dtype).permute(2, 0, 3, 1, 4).unbind(0)  # [B*W, h, N, D]
    if cosine:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    scores = scale.view(-1, 1, 1) * (q @ k.mT) + bias
    if mask is not None:
        scores = (scores.unflatten(0, (-1, len(mask))) + mask.unsqueeze(1)).flatten(0, 1)
    weights = F.dropout(scores.softmax(-1), dropout)
    return (weights @ v).transpose(1, 2).flatten(2).to(qkv.dtype)


# 1. Ops


@op("swinv2_moe::window_attention")
def _window_attention(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool
) -> tuple[Tensor, Tensor]:
    """out [B*W, N, h*D] and, for the backward pass, the log-sum-exp of the scores [B*W, h, N]."""
    return _kernels(qkv).forward(qkv, bias, mask, scale, cosine)


@op("swinv2_moe::window_attention_backward")
def _window_attention_backward(
    grad: Tensor,
    qkv: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: Tensor,
    out: Tensor,
    lse: Tensor,
    cosine: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv in its dtype, of bias and scale in fp32."""
    return _kernels(qkv).backward(grad, qkv, bias, mask, scale, out, lse, cosine)


@_window_attention.register_fake
def _(qkv, bias, mask, scale, cosine):
    windows, tokens, _, heads, channels = qkv.shape
    lse = qkv.new_empty(windows, heads, tokens, dtype=torch.float32)
    return qkv.new_empty(windows, tokens, heads * channels), lse


@_window_attention_backward.register_fake
def _(grad, qkv, bias, mask, scale, out, lse, cosine):
    fp32 = torch.float32
    return (
        qkv.new_empty(qkv.shape),
        bias.new_empty(bias.shape, dtype=fp32),
        scale.new_empty(scale.shape, dtype=fp32),
    )


@register_flop_formula(torch.ops.swinv2_moe.window_attention)
def _flops(qkv_shape, *others, out_shape=None, **kwargs) -> int:
    windows, tokens, _, heads, channels = qkv_shape
    return 2 * 2 * windows * heads * tokens * tokens * channels


@register_flop_formula(torch.ops.swinv2_moe.window_attention_backward)
def _backward_flops(grad_shape, qkv_shape, *others, out_shape=None, **kwargs) -> int:
    return _flops(qkv_shape) * 5 // 2  # with the recomputed scores, as torch counts for its own


# 2. Autograd


def _save(ctx, inputs, output) -> None:
    qkv, bias, mask, scale, ctx.cosine = inputs
    out, lse = output
    ctx.save_for_backward(qkv, bias, mask, scale, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    if grad is None:
        return None, None, None, None, None
    qkv, bias, mask, scale, out, lse = ctx.saved_tensors
    if is_differentiated_again(grad):
        return _plain_backward(ctx, grad, qkv, bias, mask, scale)
    grad_qkv, grad_bias, grad_scale = _window_attention_backward(
        grad, qkv, bias, mask, scale, out, lse, ctx.cosine
    )
    return grad_qkv, grad_bias.to(bias.dtype), None, grad_scale.to(scale.dtype), None


def _plain_backward(ctx, grad, qkv, bias, mask, scale):
    """As `_backward`, differentiable."""

    def function(qkv, bias, scale):
        return (plain_attention(qkv, bias, mask, scale, ctx.cosine),)

    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    of_qkv, of_bias, of_scale = plain_gradients(function, (qkv, bias, scale), needs, [grad])
    return of_qkv, of_bias, None, of_scale, None


_window_attention.register_autograd(_backward, _save)
