"""Dispatch, the experts' networks and combine in one operation.

The Triton form is one torch.library op. For the backward pass it keeps the tokens and the hidden
layer, but neither the gathered rows nor the experts' outputs. The torch form calls separate ops.
"""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.context import in_transform
from moe_core.ops.autograd import empty_gradients, register_backward
from moe_core.ops.backend import Request, load, select
from moe_core.ops.combine.reference import dispatch_rows, plain_sum_rows
from moe_core.ops.ffn.dropout import draw_seed
from moe_core.ops.ffn.inputs import ExpertWeights
from moe_core.ops.ffn.op import backward_products, check_dropout, expert_ffn
from moe_core.ops.ffn.reference import plain_ffn
from moe_core.ops.moe_ffn import composed
from moe_core.ops.moe_ffn.inputs import MoEFFNInputs, cast_matrices
from moe_core.ops.plan.op import DispatchPlan

_NUM_TENSORS = MoEFFNInputs._fields.index("activation")
_NUM_DIFFERENTIABLE = MoEFFNInputs._fields.index("w1_cast")
_GRADIENTS = ", ".join(["Tensor"] * _NUM_DIFFERENTIABLE)
_SCHEMA = (
    "Tensor tokens, Tensor? gates, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? w3,"
    " Tensor? b3, Tensor? w1_cast, Tensor? w2_cast, Tensor? w3_cast, Tensor choices,"
    " Tensor offsets, Tensor slots, Tensor? kept, Tensor? seed, str activation, float dropout"
)


def moe_ffn(
    tokens: Tensor,
    gates: Tensor | None,
    weights: ExpertWeights,
    plan: DispatchPlan,
    activation: str = "gelu",
    dropout: float = 0.0,
    kernels: str = "auto",
    casts: ExpertWeights | None = None,
) -> Tensor:
    """`y_t = sum_k gates_tk * expert_tk(tokens_t)` over the kept choices.

    Differentiable in tokens, gates and weights.

    Args:
        tokens: [T, M]. The computation is in their dtype.
        gates: [T, K]. None: all 1. The plan must then be a permutation: K = 1, nothing is dropped.
        weights, activation, dropout, kernels: see `expert_ffn`.
        plan: the dispatch plan of these tokens.
        casts: w1, w2 and w3 in the dtype of the tokens, if they have been cast before.

    Returns:
        [T, M] in the wider dtype of tokens and gates.

    Raises:
        ValueError: as `expert_ffn`.
    """
    weights.check(activation, tokens.shape[1], len(plan.offsets))
    request = Request(kernels, tokens.device.type, tokens.dtype, activation=activation)
    if in_transform(tokens) or select("moe_ffn", request) == "moe_ffn.composed":

        def ffn(rows: Tensor) -> Tensor:
            return expert_ffn(rows, weights, plan.offsets, activation, dropout, kernels)

        return composed.moe_ffn(tokens, gates, ffn, plan, kernels)
    # The weights are cast once for both passes. The op does not cast, so each gradient is rounded
    # only once, to the dtype of the parameters.
    if weights.w1.dtype == tokens.dtype:
        casts = None
    elif casts is None or casts.w1.dtype != tokens.dtype:
        casts = weights.matrices().map(lambda weight: weight.detach().to(tokens.dtype))
    seed = None
    if dropout > 0:
        seed = torch.ops.moe_core.dropout_seed(tokens)
    inputs = MoEFFNInputs(
        tokens,
        gates,
        *weights,
        *cast_matrices(casts),
        choices=plan.choices,
        offsets=plan.offsets,
        slots=plan.slots,
        kept=plan.kept,
        seed=seed,
        activation=activation,
        dropout=dropout,
    )
    keep_hidden = inputs.needs_gradients() and torch.is_grad_enabled()
    return torch.ops.moe_core.moe_ffn(*inputs, keep_hidden)[0]


def casts_weights(
    weight: Tensor, dtype: torch.dtype, activation: str, kernels: str = "auto"
) -> bool:
    """Whether `moe_ffn` casts weights like `weight` for tokens of `dtype`."""
    request = Request(kernels, weight.device.type, dtype, activation=activation)
    return weight.dtype != dtype and select("moe_ffn", request) != "moe_ffn.composed"


# 1. Ops


@torch.library.custom_op(
    "moe_core::moe_ffn",
    mutates_args=(),
    schema=f"({_SCHEMA}, bool keep_hidden) -> (Tensor, Tensor)",
)
def _moe_ffn(*arguments):
    """out [T, M] and, if it is kept, the hidden layer [N, H] before the activation.

    For gated experts the hidden layer is [2 N, H]: the products with w1, then those with w3.
    """
    inputs, keep_hidden = MoEFFNInputs._make(arguments[:-1]), arguments[-1]
    return load("moe_ffn.triton").forward(inputs, keep_hidden)


@torch.library.custom_op(
    "moe_core::moe_ffn_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor hidden, bool[] needs, {_SCHEMA}) -> ({_GRADIENTS})",
)
def _moe_ffn_backward(grad, hidden, needs, *fields):
    """Gradients of tokens, gates and the fields of ExpertWeights; empty where `needs` is False."""
    inputs = MoEFFNInputs._make(fields)
    gradients = load("moe_ffn.triton").backward(inputs, grad, hidden, needs)
    return tuple(grad.new_empty(0) if g is None else g for g in gradients)


@torch.library.custom_op(
    "moe_core::dropout_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _dropout_seed(like: Tensor) -> Tensor:
    """int64 [1] from the generator of the device of `like`."""
    return draw_seed(like.device)


# 2. Fake kernels, FLOPs and autograd


@_moe_ffn.register_fake
def _(*arguments):
    inputs, keep_hidden = MoEFFNInputs._make(arguments[:-1]), arguments[-1]
    tokens = inputs.tokens
    dtype = tokens.dtype
    if inputs.gates is not None:
        dtype = torch.promote_types(dtype, inputs.gates.dtype)
    num_kept = 0
    if keep_hidden:
        num_kept = inputs.choices.shape[0] * inputs.num_kept
    hidden = tokens.new_empty(num_kept, inputs.w1.shape[1])
    return tokens.new_empty(tokens.shape, dtype=dtype), hidden


@_moe_ffn_backward.register_fake
def _(grad, hidden, needs, *fields):
    return tuple(empty_gradients(grad, fields[:_NUM_DIFFERENTIABLE], needs))


@_dropout_seed.register_fake
def _(like):
    return like.new_empty(1, dtype=torch.int64)


@register_flop_formula(torch.ops.moe_core.moe_ffn)
def _flops(*shapes, out_shape=None, **kwargs) -> int:
    inputs = MoEFFNInputs._make(shapes[:-1])
    _, hidden_dim, model_dim = inputs.w1
    return 2 * (1 + inputs.num_kept) * inputs.choices[0] * hidden_dim * model_dim


@register_flop_formula(torch.ops.moe_core.moe_ffn_backward)
def _backward_flops(grad_shape, hidden_shape, needs, *shapes, out_shape=None, **kwargs) -> int:
    inputs = MoEFFNInputs._make(shapes)
    num_products = backward_products(needs[0], needs[2:], inputs.w3 is not None)
    _, hidden_dim, model_dim = inputs.w1
    return 2 * num_products * inputs.choices[0] * hidden_dim * model_dim


def _plain(*fields) -> Tensor:
    inputs = MoEFFNInputs._make(fields)
    check_dropout(inputs.dropout)
    rows = dispatch_rows(inputs.tokens, inputs.choices, inputs.slots.shape[1])
    rows = plain_ffn(rows, inputs.weights, inputs.offsets, inputs.activation)
    return plain_sum_rows(rows, inputs.slots, inputs.kept, inputs.gates)


register_backward("moe_ffn", MoEFFNInputs, _NUM_TENSORS, _NUM_DIFFERENTIABLE, _plain)
