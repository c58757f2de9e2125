"""The experts' networks in int8 on a CPU, in C++."""

# E experts, N rows, I input features, O output features, M model dim, H hidden dim

import ctypes
from ctypes import c_long, c_void_p

import torch
from torch import Tensor

from moe_core.ops.backend import KERNEL_ACTIVATIONS
from moe_core.ops.buffers import empty
from moe_core.ops.ffn.inputs import check_offsets
from moe_core.ops.int8_ffn.inputs import Int8Linear, Int8Weights
from moe_core.ops.native.library import call, library, pointer


def pack_weights(weights: Int8Weights, kernels: str) -> Int8Weights:
    """Weights in the memory layout that `forward` reads."""
    linear1 = _packed(weights.linear1, kernels)
    linear2 = _packed(weights.linear2, kernels)
    linear3 = None
    if weights.linear3 is not None:
        linear3 = _packed(weights.linear3, kernels)
    return Int8Weights(linear1, linear2, linear3)


def _packed(linear: Int8Linear, kernels: str) -> Int8Linear:
    weight = linear.quantized
    num_experts, outputs, inputs = weight.shape
    words = library(kernels).int8_weight_words(c_long(outputs), c_long(inputs))
    packed = empty((num_experts, words), torch.int32, weight.device, reuse=False)
    sizes = (num_experts, outputs, inputs, torch.get_num_threads())
    call("pack_int8", [weight.contiguous(), packed], sizes, kernels)
    return linear._replace(quantized=packed)


class _Linear(ctypes.Structure):  # as Int8Linear in native/ffn_int8.hpp
    _fields_ = [(name, c_void_p) for name in ("weight", "scales", "sums", "bias")]


_NUMBERS = ("num_experts", "model_dim", "hidden_dim", "threads", "rows_bf16", "activation")


class _Problem(ctypes.Structure):  # as Int8Problem in native/ffn_int8.hpp
    _fields_ = [
        ("rows", c_void_p),
        *((name, _Linear) for name in Int8Weights._fields),
        ("ends", c_void_p),
        *((name, c_long) for name in _NUMBERS),
    ]


def forward(
    rows: Tensor, weights: Int8Weights, offsets: Tensor, activation: str, kernels: str
) -> Tensor:
    """The experts' results [N, M]; zeros for rows that belong to no expert."""
    rows = rows.contiguous()
    functions = library(kernels)
    num_experts, hidden_dim = weights.linear1.scales.shape
    model_dim = rows.shape[1]
    out = empty(rows.shape, rows.dtype, rows.device)
    ends = offsets.int().contiguous()
    if len(ends) != num_experts:
        raise ValueError(f"offsets has {len(ends)} experts, the weights {num_experts}")
    check_offsets(ends.tolist(), len(rows))
    num_used_rows = int(ends[-1])
    out[num_used_rows:] = 0
    if num_used_rows == 0:
        return out
    linears = []
    for linear, outputs, features in (
        (weights.linear1, hidden_dim, model_dim),
        (weights.linear2, model_dim, hidden_dim),
        (weights.linear3, hidden_dim, model_dim),
    ):
        if linear is None:
            linears.append(_Linear())
            continue
        words = functions.int8_weight_words(c_long(outputs), c_long(features))
        _check(linear, (num_experts, words), (num_experts, outputs))
        linears.append(_Linear(*map(pointer, linear)))
    problem = _Problem(
        pointer(rows),
        *linears,
        pointer(ends),
        num_experts=num_experts,
        model_dim=model_dim,
        hidden_dim=hidden_dim,
        threads=torch.get_num_threads(),
        rows_bf16=rows.dtype == torch.bfloat16,
        activation=KERNEL_ACTIVATIONS.index(activation),
    )
    reference = ctypes.byref(problem)
    memory = empty((functions.int8_space(reference),), torch.uint8, rows.device)
    functions.int8_experts(reference, pointer(memory), pointer(out))
    return out


def _check(linear: Int8Linear, packed: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    """Raise ValueError if C++ would read past the end of a tensor."""
    weight = linear.quantized
    if weight.dtype != torch.int32 or weight.shape != packed:
        raise ValueError(
            f"quantized is {list(weight.shape)} in {weight.dtype}; packed weights are"
            f" {list(packed)} in int32"
        )
    for name in ("scales", "sums", "bias"):
        tensor = getattr(linear, name)
        if tensor is not None and (tensor.shape != outputs or tensor.dtype != torch.float32):
            raise ValueError(
                f"{name} is {list(tensor.shape)} in {tensor.dtype}, not {list(outputs)} in fp32"
            )
