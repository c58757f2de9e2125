"""The experts' networks on a CPU, with dispatch and combine, in one C++ operation."""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_long, c_void_p

import torch
from torch import Tensor

from moe_core.ops.backend import KERNEL_ACTIVATIONS
from moe_core.ops.buffers import empty
from moe_core.ops.ffn.dropout import Dropout
from moe_core.ops.ffn.inputs import (
    ExpertWeights,
    MoEFFNInputs,
    check_offsets,
    hidden_rows,
)
from moe_core.ops.native.library import (
    PACKED_DTYPES,
    call,
    in_fp32,
    library,
    packed_dtype,
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


def forward(inputs: MoEFFNInputs) -> tuple[Tensor, Tensor]:
    """out [T, M], and the kept hidden layer before the activation, with its rows as in ffn.cpp."""
    call = _CppCall(inputs)
    tokens = call.tokens
    out = empty(tokens.shape, torch.float32, tokens.device)
    num_kept = 0
    if inputs.keep_hidden:
        num_kept = inputs.weights.num_kept * call.hidden_rows
    hidden = empty((num_kept, inputs.w1.shape[1]), tokens.dtype, tokens.device)
    kept = None
    if inputs.keep_hidden:
        kept = hidden
    call.run("forward", [out, kept])
    return out.to(inputs.out_dtype), hidden


def backward(
    inputs: MoEFFNInputs, grad: Tensor, hidden: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of tokens, gates and the fields of ExpertWeights; None where `needs` is False."""
    differentiable = (inputs.tokens, inputs.gates, *inputs.weights)
    gradients: list[Tensor | None] = []
    for tensor, is_needed in zip(differentiable, needs, strict=True):
        gradient = None
        if is_needed and tensor is not None:
            gradient = empty(tensor.shape, torch.float32, tensor.device)
        gradients.append(gradient)
    call = _CppCall(inputs)
    _, of_gates, *of_weights = gradients
    if of_gates is not None:
        of_gates.zero_()  # C++ adds to those of kept choices
    for gradient in of_weights:
        if gradient is not None:
            for e in call.unused_experts:
                gradient[e] = 0
    call.run("backward", [grad.to(hidden.dtype).contiguous(), hidden, *gradients])
    computed: list[Tensor | None] = []
    for tensor, gradient in zip(differentiable, gradients, strict=True):
        if tensor is not None and gradient is not None:
            gradient = gradient.to(tensor.dtype)
        computed.append(gradient)
    return computed


_POINTERS = ("tokens", "gates", *ExpertWeights._fields, "choices", "offsets")
_SIZES = ("num_tokens", "top_k", "num_experts", "model_dim", "hidden_dim", "hidden_rows")
_SETTINGS = ("activation", "threads", "in_bf16", "weights_bf16", "packed")
_STRIDES = ("w1_strides", "w2_strides", "w3_strides")
_DROPOUT = ("seed", "least")


class _Problem(ctypes.Structure):  # as Problem in native/ffn.hpp
    _fields_ = (
        [(name, c_void_p) for name in _POINTERS]
        + [(name, c_long) for name in (*_SIZES, *_SETTINGS)]
        + [(name, c_long * 3) for name in _STRIDES]
        + [(name, c_long) for name in _DROPOUT]
        + [("scale", c_float)]
    )


class _CppCall:
    """The arguments of a C++ call. It keeps the tensors that they point to alive."""

    def __init__(self, inputs: MoEFFNInputs) -> None:
        ends = _checked_ends(inputs)
        starts = [0] + ends[:-1]
        self.unused_experts = [e for e in range(len(ends)) if starts[e] == ends[e]]
        self.hidden_rows = hidden_rows(len(inputs.choices), len(ends))
        self.kernels = inputs.kernels
        if not inputs.keep_hidden and any(map(_has_gaps, inputs.weights.matrices().tensors())):
            inputs = _with_used_experts(inputs, self.unused_experts)
        dtype = product_dtype(inputs.tokens.dtype, self.kernels)
        matrices = {name: _readable(getattr(inputs, name)) for name in ("w1", "w2", "w3")}
        numbers = {name: in_fp32(getattr(inputs, name)) for name in ("gates", "b1", "b2", "b3")}
        self.tokens = inputs.tokens.to(dtype).contiguous()
        self.tensors = {
            "tokens": self.tokens,
            "choices": inputs.choices.long().contiguous(),
            "offsets": inputs.offsets.int().contiguous(),
            **matrices,
            **numbers,
        }
        num_experts, hidden_dim, model_dim = inputs.w1.shape
        self.problem = _Problem(
            *[x if x is None else x.data_ptr() for x in map(self.tensors.get, _POINTERS)],
            num_tokens=len(inputs.tokens),
            top_k=inputs.slots.shape[1],
            num_experts=num_experts,
            model_dim=model_dim,
            hidden_dim=hidden_dim,
            hidden_rows=self.hidden_rows,
            activation=KERNEL_ACTIVATIONS.index(inputs.activation),
            threads=torch.get_num_threads(),
            in_bf16=dtype == torch.bfloat16,
            weights_bf16=inputs.w1.dtype == torch.bfloat16,
            packed=inputs.w1.dtype in PACKED_DTYPES,
        )
        for name, weight in matrices.items():
            if weight is not None:
                setattr(self.problem, f"{name}_strides", (c_long * 3)(*weight.stride()))
        if inputs.seed is not None:
            rule = Dropout.of(inputs.dropout)
            self.problem.seed, self.problem.least = int(inputs.seed), rule.threshold
            self.problem.scale = rule.scale

    def run(self, direction: str, tensors: list[Tensor | None]) -> None:
        problem, functions = ctypes.byref(self.problem), library(self.kernels)
        space = functions.experts_space(problem, c_long(direction == "backward"))
        memory = empty((space,), torch.uint8, torch.device("cpu"))
        function = getattr(functions, f"experts_{direction}")
        pointers = [c_void_p(x if x is None else x.data_ptr()) for x in (memory, *tensors)]
        if function(problem, *pointers) != 0:
            raise ValueError("choices: one is not below the number of tokens times top_k")


def _checked_ends(inputs: MoEFFNInputs) -> list[int]:
    """The ends of the experts' rows. Without these checks, and those of `moe_ffn`, C++ could read
    or write past the end of a tensor.

    Raises:
        ValueError: the plan does not fit the tokens.
    """
    if inputs.offsets.dim() != 1 or inputs.slots.dim() != 2:
        raise ValueError(
            f"offsets is {list(inputs.offsets.shape)}, slots {list(inputs.slots.shape)}, not"
            " [E] and [T, K]"
        )
    ends: list[int] = inputs.offsets.tolist()
    check_offsets(ends, len(inputs.choices))
    plan = [len(inputs.tokens), inputs.slots.shape[1]]
    if inputs.gates is not None and list(inputs.gates.shape) != plan:
        raise ValueError(f"gates is {list(inputs.gates.shape)}, the plan has {plan} choices")
    return ends


def _has_gaps(weight: Tensor) -> bool:
    """Whether neither dim of a weight is contiguous."""
    return weight.stride(2) != 1 and weight.stride(1) != 1


def _readable(weight: Tensor | None) -> Tensor | None:
    """A weight in a layout that C++ reads: as it is, or transposed."""
    if weight is not None and _has_gaps(weight):
        return _in_memory_order(weight, Tensor.contiguous)
    return weight


def _in_memory_order(weight: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy of a weight with the order of its dims in memory: another would take several times as
    long."""
    if weight.dim() == 3 and weight.stride(1) < weight.stride(2):
        return copy(weight.mT).mT
    return copy(weight)


def _with_used_experts(inputs: MoEFFNInputs, unused: list[int]) -> MoEFFNInputs:
    """Without the experts that have no rows, whose weights would be copied for nothing."""
    used = torch.tensor(sorted(set(range(len(inputs.offsets))) - set(unused)))
    if len(used) == 0:
        return inputs

    def select(tensor: Tensor) -> Tensor:
        return _in_memory_order(tensor, lambda memory: memory[used])

    weights = inputs.weights.map(select)
    return inputs._replace(**weights._asdict(), offsets=inputs.offsets[used])
