"""`window_attention` in C++ on a CPU, in fp32 and bf16. The op is in `window_attention.py`.

The kernels are in moe_core/ops/native/attention.cpp. Scores, probabilities and sums are in fp32.
Where the CPU multiplies bf16, products of bf16 tensors read their operands in bf16.
"""

# B images, W masks of an image's windows, N tokens of a window, h heads, D channels of a head

from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.ops.native.library import call

_LEAST_WORK = 1 << 20  # multiply-adds of a thread: for fewer, waking it takes longer


class _Sizes(NamedTuple):
    """The numbers that the kernels take, in their order."""

    windows: int  # B*W
    masks: int  # W; 1 without a mask
    tokens: int
    heads: int
    channels: int
    cosine: bool
    threads: int
    is_bf16: bool


def forward(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool
) -> tuple[Tensor, Tensor]:
    """out [B*W, N, h*D] and the log-sum-exp of the scores [B*W, h, N]."""
    qkv = qkv.contiguous()
    windows, tokens, _, heads, channels = qkv.shape
    out = qkv.new_empty(windows, tokens, heads * channels)
    lse = qkv.new_empty(windows, heads, tokens, dtype=torch.float32)
    if lse.numel():
        sizes = _sizes(qkv, mask, cosine)
        tensors = [_space(sizes), qkv, _fp32(bias), _fp32(mask), _fp32(scale), out, lse]
        call("attention_forward", tensors, sizes)
    return out, lse


def backward(
    grad: Tensor,
    qkv: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: Tensor,
    out: Tensor,
    lse: Tensor,
    cosine: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv, of the bias and of the scale, the last two in fp32."""
    qkv = qkv.contiguous()
    grad_qkv = torch.empty_like(qkv)
    grad_bias = torch.zeros_like(bias, dtype=torch.float32, memory_format=torch.contiguous_format)
    grad_scale = torch.zeros_like(scale, dtype=torch.float32)
    if lse.numel():
        sizes = _sizes(qkv, mask, cosine)
        # gradients of bias and scale: one part for each head that a thread has
        parts = lse.new_empty(sizes.threads + sizes.heads - 1, sizes.tokens**2 + 1)
        inputs = [grad.to(qkv.dtype).contiguous(), qkv, _fp32(bias), _fp32(mask), _fp32(scale)]
        outputs = [grad_qkv, parts, grad_bias, grad_scale]
        call("attention_backward", [_space(sizes), *inputs, out, lse, *outputs], sizes)
    return grad_qkv, grad_bias, grad_scale


def _fp32(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.float().contiguous()


def _sizes(qkv: Tensor, mask: Tensor | None, cosine: bool) -> _Sizes:
    windows, tokens, _, heads, channels = qkv.shape
    masks = 1
    if mask is not None:
        masks = len(mask)
    work = windows * heads * tokens * tokens * channels
    threads = max(1, min(torch.get_num_threads(), windows * heads, work // _LEAST_WORK))
    is_bf16 = qkv.dtype == torch.bfloat16
    return _Sizes(windows, masks, tokens, heads, channels, cosine, threads, is_bf16)


def _space(sizes: _Sizes) -> Tensor:
    """The memory in which the threads compute."""
    words = call("attention_space", [], [sizes.tokens, sizes.channels, sizes.is_bf16])
    return torch.empty(sizes.threads * words, dtype=torch.float32)
