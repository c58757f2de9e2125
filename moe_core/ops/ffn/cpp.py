"""The experts' networks on a CPU, in C++."""

# E experts, N rows, M model dim, H hidden dim

import ctypes
from ctypes import c_float, c_long, c_void_p

import torch
from torch import Tensor

from moe_core.ops.backend import KERNEL_ACTIVATIONS
from moe_core.ops.buffers import empty
from moe_core.ops.ffn.dropout import Dropout
from moe_core.ops.ffn.inputs import FFNInputs
from moe_core.ops.native.library import (
    PACKED_DTYPES,
    call,
    library,
    packed_dtype,
    pointer,
)


def pack_weights(
    w1: Tensor, w2: Tensor, dtype: torch.dtype, kernels: str
) -> tuple[Tensor, Tensor] | None:
    """fp32 weights [E, H, M] converted to `dtype` and stored in the order that `forward` reads.

    Returns:
        Integer tensors [E, H, M]; None if H or M is no multiple of the block size.
    """
    num_experts, hidden_dim, model_dim = w1.shape
    if w1.dtype != torch.float32 or w2.dtype != torch.float32:
        return None
    if hidden_dim % 32 != 0 or model_dim % 32 != 0:
        return None
    sources = [w1.contiguous(), w2.contiguous()]
    packed_as = packed_dtype(dtype, kernels)
    assert packed_as is not None, "no library, and yet this form was chosen"
    packed = [empty(w.shape, packed_as, w.device, reuse=False) for w in sources]
    is_bf16 = dtype == torch.bfloat16
    sizes = (num_experts, hidden_dim, model_dim, is_bf16, torch.get_num_threads())
    call("pack_weights", sources + packed, sizes, kernels)
    return packed[0], packed[1]


def product_dtype(dtype: torch.dtype, kernels: str) -> torch.dtype:
    """bf16 is multiplied in fp32 where the CPU has no instructions for it."""
    if packed_dtype(dtype, kernels) == torch.int32:
        return torch.float32
    return dtype


def hidden_rows(num_rows, num_experts: int, dtype: torch.dtype):
    """Rows of the hidden layer that `forward` keeps."""
    return num_rows


def forward(inputs: FFNInputs, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    """out [N, M] and, if it is kept, the hidden layer [N * H] before the activation."""
    rows, hidden_dim = inputs.rows, inputs.w1.shape[1]
    call = _Call(inputs)
    out = empty(rows.shape, rows.dtype, rows.device)
    hidden_size = 0
    if keep_hidden:
        hidden_size = len(rows) * hidden_dim
    hidden = empty((hidden_size,), rows.dtype, rows.device)
    kept = None
    if keep_hidden:
        kept = hidden
    call.run("forward", [out, kept])
    if call.num_used_rows < len(rows):
        out[call.num_used_rows :] = 0
        hidden[call.num_used_rows * hidden_dim :] = 0
    return out, hidden


def backward(
    inputs: FFNInputs, grad: Tensor, hidden: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of rows, w1, b1, w2 and b2; None where `needs` is False."""
    tensors = (inputs.rows, inputs.w1, inputs.b1, inputs.w2, inputs.b2)
    gradients: list[Tensor | None] = []
    for tensor, is_needed in zip(tensors, needs, strict=True):
        if is_needed and tensor is not None:
            dtype = tensor.dtype
            if tensor is inputs.b1 or tensor is inputs.b2:
                dtype = torch.float32
            gradients.append(empty(tensor.shape, dtype, tensor.device))
        else:
            gradients.append(None)
    call = _Call(inputs)
    grad_rows, grad_w1, grad_b1, grad_w2, grad_b2 = gradients
    call.run("backward", [grad, hidden, grad_rows, grad_w1, grad_w2, grad_b1, grad_b2])
    for gradient in gradients[1:]:
        if gradient is not None:
            for e in call.unused_experts:
                gradient[e] = 0
    if grad_rows is not None:
        grad_rows[call.num_used_rows :] = 0
    rounded: list[Tensor | None] = []
    for gradient, tensor in zip(gradients, tensors, strict=True):
        if gradient is not None and tensor is not None:
            gradient = gradient.to(tensor.dtype)
        rounded.append(gradient)
    return rounded


class _Problem(ctypes.Structure):  # as in native/ffn.hpp
    _fields_ = (
        [(name, c_void_p) for name in ("rows", "w1", "w2", "b1", "b2", "ends", "noise")]
        + [(name, c_long) for name in ("num_experts", "model_dim", "hidden_dim", "threads")]
        + [
            (name, c_long)
            for name in ("rows_bf16", "weights_bf16", "packed", "activation", "least")
        ]
        + [("scale", c_float)]
    )


class _Call:
    """The arguments of a C++ call. Holds the tensors that they point to."""

    def __init__(self, inputs: FFNInputs) -> None:
        rows, w1, b1, w2, b2 = inputs[:5]
        if (w1.shape, w1.dtype) != (w2.shape, w2.dtype):  # or C++ would read past one of them
            raise ValueError(
                f"w1 is {list(w1.shape)} in {w1.dtype}, w2 {list(w2.shape)} in {w2.dtype}"
            )
        ends = inputs.offsets.tolist()
        starts = [0] + ends[:-1]
        self.num_used_rows = ends[-1]
        self.unused_experts = [e for e in range(len(ends)) if starts[e] == ends[e]]
        self.tensors = [
            rows.contiguous(),
            w1.contiguous(),
            w2.contiguous(),
            _in_fp32(b1),
            _in_fp32(b2),
            inputs.offsets.int().contiguous(),
            inputs.noise,
        ]
        num_experts, hidden_dim, model_dim = w1.shape
        self.kernels = inputs.kernels
        rate = 0.0
        if inputs.noise is not None:
            rate = inputs.dropout
        dropout = Dropout.of(rate)
        self.problem = _Problem(
            *map(pointer, self.tensors),
            num_experts=num_experts,
            model_dim=model_dim,
            hidden_dim=hidden_dim,
            threads=torch.get_num_threads(),
            rows_bf16=rows.dtype == torch.bfloat16,
            weights_bf16=w1.dtype in (torch.bfloat16, torch.int16),
            packed=w1.dtype in PACKED_DTYPES,
            activation=KERNEL_ACTIVATIONS.index(inputs.activation),
            least=dropout.threshold,
            scale=dropout.scale,
        )

    def run(self, direction: str, tensors: list[Tensor | None]) -> None:
        if self.num_used_rows == 0:
            return
        problem = ctypes.byref(self.problem)
        functions = library(self.kernels)
        space = getattr(functions, f"{direction}_space")(problem)
        memory = empty((space,), torch.uint8, torch.device("cpu"))
        function = getattr(functions, f"experts_{direction}")
        function(problem, pointer(memory), *map(pointer, tensors))


def _in_fp32(bias: Tensor | None) -> Tensor | None:
    if bias is None:
        return None
    return bias.float().contiguous()
