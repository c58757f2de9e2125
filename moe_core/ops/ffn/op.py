"""The experts' feed-forward networks, alone and with dispatch and combine.

`out = dropout(act(rows_e w1[e]^T + b1[e])) w2[e] + b2[e]` for the rows of each expert e. With w3
the activation is multiplied by `rows_e w3[e]^T + b3[e]`.

The torch.library op `moe_core::moe_ffn`, in Triton and in C++, dispatches and combines too. For the
backward pass it keeps the tokens and the hidden layer before the activation (for gated experts both
products) and computes the activation again. It keeps neither the gathered rows nor the experts'
outputs. Everything else is `reference.feed_forward`, in bf16 on a GPU with `F.grouped_mm`.
"""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.ops.autograd import empty_gradients, op, register_gradient, schema_of
from moe_core.ops.backend import KERNEL_ACTIVATIONS, Kernels, chosen, load
from moe_core.ops.combine.op import combine, dispatch
from moe_core.ops.combine.reference import dispatch_rows, sum_rows
from moe_core.ops.ffn.dropout import dropout_seed
from moe_core.ops.ffn.inputs import (
    ExpertWeights,
    MoEFFNInputs,
    by_name,
    hidden_rows,
)
from moe_core.ops.ffn.linear import expert_linear
from moe_core.ops.ffn.reference import feed_forward
from moe_core.ops.native.library import packed_dtype
from moe_core.ops.plan.op import DispatchPlan, inverse_plan

_FP32_AND_BF16 = (torch.float32, torch.bfloat16)


def kernels_for(
    kernels: str | Kernels, weight: Tensor, dtype: torch.dtype, activation: str
) -> Kernels:
    """The kernels of the networks for rows of `dtype`. With torch's, rows are dispatched before."""
    language, name = chosen(kernels, weight)
    runs = activation in KERNEL_ACTIVATIONS
    if language == "triton":
        runs = runs and dtype in (*_FP32_AND_BF16, torch.float16)
    elif runs and language == "cpp":
        runs = dtype in _FP32_AND_BF16 and (
            weight.dtype in _FP32_AND_BF16 or weight.dtype == _packed_dtype(dtype, name)
        )
    return Kernels(language if runs else "torch", name)


@torch.compiler.assume_constant_result
def _packed_dtype(dtype: torch.dtype, name: str) -> torch.dtype:
    return packed_dtype(dtype, name)


def expert_ffn(
    rows: Tensor,
    weights: ExpertWeights,
    offsets: Tensor,
    activation: str = "gelu",
    dropout: float = 0.0,
    kernels: str | Kernels = "auto",
) -> Tensor:
    """Apply the network of each expert to its rows; differentiable in rows, weights and biases.

    Args:
        rows: [N, M], the rows of expert 0 first. The computation is in their dtype.
        weights: may have another dtype than the rows. Their gradients have the dtype of the
            weights. If no gradients are needed, the weights may be packed (`pack_weights`).
        offsets: [E] int32, the end of each expert's rows.
        activation: a name in moe_core.registry.ACTIVATIONS; for gated experts also a name in
            GATED_ACTIVATIONS.
        dropout: the share of the activations that become 0. Kernels round it to 1/65536.
        kernels: see `backend.chosen`.

    Returns:
        [N, M]. Rows past offsets[-1] are undefined.

    Raises:
        ValueError: the shapes or dtypes of the weights do not match each other, the rows or the
            offsets; the activation is unknown; or packed weights cannot be used here.
    """
    kernels = chosen(kernels, rows)
    if kernels_for(kernels, weights.w1, rows.dtype, activation).language == "torch":
        weights.check(activation, rows.shape[1], len(offsets))
        _check_unpacked(weights, f"rows in {rows.dtype}, other kernels, transforms")
        return feed_forward(rows, weights, offsets, activation, dropout, expert_linear)
    order = torch.arange(rows.shape[0], device=rows.device)
    plan = DispatchPlan(order, offsets, order.unsqueeze(1), None, offsets)
    return moe_ffn(rows, None, weights, plan, activation, dropout, kernels)


def moe_ffn(
    tokens: Tensor,
    gates: Tensor | None,
    weights: ExpertWeights,
    plan: DispatchPlan,
    activation: str = "gelu",
    dropout: float = 0.0,
    kernels: str | Kernels = "auto",
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
    kernels = chosen(kernels, tokens)
    language, name = kernels_for(kernels, weights.w1, tokens.dtype, activation)
    if language == "torch":
        rows = dispatch(tokens, plan, kernels)
        rows = expert_ffn(rows, weights, plan.offsets, activation, dropout, kernels)
        if gates is None:
            return dispatch(rows, inverse_plan(plan), kernels)
        return combine(rows, gates, plan, kernels)
    weights.check(activation, tokens.shape[1], plan.offsets.shape[0])
    # The weights are cast once for both passes. The op does not cast, so each gradient is rounded
    # only once, to the dtype of the parameters.
    if weights.w1.dtype == tokens.dtype or language == "cpp":
        casts = None
    elif casts is None or casts.w1.dtype != tokens.dtype:
        casts = weights.matrices().map(lambda weight: weight.detach().to(tokens.dtype))
    keep_hidden = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (tokens, gates, *weights)
    )
    if keep_hidden:
        _check_unpacked(weights, "gradients")
    matrices: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if casts is not None:
        matrices = (casts.w1, casts.w2, casts.w3)
    inputs = MoEFFNInputs(
        tokens,
        gates,
        *weights,
        *matrices,
        choices=plan.choices,
        offsets=plan.offsets,
        slots=plan.slots,
        kept=plan.kept,
        seed=dropout_seed(tokens) if dropout > 0 else None,
        activation=activation,
        dropout=dropout,
        keep_hidden=keep_hidden,
        kernels=name,
        language=language,
    )
    return _forward(*inputs)[0]


def prefers_unpacked(
    tokens: Tensor,
    weight: Tensor,
    plan: DispatchPlan,
    activation: str,
    kernels: str | Kernels = "auto",
) -> bool:
    """Whether `moe_ffn` is faster with weights like `weight` that are not packed before.

    It is with many rows of a narrow layer, since with packed weights the hidden layer has to be
    transposed.
    """
    num_experts, _, model_dim = weight.shape
    language, _ = kernels_for(kernels, weight, tokens.dtype, activation)
    if model_dim > 128 or language != "cpp":
        return False
    # A comparison would fix the number of tokens of an exported program.
    return torch.compiler.is_exporting() or plan.choices.shape[0] >= 64 * num_experts  # measured


def _check_unpacked(weights: ExpertWeights, purpose: str) -> None:
    """Raise ValueError if weights are packed, in which form they are not numbers."""
    if not weights.w1.dtype.is_floating_point:
        raise ValueError(f"weights packed as {weights.w1.dtype} are not for {purpose}")


def casts_weights(
    weight: Tensor, dtype: torch.dtype, activation: str, kernels: str = "auto"
) -> bool:
    """Whether `moe_ffn` casts weights like `weight` for tokens of `dtype`."""
    language, _ = kernels_for(kernels, weight, dtype, activation)
    return weight.dtype != dtype and language == "triton"


def pack_weights(
    weights: ExpertWeights, dtype: torch.dtype, activation: str, kernels: str = "auto"
) -> ExpertWeights | None:
    """Convert fp32 weights [E, H, M] to `dtype` and to the memory layout of the form that runs.

    Returns:
        Integer tensors [E, H, M] and the unchanged biases; None if the form that runs has no memory
        layout of its own.
    """
    language, name = kernels_for(kernels, weights.w1, dtype, activation)
    if language != "cpp":
        return None
    return load("ffn", language).pack_weights(weights, dtype, name)


def product_dtype(
    weight: Tensor, dtype: torch.dtype, activation: str, kernels: str = "auto"
) -> torch.dtype:
    """The dtype in which weights like `weight` are multiplied with rows of `dtype`."""
    language, name = kernels_for(kernels, weight, dtype, activation)
    if language != "cpp":
        return dtype
    return load("ffn", language).product_dtype(dtype, name)


# 1. The op, with its fake kernel, FLOPs and autograd

_FIELDS = MoEFFNInputs._fields
_NUM_DIFFERENTIABLE = _FIELDS.index("b3") + 1
_GRADIENTS = ", ".join(["Tensor"] * _NUM_DIFFERENTIABLE)


@op("moe_core::moe_ffn", f"({schema_of(MoEFFNInputs)}) -> (Tensor, Tensor)")
def _forward(*arguments):
    """The output, and the hidden layer [N, H] before the activation if it is kept.

    For gated experts the hidden layer is [2 N, H]: the products with w1, then those with w3. Only
    the form itself reads it: ffn.cpp has an order and more rows of its own.
    """
    inputs = MoEFFNInputs._make(arguments)
    return load("ffn", inputs.language).forward(inputs)


# Not a list of tensors, for which a vectorised Jacobian has no batching rule.
@op(
    "moe_core::moe_ffn_backward",
    f"(Tensor grad, bool[] needs, {schema_of(MoEFFNInputs)}, Tensor hidden) -> ({_GRADIENTS})",
)
def _backward(grad, needs, *arguments):
    """Gradients of the fields up to b3; empty where `needs` is False."""
    inputs, hidden = MoEFFNInputs._make(arguments[:-1]), arguments[-1]
    computed = load("ffn", inputs.language).backward(inputs, grad, hidden, needs)
    return tuple(grad.new_empty(0) if g is None else g for g in computed)


@_forward.register_fake
def _(*arguments):
    inputs = MoEFFNInputs._make(arguments)
    tokens, dtype = inputs.tokens, inputs.tokens.dtype
    num_kept = 0
    if inputs.keep_hidden:
        num_rows = inputs.choices.shape[0]
        if inputs.language == "cpp":
            num_rows = hidden_rows(num_rows, inputs.w1.shape[0])
            dtype = load("ffn", inputs.language).product_dtype(dtype, inputs.kernels)
        num_kept = num_rows * inputs.weights.num_kept
    hidden = tokens.new_empty(num_kept, inputs.w1.shape[1], dtype=dtype)
    return tokens.new_empty(tokens.shape, dtype=inputs.out_dtype), hidden


@_backward.register_fake
def _(grad, needs, *arguments):
    return tuple(empty_gradients(grad, arguments[:_NUM_DIFFERENTIABLE], needs))


@register_flop_formula(torch.ops.moe_core.moe_ffn)
def _(*shapes, out_shape=None, **kwargs) -> int:
    inputs = MoEFFNInputs._make(shapes)
    return (1 + inputs.weights.num_kept) * _flops_of_product(inputs)


@register_flop_formula(torch.ops.moe_core.moe_ffn_backward)
def _(grad_shape, needs, *shapes, out_shape=None, **kwargs) -> int:
    inputs = MoEFFNInputs._make(shapes[:-1])
    needs_weights = needs[_FIELDS.index("w1") : _NUM_DIFFERENTIABLE]
    is_gated = inputs.w3 is not None
    return backward_products(needs[0], needs_weights, is_gated) * _flops_of_product(inputs)


def _flops_of_product(shapes) -> int:
    _, hidden_dim, model_dim = shapes.w1
    return 2 * shapes.choices[0] * hidden_dim * model_dim


def backward_products(needs_rows: bool, needs_weights: Sequence[bool], gated: bool) -> int:
    """The number of matrix products of a backward pass.

    There is one for the gradient of the hidden layer, one for each weight that needs a gradient,
    and one (for gated experts two) for the rows if these need a gradient.
    """
    needed = by_name(needs_weights)
    num_products = 1 + needed["w1"] + needed["w2"] + needs_rows
    if gated:
        num_products += needed["w3"] + needs_rows
    return num_products


def _plain_moe_ffn(*fields) -> Tensor:
    inputs = MoEFFNInputs._make(fields)
    if inputs.dropout > 0:
        raise ValueError(
            f"hidden_dropout ({inputs.dropout}) must be 0 for second derivatives of a MoELayer"
        )
    rows = dispatch_rows(inputs.tokens, inputs.choices, inputs.slots.shape[1])
    rows = feed_forward(rows, inputs.weights, inputs.offsets, inputs.activation)
    return sum_rows(rows, inputs.slots, inputs.kept, inputs.gates)


register_gradient(
    _forward,
    _NUM_DIFFERENTIABLE,
    _backward,
    _plain_moe_ffn,
    saved_outputs=(1,),
)
