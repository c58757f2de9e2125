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

_ALIGNMENT = 16  # bytes: F.grouped_mm takes no row stride that is not a multiple of it


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
    """out [N, M] and, if it is kept, the hidden layer before the activation [N * H]."""
    if not len(rows):  # F.grouped_mm wants some
        return rows.new_empty(rows.shape), rows.new_empty(0)
    w1, b1, w2, b2 = (None if t is None else t.to(rows.dtype) for t in (w1, b1, w2, b2))
    z = grouped_linear(rows, w1, b1, offsets)  # [N, H]
    h = _dropped(activate(activation, z, torch.empty_like(z)), noise, dropout)
    out = grouped_linear(h, w2.transpose(1, 2), b2, offsets)
    return out, z.flatten() if keep_hidden else z.new_empty(0)


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
    activation: str,
    dropout: float,
    needs: list[bool],
) -> list[Tensor | None]:
    """Gradients of rows, w1, b1, w2 and b2; None where `needs` is False."""
    if not len(rows):
        return [
            torch.zeros_like(t) if need else None
            for t, need in zip((rows, w1, b1, w2, b2), needs, strict=True)
        ]
    needs_rows, needs_w1, needs_b1, needs_w2, needs_b2 = needs
    dtype, z = rows.dtype, hidden.view(len(rows), -1)
    grad_w2 = None
    if needs_w2:
        h = _dropped(activate(activation, z, torch.empty_like(z)), noise, dropout)
        grad_w2 = grouped_weight_grad(h, grad, offsets).to(w2.dtype)
    dz = _dropped(grouped_linear(grad, w2.to(dtype), None, offsets), noise, dropout)
    dz = activation_grad(activation, dz, z)
    return [
        grouped_linear(dz, w1.to(dtype).transpose(1, 2), None, offsets) if needs_rows else None,
        grouped_weight_grad(dz, rows, offsets).to(w1.dtype) if needs_w1 else None,
        group_sum(dz, offsets).to(b1.dtype) if needs_b1 else None,
        grad_w2,
        group_sum(grad, offsets).to(b2.dtype) if needs_b2 else None,
    ]


def _dropped(values: Tensor, noise: Tensor | None, share: float) -> Tensor:
    if noise is None:
        return values
    dropped = min(round(share * 65536), 65535)
    kept = noise.view_as(values) >= dropped - 32768
    return values * kept * (65536 / (65536 - dropped))


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
    return out.masked_fill_((offsets.diff(prepend=offsets.new_zeros(1)) == 0).view(-1, 1, 1), 0)


def _aligned(x: Tensor, pad_rows: bool = False) -> Tensor:
    """x as F.grouped_mm wants it: one dense dimension, its start and all other strides on multiples
    of 16 bytes."""
    unit = _ALIGNMENT // x.element_size()
    columns, rows = -x.shape[-1] % unit, -x.shape[-2] % unit if pad_rows else 0
    if columns or rows:
        return F.pad(x, (0, columns, 0, rows))
    on_unit = x.data_ptr() % _ALIGNMENT == 0 and all(s % unit == 0 for s in x.stride() if s != 1)
    # an expanded gradient is neither of the two
    plain = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    transposed = x.stride(-2) == 1 and x.stride(-1) >= x.shape[-2]
    return (
        x if on_unit and (plain or transposed) else x.clone(memory_format=torch.contiguous_format)
    )
