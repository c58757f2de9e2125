"""Tokens through their experts and back, as one torch.library op: dispatch, both products and
combine, by Triton.

Neither the gathered rows nor the experts' answers are kept for the backward pass, only tokens and
the hidden layer. Only running an op imports Triton.
"""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.kernels.backend import choose

# those of triton_ffn_kernels, which only runs where Triton is
ACTIVATIONS = ("gelu", "relu", "silu")


def supports(tokens: Tensor, activation: str, kernels: str) -> bool:
    """Whether these kernels compute on tokens of this dtype, there: halves; fp32 if they are asked
    for by name.

    In fp32 their products do without tensor cores, to be exact.
    """
    dtypes = (torch.bfloat16, torch.float16, *([torch.float32] if kernels == "triton" else []))
    if tokens.dtype not in dtypes or activation not in ACTIVATIONS:
        return False
    return choose(kernels, tokens.device.type) == "triton"


def moe_ffn(
    tokens: Tensor,
    gates: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    choices: Tensor,
    offsets: Tensor,
    slots: Tensor,
    kept: Tensor | None,
    activation: str = "gelu",
    dropout: float = 0.0,
) -> Tensor:
    """`y_t = sum_k gates_tk * expert_tk(tokens_t)` of the kept choices; differentiable in tokens,
    gates and weights.

    Args:
        tokens: [T, M]. Their dtype is the one that is computed in.
        gates: [T, K].
        w1, w2, b1, b2, activation, dropout: as expert_ffn's.
        choices, offsets, slots, kept: a DispatchPlan's.

    Returns:
        [T, M] in the wider dtype of tokens and gates.
    """
    weights = (w1, b1, w2, b2)
    differentiable = any(t is not None and t.requires_grad for t in (tokens, gates, *weights))
    keep_hidden = differentiable and torch.is_grad_enabled()
    # Cast once for both directions; the op casts nothing, so gradients are rounded to the
    # parameters' dtype alone.
    copies = [None if w.dtype == tokens.dtype else w.detach().to(tokens.dtype) for w in (w1, w2)]
    noise = torch.ops.moe_core.fused_dropout_noise(choices, w1) if dropout else None
    plan = (choices, offsets, slots, kept)
    arguments = (tokens, gates, *weights, *copies, *plan, noise, activation, dropout, keep_hidden)
    return torch.ops.moe_core.moe_ffn(*arguments)[0]


# 1. Ops


@torch.library.custom_op("moe_core::moe_ffn", mutates_args=())
def _moe_ffn(
    tokens: Tensor,
    gates: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w1_copy: Tensor | None,
    w2_copy: Tensor | None,
    choices: Tensor,
    offsets: Tensor,
    slots: Tensor,
    kept: Tensor | None,
    noise: Tensor | None,
    activation: str,
    dropout: float,
    keep_hidden: bool,
) -> tuple[Tensor, Tensor]:
    """out [T, M] and, if it is kept, the hidden layer before the activation [N, H]; copies in the
    tokens' dtype."""
    w1, w2 = w1 if w1_copy is None else w1_copy, w2 if w2_copy is None else w2_copy
    plan = (choices, offsets, slots, kept)
    return _triton().forward(
        tokens, gates, w1, b1, w2, b2, *plan, noise, activation, dropout, keep_hidden
    )


@torch.library.custom_op("moe_core::moe_ffn_backward", mutates_args=())
def _moe_ffn_backward(
    grad: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    gates: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w1_copy: Tensor | None,
    w2_copy: Tensor | None,
    choices: Tensor,
    offsets: Tensor,
    slots: Tensor,
    kept: Tensor | None,
    noise: Tensor | None,
    activation: str,
    dropout: float,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of tokens, gates, w1, b1, w2 and b2; empty ones where `needs` is False."""
    dtype = w1.dtype
    w1, w2 = w1 if w1_copy is None else w1_copy, w2 if w2_copy is None else w2_copy
    plan = (choices, offsets, slots, kept)
    weights = (w1, b1, w2, b2)
    found = _triton().backward(
        grad, tokens, gates, hidden, *weights, *plan, noise, activation, dropout, dtype, needs
    )
    return [tokens.new_empty(0) if g is None else g for g in found]


@torch.library.custom_op(
    "moe_core::fused_dropout_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _dropout_noise(choices: Tensor, w1: Tensor) -> Tensor:
    """int16 [N, H]."""
    return torch.empty(len(choices), w1.shape[1], dtype=torch.int16, device=w1.device).random_(
        -32768, 32768
    )


def _triton():
    from moe_core.kernels import triton_ffn  # here, since it imports Triton

    return triton_ffn


# 2. Fake kernels, FLOPs and autograd


@_moe_ffn.register_fake
def _(
    tokens,
    gates,
    w1,
    b1,
    w2,
    b2,
    w1_copy,
    w2_copy,
    choices,
    offsets,
    slots,
    kept,
    noise,
    activation,
    dropout,
    keep,
):
    out = tokens.new_empty(tokens.shape, dtype=torch.promote_types(tokens.dtype, gates.dtype))
    return out, tokens.new_empty(choices.shape[0] if keep else 0, w1.shape[1])


@_moe_ffn_backward.register_fake
def _(grad, hidden, tokens, gates, w1, b1, w2, b2, *others):
    inputs, needs = (tokens, gates, w1, b1, w2, b2), others[-1]
    return [
        t.new_empty(t.shape) if need else tokens.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    ]


@_dropout_noise.register_fake
def _(choices, w1):
    return w1.new_empty(choices.shape[0], w1.shape[1], dtype=torch.int16)


@register_flop_formula(torch.ops.moe_core.moe_ffn)
def _flops(tokens_shape, gates_shape, w1_shape, *others, out_shape=None, **kwargs) -> int:
    choices_shape = others[5]
    return 2 * 2 * choices_shape[0] * w1_shape[1] * w1_shape[2]


@register_flop_formula(torch.ops.moe_core.moe_ffn_backward)
def _backward_flops(
    grad_shape, hidden_shape, tokens_shape, gates_shape, w1_shape, *others, out_shape=None, **kw
) -> int:
    needs_tokens, _, needs_w1, _, needs_w2, _ = others[-1]
    return (
        2 * (1 + needs_tokens + needs_w1 + needs_w2) * hidden_shape[0] * w1_shape[1] * w1_shape[2]
    )


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation, ctx.dropout, _ = inputs
    _, hidden = output
    ctx.save_for_backward(*tensors, hidden)
    ctx.mark_non_differentiable(hidden)
    # or zeros as large as the hidden layer would be made for its gradient
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    if grad is None:
        return 16 * (None,)
    *tensors, hidden = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:6])
    gradients = torch.ops.moe_core.moe_ffn_backward(
        grad, hidden, *tensors, ctx.activation, ctx.dropout, needs
    )
    return *(g if need else None for g, need in zip(gradients, needs, strict=True)), *10 * (None,)


torch.library.register_autograd("moe_core::moe_ffn", _backward, setup_context=_save)
