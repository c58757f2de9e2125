"""Triton kernels of `window_attention`. The op itself is in `window_attention.py`.

1. A program handles an outer block of a window's queries (or keys), for one head and for one split
   of the windows. It goes through the windows of its split one by one. Meanwhile its part of the
   position bias stays in the L1 cache, and the gradient of that part in registers.
2. The last block of a window may be smaller: the power of two (>= 16) that holds the rest. For
   example, 144 tokens are blocks of 64 + 64 + 16.
3. The backward pass has two kernels. The first one has an outer block of queries and computes the
   gradients of queries, position bias and scale. The second one has an outer block of keys and
   computes the gradients of keys and values. Both recompute the probabilities from the log-sum-exp
   of the forward pass.
4. Each split writes the gradient of the bias to its own buffer. The buffers are summed afterwards.
   There are no atomic operations, so runs repeat bit by bit.

Matrix products read tiles in the dtype of qkv and accumulate in fp32. All else is in fp32. Loops
over windows set `disable_licm` (no loop-invariant code motion), because registers are scarce.

Source: FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

# B images, W masks of an image's windows, N tokens of a window, h heads, D channels of a head
# qkv [B*W, N, 3, h, D]

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.ops.launch import recordable

# Tokens of an outer block. This is the number of rows of a WGMMA, Hopper's matrix product of four
# warps.
_OUTER = 64
# One stage: with prefetching, the bias would be read from the L2 cache at each window.
_OPTIONS = {"num_warps": 4, "num_stages": 1}
_PROGRAMS = 1024  # four waves of two programs on each multiprocessor of a large GPU
_LOG2E = tl.constexpr(1.4426950408889634)
_EPS = tl.constexpr(1e-12)  # as in F.normalize


# 1. Tiles


@triton.jit
def _tokens(j: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """The tokens of block j."""
    if j < N // BLOCK:
        return j * BLOCK + tl.arange(0, BLOCK)
    else:
        return j * BLOCK + tl.arange(0, TAIL)


@triton.jit
def _vectors(start, stride, tokens, N: tl.constexpr, D: tl.constexpr):
    """Load vectors [len(tokens), D]; 0 past the window's end."""
    return tl.load(
        start + tokens[:, None] * stride + tl.arange(0, D)[None, :],
        mask=(tokens < N)[:, None],
        other=0.0,
    )


@triton.jit
def _store(start, stride, tokens, values, N: tl.constexpr, D: tl.constexpr):
    pointers = start + tokens[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(pointers, values.to(start.dtype.element_ty), mask=(tokens < N)[:, None])


@triton.jit
def _pairs(table, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, N: tl.constexpr):
    """Load [len(left), len(right)] from a table [N, N] with these strides. Entries past its edges
    are -inf, which gives a probability of 0."""
    inside = (left < N)[:, None] & (right < N)[None, :]
    return tl.load(
        table + left[:, None] * LEFT + right[None, :] * RIGHT, mask=inside, other=float("-inf")
    )


@triton.jit
def _unit(vectors, COSINE: tl.constexpr):
    """The rows, scaled to unit length with COSINE and unchanged otherwise; and the scale
    factors."""
    wide = vectors.to(tl.float32)
    if COSINE:
        inverse = 1 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), _EPS)
        return (wide * inverse[:, None]).to(vectors.dtype), inverse
    else:
        return vectors, tl.sum(wide, 1)  # the second value is not used


@triton.jit
def _unit_grad(grad, along, unit, inverse, COSINE: tl.constexpr):
    """The gradient of `_unit`'s input.

    `grad` is the gradient of its output `unit`, `along` the dot product of both for each row.
    """
    if COSINE:
        # A row shorter than _EPS is divided by the constant _EPS.
        along = tl.where(inverse < 1 / _EPS, along, 0.0)
        return (grad - along[:, None] * unit) * inverse[:, None]
    else:
        return grad


@triton.jit
def _scores(
    left, right, scale, bias, mask, left_tokens, right_tokens,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Scores [len(left), len(right)] times log2(e), the argument of exp2."""
    offset = _pairs(bias, left_tokens, right_tokens, LEFT, RIGHT, N).to(tl.float32)
    if mask is not None:
        offset += _pairs(mask, left_tokens, right_tokens, LEFT, RIGHT, N)
    product = tl.dot(left, tl.trans(right), input_precision="ieee")
    return product * (scale * _LOG2E) + offset * _LOG2E


@triton.jit
def _split(num_windows):
    """The range of steps [first, end) of this program."""
    steps = tl.cdiv(num_windows, tl.num_programs(2))
    first = tl.program_id(2) * steps
    return first, tl.minimum(first + steps, num_windows)


@triton.jit
def _window(step, num_windows, num_masks):
    """The window of a step and the index of its mask.

    Windows with the same mask follow each other, so that the mask stays in the L1 cache.
    """
    images = num_windows // num_masks
    mask_index = step // images
    window = (step % images) * num_masks + mask_index
    return window.to(tl.int64), mask_index.to(tl.int64)


# 2. Forward


@triton.jit
def _forward_rows(
    qkv, bias, mask, scale, out, lse, num_windows, num_masks, N: tl.constexpr, HEADS,
    D: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    OUTER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * OUTER + tl.arange(0, ROWS)
    head_scale = tl.load(scale + head)
    head_bias = bias + head * (N * N)
    WIDTH = HEADS * D
    first, end = _split(num_windows)
    for step in tl.range(first, end, disable_licm=True):
        window, mask_index = _window(step, num_windows, num_masks)
        start = qkv + window * (N * 3 * WIDTH) + head * D
        window_mask = None if mask is None else mask + mask_index * (N * N)
        q, _ = _unit(_vectors(start, 3 * WIDTH, rows, N, D), COSINE)
        # Finite, because the mask may be -inf for all keys of a block.
        maximum = tl.full([ROWS], -1e30, dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        values = tl.zeros([ROWS, D], dtype=tl.float32)
        for j in tl.static_range((N + BLOCK - 1) // BLOCK):
            keys = _tokens(j, N, BLOCK, TAIL)
            k, _ = _unit(_vectors(start + WIDTH, 3 * WIDTH, keys, N, D), COSINE)
            v = _vectors(start + 2 * WIDTH, 3 * WIDTH, keys, N, D)
            scores = _scores(q, k, head_scale, head_bias, window_mask, rows, keys, N, 1, N)
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            p = tl.exp2(scores - new_maximum[:, None])
            rescale = tl.exp2(maximum - new_maximum)
            total = total * rescale + tl.sum(p, 1)
            values = tl.dot(p.to(v.dtype), v, values * rescale[:, None], input_precision="ieee")
            maximum = new_maximum
        _store(out + window * (N * WIDTH) + head * D, WIDTH, rows, values / total[:, None], N, D)
        lse_pointers = lse + (window * HEADS + head) * N + rows
        tl.store(lse_pointers, (maximum + tl.log2(total)) / _LOG2E, mask=rows < N)


@recordable
@triton.jit(do_not_specialize=["num_windows", "num_masks", "HEADS"])
def _forward_kernel(
    qkv, bias, mask, scale, out, lse, num_windows, num_masks, N: tl.constexpr, HEADS,
    D: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    OUTER: tl.constexpr, OUTER_TAIL: tl.constexpr,
):  # fmt: skip
    if OUTER_TAIL == OUTER or tl.program_id(0) < N // OUTER:
        _forward_rows(
            qkv, bias, mask, scale, out, lse, num_windows, num_masks, N, HEADS, D, COSINE,
            BLOCK, TAIL, OUTER, OUTER,
        )  # fmt: skip
    else:
        _forward_rows(
            qkv, bias, mask, scale, out, lse, num_windows, num_masks, N, HEADS, D, COSINE,
            BLOCK, TAIL, OUTER, OUTER_TAIL,
        )  # fmt: skip


# 3. Backward


@triton.jit
def _backward_queries(
    qkv, bias, mask, scale, out, lse, grad, delta, grad_qkv, grad_bias, grad_scale, num_windows,
    num_masks, N: tl.constexpr, HEADS, D: tl.constexpr, COSINE: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, and this split's gradients of the position bias and the scale.

    Also writes `delta` [B*W, h, N], the sum of grad * out over channels, for the second kernel.
    """
    head = tl.program_id(1)
    rows = tl.program_id(0) * OUTER + tl.arange(0, ROWS)
    head_scale = tl.load(scale + head)
    head_bias = bias + head * (N * N)
    WIDTH = HEADS * D
    grad_biases = ()
    for j in tl.static_range((N + BLOCK - 1) // BLOCK):
        grad_biases = grad_biases + (  # type: ignore[assignment]  # the loop is unrolled
            tl.zeros([ROWS, BLOCK if j < N // BLOCK else TAIL], dtype=tl.float32),
        )
    scale_grads = tl.zeros([ROWS], dtype=tl.float32)
    first, end = _split(num_windows)
    for step in tl.range(first, end, disable_licm=True):
        window, mask_index = _window(step, num_windows, num_masks)
        start = window * (N * 3 * WIDTH) + head * D
        start_out = window * (N * WIDTH) + head * D
        row_offsets = (window * HEADS + head) * N + rows
        window_mask = None if mask is None else mask + mask_index * (N * N)
        q, inverse = _unit(_vectors(qkv + start, 3 * WIDTH, rows, N, D), COSINE)
        grads = _vectors(grad + start_out, WIDTH, rows, N, D)
        outputs = _vectors(out + start_out, WIDTH, rows, N, D)
        deltas = tl.sum(grads.to(tl.float32) * outputs.to(tl.float32), 1)
        tl.store(delta + row_offsets, deltas, mask=rows < N)
        log2_sum = tl.load(lse + row_offsets, mask=rows < N, other=0.0) * _LOG2E
        total = tl.zeros([ROWS, D], dtype=tl.float32)
        new_grad_biases = ()
        for j in tl.static_range((N + BLOCK - 1) // BLOCK):
            keys = _tokens(j, N, BLOCK, TAIL)
            k, _ = _unit(_vectors(qkv + start + WIDTH, 3 * WIDTH, keys, N, D), COSINE)
            v = _vectors(qkv + start + 2 * WIDTH, 3 * WIDTH, keys, N, D)
            scores = _scores(q, k, head_scale, head_bias, window_mask, rows, keys, N, 1, N)
            p = tl.exp2(scores - log2_sum[:, None])
            grad_scores = p * (tl.dot(grads, tl.trans(v), input_precision="ieee") - deltas[:, None])
            new_grad_biases = new_grad_biases + (grad_biases[j] + grad_scores,)  # type: ignore[assignment]
            total = tl.dot(grad_scores.to(k.dtype), k, total, input_precision="ieee")
        grad_biases = new_grad_biases
        along = tl.sum(total * q, 1)
        scale_grads += along
        grad_q = _unit_grad(total, along, q, inverse, COSINE) * head_scale
        _store(grad_qkv + start, 3 * WIDTH, rows, grad_q, N, D)
    split = tl.program_id(2)
    for j in tl.static_range((N + BLOCK - 1) // BLOCK):
        keys = _tokens(j, N, BLOCK, TAIL)
        pointers = grad_bias + (split * HEADS + head) * N * N + rows[:, None] * N + keys[None, :]
        tl.store(pointers, grad_biases[j], mask=(rows < N)[:, None] & (keys < N)[None, :])
    scale_row = split * tl.num_programs(0) + tl.program_id(0)
    tl.store(grad_scale + scale_row * HEADS + head, tl.sum(scale_grads, 0))


@recordable
@triton.jit(do_not_specialize=["num_windows", "num_masks", "HEADS"])
def _backward_queries_kernel(
    qkv, bias, mask, scale, out, lse, grad, delta, grad_qkv, grad_bias, grad_scale, num_windows,
    num_masks, N: tl.constexpr, HEADS, D: tl.constexpr, COSINE: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, OUTER: tl.constexpr, OUTER_TAIL: tl.constexpr,
):  # fmt: skip
    if OUTER_TAIL == OUTER or tl.program_id(0) < N // OUTER:
        _backward_queries(
            qkv, bias, mask, scale, out, lse, grad, delta, grad_qkv, grad_bias, grad_scale,
            num_windows, num_masks, N, HEADS, D, COSINE, BLOCK, TAIL, OUTER, OUTER,
        )  # fmt: skip
    else:
        _backward_queries(
            qkv, bias, mask, scale, out, lse, grad, delta, grad_qkv, grad_bias, grad_scale,
            num_windows, num_masks, N, HEADS, D, COSINE, BLOCK, TAIL, OUTER, OUTER_TAIL,
        )  # fmt: skip


@triton.jit
def _backward_keys(
    qkv, bias, mask, scale, lse, grad, delta, grad_qkv, num_windows, num_masks, N: tl.constexpr,
    HEADS, D: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, OUTER: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values.

    Tiles are [keys, rows], so that the probabilities are the left factor of a product.
    """
    head = tl.program_id(1)
    keys = tl.program_id(0) * OUTER + tl.arange(0, KEYS)
    head_scale = tl.load(scale + head)
    head_bias = bias + head * (N * N)
    WIDTH = HEADS * D
    first, end = _split(num_windows)
    for step in tl.range(first, end, disable_licm=True):
        window, mask_index = _window(step, num_windows, num_masks)
        start = window * (N * 3 * WIDTH) + head * D
        window_mask = None if mask is None else mask + mask_index * (N * N)
        k, inverse = _unit(_vectors(qkv + start + WIDTH, 3 * WIDTH, keys, N, D), COSINE)
        v = _vectors(qkv + start + 2 * WIDTH, 3 * WIDTH, keys, N, D)
        grad_k = tl.zeros([KEYS, D], dtype=tl.float32)
        grad_v = tl.zeros([KEYS, D], dtype=tl.float32)
        for i in tl.static_range((N + BLOCK - 1) // BLOCK):
            rows = _tokens(i, N, BLOCK, TAIL)
            row_offsets = (window * HEADS + head) * N + rows
            q, _ = _unit(_vectors(qkv + start, 3 * WIDTH, rows, N, D), COSINE)
            grads = _vectors(grad + window * (N * WIDTH) + head * D, WIDTH, rows, N, D)
            log2_sum = tl.load(lse + row_offsets, mask=rows < N, other=0.0) * _LOG2E
            deltas = tl.load(delta + row_offsets, mask=rows < N, other=0.0)
            scores = _scores(k, q, head_scale, head_bias, window_mask, keys, rows, 1, N, N)
            p = tl.exp2(scores - log2_sum[None, :])
            grad_v = tl.dot(p.to(grads.dtype), grads, grad_v, input_precision="ieee")
            grad_scores = p * (tl.dot(v, tl.trans(grads), input_precision="ieee") - deltas[None, :])
            grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision="ieee")
        grad_k = _unit_grad(grad_k, tl.sum(grad_k * k, 1), k, inverse, COSINE)
        _store(grad_qkv + start + WIDTH, 3 * WIDTH, keys, grad_k * head_scale, N, D)
        _store(grad_qkv + start + 2 * WIDTH, 3 * WIDTH, keys, grad_v, N, D)


@recordable
@triton.jit(do_not_specialize=["num_windows", "num_masks", "HEADS"])
def _backward_keys_kernel(
    qkv, bias, mask, scale, lse, grad, delta, grad_qkv, num_windows, num_masks, N: tl.constexpr,
    HEADS, D: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, OUTER: tl.constexpr, OUTER_TAIL: tl.constexpr,
):  # fmt: skip
    if OUTER_TAIL == OUTER or tl.program_id(0) < N // OUTER:
        _backward_keys(
            qkv, bias, mask, scale, lse, grad, delta, grad_qkv, num_windows, num_masks, N, HEADS, D,
            COSINE, BLOCK, TAIL, OUTER, OUTER,
        )  # fmt: skip
    else:
        _backward_keys(
            qkv, bias, mask, scale, lse, grad, delta, grad_qkv, num_windows, num_masks, N, HEADS, D,
            COSINE, BLOCK, TAIL, OUTER, OUTER_TAIL,
        )  # fmt: skip


# 4. Launchers


def forward(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool
) -> tuple[Tensor, Tensor]:
    """out [B*W, N, h*D] and the log-sum-exp of the scores [B*W, h, N]."""
    qkv = qkv.contiguous()
    bias = bias.contiguous()
    scale = scale.contiguous()
    mask, num_masks = _masks(mask)
    windows, tokens, _, heads, channels = qkv.shape
    out = qkv.new_empty(windows, tokens, heads * channels)
    lse = qkv.new_empty(windows, heads, tokens, dtype=torch.float32)
    if windows == 0:
        return out, lse
    row_block, row_tail = _blocks(tokens, _OUTER)
    # If rows of the bias are not aligned to 16 bytes, its elements are loaded one by one. Narrower
    # blocks are then faster.
    widest = 64
    if tokens % 8:
        widest = 32
    key_block, key_tail = _blocks(tokens, widest)
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        _forward_kernel[_grid(qkv)](
            qkv, bias, mask, scale, out, lse, windows, num_masks, tokens, heads, channels, cosine,
            key_block, key_tail, row_block, row_tail, **_OPTIONS,
        )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor,
    qkv: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: Tensor,
    out: Tensor,
    lse: Tensor,
    cosine: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of qkv, of the bias and of the scale, the last two in fp32."""
    grad = grad.contiguous()
    qkv = qkv.contiguous()
    bias = bias.contiguous()
    scale = scale.contiguous()
    mask, num_masks = _masks(mask)
    windows, tokens, _, heads, channels = qkv.shape
    grid = _grid(qkv)
    outer_blocks, _, splits = grid
    grad_qkv = torch.empty_like(qkv)
    grad_bias = bias.new_empty(splits, heads, tokens, tokens, dtype=torch.float32)
    grad_scale = bias.new_empty(splits * outer_blocks, heads, dtype=torch.float32)
    if windows:
        delta = torch.empty_like(lse)
        outer, outer_tail = _blocks(tokens, _OUTER)
        query_block, query_tail = _blocks(tokens, 32)
        # Narrower for many tokens, because registers also hold whole rows of the bias gradient.
        widest = 32
        if tokens > 64:
            widest = 16
        key_block, key_tail = _blocks(tokens, widest)
        with torch.cuda.device_of(qkv):
            _backward_queries_kernel[grid](
                qkv, bias, mask, scale, out, lse, grad, delta, grad_qkv, grad_bias, grad_scale,
                windows, num_masks, tokens, heads, channels, cosine, key_block, key_tail,
                outer, outer_tail, **_OPTIONS,
            )  # fmt: skip
            _backward_keys_kernel[grid](
                qkv, bias, mask, scale, lse, grad, delta, grad_qkv, windows, num_masks, tokens,
                heads, channels, cosine, query_block, query_tail, outer, outer_tail, **_OPTIONS,
            )  # fmt: skip
    return grad_qkv, grad_bias.sum(0), grad_scale.sum(0)


def _masks(mask: Tensor | None) -> tuple[Tensor | None, int]:
    """The contiguous mask, and the number of windows in it."""
    if mask is None:
        return None, 1
    return mask.contiguous(), len(mask)


def _blocks(tokens: int, widest: int) -> tuple[int, int]:
    """Number of tokens in each block, and in the last block."""
    block = min(widest, _padded(tokens))
    remainder = tokens % block
    if remainder == 0:
        return block, block
    return block, _padded(remainder)


def _padded(tokens: int) -> int:
    return max(16, 1 << (tokens - 1).bit_length())  # tl.dot needs at least 16 rows


def _grid(qkv: Tensor) -> tuple[int, int, int]:
    """The grid of every kernel: (outer blocks, heads, splits).

    The number of splits depends only on sizes, so that sums are the same on any GPU. A split has at
    least eight windows, so that the buffers of the bias gradient are small compared with the
    windows.
    """
    windows, tokens, _, heads, _ = qkv.shape
    block, _ = _blocks(tokens, _OUTER)
    outer_blocks = -(-tokens // block)
    splits = min(-(-_PROGRAMS // (outer_blocks * heads)), max(windows // 8, 1), windows)
    return outer_blocks, heads, splits
