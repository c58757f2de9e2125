"""The experts' networks as a loop over the experts, for CPUs.

1. The result of an expert's product stays in the cache for the expert's next product. An expert
   without rows costs nothing.
2. If the weights have another dtype than the rows (autocast), each expert's weight is cast just
   before it is used. A cast of all weights and gradients at once would take longer than the
   products of few rows.
3. An expert's hidden layer is stored transposed, [H, n]. Four of the six products are then faster
   (docs/explanation/performance.md).
4. In half precision oneDNN compiles a kernel for each new shape, which takes several times as long
   as a product of few rows. To limit the number of shapes, an expert computes a multiple of `step`
   rows: its own rows and the first rows of the next experts. The results of the additional rows
   are overwritten when the next experts are computed.
5. Large tensors are in buffers that are reused.
"""

# E experts, N rows, n rows of one expert rounded up, M model dim, H hidden dim

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.activations import activate, activate_gated, activation_grad, gated_grads
from moe_core.ops.buffers import empty
from moe_core.ops.ffn.dropout import Dropout
from moe_core.ops.ffn.inputs import FFNInputs

# For fewer rows of an expert, a weight's gradient is faster to compute in fp32 than to cast.
_FEW_ROWS = 64


def hidden_rows(num_rows, num_experts: int, dtype: torch.dtype):
    """The largest number of rows of the kept hidden layers. Each expert's rows are rounded up."""
    return num_rows + num_experts * (_step(dtype) - 1)


def _step(dtype: torch.dtype) -> int:
    # 16 rows are a tile of AMX, which computes all its rows in any case.
    if dtype.itemsize == 2:
        return 16
    return 1


def forward(inputs: FFNInputs, keep_hidden: bool) -> tuple[Tensor, Tensor]:
    """out [N, M] and, with `keep_hidden`, the hidden layers of all experts before the activation.

    The hidden layers [H, n] are stored one after the other. For gated experts, the products of all
    experts with w1 come first, then the products of all experts with w3.
    """
    rows, activation = inputs.rows, inputs.activation
    groups = _Groups(rows, inputs.offsets, inputs.w1)
    dropout = _GroupDropout(inputs, groups)
    cast = _Cast(rows, inputs.w1)
    h_buffer = groups.hidden_buffer()
    u_buffer = h_buffer
    if inputs.w3 is not None and not keep_hidden:
        u_buffer = groups.hidden_buffer()
    out = groups.output()
    kept_size = groups.hidden_size * inputs.num_kept if keep_hidden else 0
    hidden = empty((kept_size,), rows.dtype, rows.device)
    b1, b2, b3 = [_cast_bias(b, rows.dtype) for b in (inputs.b1, inputs.b2, inputs.b3)]
    for group in groups:
        e = group.expert
        x = groups.window(rows, group)
        h = group.block(h_buffer, 0)
        z = group.block(hidden) if keep_hidden else h
        _product(cast(inputs.w1[e]), x.t(), z, _column(b1, e))
        if inputs.w3 is None:
            activate(activation, z, h)
        else:
            u = groups.second_block(hidden, group) if keep_hidden else group.block(u_buffer, 0)
            _product(cast(inputs.w3[e]), x.t(), u, _column(b3, e))
            activate_gated(activation, z, u, h)
        dropout(h, group)
        bias = None
        if b2 is not None:
            bias = b2[e]
        _product(h.t(), cast(inputs.w2[e]), group.window_of(out), bias, dropout.scale)
    if keep_hidden:
        hidden.view(inputs.num_kept, -1)[:, groups.rows_computed * groups.hidden_dim :] = 0
    return groups.trimmed(out), hidden


def backward(
    inputs: FFNInputs, grad: Tensor, hidden: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of the rows and of the fields of ExpertWeights; None where `needs` is False."""
    rows, activation = inputs.rows, inputs.activation
    groups = _Groups(rows, inputs.offsets, inputs.w1)
    dropout = _GroupDropout(inputs, groups)
    cast = _Cast(rows, inputs.w1)
    h_buffer, dz_buffer = groups.hidden_buffer(), groups.hidden_buffer()
    grad_rows = None
    if needs[0]:
        grad_rows = groups.output()
    gradients: list[Tensor | None] = []
    for parameter, is_needed in zip(inputs.weights, needs[1:], strict=True):
        if is_needed and parameter is not None:
            gradients.append(empty(parameter.shape, parameter.dtype, parameter.device))
        else:
            gradients.append(None)
    grad_w1, grad_b1, grad_w2, grad_b2, grad_w3, grad_b3 = gradients
    for group in groups:
        e = group.expert
        z, u = group.block(hidden), None
        if inputs.w3 is not None:
            u = groups.second_block(hidden, group)
        x, dy = groups.window(rows, group), groups.window(grad, group)
        if grad_w2 is not None:
            h = group.block(h_buffer, 0)
            if u is None:
                activate(activation, z, h)
            else:
                activate_gated(activation, z, u, h)
            dropout(h, group)
            cast.product(group.without_others(h), dy, grad_w2[e], dropout.scale)
        if grad_b2 is not None:
            torch.sum(grad[group.start : group.end], 0, dtype=grad_b2.dtype, out=grad_b2[e])
        dz = group.block(dz_buffer, 0)
        _product(cast(inputs.w2[e]), dy.t(), dz, scale=dropout.scale)
        dropout(dz, group)
        products = [(dz, inputs.w1, grad_w1, grad_b1)]
        if u is None or inputs.w3 is None:
            activation_grad(activation, dz, z)
        else:
            du = group.block(h_buffer, 0)
            gated_grads(activation, dz, z, u, du)
            products.append((du, inputs.w3, grad_w3, grad_b3))
        for number, (d_hidden, weight, grad_weight, grad_bias) in enumerate(products):
            group.without_others(d_hidden)
            if grad_bias is not None:
                torch.sum(d_hidden, 1, dtype=grad_bias.dtype, out=grad_bias[e])
            if grad_weight is not None:
                cast.product(d_hidden, x, grad_weight[e])
            if grad_rows is not None:
                d_rows = group.window_of(grad_rows)
                _product(d_hidden.t(), cast(weight[e]), d_rows, add=number > 0)
    for gradient in gradients:
        if gradient is not None:
            for e in groups.unused:
                gradient[e] = 0
    if grad_rows is not None:
        grad_rows = groups.trimmed(grad_rows)
    return [grad_rows] + gradients


def _cast_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if bias is None:
        return None
    return bias.to(dtype)


def _column(bias: Tensor | None, expert: int) -> Tensor | None:
    """The bias of an expert as a column [H, 1]."""
    if bias is None:
        return None
    return bias[expert].unsqueeze(1)


def _product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    add: bool = False,
) -> None:
    """out = scale * a @ b + bias; with `add`, out += scale * a @ b."""
    if add:
        out.addmm_(a, b, alpha=scale)
    elif bias is not None:
        torch.addmm(bias, a, b, alpha=scale, out=out)
    elif scale != 1:
        torch.addmm(out, a, b, beta=0, alpha=scale, out=out)
    else:
        torch.mm(a, b, out=out)


class _Group(NamedTuple):
    """The rows of one expert, from `start` to `end`.

    The expert computes `size` rows from `start`. Its hidden layer begins at row `place` of the kept
    hidden layers.
    """

    expert: int
    start: int
    end: int
    size: int
    place: int
    hidden_dim: int

    def block(self, flat: Tensor, place: int | None = None) -> Tensor:
        """A view [H, n] of `flat` at `place`; None: at the place of this group."""
        start = self.place if place is None else place
        return flat.narrow(0, start * self.hidden_dim, self.size * self.hidden_dim).view(
            self.hidden_dim, self.size
        )

    def window_of(self, out: Tensor) -> Tensor:
        """The rows [n, M] of `out` that this group computes."""
        return out.narrow(0, self.start, self.size)

    def without_others(self, hidden: Tensor) -> Tensor:
        """Set the rows of other experts in `hidden` [H, n] to 0, so that a sum excludes them."""
        if self.size > self.end - self.start:
            hidden[:, self.end - self.start :] = 0
        return hidden


class _Groups:
    """The groups of the experts that have rows, in the order of the experts."""

    def __init__(self, rows: Tensor, offsets: Tensor, weight: Tensor) -> None:
        num_experts, self.hidden_dim, _ = weight.shape
        ends = offsets.tolist()
        self.rows, self.end, self.step = rows, ends[-1], _step(rows.dtype)
        self.used: list[_Group] = []
        self.unused: list[int] = []
        start = place = 0
        for e, end in enumerate(ends):
            num_steps = math.ceil((end - start) / self.step)
            size = num_steps * self.step
            if size > 0:
                self.used.append(_Group(e, start, end, size, place, self.hidden_dim))
            else:
                self.unused.append(e)
            place += size
            start = end
        self.rows_computed = place
        self.largest = max((group.size for group in self.used), default=0)
        self.hidden_size = hidden_rows(len(rows), num_experts, rows.dtype) * self.hidden_dim

    def __iter__(self) -> Iterator[_Group]:
        return iter(self.used)

    def hidden_buffer(self) -> Tensor:
        """A buffer that is large enough for any expert's hidden layer."""
        return empty((self.largest * self.hidden_dim,), self.rows.dtype, self.rows.device)

    def second_block(self, hidden: Tensor, group: _Group) -> Tensor:
        """The kept product [H, n] of a group with w3. They follow all products with w1."""
        return group.block(hidden[self.hidden_size :])

    def output(self) -> Tensor:
        """An uninitialised output [N + step - 1, M]. `trimmed` returns the result from it."""
        return empty(
            (len(self.rows) + self.step - 1, self.rows.shape[1]), self.rows.dtype, self.rows.device
        )

    def trimmed(self, output: Tensor) -> Tensor:
        """The first N rows of `output`, with zeros for rows that belong to no expert."""
        output[self.end :] = 0
        return output[: len(self.rows)]

    def window(self, rows: Tensor, group: _Group) -> Tensor:
        """[n, M]: the rows of the group and the next rows.

        Rows after the last expert's rows are undefined, so zeros replace them.
        """
        if group.start + group.size <= self.end:
            return rows.narrow(0, group.start, group.size)
        padded = rows.new_zeros(group.size, rows.shape[1])
        padded[: self.end - group.start] = rows[group.start : self.end]
        return padded


class _Cast:
    """Casts a weight to the dtype of the rows, and a gradient to the dtype of the weight.

    All experts use the same buffer, one after the other.
    """

    def __init__(self, rows: Tensor, weight: Tensor) -> None:
        self.buffer: Tensor | None = None  # None: the dtypes are the same
        if rows.dtype != weight.dtype:
            self.buffer = empty(weight.shape[1:], rows.dtype, rows.device)

    def __call__(self, weight: Tensor) -> Tensor:
        if self.buffer is None:
            return weight
        return self.buffer.copy_(weight)

    def product(self, a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """out [H, M] = scale * a [H, n] @ b [n, M]."""
        if self.buffer is None or len(b) < _FEW_ROWS:
            _product(a.to(out.dtype), b.to(out.dtype), out, scale=scale)
        else:
            _product(a, b, self.buffer, scale=scale)
            out.copy_(self.buffer)


class _GroupDropout:
    """Sets dropped activations to zero. The next product must apply `scale`."""

    def __init__(self, inputs: FFNInputs, groups: _Groups) -> None:
        self.noise, self.scale = inputs.noise, 1.0
        if inputs.noise is not None:
            self.threshold, self.scale = Dropout.of(inputs.dropout)
            self.factors = groups.hidden_buffer()

    def __call__(self, values: Tensor, group: _Group) -> None:
        if self.noise is None:
            return
        # The noise of the expert's own rows: its place must not depend on the dtype's rounding.
        hidden_dim, num_rows = len(values), group.end - group.start
        noise = self.noise[group.start * hidden_dim : group.end * hidden_dim]
        factors = self.factors[: noise.numel()].view(hidden_dim, num_rows)
        torch.ge(noise.view(hidden_dim, num_rows), self.threshold, out=factors)
        values[:, :num_rows].mul_(factors)
