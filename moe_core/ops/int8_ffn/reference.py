"""The experts' networks in int8, in plain torch: the specification.

Weights are int8 with a scale for each output; the inputs of a product are bytes with a scale and an
offset for each row, so that its smallest number is 0 and its largest 255 (dynamic quantisation, as
in arXiv 2004.09602, sections 3.1 and 3.2). Products of integers are exact; all else is fp32.
"""

# E experts, N rows, I input features, O output features, M model dim, H hidden dim

import torch
from torch import Tensor

from moe_core.ops.int8_ffn.inputs import Int8Inputs
from moe_core.registry import ACTIVATIONS

_SMALLEST_RANGE = 1e-30  # of a row; below, its numbers count as equal


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [E, O, I] -> int8 [E, O, I], and in fp32 scales [E, O] and sums [E, O]."""
    weight = weight.float()
    largest = weight.abs().amax(2)
    scale = torch.where(largest > 0, largest / 127, 1.0)
    quantized = (weight / scale.unsqueeze(2)).round().to(torch.int8)
    sums = quantized.sum(2, dtype=torch.int64).float() * scale
    return quantized, scale, sums


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows [N, I] -> bytes as fp32 [N, I], and scales and offsets [N, 1]: offset + scale * byte.

    A row with a number that is not finite has an offset of NaN.
    """
    rows = rows.float()
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = torch.where(high - low > _SMALLEST_RANGE, (high - low) / 255, 1.0)
    quantized = ((rows - low) / scale).round()
    is_finite = rows.isfinite().all(1, keepdim=True)
    return quantized.where(is_finite, 0), scale, low.where(is_finite, torch.nan)


def linear(
    rows: Tensor, weight: Tensor, scale: Tensor, weight_sum: Tensor, bias: Tensor | None
) -> Tensor:
    """rows [n, I] times one expert's weight: int8 [O, I], fp32 [O] -> fp32 [n, O]."""
    quantized, row_scale, row_offset = quantize_rows(rows)
    # fp64 holds sums of such products exactly, and multiplies them faster than int64
    products = quantized.double() @ weight.double().t()
    out = products.float() * (scale * row_scale) + row_offset * weight_sum
    if bias is not None:
        out = out + bias
    return out


def forward(inputs: Int8Inputs) -> Tensor:
    """The results of each expert's rows [N, M], in the rows' dtype; zeros for rows of none."""
    activation = ACTIVATIONS[inputs.activation]
    rows = inputs.rows
    out = torch.zeros_like(rows)
    start = 0
    for e, end in enumerate(inputs.offsets.tolist()):
        b1 = b2 = None
        if inputs.b1 is not None:
            b1 = inputs.b1[e]
        if inputs.b2 is not None:
            b2 = inputs.b2[e]
        hidden = linear(rows[start:end], inputs.q1[e], inputs.scale1[e], inputs.sum1[e], b1)
        result = linear(activation(hidden), inputs.q2[e], inputs.scale2[e], inputs.sum2[e], b2)
        out[start:end] = result.to(out.dtype)
        start = end
    return out
