"""Linear layers of all experts with torch.nn.functional.grouped_mm, for GPUs in bf16.

grouped_mm accepts neither a bias nor strides that are not multiples of 16 bytes, and it has no sum
over rows. The functions here add these. It has kernels for the compute capabilities in
`CAPABILITIES`. On other GPUs it is a loop that reads the offsets on the host (torch 2.11).
"""

# E experts, N rows, I input features, O output features

import torch
import torch.nn.functional as F
from torch import Tensor

CAPABILITIES = ((9, 0), (10, 0))  # for which F.grouped_mm has kernels
_ALIGNMENT = 16  # bytes; F.grouped_mm needs row strides that are multiples of it


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """`rows_e @ weight[e]^T + bias[e]` for the rows of every expert e.

    rows [N, I], weight [E, O, I], bias [E, O] or None, offsets [E] -> [N, O].
    """
    num_rows, out_features = len(rows), weight.shape[1]
    if num_rows == 0:  # F.grouped_mm needs at least one row
        return rows.new_empty(0, out_features)
    out = F.grouped_mm(
        _aligned(rows), _aligned(weight, pad_rows=True).transpose(1, 2), offs=offsets
    )[:, :out_features]
    if bias is None:
        return out.contiguous()
    expert = torch.searchsorted(
        offsets, torch.arange(num_rows, device=rows.device, dtype=offsets.dtype), right=True
    )
    return out + bias.index_select(0, expert.clamp_(max=len(bias) - 1))


def weight_grad(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """`grad_e^T @ rows_e` for every expert e: [N, O], [N, I], [E] -> [E, O, I]."""
    if len(rows) == 0:
        return rows.new_zeros(len(offsets), grad.shape[1], rows.shape[1])
    out = _contracted(_aligned(grad), _aligned(rows), offsets)
    return out[:, : grad.shape[1], : rows.shape[1]].contiguous()


def bias_grad(grad: Tensor, offsets: Tensor) -> Tensor:
    """The sum over the rows of every expert: [N, O], [E] -> [E, O].

    It is a product with ones, so sums are in fp32 and in a fixed order.
    """
    if len(grad) == 0:
        return grad.new_zeros(len(offsets), grad.shape[1])
    ones = grad.new_ones(len(grad), _ALIGNMENT // grad.element_size())
    return _contracted(_aligned(grad), ones, offsets)[:, : grad.shape[1], 0].contiguous()


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
