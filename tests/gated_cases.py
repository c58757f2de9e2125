"""Gated experts in the specification, and comparisons with it, for the tests of moe_core."""

# E experts, N rows, M model dim, H hidden dim

import torch
import torch.nn.functional as F

from moe_core.activations import clamped_swiglu
from moe_core.ops import ExpertWeights
from moe_core.ops.ffn import reference

FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "clamped_swiglu": clamped_swiglu,
}
DTYPES = {
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
}
TOLERANCES = {  # of the largest value
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 4e-2,
}


def gated_inputs(sizes, model_dim=24, hidden_dim=40, dtypes=DTYPES["fp64"], bias=True):
    """rows [N, M], the weights, the rows' ends [E] and a gradient of the output [N, M]."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype=dtypes[1]):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_experts, num_rows = len(sizes), sum(sizes)
    matrix = (num_experts, hidden_dim, model_dim)
    w1, w3 = random(*matrix) / model_dim**0.5, random(*matrix) / model_dim**0.5
    w2 = random(*matrix) / hidden_dim**0.5
    b1, b2, b3 = None, None, None
    if bias:
        b1, b3 = random(*matrix[:2]), random(*matrix[:2])
        b2 = random(num_experts, model_dim)
    rows, grad = (random(num_rows, model_dim, dtype=dtypes[0]) for _ in range(2))
    ends = torch.tensor(sizes).cumsum(0).int()
    return rows, ExpertWeights(w1, b1, w2, b2, w3, b3), ends, grad


def outcome(function, rows, weights, grad) -> list[torch.Tensor]:
    """The output and all gradients of `function(rows, weights)`."""
    rows = rows.detach().requires_grad_()
    weights = weights.map(lambda weight: weight.detach().requires_grad_())
    out = function(rows, weights)
    inputs = [rows, *weights.tensors()]
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype), materialize_grads=True)]


def by_reference(rows, weights, ends, grad, activation="silu", kept=None) -> list[torch.Tensor]:
    def specification(rows, weights):
        w1, b1, w2, b2, w3, b3 = weights
        function = FUNCTIONS[activation]
        return reference.expert_ffn(rows, w1, b1, w2, b2, ends, function, kept, w3, b3)

    doubles = weights.map(torch.Tensor.double)
    return outcome(specification, rows.double(), doubles, grad.double())


def assert_close(found, expected, dtype) -> None:
    for a, b in zip(found, expected, strict=True):
        largest = b.abs().max().item() if b.numel() else 0.0
        limit = TOLERANCES[dtype] * max(largest, 1.0)  # a sum may cancel
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=limit)
