"""Launches the kernels of `triton_kernels`, for the forward and the backward pass."""

# T tokens, E experts, K top-k, N rows, B blocks of rows, M model dim, H hidden dim

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.ops.backend import KERNEL_ACTIVATIONS, on_device_of
from moe_core.ops.blocks import cdiv, next_power_of_2
from moe_core.ops.combine.triton import dispatch_rows, sum_rows
from moe_core.ops.ffn.dropout import Dropout
from moe_core.ops.ffn.inputs import ExpertWeights, MoEFFNInputs, by_name
from moe_core.ops.ffn.triton_kernels import (
    blocks_kernel,
    gate_grad_kernel,
    hidden_grad_kernel,
    hidden_kernel,
    model_kernel,
    sum_blocks_kernel,
    weight_grad_kernel,
)


class Tile(NamedTuple):
    """The tile [rows, columns] of a program. `depth` is the step in the contracted dimension."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tiles(rows_per_expert: float, width: int, shared_memory: int) -> tuple[Tile, Tile]:
    """The tiles of products with an activation, and the tiles of the other products.

    The first tile is small enough for two programs on a multiprocessor: one multiplies while the
    other computes its activation. The second tile needs less memory traffic for each product.

    Args:
        rows_per_expert: the mean number of rows of an expert.
        width: the number of columns of the output, M.
        shared_memory: bytes of shared memory that a program can use; 0 for fp32.
    """
    # The last tile of an expert is half empty on average. For example, 144 rows of an expert take
    # 256 rows of work with tiles of 128 rows, and 192 with tiles of 64 rows.
    rows = 64
    if rows_per_expert >= 192:
        rows = 128
    if shared_memory < 160_000:  # fp32, or not a data centre GPU
        warps = 4
        if shared_memory == 0:  # fp32: three products of TF32 do not fit the registers of 4 warps
            warps = 8
        tile = Tile(rows, 64 * 128 // rows, 32, warps, 3)
        return tile, tile
    small = Tile(rows, 128, 64, 8, 3)
    if width < 256:
        return small, small
    stages = 3
    if shared_memory >= 200_000:
        stages = 4
    return small, Tile(rows, 256, 64, 8, stages)


def forward(inputs: MoEFFNInputs) -> tuple[Tensor, Tensor]:
    """out [T, M] in the wider dtype of tokens and gates, and the kept hidden layer.

    With `inputs.keep_hidden`, the second result is the hidden layer [N, H] before the activation.
    For gated experts it is [2 N, H]: the products with w1, then those with w3.
    """
    with on_device_of(inputs.tokens):
        return _forward(inputs)


def backward(
    inputs: MoEFFNInputs, grad: Tensor, hidden: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of tokens, gates and the fields of ExpertWeights; None where `needs` is False.

    The gradients of weights have the dtype of the weights.
    """
    with on_device_of(inputs.tokens):
        return _backward(inputs, grad, hidden, needs)


def _forward(inputs: MoEFFNInputs) -> tuple[Tensor, Tensor]:
    call = _Launches(inputs)
    weights = inputs.cast_weights
    w1, b1, w2, b2, w3, b3 = weights
    h = call.tokens.new_empty(call.num_rows, call.hidden_dim)
    num_kept = weights.num_kept * call.num_rows if inputs.keep_hidden else 0
    hidden = call.tokens.new_empty(num_kept, call.hidden_dim)
    kept_hidden = None
    if inputs.keep_hidden:
        kept_hidden = hidden
    call.over_blocks(
        hidden_kernel,
        call.for_hidden,
        call.hidden_dim,
        (call.tokens, call.choices, call.blocks, w1, b1, w3, b3, inputs.seed, kept_hidden, h),
        (call.top_k, call.num_rows, *call.constants),
    )
    gates = _contiguous(inputs.gates)
    return call.to_tokens([(h, w2)], b2, gates, inputs.kept), hidden


def _backward(
    inputs: MoEFFNInputs, grad: Tensor, hidden: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    call = _Launches(inputs)
    needs_tokens, needs_gates, *rest = needs
    needed = by_name(rest)
    weights = inputs.cast_weights
    gates = _contiguous(inputs.gates)
    grad = dispatch_rows(grad, call.choices, call.top_k, call.tokens.dtype)  # [N, M]
    grad_z = torch.empty_like(hidden)
    weighted = None
    if needed["w2"]:
        weighted = call.tokens.new_empty(call.num_rows, call.hidden_dim)
    num_dots = cdiv(call.hidden_dim, call.small.columns)
    dots = call.new(needs_gates or needed["b2"], call.num_rows, num_dots)
    needs_sums = needed["b1"] or needed["b3"]
    sums = call.new(needs_sums, weights.num_kept, call.num_blocks, call.hidden_dim)
    results = (grad_z, weighted, dots, sums)
    call.over_blocks(
        hidden_grad_kernel,
        call.small,
        call.hidden_dim,
        (grad, call.choices, call.blocks, weights.w2, hidden, inputs.seed, gates, *results),
        (call.num_rows, inputs.w3 is not None, *call.constants),
        **call.hidden_grad_options,
    )
    by_weight: dict[str, Tensor] = {}
    if weighted is not None:
        by_weight["w2"] = call.weight_grad(weighted, grad, inputs.w1.dtype)
    del weighted, results
    grad_gates = None
    if dots is not None:
        if gates is not None:
            grad_gates = torch.zeros_like(gates)  # stays 0 for dropped choices
        bias_sums = call.new(needed["b2"], call.num_blocks, call.model_dim)
        call.gate_grad(grad, gates, weights.b2, dots, grad_gates, bias_sums)
        if bias_sums is not None and weights.b2 is not None:
            by_weight["b2"] = call.sum_blocks(bias_sums, weights.b2)
    halves = [(grad_z[: call.num_rows], weights.w1)]
    if weights.w3 is not None:
        halves.append((grad_z[call.num_rows :], weights.w3))
    rows = None
    if needed["w1"] or needed["w3"]:
        rows = dispatch_rows(call.tokens, call.choices, call.top_k)
    for i, (d_hidden, _) in enumerate(halves):
        weight, bias = ("w1", "b1") if i == 0 else ("w3", "b3")
        if rows is not None and needed[weight]:
            by_weight[weight] = call.weight_grad(d_hidden, rows, inputs.w1.dtype)
        if sums is not None and needed[bias]:
            by_weight[bias] = call.sum_blocks(sums[i], getattr(weights, bias))
    grad_tokens = None
    if needs_tokens:
        grad_tokens = call.to_tokens(halves, None, None, inputs.kept)
    if not needs_gates:
        grad_gates = None
    return [grad_tokens, grad_gates, *[by_weight.get(name) for name in ExpertWeights._fields]]


class _Launches:
    """The sizes and the blocks of rows of one call, and launches that both passes use."""

    def __init__(self, inputs: MoEFFNInputs) -> None:
        self.num_experts, self.hidden_dim, self.model_dim = inputs.w1.shape
        self.tokens = inputs.tokens.contiguous()
        self.choices = inputs.choices.contiguous()
        self.offsets = inputs.offsets.contiguous()
        self.slots = inputs.slots.contiguous()
        self.num_rows, self.top_k = self.choices.shape[0], self.slots.shape[1]
        rows_per_expert = self.num_rows / self.num_experts
        shared_memory = _shared_memory(self.tokens)
        self.small, self.large = tiles(rows_per_expert, self.model_dim, shared_memory)
        # A program of gated experts computes the same columns of both products.
        self.for_hidden = self.small
        if inputs.w3 is not None:
            self.for_hidden = self.small._replace(columns=self.small.columns // 2)
        # With at most 128 registers a thread, two programs of `hidden_grad_kernel` run on a
        # multiprocessor.
        self.hidden_grad_options = {}
        if shared_memory >= 160_000:
            self.hidden_grad_options["maxnreg"] = 128
        # The gradient of a weight contracts over rows, so a large tile wastes no work. Compiled for
        # an A100, which has less shared memory, the large one spills 4,000 bytes.
        self.for_weights, large = tiles(math.inf, self.model_dim, shared_memory)
        if shared_memory >= 200_000:
            self.for_weights = large
        dropout = Dropout.of(inputs.dropout)
        activation = KERNEL_ACTIVATIONS.index(inputs.activation)
        self.constants = (activation, dropout.threshold, dropout.scale)
        # An upper bound: full blocks, and at most one partial block for each expert.
        self.num_blocks = self.num_rows // self.small.rows + min(self.num_experts, self.num_rows)
        self.blocks = self.offsets.new_empty(3, self.num_blocks, dtype=torch.int32)
        if self.num_blocks:
            block_e = next_power_of_2(self.num_experts)
            blocks_kernel[(cdiv(self.num_blocks, 32),)](
                self.offsets,
                self.blocks,
                self.num_blocks,
                self.num_experts,
                self.small.rows,
                32,
                block_e,
            )

    def new(self, is_needed: bool, *shape: int) -> Tensor | None:
        """An uninitialised fp32 tensor for sums; None if it is not needed."""
        if not is_needed:
            return None
        return self.tokens.new_empty(shape, dtype=torch.float32)

    def over_blocks(
        self, kernel, tile: Tile, width: int, arguments: tuple, constants: tuple = (), **options
    ) -> None:
        """Launch a kernel with one program for each tile of each block."""
        if self.num_blocks == 0:
            return
        kernel[(self.num_blocks * cdiv(width, tile.columns),)](
            *arguments, self.num_blocks, self.model_dim, self.hidden_dim, *constants,
            tile.rows, tile.columns, tile.depth,
            num_warps=tile.warps, num_stages=tile.stages, **options,
        )  # fmt: skip

    def to_tokens(self, pairs: list[tuple[Tensor, Tensor]], bias, gates, kept) -> Tensor:
        """For each token [T, M], the sum of its rows of h w, weighted by the gates.

        Args:
            pairs: one or two pairs of h [N, H] and w [E, H, M]. Their products are added.
        """
        (h, w), (other_h, other_w) = pairs[0], (None, None)
        if len(pairs) == 2:
            other_h, other_w = pairs[1]
        if self.top_k > 1:
            rows = h.new_empty(self.num_rows, self.model_dim)
            to_rows = (h, self.blocks, w, other_h, other_w, bias, None, None, rows)
            self.over_blocks(model_kernel, self.large, self.model_dim, to_rows)
            return sum_rows(rows, self.slots, kept, gates)
        # A token has at most one row. The kernel multiplies it by the gate and writes it to the
        # token's position.
        dtype = h.dtype
        if gates is not None:
            dtype = torch.promote_types(dtype, gates.dtype)
        out = h.new_empty(self.slots.shape[0], self.model_dim, dtype=dtype)
        if kept is not None:
            out.zero_()
        to_places = (h, self.blocks, w, other_h, other_w, bias, self.choices, gates, out)
        self.over_blocks(model_kernel, self.large, self.model_dim, to_places)
        return out

    def weight_grad(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """[E, H, M]: for each expert, a^T b over its rows of a [N, H] and b [N, M]."""
        out = a.new_empty(self.num_experts, self.hidden_dim, self.model_dim, dtype=dtype)
        tile = self.for_weights
        lines, columns = tile.rows, tile.columns
        tiles_down = cdiv(self.hidden_dim, lines)
        tiles_across = cdiv(self.model_dim, columns)
        weight_grad_kernel[(self.num_experts * tiles_down * tiles_across,)](
            a, b, self.offsets, out, self.model_dim, self.hidden_dim,
            next_power_of_2(self.num_experts), lines, columns, tile.depth,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out

    def gate_grad(
        self, grad: Tensor, gates: Tensor | None, b2, dots: Tensor, grad_gates: Tensor | None, sums
    ) -> None:
        if self.num_blocks == 0:
            return
        num_dots = dots.shape[1]
        block_m = min(next_power_of_2(self.model_dim), 64)
        block_d = next_power_of_2(num_dots)
        gate_grad_kernel[(self.num_blocks,)](
            grad, self.choices, self.blocks, gates, b2, dots, grad_gates, sums, self.num_blocks,
            self.model_dim, num_dots, self.small.rows, block_m, block_d,
        )  # fmt: skip

    def sum_blocks(self, sums: Tensor, bias: Tensor) -> Tensor:
        """Add `sums` [B, width] over the blocks of each expert: [E, width], like `bias`."""
        out = torch.empty_like(bias, memory_format=torch.contiguous_format)
        width, block_m = bias.shape[1], 128
        block_e = next_power_of_2(self.num_experts)
        sum_blocks_kernel[(self.num_experts, cdiv(width, block_m))](
            sums, self.offsets, out, width, self.small.rows, block_e, 16, block_m
        )
        return out


def _contiguous(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return x.contiguous()


def _shared_memory(tokens: Tensor) -> int:
    """Bytes of shared memory that a program can use, for 16-bit tokens on a GPU; otherwise 0."""
    if not tokens.is_cuda or tokens.dtype == torch.float32:
        return 0
    properties = torch.cuda.get_device_properties(tokens.device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
