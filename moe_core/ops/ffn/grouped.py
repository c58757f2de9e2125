"""The experts' networks with torch.nn.functional.grouped_mm, for GPUs in bf16.

grouped_mm accepts neither a bias nor strides that are not multiples of 16 bytes, and it has no sum
over rows. The functions here add these. grouped_mm has kernels for compute capability 9.0 and 10.0.
On other GPUs it is a loop that reads the offsets on the host (torch 2.11).
"""

# E experts, N rows, I input features, O output features, M model dim, H hidden dim

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.activations import activate, activate_gated, activation_grad, gated_grads
from moe_core.ops.ffn.dropout import Dropout
from moe_core.ops.ffn.inputs import FFNInputs, by_name

_ALIGNMENT = 16  # bytes; F.grouped_mm needs row strides that are multiples of it


def hidden_rows(num_rows, num_experts: int, dtype: torch.dtype):
    """The number of rows of the hidden layer that `forward` keeps."""
    return num_rows


def forward(inputs: FFNInputs, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    """out [N, M] and, with `keep_hidden`, the hidden layer [N * H] before the activation.

    For gated experts, both the products with w1 and those with w3 are kept: [2 * N * H].
    """
    rows, offsets = inputs.rows, inputs.offsets
    if len(rows) == 0:  # F.grouped_mm needs at least one row
        return rows.new_empty(rows.shape), rows.new_empty(0)
    weights = inputs.weights.map(lambda tensor: tensor.to(rows.dtype))
    kept = [grouped_linear(rows, weights.w1, weights.b1, offsets)]  # [N, H]
    if weights.w3 is not None:
        kept.append(grouped_linear(rows, weights.w3, weights.b3, offsets))
    h = _drop(_activated(inputs, kept), inputs)
    out = grouped_linear(h, weights.w2.transpose(1, 2), weights.b2, offsets)
    if not keep_hidden:
        return out, out.new_empty(0)
    if len(kept) == 1:
        return out, kept[0].flatten()
    return out, torch.stack(kept).flatten()


def backward(
    inputs: FFNInputs, grad: Tensor, hidden: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of the rows and of the fields of ExpertWeights; None where `needs` is False."""
    rows, offsets, weights = inputs.rows, inputs.offsets, inputs.weights
    if len(rows) == 0:
        return _zeros((rows, *weights), needs)
    needs_rows, needed = needs[0], by_name(needs[1:])
    kept = list(hidden.view(inputs.num_kept, len(rows), -1).unbind())
    by_weight: dict[str, Tensor] = {}
    if needed["w2"]:
        h = _drop(_activated(inputs, kept), inputs)
        by_weight["w2"] = grouped_weight_grad(h, grad, offsets)
    if needed["b2"]:
        by_weight["b2"] = group_sum(grad, offsets)
    d_hidden = _drop(grouped_linear(grad, weights.w2.to(rows.dtype), None, offsets), inputs)
    grad_rows = None
    for number, d_product in zip("13", _hidden_grads(inputs, d_hidden, kept), strict=False):
        weight, bias = f"w{number}", f"b{number}"
        if needs_rows:
            transposed = getattr(weights, weight).to(rows.dtype).transpose(1, 2)
            part = grouped_linear(d_product, transposed, None, offsets)
            if grad_rows is None:
                grad_rows = part
            else:
                grad_rows = grad_rows + part
        if needed[weight]:
            by_weight[weight] = grouped_weight_grad(d_product, rows, offsets)
        if needed[bias]:
            by_weight[bias] = group_sum(d_product, offsets)
    gradients: list[Tensor | None] = [grad_rows]
    for name, weight in weights._asdict().items():
        gradient = by_weight.get(name)
        if gradient is not None:
            gradient = gradient.to(weight.dtype)
        gradients.append(gradient)
    return gradients


def _zeros(tensors: Sequence[Tensor | None], needs: list[bool]) -> list[Tensor | None]:
    """The gradients if there are no rows: zeros, or None where `needs` is False."""
    gradients: list[Tensor | None] = []
    for tensor, is_needed in zip(tensors, needs, strict=True):
        if tensor is not None and is_needed:
            gradients.append(torch.zeros_like(tensor))
        else:
            gradients.append(None)
    return gradients


def _activated(inputs: FFNInputs, kept: list[Tensor]) -> Tensor:
    """The hidden layer [N, H] from the products with w1 and, for gated experts, with w3."""
    out = torch.empty_like(kept[0])
    if inputs.w3 is None:
        return activate(inputs.activation, kept[0], out)
    return activate_gated(inputs.activation, kept[0], kept[1], out)


def _hidden_grads(inputs: FFNInputs, grad: Tensor, kept: list[Tensor]) -> list[Tensor]:
    """The gradients of `kept` from `grad`, the gradient of the hidden layer. Overwrites `grad`."""
    if inputs.w3 is None:
        return [activation_grad(inputs.activation, grad, kept[0])]
    grad_u = torch.empty_like(grad)
    gated_grads(inputs.activation, grad, kept[0], kept[1], grad_u)
    return [grad, grad_u]


def _drop(values: Tensor, inputs: FFNInputs) -> Tensor:
    if inputs.noise is None:
        return values
    dropout = Dropout.of(inputs.dropout)
    is_kept = inputs.noise.view_as(values) >= dropout.threshold
    return values * is_kept * dropout.scale


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """`rows_e @ weight[e]^T + bias[e]` for the rows of every expert e.

    rows [N, I], weight [E, O, I], bias [E, O] or None, offsets [E] -> [N, O].
    """
    num_rows, out_features = len(rows), weight.shape[1]
    out = F.grouped_mm(
        _aligned(rows), _aligned(weight, pad_rows=True).transpose(1, 2), offs=offsets
    )[:, :out_features]
    if bias is None:
        return out.contiguous()
    expert = torch.searchsorted(
        offsets, torch.arange(num_rows, device=rows.device, dtype=offsets.dtype), right=True
    )
    return out + bias.index_select(0, expert.clamp_(max=len(bias) - 1))


def grouped_weight_grad(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """`grad_e^T @ rows_e` for every expert e: [N, O], [N, I], [E] -> [E, O, I]."""
    out = _contracted(_aligned(grad), _aligned(rows), offsets)
    return out[:, : grad.shape[1], : rows.shape[1]].contiguous()


def group_sum(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, O] -> [E, O]: the sum over the rows of every expert.

    It is a product with ones, so sums are in fp32 and in a fixed order.
    """
    ones = rows.new_ones(len(rows), _ALIGNMENT // rows.element_size())
    return _contracted(_aligned(rows), ones, offsets)[:, : rows.shape[1], 0].contiguous()


def _contracted(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`a_e^T @ b_e` for every expert e: [N, O], [N, I] -> [E, O, I]."""
    out = F.grouped_mm(a.t(), b, offs=offsets)
    if a.is_cuda and torch.cuda.get_device_capability(a.device)[0] != 10:
        return out
    # On a B200 the result of a product over no rows is undefined: the kernel stores registers that
    # it has not initialised (NVIDIA/cutlass issue 2674).
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    return out.masked_fill_((sizes == 0).view(-1, 1, 1), 0)


def _aligned(x: Tensor, pad_rows: bool = False) -> Tensor:
    """x in a layout that F.grouped_mm accepts.

    One dimension has stride 1. The address and all other strides are multiples of 16 bytes.
    """
    unit = _ALIGNMENT // x.element_size()
    missing_columns = -x.shape[-1] % unit
    missing_rows = 0
    if pad_rows:
        missing_rows = -x.shape[-2] % unit
    if missing_columns > 0 or missing_rows > 0:
        return F.pad(x, (0, missing_columns, 0, missing_rows))
    on_unit = x.data_ptr() % _ALIGNMENT == 0 and all(s % unit == 0 for s in x.stride() if s != 1)
    # An expanded gradient is neither plain nor transposed.
    plain = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    transposed = x.stride(-2) == 1 and x.stride(-1) >= x.shape[-2]
    if on_unit and (plain or transposed):
        return x
    return x.clone(memory_format=torch.contiguous_format)
