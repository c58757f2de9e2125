"""The experts' feed-forward networks in int8, without gradients, as one torch.library op.

`out = act(rows_e w1[e]^T + b1[e]) w2[e] + b2[e]` for the rows of each expert e. Gated experts are
computed as in `expert_ffn`. The factors of all matrix products are 8-bit integers.
"""

# E experts, N rows, M model dim, H hidden dim

import torch
from torch import Tensor

from moe_core.context import in_transform
from moe_core.ops.backend import Request, load, select
from moe_core.ops.ffn.inputs import ExpertWeights
from moe_core.ops.int8_ffn import reference
from moe_core.ops.int8_ffn.inputs import Int8Weights
from moe_core.ops.int8_ffn.reference import quantize_weight


def int8_ffn(
    rows: Tensor,
    weights: Int8Weights,
    offsets: Tensor,
    activation: str = "gelu",
    kernels: str = "auto",
) -> Tensor:
    """Apply the network of each expert to its rows.

    Args:
        rows: [N, M], the rows of expert 0 first, in fp32, bf16 or fp16.
        weights: the result of `quantize_weights` for the same activation and kernels.
        offsets: [E] int32, the end of each expert's rows.
        activation: a name in moe_core.registry.ACTIVATIONS.
        kernels: see `backend.select`.

    Returns:
        [N, M] in the dtype of rows; zeros past offsets[-1].
    """
    if in_transform(rows):
        raise ValueError("int8_ffn has no derivatives and no torch.func transforms: use expert_ffn")
    tensors = weights.tensors()
    return torch.ops.moe_core.int8_ffn(rows, tensors, offsets, activation, kernels)


def quantize_weights(
    weights: ExpertWeights, dtype: torch.dtype, activation: str, kernels: str = "auto"
) -> Int8Weights:
    """Weights in int8 for rows of `dtype`, in the memory layout of the form that will run.

    Args:
        weights: in any floating-point dtype.
    """
    linear1 = quantize_weight(weights.w1, weights.b1)
    linear2 = quantize_weight(weights.w2.transpose(1, 2), weights.b2)
    linear3 = None
    if weights.w3 is not None:
        linear3 = quantize_weight(weights.w3, weights.b3)
    quantized = Int8Weights(linear1, linear2, linear3)
    num_inputs = max(weights.w1.shape[1:])
    form = _form(weights.w1.device.type, dtype, activation, kernels, num_inputs)
    if form == "int8_ffn.cpp":
        return load(form).pack_weights(quantized, kernels)
    return quantized


def _form(device: str, dtype: torch.dtype, activation: str, kernels: str, num_inputs: int) -> str:
    request = Request(kernels, device, dtype, activation=activation, num_inputs=num_inputs)
    return select("int8_ffn", request)


@torch.library.custom_op(
    "moe_core::int8_ffn",
    mutates_args=(),
    schema=(
        "(Tensor rows, Tensor?[] weights, Tensor offsets, str activation, str kernels) -> Tensor"
    ),
)
def _int8_ffn(rows, weights, offsets, activation, kernels):
    weights = Int8Weights.of_tensors(weights)
    num_inputs = max(rows.shape[1], weights.linear1.scales.shape[1])
    form = _form(rows.device.type, rows.dtype, activation, kernels, num_inputs)
    if form == "int8_ffn.cpp":
        return load(form).forward(rows, weights, offsets, activation, kernels)
    return reference.forward(rows, weights, offsets, activation)


@_int8_ffn.register_fake
def _(rows, weights, offsets, activation, kernels):
    return torch.empty_like(rows)
