"""Linear layers of all experts, one product for each expert. Reads the offsets on the host."""

# E experts, N rows, I input features, O output features

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.ops.ffn.inputs import check_offsets

_TILE = 16  # rows


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Apply the linear layer of each expert to its rows; 0 for rows of no expert.

    rows [N, I], weight [E, O, I], bias [E, O] or None, offsets [E] -> [N, O].
    """
    *parts, unused = _split(rows, offsets)
    biases: tuple[Tensor | None, ...] = (None,) * len(weight)
    if bias is not None:
        biases = bias.unbind()
    # Not weight[e], whose gradient would be a tensor of all experts.
    products = []
    for part, weight_of_expert, bias_of_expert in zip(parts, weight.unbind(), biases, strict=True):
        product = F.linear(_in_tiles(part), weight_of_expert, bias_of_expert)
        products.append(product[: len(part)])
    products.append(unused.new_zeros(len(unused), weight.shape[1]))
    return torch.cat(products)


def weight_grad(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of the weight: [N, O], [N, I], [E] -> [E, O, I]."""
    out = grad.new_empty(len(offsets), grad.shape[1], rows.shape[1])
    *parts, _ = _split(grad, offsets)
    *rows_of_experts, _ = _split(rows, offsets)
    for own_grad, own_rows, own_out in zip(parts, rows_of_experts, out, strict=True):
        torch.mm(_in_tiles(own_grad).t(), _in_tiles(own_rows), out=own_out)
    return out


def bias_grad(grad: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of the bias: [N, O], [E] -> [E, O]."""
    return torch.stack([part.sum(0) for part in _split(grad, offsets)[:-1]])


def _split(rows: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """The rows of each expert, then the rows of no expert."""
    ends = offsets.tolist()
    check_offsets(ends, len(rows))
    return rows.tensor_split(ends)


def _in_tiles(rows: Tensor) -> Tensor:
    """The rows, with zeros up to a multiple of `_TILE` for products of 16 bits on a CPU.

    oneDNN compiles a kernel for each new shape of them, which takes several times as long as a
    product of few rows. A tile of AMX has 16 rows and computes all of them in any case.
    """
    missing = -len(rows) % _TILE
    if missing == 0 or rows.dtype.itemsize != 2 or rows.device.type != "cpu":
        return rows
    return F.pad(rows, (0, 0, 0, missing))
