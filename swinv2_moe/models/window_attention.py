"""Attention within windows with a position bias, from the projection's output to the next
projection's input, as a torch.library op on Triton's kernels (`triton_window_attention`), for CUDA
devices in half precision.

Normalised queries and keys, the bias and mask of each window, the gradient of the bias of each
window: none of them is ever in memory. scaled_dot_product_attention, which runs elsewhere, needs a
pass and a tensor for each.
"""

# B images, W windows of an image, N tokens of a window, h heads, D channels of a head

import functools
import logging

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_log = logging.getLogger(__name__)


def window_attention(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool
) -> Tensor:
    """`softmax(scale * q @ k^T + bias + mask) @ v` of each window and head; of bf16, fp16 or fp32,
    whose products add up in fp32.

    Args:
        qkv: [B*W, N, 3, h, D], D of 16, 32 or 64.
        bias: [h, N, N].
        mask: [W, N, N] without gradient, -inf where a token is not to be seen; None: all are.
        scale: [h] fp32.
        cosine: queries and keys are divided by their lengths, as F.normalize does it (arXiv
            2111.09883, section 3).

    Returns:
        [B*W, N, h*D]. Gradients of qkv, bias and scale are the same in every run, to the bit.

    Raises:
        ValueError: sizes that do not fit each other.
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
    return torch.ops.swinv2_moe.window_attention(qkv, bias, mask, scale, cosine)[0]


def runs(qkv: Tensor) -> bool:
    """Whether the op is the way to go for qkv [B*W, N, 3, h, D]; an exported program has to run
    without Triton."""
    fits = qkv.is_cuda and qkv.dtype in (torch.bfloat16, torch.float16) and qkv.shape[1] <= 256
    return (
        fits
        and qkv.shape[-1] in (16, 32, 64)
        and not torch.compiler.is_exporting()
        and _triton_runs()
    )


# it imports and logs, neither of which torch.compile can trace
@torch.compiler.assume_constant_result
@functools.cache
def _triton_runs() -> bool:
    try:
        import triton

        triton.runtime.driver.active.get_current_device()  # builds what every launch goes through
    except Exception as error:  # whatever it is, scaled_dot_product_attention still runs
        _log.warning(
            "window attention by torch, since Triton cannot run: %s: %s",
            type(error).__name__,
            error,
        )
        return False
    return True


def _kernels():
    from swinv2_moe.models import triton_window_attention  # here, since it imports Triton

    return triton_window_attention


# 1. Ops


@torch.library.custom_op("swinv2_moe::window_attention", mutates_args=())
def _window_attention(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool
) -> tuple[Tensor, Tensor]:
    """out [B*W, N, h*D] and the log-sum-exp of the scores [B*W, h, N], which the backward pass
    reads."""
    return _kernels().forward(qkv, bias, mask, scale, cosine)


@torch.library.custom_op("swinv2_moe::window_attention_backward", mutates_args=())
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
    return _kernels().backward(grad, qkv, bias, mask, scale, out, lse, cosine)


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
    return _flops(qkv_shape) * 5 // 2  # the scores once more, as torch counts its own


# 2. Autograd


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.cosine = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    if grad is None:
        return 5 * (None,)
    _, bias, _, scale, _, _ = saved = ctx.saved_tensors
    grad_qkv, grad_bias, grad_scale = torch.ops.swinv2_moe.window_attention_backward(
        grad, *saved, ctx.cosine
    )
    return grad_qkv, grad_bias.to(bias.dtype), None, grad_scale.to(scale.dtype), None


torch.library.register_autograd("swinv2_moe::window_attention", _backward, setup_context=_save)
