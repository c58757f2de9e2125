"""The experts' feed-forward networks, forward and backward, as one torch.library op.

`out = dropout(act(rows_e w1[e]^T + b1[e])) w2[e] + b2[e]` for each expert e's rows. On a CPU
`ffn_x86` does it where the instructions are there and `kernels` is not "torch", `ffn_loop`
elsewhere. On a GPU in bf16 `grouped` does, by F.grouped_mm, which reads nothing back to the host on
an H100 or B200; for other dtypes that is itself a loop which does (torch 2.11), so the loop here
runs there, too.

The backward pass gets the hidden layer as it was before the activation, and computes the activation
once more.
"""

# E experts, N rows, M model dim, H hidden dim

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.kernels import ffn_loop, ffn_x86, grouped


def expert_ffn(
    rows: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    offsets: Tensor,
    activation: str = "gelu",
    dropout: float = 0.0,
    kernels: str = "auto",
) -> Tensor:
    """Each expert's rows through its own network; differentiable in rows, weights and biases.

    Args:
        rows: [N, M], expert 0's rows first. Their dtype is the one that is computed in.
        w1, w2: [E, H, M]. Weights and biases may have another dtype, which their gradients then
            have, too. Without gradients they may be `ffn_x86.pack_weights`'s.
        b1, b2: [E, H] and [E, M], or None.
        offsets: [E] int32, where each expert's rows end.
        activation: a name of moe_core.registry.ACTIVATIONS.
        dropout: the share of the activations that become 0, to the nearest 1/65536.
        kernels: "torch" leaves C++ out.

    Returns:
        [N, M]; rows past offsets[-1] hold nothing meaningful.
    """
    noise = torch.ops.moe_core.dropout_noise(rows, w1, activation, kernels) if dropout else None
    differentiable = any(t is not None and t.requires_grad for t in (rows, w1, b1, w2, b2))
    keep_hidden = differentiable and torch.is_grad_enabled()
    arguments = (rows, w1, b1, w2, b2, offsets, noise, activation, dropout, keep_hidden, kernels)
    return torch.ops.moe_core.expert_ffn(*arguments)[0]


# 1. Ops


def _kernel(rows: Tensor, w1: Tensor, activation: str, kernels: str):
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return grouped
    return ffn_x86 if kernels != "torch" and ffn_x86.supports(rows, w1, activation) else ffn_loop


def _hidden_size(rows: Tensor, w1: Tensor, activation: str, kernels: str):
    """Of the hidden layer as the kernel keeps it: a number or a symbol."""
    return (
        _kernel(rows, w1, activation, kernels).hidden_rows(rows.shape[0], w1.shape[0], rows.dtype)
        * w1.shape[1]
    )


@torch.library.custom_op("moe_core::expert_ffn", mutates_args=())
def _expert_ffn(
    rows: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    offsets: Tensor,
    noise: Tensor | None,
    activation: str,
    dropout: float,
    keep_hidden: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """out [N, M] and the hidden layer before the activation, in the kernel's own order, if it is
    kept."""
    kernel = _kernel(rows, w1, activation, kernels)
    return kernel.forward(rows, w1, b1, w2, b2, offsets, noise, activation, dropout, keep_hidden)


@torch.library.custom_op("moe_core::expert_ffn_backward", mutates_args=())
def _expert_ffn_backward(
    grad: Tensor,
    rows: Tensor,
    hidden: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    offsets: Tensor,
    noise: Tensor | None,
    activation: str,
    dropout: float,
    needs: list[bool],
    kernels: str,
) -> list[Tensor]:
    """Gradients of rows, w1, b1, w2 and b2; empty ones where `needs` is False."""
    arguments = (
        grad.contiguous(),
        rows,
        hidden,
        w1,
        b1,
        w2,
        b2,
        offsets,
        noise,
        activation,
        dropout,
        needs,
    )
    return [
        rows.new_empty(0) if g is None else g
        for g in _kernel(rows, w1, activation, kernels).backward(*arguments)
    ]


@torch.library.custom_op(
    "moe_core::dropout_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _dropout_noise(rows: Tensor, w1: Tensor, activation: str, kernels: str) -> Tensor:
    """int16, one for each number in the hidden layer; four from a draw of the generator, which is
    slow on a CPU."""
    size = _hidden_size(rows, w1, activation, kernels)
    numbers = torch.empty(-(-size // 4), dtype=torch.int64, device=rows.device).random_(
        -(2**63), None
    )
    return numbers.view(torch.int16)[:size]


@_expert_ffn.register_fake
def _(rows, w1, b1, w2, b2, offsets, noise, activation, dropout, keep_hidden, kernels):
    return rows.new_empty(rows.shape), rows.new_empty(
        _hidden_size(rows, w1, activation, kernels) if keep_hidden else 0
    )


@_expert_ffn_backward.register_fake
def _(grad, rows, hidden, w1, b1, w2, b2, offsets, noise, activation, dropout, needs, kernels):
    inputs = (rows, w1, b1, w2, b2)
    return [
        t.new_empty(t.shape) if need else rows.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    ]


@_dropout_noise.register_fake
def _(rows, w1, activation, kernels):
    return rows.new_empty(_hidden_size(rows, w1, activation, kernels), dtype=torch.int16)


@register_flop_formula(torch.ops.moe_core.expert_ffn)
def _flops(rows_shape, w1_shape, *others, out_shape=None, **kwargs) -> int:
    return 2 * 2 * rows_shape[0] * w1_shape[1] * w1_shape[2]


@register_flop_formula(torch.ops.moe_core.expert_ffn_backward)
def _backward_flops(
    grad_shape, rows_shape, hidden_shape, w1_shape, *others, out_shape=None, **kwargs
) -> int:
    needs_rows, needs_w1, _, needs_w2, _ = others[-2]
    return 2 * (1 + needs_rows + needs_w1 + needs_w2) * rows_shape[0] * w1_shape[1] * w1_shape[2]


# 2. Autograd


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation, ctx.dropout, _, ctx.kernels = inputs
    _, hidden = output
    ctx.save_for_backward(*tensors, hidden)
    ctx.mark_non_differentiable(hidden)
    # or zeros as large as the hidden layer would be made for its gradient
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    if grad is None:
        return 11 * (None,)
    rows, w1, b1, w2, b2, offsets, noise, hidden = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    tensors = (grad, rows, hidden, w1, b1, w2, b2, offsets, noise)
    gradients = torch.ops.moe_core.expert_ffn_backward(
        *tensors, ctx.activation, ctx.dropout, needs, ctx.kernels
    )
    return *(g if need else None for g, need in zip(gradients, needs, strict=True)), *6 * (None,)


torch.library.register_autograd("moe_core::expert_ffn", _backward, setup_context=_save)
