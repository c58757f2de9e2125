"""The experts' networks on an x86 CPU, in C++: fp32 with AVX-512, bf16 with AMX.

Where the CPU lacks the instructions or the compiler is missing, `supports` is False and ffn_loop
runs.
"""

# E experts, N rows, M model dim, H hidden dim

import ctypes
from ctypes import c_float, c_long, c_void_p

import torch
from torch import Tensor

from moe_core.kernels.buffers import empty
from moe_core.kernels.library_x86 import library, pointer, usable

ACTIVATIONS = ("gelu", "relu", "silu")  # in the order of ffn_x86.cpp
# dtypes of packed weights: not taken for numbers
_PACKED = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def supports(rows: Tensor, weight: Tensor, activation: str = "gelu") -> bool:
    """Whether this kernel computes on these dtypes with this activation, here."""
    dtypes = (torch.float32, rows.dtype, _PACKED.get(rows.dtype))
    return (
        activation in ACTIVATIONS
        and rows.device.type == "cpu"
        and weight.dtype in dtypes
        and usable(rows.dtype)
    )


def pack_weights(
    w1: Tensor, w2: Tensor, dtype: torch.dtype, activation: str = "gelu"
) -> tuple[Tensor, Tensor] | None:
    """fp32 weights [E, H, M] in `dtype`, in the order in which `forward` reads them, in integers of
    that shape.

    None where rows of `dtype` or the activation are not for this kernel, or the shape leaves blocks
    that are not full.
    """
    packable = w1.dtype == w2.dtype == torch.float32 and w1.shape[1] % 32 == w1.shape[2] % 32 == 0
    if not packable or not supports(w1.new_empty(0, dtype=dtype), w1, activation):
        return None
    new = tuple(empty(w.shape, _PACKED[dtype], w.device, reuse=False) for w in (w1, w2))
    weights = [w1.contiguous(), w2.contiguous()]
    sizes = (*w1.shape, dtype == torch.bfloat16, torch.get_num_threads())
    library().pack_weights(*map(pointer, (*weights, *new)), *map(c_long, sizes))
    return new


def hidden_rows(num_rows, num_experts: int, dtype: torch.dtype):
    """Rows of the hidden layer as it is kept."""
    return num_rows


def forward(
    rows: Tensor,
    w1,
    b1,
    w2,
    b2,
    offsets: Tensor,
    noise,
    activation: str,
    dropout: float,
    keep_hidden: bool,
) -> tuple[Tensor, Tensor]:
    """out [N, M] and, if it is kept, the hidden layer [N * H] before the activation."""
    problem = _Call(rows, w1, b1, w2, b2, offsets, noise, activation, dropout)
    out = empty(rows.shape, rows.dtype, rows.device)
    hidden = empty((len(rows) * w1.shape[1] if keep_hidden else 0,), rows.dtype, rows.device)
    problem.run("forward", out, hidden if keep_hidden else None)
    if problem.end < len(rows):
        out[problem.end :] = 0
        hidden[problem.end * w1.shape[1] :] = 0
    return out, hidden


def backward(
    grad: Tensor,
    rows: Tensor,
    hidden: Tensor,
    w1,
    b1,
    w2,
    b2,
    offsets: Tensor,
    noise,
    activation,
    dropout,
    needs,
) -> list[Tensor | None]:
    """Gradients of rows, w1, b1, w2 and b2; None where `needs` is False."""
    problem = _Call(rows, w1, b1, w2, b2, offsets, noise, activation, dropout)
    inputs = (
        (rows, rows.dtype),
        (w1, w1.dtype),
        (b1, torch.float32),
        (w2, w2.dtype),
        (b2, torch.float32),
    )
    new = [
        empty(t.shape, dtype, t.device) if n else None
        for (t, dtype), n in zip(inputs, needs, strict=True)
    ]
    problem.run("backward", grad, hidden, new[0], new[1], new[3], new[2], new[4])
    for gradient in new[1:]:
        for e in problem.unused if gradient is not None else ():
            gradient[e] = 0
    if needs[0]:
        new[0][problem.end :] = 0
    return [g if g is None else g.to(t.dtype) for g, (t, _) in zip(new, inputs, strict=True)]


class _Problem(ctypes.Structure):  # as in ffn_x86.cpp
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
    """One call's arguments, and what keeps their memory alive."""

    def __init__(
        self, rows: Tensor, w1, b1, w2, b2, offsets: Tensor, noise, activation: str, dropout: float
    ) -> None:
        if (w1.shape, w1.dtype) != (w2.shape, w2.dtype):  # or C++ would read past one of them
            raise ValueError(
                f"w1 is {list(w1.shape)} in {w1.dtype}, w2 {list(w2.shape)} in {w2.dtype}"
            )
        ends = offsets.tolist()
        self.end, self.unused = (
            ends[-1],
            [e for e, end in enumerate(ends) if end == (ends[e - 1] if e else 0)],
        )
        biases = (None if b is None else b.float().contiguous() for b in (b1, b2))
        tensors = [
            rows.contiguous(),
            w1.contiguous(),
            w2.contiguous(),
            *biases,
            offsets.int().contiguous(),
            noise,
        ]
        dropped = 0 if noise is None else min(round(dropout * 65536), 65535)
        num_experts, hidden_dim, model_dim = w1.shape
        self.tensors = tensors
        self.problem = _Problem(
            *map(pointer, tensors),
            *(num_experts, model_dim, hidden_dim, torch.get_num_threads()),
            *(
                rows.dtype == torch.bfloat16,
                w1.dtype != torch.float32,
                w1.dtype in _PACKED.values(),
            ),
            *(ACTIVATIONS.index(activation), dropped - 32768, 65536 / (65536 - dropped)),
        )

    def run(self, direction: str, *tensors: Tensor | None) -> None:
        if not self.end:
            return
        problem = ctypes.byref(self.problem)
        memory = empty(
            (getattr(library(), f"{direction}_space")(problem),), torch.uint8, torch.device("cpu")
        )
        getattr(library(), f"experts_{direction}")(problem, pointer(memory), *map(pointer, tensors))
