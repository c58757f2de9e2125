"""The experts' networks by torch.nn.functional.grouped_mm, for GPUs in bf16; runs wherever that
does.

Wrapped: it takes neither a bias nor strides that are not multiples of 16 bytes, and does not sum.
Its kernels are for compute capability 9.0 and 10.0; on other GPUs it is a loop that reads the
offsets back to the host (torch 2.11).
"""

# E experts, N rows, I input features, O output features, M model dim, H hidden dim

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.activations import activate, activation_grad
from moe_core.ops.ffn.dropout import Dropout
from moe_core.ops.ffn.inputs import FFNInputs

_ALIGNMENT = 16  # bytes: F.grouped_mm takes no row stride that is not a multiple of it


def hidden_rows(num_rows, num_experts: int, dtype: torch.dtype):
    """Rows of the hidden layer as it is kept."""
    return num_rows


def forward(inputs: FFNInputs, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    """out [N, M] and, if it is kept, the hidden layer before the activation [N * H]."""
    rows, offsets = inputs.rows, inputs.offsets
    if len(rows) == 0:  # F.grouped_mm needs some
        return rows.new_empty(rows.shape), rows.new_empty(0)
    w1, w2 = inputs.w1.to(rows.dtype), inputs.w2.to(rows.dtype)
    b1 = None
    if inputs.b1 is not None:
        b1 = inputs.b1.to(rows.dtype)
    b2 = None
    if inputs.b2 is not None:
        b2 = inputs.b2.to(rows.dtype)
    z = grouped_linear(rows, w1, b1, offsets)  # [N, H]
    h = _drop(activate(inputs.activation, z, torch.empty_like(z)), inputs)
    out = grouped_linear(h, w2.transpose(1, 2), b2, offsets)
    if keep_hidden:
        return out, z.flatten()
    return out, z.new_empty(0)


def backward(
    inputs: FFNInputs, grad: Tensor, hidden: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of rows, w1, b1, w2 and b2; None where `needs` is False."""
    rows, w1, b1, w2, b2 = inputs[:5]
    offsets, activation = inputs.offsets, inputs.activation
    if len(rows) == 0:
        return [
            torch.zeros_like(tensor) if is_needed and tensor is not None else None
            for tensor, is_needed in zip((rows, w1, b1, w2, b2), needs, strict=True)
        ]
    needs_rows, needs_w1, needs_b1, needs_w2, needs_b2 = needs
    z = hidden.view(len(rows), -1)
    gradients: list[Tensor | None] = [None] * 5
    if needs_w2:
        h = _drop(activate(activation, z, torch.empty_like(z)), inputs)
        gradients[3] = grouped_weight_grad(h, grad, offsets).to(w2.dtype)
    dz = _drop(grouped_linear(grad, w2.to(rows.dtype), None, offsets), inputs)
    dz = activation_grad(activation, dz, z)
    if needs_rows:
        transposed = w1.to(rows.dtype).transpose(1, 2)
        gradients[0] = grouped_linear(dz, transposed, None, offsets)
    if needs_w1:
        gradients[1] = grouped_weight_grad(dz, rows, offsets).to(w1.dtype)
    if needs_b1 and b1 is not None:
        gradients[2] = group_sum(dz, offsets).to(b1.dtype)
    if needs_b2 and b2 is not None:
        gradients[4] = group_sum(grad, offsets).to(b2.dtype)
    return gradients


def _drop(values: Tensor, inputs: FFNInputs) -> Tensor:
    if inputs.noise is None:
        return values
    dropout = Dropout.of(inputs.dropout)
    is_kept = inputs.noise.view_as(values) >= dropout.threshold
    return values * is_kept * dropout.scale


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """`rows_e @ weight[e]^T + bias[e]` for every expert's rows: [N, I], [E, O, I], [E, O] or None,
    [E] -> [N, O]."""
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
    """`grad_e^T @ rows_e` for every expert: [N, O], [N, I], [E] -> [E, O, I]."""
    out = _contracted(_aligned(grad), _aligned(rows), offsets)
    return out[:, : grad.shape[1], : rows.shape[1]].contiguous()


def group_sum(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, O] -> [E, O]: the sum over every expert's rows, by a product with ones: in fp32 and
    a fixed order."""
    ones = rows.new_ones(len(rows), _ALIGNMENT // rows.element_size())
    return _contracted(_aligned(rows), ones, offsets)[:, : rows.shape[1], 0].contiguous()


def _contracted(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`a_e^T @ b_e` for every expert: [N, O], [N, I] -> [E, O, I]."""
    out = F.grouped_mm(a.t(), b, offs=offsets)
    if a.is_cuda and torch.cuda.get_device_capability(a.device)[0] != 10:
        return out
    # On a B200 a product over no rows is what its registers held before (NVIDIA/cutlass issue
    # 2674).
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    return out.masked_fill_((sizes == 0).view(-1, 1, 1), 0)


def _aligned(x: Tensor, pad_rows: bool = False) -> Tensor:
    """x as F.grouped_mm wants it: one dense dimension, its start and all other strides on multiples
    of 16 bytes."""
    unit = _ALIGNMENT // x.element_size()
    missing_columns = -x.shape[-1] % unit
    missing_rows = 0
    if pad_rows:
        missing_rows = -x.shape[-2] % unit
    if missing_columns > 0 or missing_rows > 0:
        return F.pad(x, (0, missing_columns, 0, missing_rows))
    on_unit = x.data_ptr() % _ALIGNMENT == 0 and all(s % unit == 0 for s in x.stride() if s != 1)
    # an expanded gradient is neither of the two
    plain = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    transposed = x.stride(-2) == 1 and x.stride(-1) >= x.shape[-2]
    if on_unit and (plain or transposed):
        return x
    return x.clone(memory_format=torch.contiguous_format)
