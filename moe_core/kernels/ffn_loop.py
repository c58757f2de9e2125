"""The experts' networks as a loop over the experts, for CPUs.

1. What one expert computes stays in the cache for its next product, and an expert without rows
   costs nothing.
2. Where the weights have another dtype than the rows (autocast), each is cast when its turn comes:
   a copy of all at once, and its gradient, would cost more than the products of few rows.
3. An expert's hidden layer lies transposed, [H, n]: four of the six products are faster so
   (docs/explanation/performance.md).
4. In half precision oneDNN compiles a kernel for each new shape, which takes several times as long
   as a product of few rows. So an expert computes on a multiple of `step` rows: its own and the
   first of the next ones, whose results are overwritten when their turn comes. Few shapes are left.
5. Everything large lies in buffers that are used again.
"""

# E experts, N rows, n rows of one expert rounded up, M model dim, H hidden dim

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.activations import activate, activation_grad
from moe_core.kernels.buffers import empty

# of an expert: below it writing a weight's fp32 gradient takes longer than its product in fp32
_FEW_ROWS = 64


def hidden_rows(num_rows, num_experts: int, dtype: torch.dtype):
    """Rows of the hidden layer as it is kept, at most: each expert's rounded up."""
    return num_rows + num_experts * (_step(dtype) - 1)


def _step(dtype: torch.dtype) -> int:
    # 16: of a tile in AMX, whose other rows would be computed in vain anyway
    return 16 if dtype.itemsize == 2 else 1


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
    """out [N, M] and, if it is kept, each expert's hidden layer [H, n] before the activation, one
    after the other."""
    groups = _Groups(rows, offsets, w1)
    drop, cast, h_buffer = _Dropout(noise, dropout, groups), _Cast(rows, w1), groups.hidden_buffer()
    out = groups.output()
    hidden = empty((groups.hidden_size if keep_hidden else 0,), rows.dtype, rows.device)
    w1, w2 = w1.unbind(), w2.unbind()
    b1, b2 = (None if b is None else b.to(rows.dtype) for b in (b1, b2))
    for group in groups:
        e, x = group.expert, groups.window(rows, group)
        h = group.block(h_buffer, 0)
        z = group.block(hidden) if keep_hidden else h
        _product(cast(w1[e]), x.t(), z, None if b1 is None else b1[e].unsqueeze(1))
        activate(activation, z, h)
        drop(h, group)
        _product(
            h.t(), cast(w2[e]), group.window_of(out), None if b2 is None else b2[e], drop.scale
        )
    if keep_hidden:
        hidden[groups.rows_computed * groups.hidden_dim :] = 0
    return groups.trimmed(out), hidden


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
    groups = _Groups(rows, offsets, w1)
    drop, cast = _Dropout(noise, dropout, groups), _Cast(rows, w1)
    h_buffer, dz_buffer = groups.hidden_buffer(), groups.hidden_buffer()
    grad_rows = groups.output() if needs[0] else None
    new = [
        empty(t.shape, t.dtype, t.device) if n else None
        for t, n in zip((w1, b1, w2, b2), needs[1:], strict=True)
    ]
    w1, w2 = w1.unbind(), w2.unbind()
    grad_w1, grad_b1, grad_w2, grad_b2 = (None if t is None else t.unbind() for t in new)
    for group in groups:
        e, z = group.expert, group.block(hidden)
        x, dy = groups.window(rows, group), groups.window(grad, group)
        if grad_w2 is not None:
            h = group.block(h_buffer, 0)
            activate(activation, z, h)
            drop(h, group)
            cast.product(group.without_others(h), dy, grad_w2[e], drop.scale)
        if grad_b2 is not None:
            torch.sum(grad[group.start : group.end], 0, dtype=grad_b2[e].dtype, out=grad_b2[e])
        dz = group.block(dz_buffer, 0)
        _product(cast(w2[e]), dy.t(), dz, scale=drop.scale)
        drop(dz, group)
        group.without_others(activation_grad(activation, dz, z))
        if grad_b1 is not None:
            torch.sum(dz, 1, dtype=grad_b1[e].dtype, out=grad_b1[e])
        if grad_w1 is not None:
            cast.product(dz, x, grad_w1[e])
        if grad_rows is not None:
            _product(dz.t(), cast(w1[e]), group.window_of(grad_rows))
    for gradient in new:
        for e in groups.unused if gradient is not None else ():
            gradient[e] = 0
    return [None if grad_rows is None else groups.trimmed(grad_rows), *new]


def _product(
    a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> None:
    """out = scale * a @ b + bias."""
    if bias is not None:
        torch.addmm(bias, a, b, alpha=scale, out=out)
    elif scale != 1:
        torch.addmm(out, a, b, beta=0, alpha=scale, out=out)
    else:
        torch.mm(a, b, out=out)


class _Group(NamedTuple):
    """One expert's rows, start to end. It computes on `size` rows from start; its hidden layer
    begins at `place`."""

    expert: int
    start: int
    end: int
    size: int
    place: int
    hidden_dim: int

    def block(self, flat: Tensor, place: int | None = None) -> Tensor:
        """[H, n], at this group's place or another one."""
        start = self.place if place is None else place
        return flat.narrow(0, start * self.hidden_dim, self.size * self.hidden_dim).view(
            self.hidden_dim, self.size
        )

    def window_of(self, out: Tensor) -> Tensor:
        """[n, M]."""
        return out.narrow(0, self.start, self.size)

    def without_others(self, hidden: Tensor) -> Tensor:
        """Zeros in [H, n] for the rows of other experts, over which a product is to sum."""
        if self.size > self.end - self.start:
            hidden[:, self.end - self.start :] = 0
        return hidden


class _Groups:
    """The experts that have rows, in their order."""

    def __init__(self, rows: Tensor, offsets: Tensor, weight: Tensor) -> None:
        num_experts, self.hidden_dim, _ = weight.shape
        ends, self.step = offsets.tolist(), _step(rows.dtype)
        self.rows, self.end, self.used, self.unused, place = rows, ends[-1], [], [], 0
        for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            size = -(-(end - start) // self.step) * self.step
            if size:
                self.used.append(_Group(e, start, end, size, place, self.hidden_dim))
            else:
                self.unused.append(e)
            place += size
        self.rows_computed = place
        self.largest = max((group.size for group in self.used), default=0)
        self.hidden_size = hidden_rows(len(rows), num_experts, rows.dtype) * self.hidden_dim

    def __iter__(self) -> Iterator[_Group]:
        return iter(self.used)

    def hidden_buffer(self) -> Tensor:
        """Room for any expert's hidden layer."""
        return empty((self.largest * self.hidden_dim,), self.rows.dtype, self.rows.device)

    def output(self) -> Tensor:
        """[N + step - 1, M], of which `trimmed` is the result."""
        return empty(
            (len(self.rows) + self.step - 1, self.rows.shape[1]), self.rows.dtype, self.rows.device
        )

    def trimmed(self, output: Tensor) -> Tensor:
        """[N, M], with zeros for rows of no expert."""
        output[self.end :] = 0
        return output[: len(self.rows)]

    def window(self, rows: Tensor, group: _Group) -> Tensor:
        """[n, M]: the group's rows and the next ones; zeros past the last expert's, where anything
        may lie."""
        if group.start + group.size <= self.end:
            return rows.narrow(0, group.start, group.size)
        padded = rows.new_zeros(group.size, rows.shape[1])
        padded[: self.end - group.start] = rows[group.start : self.end]
        return padded


class _Cast:
    """A weight in the rows' dtype, and a gradient back in the weight's; one buffer serves all
    experts in turn."""

    def __init__(self, rows: Tensor, weight: Tensor) -> None:
        self.same = rows.dtype == weight.dtype
        self.buffer = None if self.same else empty(weight.shape[1:], rows.dtype, rows.device)

    def __call__(self, weight: Tensor) -> Tensor:
        return weight if self.same else self.buffer.copy_(weight)

    def product(self, a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """out [H, M] = scale * a [H, n] @ b [n, M]."""
        if self.same or len(b) < _FEW_ROWS:
            _product(a.to(out.dtype), b.to(out.dtype), out, scale=scale)
        else:
            _product(a, b, self.buffer, scale=scale)
            out.copy_(self.buffer)


class _Dropout:
    """Zeros where the noise says so, alike in both directions; the others' `scale` is left to the
    next product."""

    def __init__(self, noise: Tensor | None, share: float, groups: _Groups) -> None:
        dropped = 0 if noise is None else min(round(share * 65536), 65535)
        self.noise, self.least, self.scale = noise, dropped - 32768, 65536 / (65536 - dropped)
        self.factors = None if noise is None else groups.hidden_buffer()

    def __call__(self, values: Tensor, group: _Group) -> None:
        if self.noise is not None:
            values.mul_(
                torch.ge(group.block(self.noise), self.least, out=group.block(self.factors, 0))
            )
