"""Triton kernels for the experts' networks on a GPU, from tokens to tokens. `triton`
launches them.

1. `blocks_kernel` cuts every expert's rows into blocks: no padding, and the host need not know
   their number.
2. `hidden_kernel`: gather, product with w1, bias, activation and dropout; of gated experts also the
   product with w3, of the same rows in the same program. `model_kernel`: product
   with w2, bias and, where a token has one row, the gate value and the way back to the token's
   place.
3. Backward, `hidden_grad_kernel`: gather of the output's gradient, product with w2, activation and
   slope, from the hidden layer before the activation, the one thing kept for each row. The gradient
   of a gate is the inner product of the hidden layer and its gradient, so the experts' output is
   not needed either (SonicMoE, arXiv 2512.14080). `weight_grad_kernel` contracts over an expert's
   rows, `model_kernel` gives the tokens' gradient.

Products of halves are summed in fp32. Those of fp32 are three TF32 products ("tf32x3"), on tensor
cores at nearly the accuracy of fp32. Every output element is written by one program, in a fixed
order of additions: nothing is atomic, so runs repeat bit by bit. Rows are counted in 64 bits: N * H
may exceed 2^31.
"""

# T tokens, E experts, K top-k, N rows, B blocks of rows, M model dim, H hidden dim

import triton
import triton.language as tl

from moe_core.ops.moe_ffn.triton_activations import activation, dropout_factors, gated_activation

# 1. Blocks of rows


@triton.jit(do_not_specialize=["num_blocks"])
def blocks_kernel(
    offsets, blocks, num_blocks, NUM_EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """blocks [3, B]: each one's expert, first row and the row behind its last; the two are 0 where
    there is none."""
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
    """`total` in fp32 plus a product from pointers to the first BLOCK_K of the contracted
    dimension; b's go on by STEP_B."""
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
    """source [T, M] at the tokens of the rows n, times w[expert] [H, M] transposed, at these
    columns of H."""
    k = tl.arange(0, BLOCK_K)
    token = tl.load(choices + n) // TOP_K
    a = source + token[:, None] * M + k[None, :]
    b = w + (expert * H + columns % H)[None, :] * M + k[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_COLUMNS], dtype=tl.float32)
    return _product(total, a, b, M, 1, BLOCK_K)


@triton.jit
def _two_gathered_products(
    source, choices, w1, w3, expert, n, columns, M: tl.constexpr, H: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """_gathered_product with w1 and with w3; source is read once."""
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


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def hidden_kernel(
    tokens, choices, blocks, w1, b1, w3, b3, seed, z, h, num_blocks, M: tl.constexpr,
    H: tl.constexpr, TOP_K: tl.constexpr, num_rows, ACTIVATION: tl.constexpr, LEAST: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """z [N, H], if it is wanted, before the activation, and h [N, H] after it. With w3, of gated
    experts, z [2 N, H] has the products with w1 and then those with w3."""
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
        # rounded first: the activation is that of what the backward pass will read
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


@triton.jit(do_not_specialize=["num_blocks"])
def model_kernel(
    h, blocks, w, other_h, other_w, bias, choices, gates, out, num_blocks, M: tl.constexpr,
    H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """h [N, H] times w [E, H, M], plus the other product if there is one, and the bias: out [N, M];
    or, with `choices`, at their places, with their gates."""
    tiles_of_block: tl.constexpr = (M + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    expert, start, end = _block(blocks, tl.program_id(0) // tiles_of_block, num_blocks)
    if start < end:
        n, columns = (
            start + tl.arange(0, BLOCK_N),
            tl.program_id(0) % tiles_of_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS),
        )
        k, row = tl.arange(0, BLOCK_K), tl.minimum(n, end - 1)
        cells = row[:, None] * H + k[None, :]
        # a remainder keeps columns out of bounds inside: of a minimum Triton does not know that 16
        # bytes lie together
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
    """A tile of the gradient of z, and the sum of its rows as those of a block."""
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
    """What hidden_grad_kernel writes for some columns, from the gradient of h; <h, its gradient> of
    each row."""
    cells, mask = n[:, None] * H + columns[None, :], in_range[:, None] & (columns < H)[None, :]
    first = tl.load(z + cells, mask=mask, other=0.0).to(tl.float32)
    second_start = num_rows.to(tl.int64) * H  # to the products with w3
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


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def hidden_grad_kernel(
    grad, choices, blocks, w2, z, seed, gates, grad_z, weighted, dots, sums, num_blocks,
    M: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr, num_rows, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """From the output's gradient [T, M]: that of z [N, H]; gate * h [N, H], which the gradient of
    w2 needs; for each row and tile <h, its gradient without the gate>; for each block the sum of
    its rows' gradients of z. Of gated experts z, its gradient and the sums have two parts, for w1
    and w3."""
    tiles_of_block: tl.constexpr = (H + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    block, tile = tl.program_id(0) // tiles_of_block, tl.program_id(0) % tiles_of_block
    expert, start, end = _block(blocks, block, num_blocks)
    if start < end:
        n = start + tl.arange(0, BLOCK_N)
        columns = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        row = tl.minimum(n, end - 1)
        grad_h = _gathered_product(
            grad, choices, w2, expert, row, columns, M, H, TOP_K, BLOCK_N, BLOCK_COLUMNS, BLOCK_K
        )
        gate = tl.full([BLOCK_N], 1.0, tl.float32)
        if gates is not None:
            gate = tl.load(gates + tl.load(choices + row)).to(tl.float32)
        # two halves, one after the other, to use fewer registers
        left, right = tl.split(
            tl.permute(tl.reshape(grad_h, (BLOCK_N, 2, BLOCK_COLUMNS // 2)), (0, 2, 1))
        )
        columns = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS // 2)
        dot = _slopes(
            left, block, n, n < end, columns, gate, z, seed, grad_z, weighted, sums, num_blocks,
            num_rows, H, GATED, ACTIVATION, LEAST, SCALE,
        )  # fmt: skip
        columns += BLOCK_COLUMNS // 2
        dot += _slopes(
            right, block, n, n < end, columns, gate, z, seed, grad_z, weighted, sums, num_blocks,
            num_rows, H, GATED, ACTIVATION, LEAST, SCALE,
        )  # fmt: skip
        if dots is not None:
            tl.store(dots + n * tiles_of_block + tile, dot, mask=n < end)


@triton.jit
def weight_grad_kernel(
    a, source, choices, offsets, out, M: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [E, H, M]: for each expert the product over its rows of a [N, H] and source [T, M] at
    their tokens."""
    columns: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    lines: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    expert = tl.program_id(0) // (lines * columns)
    h = tl.program_id(0) // columns % lines * BLOCK_H + tl.arange(0, BLOCK_H)
    m = tl.program_id(0) % columns * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets + e, mask=e <= expert, other=0).to(tl.int64)
    start, end = tl.max(tl.where(e < expert, ends, 0), 0), tl.max(ends, 0)
    total = tl.zeros([BLOCK_H, BLOCK_M], dtype=tl.float32)
    for first in range(start, end, BLOCK_K):
        n = first + tl.arange(0, BLOCK_K)
        in_range = (n < end)[:, None]
        token = tl.load(choices + n, mask=n < end, other=0) // TOP_K
        left = tl.load(a + n[:, None] * H + h[None, :], mask=in_range & (h < H)[None, :], other=0.0)
        right = tl.load(
            source + token[:, None] * M + m[None, :], mask=in_range & (m < M)[None, :], other=0.0
        )
        total = tl.dot(tl.trans(left), right, total, input_precision="tf32x3")
    cells = (expert.to(tl.int64) * H + h)[:, None] * M + m[None, :]
    tl.store(out + cells, total.to(out.dtype.element_ty), mask=(h < H)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def gate_grad_kernel(
    grad, choices, blocks, gates, b2, dots, grad_gates, sums, num_blocks, M: tl.constexpr,
    TOP_K: tl.constexpr, NUM_DOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of a block's rows: the gates' gradients, <h, its gradient> + <b2, output's gradient>; for b2
    the sum of gate * output's gradient."""
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
                values = tl.load(
                    grad + (choice // TOP_K)[:, None] * M + columns[None, :], mask=mask, other=0.0
                )
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


@triton.jit
def sum_blocks_kernel(
    sums, offsets, out, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """out [E, WIDTH]: of each expert's blocks the sum of sums [B, WIDTH]."""
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
