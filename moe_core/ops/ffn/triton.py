"""The experts' networks with the kernels of `moe_ffn`. The rows are tokens sorted by expert."""

# E experts, N rows, M model dim, H hidden dim

import torch
from torch import Tensor

from moe_core.ops.ffn.inputs import FFNInputs
from moe_core.ops.moe_ffn import triton as moe_ffn
from moe_core.ops.moe_ffn.inputs import MoEFFNInputs, cast_matrices

SEEDED_DROPOUT = True  # `noise` is a seed


def hidden_rows(num_rows, num_experts: int, dtype: torch.dtype):
    """The number of rows of the hidden layer that `forward` keeps."""
    return num_rows


def forward(inputs: FFNInputs, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    """out [N, M] and, with `keep_hidden`, the hidden layer [N * H] before the activation.

    For gated experts, both the products with w1 and those with w3 are kept: [2 * N * H].
    """
    out, hidden = moe_ffn.forward(_with_plan(inputs), keep_hidden)
    return out, hidden.flatten()


def backward(
    inputs: FFNInputs, grad: Tensor, hidden: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of the rows and of the fields of ExpertWeights; None where `needs` is False."""
    needs_rows, *needs_weights = needs
    hidden = hidden.view(-1, inputs.w1.shape[1])
    needs = [needs_rows, False, *needs_weights]  # no gates
    grad_rows, _, *gradients = moe_ffn.backward(_with_plan(inputs), grad, hidden, needs)
    return [grad_rows, *gradients]


def _with_plan(inputs: FFNInputs) -> MoEFFNInputs:
    """The inputs of `moe_ffn` in which each row is a token with one choice, in the same order."""
    rows = inputs.rows
    order = torch.arange(len(rows), device=rows.device)
    casts = None
    if inputs.w1.dtype != rows.dtype:
        casts = inputs.weights.matrices().map(lambda weight: weight.to(rows.dtype))
    return MoEFFNInputs(
        rows,
        None,  # gates
        *inputs.weights,
        *cast_matrices(casts),
        choices=order,
        offsets=inputs.offsets,
        slots=order.unsqueeze(1),
        kept=None,
        seed=inputs.noise,
        activation=inputs.activation,
        dropout=inputs.dropout,
    )
