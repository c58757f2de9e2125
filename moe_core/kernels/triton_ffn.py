"""Launches the experts' networks on a GPU (`triton_ffn_kernels`), in both directions; `fused_ffn`
has the op."""

# T tokens, E experts, K top-k, N rows, B blocks of rows, M model dim, H hidden dim

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from moe_core.kernels.backend import on_its_device
from moe_core.kernels.triton_ffn_kernels import (
    ACTIVATIONS,
    blocks_kernel,
    gate_grad_kernel,
    hidden_grad_kernel,
    hidden_kernel,
    model_kernel,
    sum_blocks_kernel,
    weight_grad_kernel,
)
from moe_core.kernels.triton_rows import sum_rows


class Tile(NamedTuple):
    """What a program computes at a time: rows x columns, `depth` of the contracted dimension in
    each step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tiles(rows_per_expert: float, width: int, shared_memory: int) -> tuple[Tile, Tile]:
    """For products that end in an activation and for the others, given the bytes of shared memory
    for a program.

    The first leaves room for a second program on a multiprocessor, which multiplies while one
    computes its activation. The second reads less for each product.
    """
    rows = 128 if rows_per_expert > 64 else 64
    if shared_memory < 160_000:  # fp32, or not a data centre's GPU
        tile = Tile(rows, 128 if rows == 64 else 64, 32, 4, 3)
        return tile, tile
    small = Tile(rows, 128, 64, 8, 3)
    return small, Tile(rows, 256, 64, 8, 3) if width >= 256 else small


@on_its_device
def forward(
    tokens: Tensor, gates: Tensor, w1: Tensor, b1, w2: Tensor, b2, choices: Tensor,
    offsets: Tensor, slots: Tensor,
    kept, noise, activation: str, dropout: float, keep_hidden: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [T, M] in the wider dtype of tokens and gates, and, if it is kept, the hidden layer [N,
    H] before activation.

    w1 and w2 [E, H, M] in the tokens' dtype.
    """
    call = _Call(tokens, w1, choices, offsets, slots, activation, dropout)
    w1, b1, w2, b2, gates = map(_contiguous, (w1, b1, w2, b2, gates))
    hidden, h = (
        tokens.new_empty(call.num_rows if wanted else 0, call.hidden_dim)
        for wanted in (keep_hidden, True)
    )
    call.over_blocks(
        hidden_kernel, call.small, call.hidden_dim,
        (call.tokens, call.choices, call.blocks, w1, b1, noise, hidden if keep_hidden else None, h),
        TOP_K=call.top_k, **call.activation,
    )  # fmt: skip
    return call.to_tokens(h, w2, b2, gates, kept), hidden


@on_its_device
def backward(
    grad: Tensor, tokens: Tensor, gates: Tensor, hidden: Tensor, w1: Tensor, b1, w2: Tensor, b2,
    choices: Tensor,
    offsets: Tensor, slots: Tensor, kept, noise, activation: str, dropout: float,
    weight_dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of tokens, gates, w1, b1, w2 and b2, None where `needs` is False; those of weights
    in their dtype."""
    call = _Call(tokens, w1, choices, offsets, slots, activation, dropout)
    needs_tokens, needs_gates, needs_w1, needs_b1, needs_w2, needs_b2 = needs
    w1, b1, w2, b2, gates, grad = map(_contiguous, (w1, b1, w2, b2, gates, grad.to(tokens.dtype)))
    grad_z, num_dots = torch.empty_like(hidden), triton.cdiv(call.hidden_dim, call.small.columns)
    gated = torch.empty_like(hidden) if needs_w2 else None
    dots = call.new(needs_gates or needs_b2, call.num_rows, num_dots)
    sums = call.new(needs_b1, call.num_blocks, call.hidden_dim)
    call.over_blocks(
        hidden_grad_kernel, call.small, call.hidden_dim,
        (grad, call.choices, call.blocks, w2, hidden, noise, gates, grad_z, gated, dots, sums),
        TOP_K=call.top_k, **call.activation,
    )  # fmt: skip
    found: list[Tensor | None] = 6 * [None]
    if needs_w2:
        found[4] = call.weight_grad(gated, grad, weight_dtype)
    del gated
    if needs_b1:
        found[3] = call.sum_blocks(sums, b1)
    if needs_gates or needs_b2:
        grad_gates = torch.zeros_like(gates)  # dropped choices keep the 0
        sums = call.new(needs_b2, call.num_blocks, call.model_dim)
        call.gate_grad(grad, gates, b2, dots, grad_gates, sums)
        found[1] = grad_gates if needs_gates else None
        found[5] = call.sum_blocks(sums, b2) if needs_b2 else None
    if needs_w1:
        found[2] = call.weight_grad(grad_z, call.tokens, weight_dtype)
    if needs_tokens:
        found[0] = call.to_tokens(grad_z, w1, None, None, kept)
    return found


class _Call:
    """One call's sizes, its blocks of rows, and the launches that both directions share."""

    def __init__(
        self, tokens: Tensor, w1: Tensor, choices, offsets, slots, activation: str, dropout: float
    ) -> None:
        self.num_experts, self.hidden_dim, self.model_dim = w1.shape
        self.tokens, self.choices, self.offsets, self.slots = map(
            _contiguous, (tokens, choices, offsets, slots)
        )
        self.num_rows, self.top_k = len(choices), slots.shape[1]
        shared_memory = 0
        if tokens.is_cuda and tokens.dtype != torch.float32:
            shared_memory = torch.cuda.get_device_properties(
                tokens.device
            ).shared_memory_per_block_optin
        tile = tiles(self.num_rows / self.num_experts, self.model_dim, shared_memory)
        self.small, self.large = tile
        dropped = min(round(dropout * 65536), 65535)
        self.activation = {
            "ACTIVATION": ACTIVATIONS.index(activation),
            "LEAST": dropped - 32768,
            "SCALE": 65536 / (65536 - dropped),
        }
        # every expert may begin a block, and every row is in one
        self.num_blocks = self.num_rows // self.small.rows + min(self.num_experts, self.num_rows)
        self.blocks = offsets.new_empty(3, self.num_blocks, dtype=torch.int32)
        if self.num_blocks:
            block_e = triton.next_power_of_2(self.num_experts)
            size = (self.small.rows, 32, block_e)
            blocks_kernel[(triton.cdiv(self.num_blocks, 32),)](
                self.offsets, self.blocks, self.num_blocks, self.num_experts, *size
            )

    def new(self, wanted: bool, *shape: int) -> Tensor | None:
        return self.tokens.new_empty(shape, dtype=torch.float32) if wanted else None

    def over_blocks(self, kernel, tile: Tile, width: int, arguments: tuple, **constants) -> None:
        """A program for each tile of each block."""
        if self.num_blocks:
            kernel[(self.num_blocks * triton.cdiv(width, tile.columns),)](
                *arguments, self.num_blocks, self.model_dim, self.hidden_dim, **constants,
                BLOCK_N=tile.rows, BLOCK_K=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
                **{"BLOCK_M" if kernel is model_kernel else "BLOCK_H": tile.columns},
            )  # fmt: skip

    def to_tokens(self, h: Tensor, w: Tensor, bias, gates, kept) -> Tensor:
        """h [N, H] times w [E, H, M], summed for each token with its gates: [T, M]."""
        dtype = h.dtype if gates is None else torch.promote_types(h.dtype, gates.dtype)
        alone = self.top_k == 1  # a token has one row at most: it goes where it belongs
        num_out, out_dtype = (len(self.slots), dtype) if alone else (self.num_rows, h.dtype)
        new = torch.zeros if alone and kept is not None else torch.empty
        out = new(num_out, self.model_dim, dtype=out_dtype, device=h.device)
        places = (self.choices, gates) if alone else (None, None)
        self.over_blocks(
            model_kernel, self.large, self.model_dim, (h, self.blocks, w, bias, *places, out)
        )
        return out if alone else sum_rows(out, self.slots, kept, gates)

    def weight_grad(self, a: Tensor, source: Tensor, dtype: torch.dtype) -> Tensor:
        """For each expert a^T [H, n] times its rows of source [T, M]: [E, H, M]."""
        out = a.new_empty(self.num_experts, self.hidden_dim, self.model_dim, dtype=dtype)
        lines, columns = min(self.large.rows, 128), self.large.columns
        grid = (
            self.num_experts
            * triton.cdiv(self.hidden_dim, lines)
            * triton.cdiv(self.model_dim, columns)
        )
        weight_grad_kernel[(grid,)](
            a, source, self.choices, self.offsets, out, self.model_dim, self.hidden_dim, self.top_k,
            triton.next_power_of_2(self.num_experts), lines, columns, self.large.depth,
            num_warps=self.large.warps, num_stages=self.large.stages,
        )  # fmt: skip
        return out

    def gate_grad(
        self, grad: Tensor, gates: Tensor, b2, dots: Tensor, grad_gates: Tensor, sums
    ) -> None:
        if self.num_blocks:
            block_m, block_d = (
                min(triton.next_power_of_2(self.model_dim), 64),
                triton.next_power_of_2(dots.shape[1]),
            )
            gate_grad_kernel[(self.num_blocks,)](
                grad, self.choices, self.blocks, gates, b2, dots, grad_gates, sums,
                self.num_blocks, self.model_dim,
                self.top_k, dots.shape[1], self.small.rows, block_m, block_d,
            )  # fmt: skip

    def sum_blocks(self, sums: Tensor, bias: Tensor) -> Tensor:
        """Of each expert's blocks the sum of sums [B, width]: like `bias` [E, width]."""
        out, block_m = torch.empty_like(bias, memory_format=torch.contiguous_format), 128
        grid = (self.num_experts, triton.cdiv(bias.shape[1], block_m))
        size = (self.small.rows, triton.next_power_of_2(self.num_experts), 16, block_m)
        sum_blocks_kernel[grid](sums, self.offsets, out, bias.shape[1], *size)
        return out


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
