"""The experts' feed-forward networks, forward and backward, as one torch.library op.

`out = dropout(act(rows_e w1[e]^T + b1[e])) w2[e] + b2[e]` for the rows of each expert e. With w3
the activation is multiplied by `rows_e w3[e]^T + b3[e]`. The forward pass keeps the hidden layer
before the activation (for gated experts both products). The backward pass computes the activation
again.
"""

# E experts, N rows, M model dim, H hidden dim

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.context import in_transform
from moe_core.ops.autograd import empty_gradients, register_backward
from moe_core.ops.backend import Request, load, select
from moe_core.ops.ffn.dropout import draw_seed
from moe_core.ops.ffn.inputs import ExpertWeights, FFNInputs, by_name, is_transposed
from moe_core.ops.ffn.reference import plain_ffn

_NUM_TENSORS = FFNInputs._fields.index("activation")
_NUM_DIFFERENTIABLE = FFNInputs._fields.index("offsets")
_GRADIENTS = ", ".join(["Tensor"] * _NUM_DIFFERENTIABLE)
_SCHEMA = (
    "Tensor rows, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? w3, Tensor? b3,"
    " Tensor offsets, Tensor? noise, str activation, float dropout, str kernels"
)


def expert_ffn(
    rows: Tensor,
    weights: ExpertWeights,
    offsets: Tensor,
    activation: str = "gelu",
    dropout: float = 0.0,
    kernels: str = "auto",
) -> Tensor:
    """Apply the network of each expert to its rows; differentiable in rows, weights and biases.

    Args:
        rows: [N, M], the rows of expert 0 first. The computation is in their dtype.
        weights: may have another dtype than the rows. Their gradients have the dtype of the
            weights. If no gradients are needed, the weights may be packed (`pack_weights`).
        offsets: [E] int32, the end of each expert's rows.
        activation: a name in moe_core.registry.ACTIVATIONS; for gated experts also a name in
            GATED_ACTIVATIONS.
        dropout: the share of the activations that become 0, rounded to 1/65536.
        kernels: see `backend.select`.

    Returns:
        [N, M]. Rows past offsets[-1] are undefined.

    Raises:
        ValueError: the shapes or dtypes of the weights do not match each other, the rows or the
            offsets; or the activation is unknown.
    """
    weights.check(activation, rows.shape[1], len(offsets))
    if in_transform(rows):
        return plain_ffn(rows, weights, offsets, activation, dropout)
    noise = None
    if dropout > 0:
        noise = torch.ops.moe_core.dropout_noise(rows, weights.w1, activation, kernels)
    inputs = FFNInputs(rows, *weights, offsets, noise, activation, dropout, kernels)
    keep_hidden = inputs.needs_gradients() and torch.is_grad_enabled()
    return torch.ops.moe_core.expert_ffn(*inputs, keep_hidden)[0]


def pack_weights(
    weights: ExpertWeights, dtype: torch.dtype, activation: str, kernels: str = "auto"
) -> ExpertWeights | None:
    """Convert fp32 weights [E, H, M] to `dtype` and to the memory layout of the form that runs.

    Returns:
        Integer tensors [E, H, M] and the unchanged biases; None if the form that runs has no memory
        layout of its own.
    """
    w1 = weights.w1
    form = _form(w1.device.type, dtype, w1.dtype, activation, kernels)
    pack = getattr(form, "pack_weights", None)
    if pack is None:
        return None
    return pack(weights, dtype, kernels)


def product_dtype(
    weight: Tensor, dtype: torch.dtype, activation: str, kernels: str = "auto"
) -> torch.dtype:
    """The dtype in which weights like `weight` are multiplied with rows of `dtype`."""
    form = _form(weight.device.type, dtype, weight.dtype, activation, kernels)
    of_form = getattr(form, "product_dtype", None)
    if of_form is None:
        return dtype
    return of_form(dtype, kernels)


# 1. Ops


def _form(
    device: str, dtype: torch.dtype, weight_dtype: torch.dtype, activation: str, kernels: str
) -> ModuleType:
    request = Request(kernels, device, dtype, weight_dtype=weight_dtype, activation=activation)
    return load(select("ffn", request))


def _form_of(inputs: FFNInputs) -> ModuleType:
    rows = inputs.rows
    return _form(rows.device.type, rows.dtype, inputs.w1.dtype, inputs.activation, inputs.kernels)


def _has_seeded_dropout(form: ModuleType) -> bool:
    return getattr(form, "SEEDED_DROPOUT", False)


def _hidden_size(rows: Tensor, w1: Tensor, activation: str, kernels: str):
    """The number of elements of a hidden layer that the form keeps: an integer or a symbol."""
    form = _form(rows.device.type, rows.dtype, w1.dtype, activation, kernels)
    num_experts, hidden_dim, _ = w1.shape
    return form.hidden_rows(rows.shape[0], num_experts, rows.dtype) * hidden_dim


@torch.library.custom_op(
    "moe_core::expert_ffn",
    mutates_args=(),
    schema=f"({_SCHEMA}, bool keep_hidden) -> (Tensor, Tensor)",
)
def _expert_ffn(*arguments):
    """out [N, M] and the hidden layer before the activation in the form's layout, if it is kept."""
    inputs, keep_hidden = FFNInputs._make(arguments[:-1]), arguments[-1]
    return _form_of(inputs).forward(inputs, keep_hidden)


@torch.library.custom_op(
    "moe_core::expert_ffn_backward",
    mutates_args=(),
    # Not a list of tensors, for which a vectorised Jacobian has no batching rule.
    schema=f"(Tensor grad, Tensor hidden, bool[] needs, {_SCHEMA}) -> ({_GRADIENTS})",
)
def _expert_ffn_backward(grad, hidden, needs, *fields):
    """Gradients of the rows and of the fields of ExpertWeights; empty where `needs` is False."""
    inputs = FFNInputs._make(fields)
    gradients = _form_of(inputs).backward(inputs, grad.contiguous(), hidden, needs)
    return tuple(inputs.rows.new_empty(0) if g is None else g for g in gradients)


@torch.library.custom_op(
    "moe_core::dropout_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _dropout_noise(rows: Tensor, w1: Tensor, activation: str, kernels: str) -> Tensor:
    """The noise, int16, one value for each element of the hidden layer; or the form's seed."""
    form = _form(rows.device.type, rows.dtype, w1.dtype, activation, kernels)
    if _has_seeded_dropout(form):
        return draw_seed(rows.device)
    size = rows.shape[0] * w1.shape[1]  # in every dtype the same, so that the masks are the same
    # Each int64 from the generator gives four int16, because the generator is slow on a CPU.
    draws = torch.empty(-(-size // 4), dtype=torch.int64, device=rows.device)
    return draws.random_(-(2**63), None).view(torch.int16)[:size]


@_expert_ffn.register_fake
def _(*arguments):
    inputs, keep_hidden = FFNInputs._make(arguments[:-1]), arguments[-1]
    rows = inputs.rows
    size = 0
    if keep_hidden:
        size = _hidden_size(rows, inputs.w1, inputs.activation, inputs.kernels)
        size = size * inputs.num_kept
    return rows.new_empty(rows.shape), rows.new_empty(size)


@_expert_ffn_backward.register_fake
def _(grad, hidden, needs, *fields):
    gradients = empty_gradients(grad, fields[:_NUM_DIFFERENTIABLE], needs)
    inputs = FFNInputs._make(fields)
    if not getattr(_form_of(inputs), "TRANSPOSED_GRADIENTS", False):
        return tuple(gradients)
    layouts = {"w1": inputs.w1, "w2": inputs.w2, "w3": inputs.w1}
    for name, like in layouts.items():
        place = FFNInputs._fields.index(name)
        if needs[place] and is_transposed(like):
            gradient = gradients[place]
            gradients[place] = gradient.new_empty(gradient.mT.shape).mT
    return tuple(gradients)


@_dropout_noise.register_fake
def _(rows, w1, activation, kernels):
    form = _form(rows.device.type, rows.dtype, w1.dtype, activation, kernels)
    if _has_seeded_dropout(form):
        return rows.new_empty(1, dtype=torch.int64)
    return rows.new_empty(rows.shape[0] * w1.shape[1], dtype=torch.int16)


@register_flop_formula(torch.ops.moe_core.expert_ffn)
def _flops(rows_shape, w1_shape, b1, w2, b2, w3, *others, out_shape=None, **kwargs) -> int:
    num_products = 2 if w3 is None else 3
    return 2 * num_products * rows_shape[0] * w1_shape[1] * w1_shape[2]


@register_flop_formula(torch.ops.moe_core.expert_ffn_backward)
def _backward_flops(
    grad_shape, hidden_shape, needs, rows_shape, w1_shape, b1, w2, b2, w3, *others,
    out_shape=None, **kwargs,
) -> int:  # fmt: skip
    num_products = backward_products(needs[0], needs[1:], w3 is not None)
    return 2 * num_products * rows_shape[0] * w1_shape[1] * w1_shape[2]


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


def check_dropout(dropout: float) -> None:
    """Raise ValueError with dropout, which second derivatives do not support."""
    if dropout > 0:
        raise ValueError(
            f"hidden_dropout ({dropout}) must be 0 for second derivatives of a MoELayer"
        )


def _plain(*fields) -> Tensor:
    inputs = FFNInputs._make(fields)
    check_dropout(inputs.dropout)
    return plain_ffn(inputs.rows, inputs.weights, inputs.offsets, inputs.activation)


register_backward("expert_ffn", FFNInputs, _NUM_TENSORS, _NUM_DIFFERENTIABLE, _plain)
