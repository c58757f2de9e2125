"""The experts' networks on a CPU, with dispatch and combine, in one C++ operation."""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import ctypes
from ctypes import c_long, c_void_p

import torch
from torch import Tensor

from moe_core.ops.backend import KERNEL_ACTIVATIONS
from moe_core.ops.buffers import empty
from moe_core.ops.ffn.inputs import ExpertWeights, MoEFFNInputs, check_offsets, hidden_rows
from moe_core.ops.native.library import library, packed_dtype, pointer


def forward(inputs: MoEFFNInputs) -> tuple[Tensor, Tensor]:
    """out [T, M] and, if it is kept, the hidden layer before the activation, in C++'s order."""
    tokens = inputs.tokens
    call = _Call(inputs)
    out = empty(tokens.shape, torch.float32, tokens.device)
    num_kept = 0
    if inputs.keep_hidden:
        num_kept = inputs.weights.num_kept * call.hidden_rows
    hidden = empty((num_kept, inputs.w1.shape[1]), tokens.dtype, tokens.device)
    kept = None
    if inputs.keep_hidden:
        kept = hidden
    call.run("forward", [out, kept])
    if inputs.gates is None:
        out = out.to(tokens.dtype)
    return out, hidden


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
    call = _Call(inputs)
    _, of_gates, *of_weights = gradients
    if of_gates is not None:
        of_gates.zero_()  # C++ does not write those of dropped choices
    for gradient in of_weights:
        if gradient is not None:
            for e in call.unused_experts:
                gradient[e] = 0
    call.run("backward", [grad.to(inputs.tokens.dtype).contiguous(), hidden, *gradients])
    computed: list[Tensor | None] = []
    for tensor, gradient in zip(differentiable, gradients, strict=True):
        if tensor is not None and gradient is not None:
            gradient = gradient.to(tensor.dtype)
        computed.append(gradient)
    return computed


_POINTERS = ("tokens", "gates", *ExpertWeights._fields, "choices", "offsets")
_SIZES = ("num_tokens", "top_k", "num_experts", "model_dim", "hidden_dim")
_SETTINGS = ("hidden_rows", "activation", "threads", "in_bf16")


class _Problem(ctypes.Structure):  # as MoEProblem in native/moe_ffn.hpp
    _fields_ = [(name, c_void_p) for name in _POINTERS] + [
        (name, c_long) for name in (*_SIZES, *_SETTINGS)
    ]


class _Call:
    """The arguments of a C++ call. It keeps the tensors that they point to alive."""

    def __init__(self, inputs: MoEFFNInputs) -> None:
        num_tokens, model_dim = inputs.tokens.shape
        num_experts, hidden_dim, _ = inputs.w1.shape
        if inputs.offsets.dim() != 1 or inputs.slots.dim() != 2:
            raise ValueError(
                f"offsets is {list(inputs.offsets.shape)}, slots {list(inputs.slots.shape)}, not"
                " [E] and [T, K]"
            )
        ends = inputs.offsets.tolist()
        num_rows, top_k = len(inputs.choices), inputs.slots.shape[1]
        # otherwise C++ could read or write past the end of a tensor
        inputs.weights.check(inputs.activation, model_dim, len(ends))
        check_offsets(ends, num_rows)
        if inputs.gates is not None and inputs.gates.shape != (num_tokens, top_k):
            raise ValueError(
                f"gates is {list(inputs.gates.shape)}, the plan has {[num_tokens, top_k]} choices"
            )
        self.hidden_rows = hidden_rows(num_rows, num_experts)
        starts = [0] + ends[:-1]
        self.unused_experts = [e for e in range(num_experts) if starts[e] == ends[e]]
        self.kernels = inputs.kernels
        is_bf16 = inputs.tokens.dtype == torch.bfloat16
        if is_bf16 and packed_dtype(torch.bfloat16, self.kernels) != torch.int16:
            raise ValueError(f"tokens are bfloat16, in which {self.kernels!r} does not multiply")
        numbers = (inputs.gates, *inputs.weights)  # biases may have any dtype
        tensors = [None if tensor is None else tensor.float() for tensor in numbers]
        tensors.insert(0, inputs.tokens)
        tensors += [inputs.choices.long(), inputs.offsets.int()]
        # in the order of _POINTERS
        self.tensors = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        self.problem = _Problem(
            *map(pointer, self.tensors),
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=num_experts,
            model_dim=model_dim,
            hidden_dim=hidden_dim,
            hidden_rows=self.hidden_rows,
            activation=KERNEL_ACTIVATIONS.index(inputs.activation),
            threads=torch.get_num_threads(),
            in_bf16=inputs.tokens.dtype == torch.bfloat16,
        )

    def run(self, direction: str, tensors: list[Tensor | None]) -> None:
        problem, functions = ctypes.byref(self.problem), library(self.kernels)
        space = functions.moe_space(problem, c_long(direction == "backward"))
        memory = empty((space,), torch.uint8, torch.device("cpu"))
        function = getattr(functions, f"moe_{direction}")
        if function(problem, pointer(memory), *map(pointer, tensors)) != 0:
            raise ValueError("choices: one is not below the number of tokens times top_k")
