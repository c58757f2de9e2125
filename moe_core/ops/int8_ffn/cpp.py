"""The experts' networks in int8 on a CPU, in C++."""

# E experts, N rows, I input features, O output features, M model dim, H hidden dim

import ctypes
from ctypes import c_long, c_void_p

import torch
from torch import Tensor

from moe_core.ops.backend import KERNEL_ACTIVATIONS
from moe_core.ops.buffers import empty
from moe_core.ops.int8_ffn.inputs import Int8Inputs
from moe_core.ops.native.library import call, library, pointer


def pack_weight(weight: Tensor, kernels: str) -> Tensor:
    """int8 [E, O, I] -> int32 [E, words], in the order that `forward` reads."""
    num_experts, outputs, inputs = weight.shape
    words = library(kernels).int8_weight_words(c_long(outputs), c_long(inputs))
    packed = empty((num_experts, words), torch.int32, weight.device, reuse=False)
    sizes = (num_experts, outputs, inputs, torch.get_num_threads())
    call("pack_int8", [weight.contiguous(), packed], sizes, kernels)
    return packed


class _Problem(ctypes.Structure):  # as in native/ffn_int8.hpp
    _fields_ = [
        (name, c_void_p)
        for name in ("rows", "w1", "w2", "scale1", "sum1", "b1", "scale2", "sum2", "b2", "ends")
    ] + [
        (name, c_long)
        for name in (
            "num_experts",
            "model_dim",
            "hidden_dim",
            "threads",
            "rows_bf16",
            "activation",
        )
    ]


def forward(inputs: Int8Inputs) -> Tensor:
    """The results of each expert's rows [N, M]; zeros for rows of none."""
    rows = inputs.rows.contiguous()
    functions = library(inputs.kernels)
    num_experts, hidden_dim = inputs.scale1.shape
    model_dim = inputs.scale2.shape[1]
    _check(inputs, functions)
    out = empty(rows.shape, rows.dtype, rows.device)
    ends = inputs.offsets.int().contiguous()
    num_used_rows = int(ends[-1])
    out[num_used_rows:] = 0
    if num_used_rows == 0:
        return out
    tensors = (
        rows,
        inputs.q1,
        inputs.q2,
        inputs.scale1,
        inputs.sum1,
        inputs.b1,
        inputs.scale2,
        inputs.sum2,
        inputs.b2,
        ends,
    )
    problem = _Problem(
        *map(pointer, tensors),
        num_experts=num_experts,
        model_dim=model_dim,
        hidden_dim=hidden_dim,
        threads=torch.get_num_threads(),
        rows_bf16=rows.dtype == torch.bfloat16,
        activation=KERNEL_ACTIVATIONS.index(inputs.activation),
    )
    reference = ctypes.byref(problem)
    memory = empty((functions.int8_space(reference),), torch.uint8, rows.device)
    functions.int8_experts(reference, pointer(memory), pointer(out))
    return out


def _check(inputs: Int8Inputs, functions: ctypes.CDLL) -> None:
    """Refuse tensors past whose end C++ would read."""
    num_experts, hidden_dim = inputs.scale1.shape
    model_dim = inputs.scale2.shape[1]
    for name, packed, outputs, features in (
        ("q1", inputs.q1, hidden_dim, model_dim),
        ("q2", inputs.q2, model_dim, hidden_dim),
    ):
        words = functions.int8_weight_words(c_long(outputs), c_long(features))
        if packed.dtype != torch.int32 or packed.shape != (num_experts, words):
            raise ValueError(
                f"{name} is {list(packed.shape)} in {packed.dtype}; weights [{outputs}, {features}]"
                f" of {num_experts} experts are packed as int32 [{num_experts}, {words}]"
            )
    if inputs.rows.shape[1] != model_dim:
        raise ValueError(f"rows are {list(inputs.rows.shape)}, the model dim is {model_dim}")
