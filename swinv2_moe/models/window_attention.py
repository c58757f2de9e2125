"""Window attention with a position bias: everything between the two projections.

On CUDA devices in half precision it is a torch.library op, whose kernels are in
`triton_window_attention`. They do not store normalised queries and keys, the sum of bias and mask
for each window, or the gradient of the bias for each window. scaled_dot_product_attention, which
runs elsewhere, needs a tensor for each of these. On a CPU `attention_on_cpu` replaces it.
"""

# B images, W windows of an image, N tokens of a window, h heads, D channels of a head

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.context import in_transform, without_autocast
from moe_core.ops.autograd import (
    is_differentiated_again,
    op,
    plain_gradients,
    register_autograd,
)

_log = logging.getLogger(__name__)


def window_attention(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool
) -> Tensor:
    """`softmax(scale * q @ k^T + bias + mask) @ v` for each window and head.

    In bf16, fp16 or fp32. Matrix products accumulate in fp32.

    Args:
        qkv: [B*W, N, 3, h, D], D of 16, 32 or 64.
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
    return _differentiable(qkv, bias, mask, scale, cosine)[0]


def runs(qkv: Tensor) -> bool:
    """Whether the op supports qkv [B*W, N, 3, h, D] here.

    False during export, because an exported program must run without Triton, and where the op has
    no derivatives (`moe_core.ops.autograd`).
    """
    if not qkv.is_cuda or qkv.dtype not in (torch.bfloat16, torch.float16):
        return False
    if qkv.shape[1] > 256 or qkv.shape[-1] not in (16, 32, 64):
        return False
    return not (torch.compiler.is_exporting() or in_transform(qkv)) and _triton_runs()


def trains_on_cpu(qkv: Tensor) -> bool:
    """Whether `attention_on_cpu` is used for qkv [B*W, N, 3, h, D].

    False in a program that is saved, which must not contain a function of Python, and without
    gradients, where scaled_dot_product_attention has a fused kernel.
    """
    if not (qkv.is_cpu and qkv.requires_grad):
        return False
    return not (torch.compiler.is_exporting() or torch.jit.is_tracing())


# A constant for torch.compile, which cannot trace imports and logging.
@torch.compiler.assume_constant_result
@functools.cache
def _triton_runs() -> bool:
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


def _kernels():
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
    return _kernels().forward(qkv, bias, mask, scale, cosine)


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


_differentiable = register_autograd(_window_attention, _backward, _save)


# 3. On a CPU, from torch's operations
#
# scaled_dot_product_attention has no fused kernel on a CPU if the bias needs a gradient, and its
# parts copy queries, keys and values several times. Here they are copied once, into the layout of
# the products; the backward pass by hand computes in place.


def attention_on_cpu(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool
) -> Tensor:
    """As `window_attention`, computed in fp32 or fp64."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain form's passes
        with without_autocast(qkv):
            return plain_attention(qkv, bias, mask, scale, cosine)
    return _AttentionOnCpu.apply(qkv, bias, mask, scale, cosine)


class _AttentionOnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, bias, mask, scale, cosine):
        out, weights, inverse = _attend(qkv, bias, mask, scale, cosine)
        ctx.save_for_backward(qkv, bias, mask, scale, weights, inverse, out)
        ctx.cosine = cosine
        return out

    @staticmethod
    def backward(ctx, grad):
        qkv, bias, mask, scale, weights, inverse, out = ctx.saved_tensors
        # Batched gradients, of is_grads_batched, have rules for torch's own operations.
        is_batched = torch._C._functorch.is_legacy_batchedtensor(grad)
        if is_batched or is_differentiated_again(grad):
            return _plain_backward(ctx, grad, qkv, bias, mask, scale)
        with without_autocast(qkv):
            grads = _gradients(grad, out, qkv, scale, weights, inverse)
        of_qkv, of_bias, of_scale = grads
        return of_qkv.to(qkv.dtype), of_bias.to(bias.dtype), None, of_scale.to(scale.dtype), None


def _attend(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output [B*W, N, h*D], the attention weights [B*W, h, N, N], and the inverse lengths of
    queries and keys [2, B*W, h, N, 1]; None if these are not normalised."""
    with without_autocast(qkv):
        rows, inverse = _rows(qkv), None
        if cosine:
            inverse = _inverse_lengths(rows[:2])
            rows[:2].mul_(inverse)
        q, k, v = rows.unbind(0)
        scores = (q * scale.view(-1, 1, 1)) @ k.mT
        if mask is None:
            scores += bias
        else:
            scores.unflatten(0, (-1, len(mask))).add_(bias + mask.unsqueeze(1))
        weights = scores.softmax(-1)
        out = (weights @ v).transpose(1, 2).flatten(2)
    return out.to(qkv.dtype), weights, inverse


def _rows(qkv: Tensor) -> Tensor:
    """A copy of qkv [B*W, N, 3, h, D] in the layout of the products: [3, B*W, h, N, D]."""
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    # a copy in any case, because it is changed in place
    return qkv.permute(2, 0, 3, 1, 4).to(dtype, copy=True, memory_format=torch.contiguous_format)


def _inverse_lengths(rows: Tensor) -> Tensor:
    """rows [..., D] -> [..., 1], limited as in F.normalize."""
    return (rows * rows).sum(-1, keepdim=True).clamp_(min=1e-24).rsqrt_()


def _gradients(
    grad: Tensor,
    out: Tensor,
    qkv: Tensor,
    scale: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv [B*W, N, 3, h, D], of bias [h, N, N] and of scale [h], from that of the
    output `out`."""
    rows, scale = _rows(qkv), scale.view(-1, 1, 1)
    if inverse is not None:
        rows[:2].mul_(inverse)
    q, k, v = (part.flatten(0, 1) for part in rows)  # [B*W*h, N, D]
    grad = grad.to(rows.dtype).unflatten(2, qkv.shape[3:])  # [B*W, N, h, D]
    # of a row of scores, the mean gradient of its weights, which softmax removes
    means = (grad * out.view_as(grad)).sum(-1).transpose(1, 2).reshape(*v.shape[:2], 1)
    grad = grad.transpose(1, 2).reshape(v.shape)
    of_rows = torch.empty_like(rows)
    of_q, of_k, of_v = (part.flatten(0, 1) for part in of_rows)
    flat = weights.flatten(0, 1)
    torch.bmm(flat.mT, grad, out=of_v)
    of_scores = torch.baddbmm(means, grad, v.mT, beta=-1).mul_(flat)
    torch.bmm(of_scores, k, out=of_q)
    torch.bmm(of_scores.mT, q, out=of_k)
    of_lengths = of_rows[:2]
    along = (of_lengths * rows[:2]).sum(-1, keepdim=True)  # [2, B*W, h, N, 1]
    if inverse is not None:  # no part along the rows, whose lengths stay 1
        of_lengths.addcmul_(rows[:2], along, value=-1).mul_(inverse)
    of_lengths.mul_(scale)
    of_bias = of_scores.view_as(weights).sum(0)
    return of_rows.permute(1, 3, 0, 2, 4), of_bias, along[0].sum((0, 2, 3))
