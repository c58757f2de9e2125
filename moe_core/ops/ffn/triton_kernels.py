"""Triton kernels of the experts' networks, including dispatch and combine. `triton` launches them.

1. `blocks_kernel` divides the rows of every expert into blocks. Rows are not padded, and the host
   does not need the number of rows of an expert.
2. Forward. `hidden_kernel` gathers tokens, multiplies by w1, adds the bias and applies activation
   and dropout. For gated experts, the same program also multiplies the same rows by w3.
   `model_kernel` multiplies by w2 and adds the bias. If a token has only one row, it also
   multiplies by the gate value and writes the result to the token's position.
3. Backward. The rows of the output's gradient are gathered first, because three kernels read them.
   `hidden_grad_kernel` multiplies them by w2 and computes the activation and its derivative. For
   this, only the hidden layer before the activation is kept. The gradient of a gate is the inner
   product of the hidden layer and its gradient, so the experts' output is not kept either
   (SonicMoE, arXiv 2512.14080). `weight_grad_kernel` computes the gradients of weights from
   gathered rows, `model_kernel` the gradient of the tokens.

Products of 16-bit numbers are summed in fp32. A product in fp32 is three TF32 products ("tf32x3")
on tensor cores, with nearly the accuracy of fp32. Every output element is written by one program,
in a fixed order of additions and without atomic operations, so runs repeat bit by bit. Offsets are
64-bit integers, because N * H may exceed 2^31.
"""

# T tokens, E experts, K top-k, N rows, B blocks of rows, M model dim, H hidden dim

import triton
import triton.language as tl

from moe_core.ops.ffn.triton_activations import activation, dropout_factors, gated_activation
from moe_core.ops.launch import recordable

# 1. Blocks of rows


@recordable
@triton.jit(do_not_specialize=["num_blocks"])
def blocks_kernel(
    offsets, blocks, num_blocks, NUM_EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write blocks [3, B]: the expert, the first row and the end of the rows of each block.

    First row and end are 0 for unused blocks.
    """
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets + e, mask=e < NUM_EXPERTS, other=0)
    starts = tl.load(offsets + e - 1, mask=(e > 0) & (e < NUM_EXPERTS), other=0)
    counts = tl.where(e < NUM_EXPERTS, (ends - starts + BLOCK_N - 1) // BLOCK_N, 0)
    behind = tl.cumsum(counts, 0)
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    expert = tl.sum(((behind[None, :] <= b[:, None]) & (e < NUM_EXPERTS)[None, :]).to(tl.int32), 1)
    its = e[None, :] == expert[:, None]
    first = tl.sum(tl.where(its, (behind - counts)[None, :], 0), 1)
    start = tl.sum(tl.where(its, starts[None, :], 0), 1) + (b - first) * BLOCK_N
    end = tl.minimum(start + BLOCK_N, tl.sum(tl.where(its, ends[None, :], 0), 1))
    in_range = expert < NUM_EXPERTS
    tl.store(blocks + b, tl.where(in_range, expert, 0), mask=b < num_blocks)
    tl.store(blocks + num_blocks + b, tl.where(in_range, start, 0), mask=b < num_blocks)
    tl.store(blocks + 2 * num_blocks + b, tl.where(in_range, end, 0), mask=b < num_blocks)


@triton.jit
def _block(blocks, block, num_blocks):
    expert = tl.load(blocks + block).to(tl.int64)
    start = tl.load(blocks + num_blocks + block).to(tl.int64)
    end = tl.load(blocks + 2 * num_blocks + block).to(tl.int64)
    return expert, start, end


# 2. Products


@triton.jit
def _product(
    total,
    a,
    b,
    DEPTH: tl.constexpr,
    STEP_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`total` in fp32 plus the product of the tiles that a and b point to.

    The pointers are for the first BLOCK_K of DEPTH in the contracted dimension. STEP_B is the
    stride of b in this dimension.
    """
    k = tl.arange(0, BLOCK_K)
    for start in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=(start + k < DEPTH)[None, :], other=0.0)
            right = tl.load(b, mask=(start + k < DEPTH)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
        a += BLOCK_K
        b += BLOCK_K * STEP_B
    return total


@triton.jit
def _gathered_product(
    source, choices, w, expert, n, columns, M: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The rows n of `source` times w[expert]^T [M, H], at `columns`.

    `source` is [N, M], or with `choices` [T, M], whose rows are gathered by token.
    """
    k = tl.arange(0, BLOCK_K)
    row = n
    if choices is not None:
        row = tl.load(choices + n) // TOP_K
    a = source + row[:, None] * M + k[None, :]
    b = w + (expert * H + columns % H)[None, :] * M + k[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_COLUMNS], dtype=tl.float32)
    return _product(total, a, b, M, 1, BLOCK_K)


@triton.jit
def _two_gathered_products(
    source, choices, w1, w3, expert, n, columns, M: tl.constexpr, H: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`_gathered_product` with w1 and with w3. `source` is read once."""
    k = tl.arange(0, BLOCK_K)
    token = tl.load(choices + n) // TOP_K
    a = source + token[:, None] * M + k[None, :]
    place = (expert * H + columns % H)[None, :] * M + k[:, None]
    first, second = w1 + place, w3 + place
    z = tl.zeros([BLOCK_N, BLOCK_COLUMNS], dtype=tl.float32)
    u = tl.zeros([BLOCK_N, BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(0, M, BLOCK_K):
        if M % BLOCK_K == 0:
            left, right, other = tl.load(a), tl.load(first), tl.load(second)
        else:
            left = tl.load(a, mask=(start + k < M)[None, :], other=0.0)
            right = tl.load(first, mask=(start + k < M)[:, None], other=0.0)
            other = tl.load(second, mask=(start + k < M)[:, None], other=0.0)
        z = tl.dot(left, right, z, input_precision="tf32x3")
        u = tl.dot(left, other, u, input_precision="tf32x3")
        a += BLOCK_K
        first += BLOCK_K
        second += BLOCK_K
    return z, u


@triton.jit
def _add_bias(value, bias, expert, columns, H: tl.constexpr):
    if bias is not None:
        numbers = tl.load(bias + expert * H + columns, mask=columns < H, other=0.0)
        value += numbers.to(tl.float32)[None, :]
    return value


@recordable
@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def hidden_kernel(
    tokens, choices, blocks, w1, b1, w3, b3, seed, z, h, num_blocks, M: tl.constexpr,
    H: tl.constexpr, TOP_K: tl.constexpr, num_rows, ACTIVATION: tl.constexpr, LEAST: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write h [N, H], the hidden layer, and optionally z [N, H], the values before the activation.

    For gated experts, which have w3, z is [2 N, H]: the products with w1, then those with w3.
    """
    tiles_of_block: tl.constexpr = (H + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    expert, start, end = _block(blocks, tl.program_id(0) // tiles_of_block, num_blocks)
    if start < end:
        n, columns = (
            start + tl.arange(0, BLOCK_N),
            tl.program_id(0) % tiles_of_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS),
        )
        row = tl.minimum(n, end - 1)
        other = None
        if w3 is None:
            value = _gathered_product(
                tokens, choices, w1, expert, row, columns, M, H, TOP_K, BLOCK_N, BLOCK_COLUMNS,
                BLOCK_K,
            )  # fmt: skip
        else:
            value, other = _two_gathered_products(
                tokens, choices, w1, w3, expert, row, columns, M, H, TOP_K, BLOCK_N, BLOCK_COLUMNS,
                BLOCK_K,
            )  # fmt: skip
        # Rounded first, so that the activation is computed from the value that the backward pass
        # reads.
        value = _add_bias(value, b1, expert, columns, H).to(h.dtype.element_ty)
        cells = n[:, None] * H + columns[None, :]
        mask = (n < end)[:, None] & (columns < H)[None, :]
        if z is not None:
            tl.store(z + cells, value, mask=mask)
        if other is None:
            value, _ = activation(value.to(tl.float32), ACTIVATION)
        else:
            other = _add_bias(other, b3, expert, columns, H).to(h.dtype.element_ty)
            if z is not None:
                tl.store(z + num_rows.to(tl.int64) * H + cells, other, mask=mask)
            value, _, _ = gated_activation(value.to(tl.float32), other.to(tl.float32), ACTIVATION)
        if seed is not None:
            value *= dropout_factors(seed, n, columns, LEAST, SCALE)
        tl.store(h + cells, value.to(h.dtype.element_ty), mask=mask)


@recordable
@triton.jit(do_not_specialize=["num_blocks"])
def model_kernel(
    h, blocks, w, other_h, other_w, bias, choices, gates, out, num_blocks, M: tl.constexpr,
    H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [N, M] = h [N, H] times w [E, H, M], plus the bias and, if given, the other product.

    With `choices`, row n is multiplied by the gate of its choice and written to row choices[n].
    """
    tiles_of_block: tl.constexpr = (M + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    expert, start, end = _block(blocks, tl.program_id(0) // tiles_of_block, num_blocks)
    if start < end:
        n, columns = (
            start + tl.arange(0, BLOCK_N),
            tl.program_id(0) % tiles_of_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS),
        )
        k, row = tl.arange(0, BLOCK_K), tl.minimum(n, end - 1)
        cells = row[:, None] * H + k[None, :]
        # The remainder keeps columns within bounds. With a minimum instead, Triton would not know
        # that 16 bytes are contiguous.
        of_weight = expert * H * M + k[:, None] * M + (columns % M)[None, :]
        value = tl.zeros([BLOCK_N, BLOCK_COLUMNS], dtype=tl.float32)
        value = _product(value, h + cells, w + of_weight, H, M, BLOCK_K)
        if other_h is not None:
            value = _product(value, other_h + cells, other_w + of_weight, H, M, BLOCK_K)
        value = _add_bias(value, bias, expert, columns, M)
        place = n
        if choices is not None:
            place = tl.load(choices + row)
            if gates is not None:
                value *= tl.load(gates + place).to(tl.float32)[:, None]
        mask = (n < end)[:, None] & (columns < M)[None, :]
        tl.store(
            out + place[:, None] * M + columns[None, :], value.to(out.dtype.element_ty), mask=mask
        )


# 3. The backward pass


@triton.jit
def _store_gradient(gradient, place, sums, block, cells, mask, columns, H: tl.constexpr):
    """Store a tile of the gradient of z, and the sum over its rows in `sums` of the block."""
    tl.store(place + cells, gradient.to(place.dtype.element_ty), mask=mask)
    if sums is not None:
        total = tl.sum(tl.where(mask, gradient, 0.0), 0)
        tl.store(sums + block.to(tl.int64) * H + columns, total, mask=columns < H)


@triton.jit
def _slopes(
    grad_h, block, n, in_range, columns, gate, z, seed, grad_z, weighted, sums, num_blocks,
    num_rows,
    H: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, LEAST: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Compute and store the results of `hidden_grad_kernel` for some columns, from `grad_h`.

    Returns the inner product of h and `grad_h` for each row.
    """
    cells, mask = n[:, None] * H + columns[None, :], in_range[:, None] & (columns < H)[None, :]
    first = tl.load(z + cells, mask=mask, other=0.0).to(tl.float32)
    second_start = num_rows.to(tl.int64) * H  # start of the products with w3
    if GATED:
        second = tl.load(z + second_start + cells, mask=mask, other=0.0).to(tl.float32)
        value, slope, slope_u = gated_activation(first, second, ACTIVATION)
    else:
        value, slope = activation(first, ACTIVATION)
    if seed is not None:
        kept = dropout_factors(seed, n, columns, LEAST, SCALE)
        value *= kept
        slope *= kept
        if GATED:
            slope_u *= kept
    dot = tl.sum(tl.where(mask, value * grad_h, 0.0), 1)
    if weighted is not None:
        numbers = (value * gate[:, None]).to(weighted.dtype.element_ty)
        tl.store(weighted + cells, numbers, mask=mask)
    grad_h *= gate[:, None]
    _store_gradient(slope * grad_h, grad_z, sums, block, cells, mask, columns, H)
    if GATED:
        other_sums = sums
        if sums is not None:
            other_sums = sums + num_blocks.to(tl.int64) * H
        grad_u = grad_z + second_start
        _store_gradient(slope_u * grad_h, grad_u, other_sums, block, cells, mask, columns, H)
    return dot


@triton.jit
def _halves(x, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right half of the columns of x [BLOCK_N, WIDTH]."""
    return tl.split(tl.permute(tl.reshape(x, (BLOCK_N, 2, WIDTH // 2)), (0, 2, 1)))


@recordable
@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def hidden_grad_kernel(
    grad, choices, blocks, w2, z, seed, gates, grad_z, weighted, dots, sums, num_blocks,
    M: tl.constexpr, H: tl.constexpr, num_rows, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    LEAST: tl.constexpr, SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute from `grad` [N, M], the rows of the gradient of the output:

    - grad_z [N, H]: the gradient of z;
    - weighted [N, H]: gate * h, for the gradient of w2;
    - dots: for each row and tile, the inner product of h and its gradient without the gate;
    - sums: for each block, the sum of grad_z over its rows.

    For gated experts z, grad_z and sums have two parts, for w1 and w3.
    """
    tiles_of_block: tl.constexpr = (H + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    block, tile = tl.program_id(0) // tiles_of_block, tl.program_id(0) % tiles_of_block
    expert, start, end = _block(blocks, block, num_blocks)
    if start < end:
        n = start + tl.arange(0, BLOCK_N)
        columns = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        row = tl.minimum(n, end - 1)
        grad_h = _gathered_product(
            grad, None, w2, expert, row, columns, M, H, 1, BLOCK_N, BLOCK_COLUMNS, BLOCK_K
        )
        gate = tl.full([BLOCK_N], 1.0, tl.float32)
        if gates is not None:
            gate = tl.load(gates + tl.load(choices + row)).to(tl.float32)
        # Four parts are computed one after the other, to use fewer registers.
        left, right = _halves(grad_h, BLOCK_N, BLOCK_COLUMNS)
        parts = _halves(left, BLOCK_N, BLOCK_COLUMNS // 2)
        parts = parts + _halves(right, BLOCK_N, BLOCK_COLUMNS // 2)
        width: tl.constexpr = BLOCK_COLUMNS // 4
        dot = tl.zeros([BLOCK_N], dtype=tl.float32)
        for i in tl.static_range(4):
            columns = tile * BLOCK_COLUMNS + i * width + tl.arange(0, width)
            dot += _slopes(
                parts[i], block, n, n < end, columns, gate, z, seed, grad_z, weighted, sums,
                num_blocks, num_rows, H, GATED, ACTIVATION, LEAST, SCALE,
            )  # fmt: skip
        if dots is not None:
            tl.store(dots + n * tiles_of_block + tile, dot, mask=n < end)


@recordable
@triton.jit
def weight_grad_kernel(
    a, b, offsets, out, M: tl.constexpr, H: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [E, H, M]: for each expert, the product of its rows of a [N, H] and b [N, M], a^T b."""
    columns: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    lines: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    expert = tl.program_id(0) // (lines * columns)
    h = tl.program_id(0) // columns % lines * BLOCK_H + tl.arange(0, BLOCK_H)
    m = tl.program_id(0) % columns * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets + e, mask=e <= expert, other=0).to(tl.int64)
    start, end = tl.max(tl.where(e < expert, ends, 0), 0), tl.max(ends, 0)
    n = start + tl.arange(0, BLOCK_K)
    # See `model_kernel` for the remainders.
    left = a + n[:, None] * H + (h % H)[None, :]
    right = b + n[:, None] * M + (m % M)[None, :]
    total = tl.zeros([BLOCK_H, BLOCK_M], dtype=tl.float32)
    # Without masks the loads of full steps are prefetched more than one step ahead.
    full_steps = (end - start) // BLOCK_K
    for _ in range(full_steps):
        total = tl.dot(tl.trans(tl.load(left)), tl.load(right), total, input_precision="tf32x3")
        left += BLOCK_K * H
        right += BLOCK_K * M
    n += full_steps * BLOCK_K
    if start + full_steps * BLOCK_K < end:
        in_range = (n < end)[:, None]
        last_left = tl.load(left, mask=in_range, other=0.0)
        last_right = tl.load(right, mask=in_range, other=0.0)
        total = tl.dot(tl.trans(last_left), last_right, total, input_precision="tf32x3")
    cells = (expert.to(tl.int64) * H + h)[:, None] * M + m[None, :]
    tl.store(out + cells, total.to(out.dtype.element_ty), mask=(h < H)[:, None] & (m < M)[None, :])


@recordable
@triton.jit(do_not_specialize=["num_blocks"])
def gate_grad_kernel(
    grad, choices, blocks, gates, b2, dots, grad_gates, sums, num_blocks, M: tl.constexpr,
    NUM_DOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the gates for the rows of a block, and the block's sums for b2.

    The gradient of a gate is the inner product of h and its gradient (`dots`), plus that of b2 and
    the output's gradient. `sums` are sums of the output's gradient multiplied by the gate.
    """
    block = tl.program_id(0)
    expert, start, end = _block(blocks, block, num_blocks)
    if start < end:
        n, d = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        in_range = n < end
        choice = tl.load(choices + n, mask=in_range, other=0)
        gate = tl.where(in_range, 1.0, 0.0)
        if gates is not None:
            gate = tl.load(gates + choice, mask=in_range, other=0.0).to(tl.float32)
        cells = n[:, None] * NUM_DOTS + d[None, :]
        dot = tl.sum(
            tl.load(dots + cells, mask=in_range[:, None] & (d < NUM_DOTS)[None, :], other=0.0), 1
        )
        if b2 is not None:
            for first in range(0, M, BLOCK_M):
                columns = first + tl.arange(0, BLOCK_M)
                mask = in_range[:, None] & (columns < M)[None, :]
                values = tl.load(grad + n[:, None] * M + columns[None, :], mask=mask, other=0.0)
                values = values.to(tl.float32)
                bias = tl.load(b2 + expert * M + columns, mask=columns < M, other=0.0).to(
                    tl.float32
                )
                dot += tl.sum(values * bias[None, :], 1)
                if sums is not None:
                    total = tl.sum(values * gate[:, None], 0)
                    tl.store(sums + block.to(tl.int64) * M + columns, total, mask=columns < M)
        if grad_gates is not None:
            tl.store(grad_gates + choice, dot.to(grad_gates.dtype.element_ty), mask=in_range)


@recordable
@triton.jit
def sum_blocks_kernel(
    sums, offsets, out, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """out [E, WIDTH]: the sum of `sums` [B, WIDTH] over the blocks of each expert."""
    expert, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    ends = tl.load(offsets + e, mask=e <= expert, other=0)
    starts = tl.load(offsets + e - 1, mask=(e > 0) & (e <= expert), other=0)
    counts = ((ends - starts + BLOCK_N - 1) // BLOCK_N).to(tl.int64)
    behind, mine = tl.sum(counts, 0), tl.sum(tl.where(e == expert, counts, 0), 0)
    total = tl.zeros([BLOCK_B, BLOCK_M], dtype=tl.float32)
    for first in range(behind - mine, behind, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        mask = (b < behind)[:, None] & (columns < WIDTH)[None, :]
        total += tl.load(sums + b[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    cells = expert.to(tl.int64) * WIDTH + columns
    tl.store(out + cells, tl.sum(total, 0).to(out.dtype.element_ty), mask=columns < WIDTH)
