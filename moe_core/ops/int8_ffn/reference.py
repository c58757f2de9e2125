"""The experts' networks in int8, in plain torch: the specification.

Weights are int8 with a scale for each output. The inputs of a product are uint8 with a scale and an
offset for each row: the row's smallest number becomes 0, its largest becomes 255 (dynamic
quantisation, as in arXiv 2004.09602, sections 3.1 and 3.2). Products of integers are exact: here in
fp64 for any number of inputs, in C++ in int32 for at most `backend.MOST_INT8_INPUTS`. Everything
else is computed in fp32. A result is finite if it is in the range of fp32, for any finite row and
weights below 1e16.
"""

# E experts, N rows, I input features, O output features, M model dim, H hidden dim

import torch
from torch import Tensor

from moe_core.activations import hidden_layer
from moe_core.ops.ffn.inputs import check_offsets
from moe_core.ops.int8_ffn.inputs import Int8Linear, Int8Weights

# Of a row or of an output's weights; with a smaller range, their numbers are treated as equal.
_SMALLEST_RANGE = 1e-30
_LARGE = 2.0**64  # rows with a larger number are divided by it


def quantize_weight(weight: Tensor, bias: Tensor | None) -> Int8Linear:
    """Quantise a weight [E, O, I] to int8. The bias [E, O] is converted to fp32.

    If the weight of an output has a NaN, the scale of the output is NaN.
    """
    weight = weight.float()
    largest = weight.abs().amax(2)
    scale = torch.where(largest < _SMALLEST_RANGE, 1.0, largest / 127)
    quantized = (weight / scale.unsqueeze(2)).round().to(torch.int8)
    sums = quantized.sum(2, dtype=torch.int64).float() * scale
    if bias is not None:
        bias = bias.float().contiguous()
    return Int8Linear(quantized, scale, sums, bias)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rows [N, I] -> integers from 0 to 255 as fp32 [N, I], scales, offsets and units [N, 1].

    `rows = unit * (offset + scale * integer)` up to rounding. A row with a number that is not
    finite has an offset of NaN.
    """
    rows = rows.float()
    unit = torch.where(rows.abs().amax(1, keepdim=True) > _LARGE, _LARGE, 1.0)
    rows = rows / unit  # exact
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = torch.where(high - low > _SMALLEST_RANGE, (high - low) / 255, 1.0)
    quantized = ((rows - low) / scale).round()
    is_finite = rows.isfinite().all(1, keepdim=True)
    return quantized.where(is_finite, 0), scale, low.where(is_finite, torch.nan), unit


def int8_linear(rows: Tensor, linear: Int8Linear, offsets: Tensor) -> Tensor:
    """The linear layer of each expert on its rows: fp32 [N, O]; 0 for rows of no expert."""
    quantized, row_scale, row_offset, unit = quantize_rows(rows)
    num_experts, num_outputs = linear.scales.shape
    out = rows.new_zeros(len(rows), num_outputs, dtype=torch.float32)
    start, ends = 0, offsets.tolist()
    check_offsets(ends, len(rows))
    for e, end in zip(range(num_experts), ends, strict=True):
        own = slice(start, end)
        # Sums of these products are exact in fp64, and products are faster than in int64.
        sums = quantized[own].double() @ linear.quantized[e].double().t()
        out[own] = sums.float() * (linear.scales[e] * row_scale[own])
        out[own] += row_offset[own] * linear.sums[e]
        out[own] *= unit[own]
        if linear.bias is not None:
            out[own] += linear.bias[e]
        start = end
    return out


def forward(rows: Tensor, weights: Int8Weights, offsets: Tensor, activation: str) -> Tensor:
    """The experts' results [N, M], in the rows' dtype; zeros for rows that belong to no expert."""
    linear1, linear2, linear3 = weights
    z, u = int8_linear(rows, linear1, offsets), None
    if linear3 is not None:
        u = int8_linear(rows, linear3, offsets)
    hidden = hidden_layer(activation, z, u)
    return int8_linear(hidden, linear2, offsets).to(rows.dtype)
