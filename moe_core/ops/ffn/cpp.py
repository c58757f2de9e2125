"""The experts' networks on a CPU, in C++."""

# E experts, N rows, M model dim, H hidden dim

import ctypes
from ctypes import c_float, c_long, c_void_p

import torch
from torch import Tensor

from moe_core.ops.backend import KERNEL_ACTIVATIONS
from moe_core.ops.buffers import empty
from moe_core.ops.ffn.dropout import Dropout
from moe_core.ops.ffn.inputs import ExpertWeights, FFNInputs, check_offsets, is_transposed
from moe_core.ops.native.library import (
    PACKED_DTYPES,
    call,
    library,
    packed_dtype,
    pointer,
)


def pack_weights(weights: ExpertWeights, dtype: torch.dtype, kernels: str) -> ExpertWeights | None:
    """fp32 weights [E, H, M] converted to `dtype` and stored in the order that `forward` reads.

    Returns:
        Integer tensors [E, H, M] and the unchanged biases; None if H or M is not a multiple of the
        block size.
    """
    num_experts, hidden_dim, model_dim = weights.w1.shape
    if hidden_dim % 32 != 0 or model_dim % 32 != 0:
        return None
    packed_as = packed_dtype(dtype, kernels)
    packed = {}
    for name, weight in weights.matrices()._asdict().items():
        if weight is None:
            continue
        if weight.dtype != torch.float32:
            return None
        packed[name] = empty(weight.shape, packed_as, weight.device, reuse=False)
        sizes = (num_experts, hidden_dim, model_dim, name == "w2")
        settings = (dtype == torch.bfloat16, torch.get_num_threads())
        call("pack_weight", [weight.contiguous(), packed[name]], sizes + settings, kernels)
    return weights._replace(**packed)


def product_dtype(dtype: torch.dtype, kernels: str) -> torch.dtype:
    """The dtype of products: `dtype`, or fp32 for bf16 if the CPU has no instructions for bf16."""
    if packed_dtype(dtype, kernels) == torch.int32:
        return torch.float32
    return dtype


def forward(inputs: FFNInputs) -> tuple[Tensor, Tensor]:
    """out [N, M] and, if it is kept, the hidden layer [N, H] before the activation.

    For gated experts, both the products with w1 and those with w3 are kept: [2 N, H], first those
    of the rows in use.
    """
    rows, hidden_dim = inputs.rows, inputs.w1.shape[1]
    num_kept = 0
    if inputs.keep_hidden:
        num_kept = inputs.weights.num_kept
    call = _Call(inputs)
    out = empty(rows.shape, rows.dtype, rows.device)
    hidden = empty((num_kept * len(rows), hidden_dim), rows.dtype, rows.device)
    kept = None
    if inputs.keep_hidden:
        kept = hidden
    call.run("forward", [out, kept])
    if call.num_used_rows < len(rows):
        out[call.num_used_rows :] = 0
        hidden[num_kept * call.num_used_rows :] = 0
    return out, hidden


def backward(
    inputs: FFNInputs, grad: Tensor, hidden: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of the rows and of the fields of ExpertWeights; None where `needs` is False."""
    tensors = {"rows": inputs.rows, **inputs.weights._asdict()}
    by_field: dict[str, Tensor | None] = {}
    for (name, tensor), is_needed in zip(tensors.items(), needs, strict=True):
        by_field[name] = None
        if is_needed and tensor is not None:
            by_field[name] = _gradient(name, tensor, inputs.weights)
    call = _Call(inputs)
    like = by_field["w1"]
    if like is None:
        like = by_field["w3"]
    call.set_strides("grad_w1_strides", like)
    call.set_strides("grad_w2_strides", by_field["w2"])
    call.run("backward", [grad.contiguous(), hidden, *by_field.values()])
    for name, tensor in tensors.items():
        gradient = by_field[name]
        if gradient is None or tensor is None:
            continue
        if name == "rows":
            gradient[call.num_used_rows :] = 0
        else:
            for e in call.unused_experts:
                gradient[e] = 0
        by_field[name] = gradient.to(tensor.dtype)
    return list(by_field.values())


def _gradient(name: str, tensor: Tensor, weights: ExpertWeights) -> Tensor:
    """An uninitialised gradient.

    The gradient of a weight has the weight's memory order, so autograd does not copy it. The
    gradient of w3 has the memory order of w1.
    """
    if name.startswith("b"):
        return empty(tensor.shape, torch.float32, tensor.device)
    like = weights.w1 if name == "w3" else tensor
    if name == "rows" or not is_transposed(like):
        return empty(tensor.shape, tensor.dtype, tensor.device)
    num_experts, hidden_dim, model_dim = tensor.shape
    shape = (num_experts, model_dim, hidden_dim)
    return empty(shape, tensor.dtype, tensor.device).transpose(1, 2)


_POINTERS = FFNInputs._fields[: FFNInputs._fields.index("activation")]  # its tensors
_SIZES = ("num_experts", "model_dim", "hidden_dim", "threads")
_SETTINGS = ("rows_bf16", "weights_bf16", "packed", "activation", "least")
_STRIDES = ("w1_strides", "w2_strides", "w3_strides", "grad_w1_strides", "grad_w2_strides")


class _Problem(ctypes.Structure):  # as in native/ffn.hpp
    _fields_ = (
        [(name, c_void_p) for name in _POINTERS]
        + [(name, c_long) for name in (*_SIZES, *_SETTINGS)]
        + [(name, c_long * 3) for name in _STRIDES]
        + [("scale", c_float)]
    )


class _Call:
    """The arguments of a C++ call. It keeps the tensors that they point to alive."""

    def __init__(self, inputs: FFNInputs) -> None:
        rows, w1 = inputs.rows, inputs.w1
        weights = inputs.weights
        ends = inputs.offsets.tolist()
        # otherwise C++ could read past the end of a tensor
        weights.check(inputs.activation, rows.shape[1], len(ends))
        check_offsets(ends, len(rows))
        starts = [0] + ends[:-1]
        self.num_used_rows = ends[-1]
        self.unused_experts = [e for e in range(len(ends)) if starts[e] == ends[e]]
        weights = weights._replace(
            b1=_in_fp32(weights.b1), b2=_in_fp32(weights.b2), b3=_in_fp32(weights.b3)
        )
        offsets = inputs.offsets.int().contiguous()
        # in the order of FFNInputs
        self.tensors = [rows.contiguous(), *weights, offsets, inputs.noise]
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
        for name in ("w1", "w2", "w3"):
            self.set_strides(f"{name}_strides", getattr(weights, name))

    def set_strides(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            setattr(self.problem, name, (c_long * 3)(*tensor.stride()))

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
