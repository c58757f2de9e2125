"""Triton kernels of `window_attention`, which has the op.

1. A program takes a block of a window's queries (or keys), one head and a split of the windows, one
   after the other: its part of the position bias stays in the L1 cache meanwhile, and of that
   bias's gradient in registers.
2. Blocks end with a smaller one, of the power of two (>= 16) that holds the rest: 144 tokens are 64
   + 64 + 16.
3. Backward, the first kernel goes by blocks of queries: the gradients of queries, position bias and
   scales. The second goes by blocks of keys. Both compute the probabilities again from the
   log-sum-exp of the forward pass.
4. Each split writes the gradient of the bias into a buffer of its own, and the buffers are summed:
   nothing is atomic, so runs repeat bit by bit.

Products take tiles in the dtype of qkv and add up in fp32; all else is fp32. Loops over windows do
not hoist what is the same for each window (`disable_licm`): registers are what is short. Source:
FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

# B images, W masks of an image's windows, N tokens of a window, h heads, D channels of a head; qkv
# [B*W, N, 3, h, D]

import torch
import triton
import triton.language as tl
from torch import Tensor

_OWN = 64  # tokens of a program's own block: the rows of a WGMMA, Hopper's product of four warps
_OPTIONS = {
    "num_warps": 4,
    "num_stages": 1,
}  # prefetched, the bias would come from the L2 cache at each window
_PROGRAMS = 1024  # two on each multiprocessor of a large GPU, four times over
_LOG2E = tl.constexpr(1.4426950408889634)
_EPS = tl.constexpr(1e-12)  # F.normalize's


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
    """[len(tokens), D], 0 past the window's end."""
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
    """[len(left), len(right)] of a table [N, N] with these strides, -inf past its edges: a
    probability of 0."""
    inside = (left < N)[:, None] & (right < N)[None, :]
    return tl.load(
        table + left[:, None] * LEFT + right[None, :] * RIGHT, mask=inside, other=float("-inf")
    )


@triton.jit
def _unit(vectors, COSINE: tl.constexpr):
    """Rows of unit length if they are to be, and what they were multiplied by."""
    wide = vectors.to(tl.float32)
    if COSINE:
        inverse = 1 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), _EPS)
        return (wide * inverse[:, None]).to(vectors.dtype), inverse
    else:
        return vectors, tl.sum(wide, 1)  # unread


@triton.jit
def _through_unit(grad, along, unit, inverse, COSINE: tl.constexpr):
    """The gradient of rows from that of `_unit` of them and its product with them, row by row."""
    if COSINE:
        along = tl.where(inverse < 1 / _EPS, along, 0.0)  # a shorter row is divided by a constant
        return (grad - along[:, None] * unit) * inverse[:, None]
    else:
        return grad


@triton.jit
def _scores(
    left, right, scale, bias, mask, left_tokens, right_tokens,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """[len(left), len(right)], in units of log 2: what exp2 takes."""
    added = _pairs(bias, left_tokens, right_tokens, LEFT, RIGHT, N).to(tl.float32)
    if mask is not None:
        added += _pairs(mask, left_tokens, right_tokens, LEFT, RIGHT, N)
    return tl.dot(left, tl.trans(right), input_precision="ieee") * (scale * _LOG2E) + added * _LOG2E


@triton.jit
def _split(num_windows):
    """The first and last step of this program."""
    steps = tl.cdiv(num_windows, tl.num_programs(2))
    first = tl.program_id(2) * steps
    return first, tl.minimum(first + steps, num_windows)


@triton.jit
def _window(step, num_windows, num_masks):
    """The window of a step, and its mask. Those of one mask follow each other, so that it stays in
    the L1 cache."""
    images = num_windows // num_masks
    return ((step % images) * num_masks + step // images).to(tl.int64), (step // images).to(
        tl.int64
    )


# 2. Forward


@triton.jit
def _forward_rows(
    qkv, bias, mask, scale, out, lse, num_windows, num_masks, N: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    OWN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * OWN + tl.arange(0, ROWS)
    of_scale = tl.load(scale + head)
    of_head = bias + head * (N * N)
    WIDTH: tl.constexpr = HEADS * D
    first, last = _split(num_windows)
    for step in tl.range(first, last, disable_licm=True):
        window, number = _window(step, num_windows, num_masks)
        start = qkv + window * (N * 3 * WIDTH) + head * D
        of_mask = None if mask is None else mask + number * (N * N)
        q, _ = _unit(_vectors(start, 3 * WIDTH, rows, N, D), COSINE)
        top = tl.full(
            [ROWS], -1e30, dtype=tl.float32
        )  # finite: a block may be masked as a whole, by -inf
        total = tl.zeros([ROWS], dtype=tl.float32)
        values = tl.zeros([ROWS, D], dtype=tl.float32)
        for j in tl.static_range((N + BLOCK - 1) // BLOCK):
            keys = _tokens(j, N, BLOCK, TAIL)
            k, _ = _unit(_vectors(start + WIDTH, 3 * WIDTH, keys, N, D), COSINE)
            v = _vectors(start + 2 * WIDTH, 3 * WIDTH, keys, N, D)
            scores = _scores(q, k, of_scale, of_head, of_mask, rows, keys, N, 1, N)
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new_top[:, None])
            fade = tl.exp2(top - new_top)
            total = total * fade + tl.sum(p, 1)
            values = tl.dot(p.to(v.dtype), v, values * fade[:, None], input_precision="ieee")
            top = new_top
        _store(out + window * (N * WIDTH) + head * D, WIDTH, rows, values / total[:, None], N, D)
        tl.store(
            lse + (window * HEADS + head) * N + rows, (top + tl.log2(total)) / _LOG2E, mask=rows < N
        )


@triton.jit(do_not_specialize=["num_windows", "num_masks"])
def _forward_kernel(
    qkv, bias, mask, scale, out, lse, num_windows, num_masks, N: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    OWN: tl.constexpr, OWN_TAIL: tl.constexpr,
):  # fmt: skip
    if OWN_TAIL == OWN or tl.program_id(0) < N // OWN:
        _forward_rows(
            qkv,
            bias,
            mask,
            scale,
            out,
            lse,
            num_windows,
            num_masks,
            N,
            HEADS,
            D,
            COSINE,
            BLOCK,
            TAIL,
            OWN,
            OWN,
        )
    else:
        _forward_rows(
            qkv,
            bias,
            mask,
            scale,
            out,
            lse,
            num_windows,
            num_masks,
            N,
            HEADS,
            D,
            COSINE,
            BLOCK,
            TAIL,
            OWN,
            OWN_TAIL,
        )


# 3. Backward


@triton.jit
def _backward_queries(
    qkv, bias, mask, scale, out, lse, grad, delta, grad_qkv, grad_bias, grad_scale, num_windows,
    num_masks, N: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, COSINE: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries and, of this split, of the position bias and the scale; delta for
    the other kernel."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * OWN + tl.arange(0, ROWS)
    of_scale = tl.load(scale + head)
    of_head = bias + head * (N * N)
    WIDTH: tl.constexpr = HEADS * D
    grad_biases = ()
    for j in tl.static_range((N + BLOCK - 1) // BLOCK):
        grad_biases = grad_biases + (
            tl.zeros([ROWS, BLOCK if j < N // BLOCK else TAIL], dtype=tl.float32),
        )
    scale_grads = tl.zeros([ROWS], dtype=tl.float32)
    first, last = _split(num_windows)
    for step in tl.range(first, last, disable_licm=True):
        window, number = _window(step, num_windows, num_masks)
        start, start_out = window * (N * 3 * WIDTH) + head * D, window * (N * WIDTH) + head * D
        of_rows = (window * HEADS + head) * N + rows
        of_mask = None if mask is None else mask + number * (N * N)
        q, inverse = _unit(_vectors(qkv + start, 3 * WIDTH, rows, N, D), COSINE)
        grads = _vectors(grad + start_out, WIDTH, rows, N, D)
        products = grads.to(tl.float32) * _vectors(out + start_out, WIDTH, rows, N, D).to(
            tl.float32
        )
        deltas = tl.sum(products, 1)
        tl.store(delta + of_rows, deltas, mask=rows < N)
        log2_sum = tl.load(lse + of_rows, mask=rows < N, other=0.0) * _LOG2E
        total = tl.zeros([ROWS, D], dtype=tl.float32)
        added = ()
        for j in tl.static_range((N + BLOCK - 1) // BLOCK):
            keys = _tokens(j, N, BLOCK, TAIL)
            k, _ = _unit(_vectors(qkv + start + WIDTH, 3 * WIDTH, keys, N, D), COSINE)
            v = _vectors(qkv + start + 2 * WIDTH, 3 * WIDTH, keys, N, D)
            scores = _scores(q, k, of_scale, of_head, of_mask, rows, keys, N, 1, N)
            p = tl.exp2(scores - log2_sum[:, None])
            grad_scores = p * (tl.dot(grads, tl.trans(v), input_precision="ieee") - deltas[:, None])
            added = added + (grad_biases[j] + grad_scores,)
            total = tl.dot(grad_scores.to(k.dtype), k, total, input_precision="ieee")
        grad_biases = added
        along = tl.sum(total * q, 1)
        scale_grads += along
        _store(
            grad_qkv + start,
            3 * WIDTH,
            rows,
            _through_unit(total, along, q, inverse, COSINE) * of_scale,
            N,
            D,
        )
    split = tl.program_id(2)
    for j in tl.static_range((N + BLOCK - 1) // BLOCK):
        keys = _tokens(j, N, BLOCK, TAIL)
        pointers = grad_bias + (split * HEADS + head) * N * N + rows[:, None] * N + keys[None, :]
        tl.store(pointers, grad_biases[j], mask=(rows < N)[:, None] & (keys < N)[None, :])
    tl.store(
        grad_scale + (split * tl.num_programs(0) + tl.program_id(0)) * HEADS + head,
        tl.sum(scale_grads, 0),
    )


@triton.jit(do_not_specialize=["num_windows", "num_masks"])
def _backward_queries_kernel(
    qkv, bias, mask, scale, out, lse, grad, delta, grad_qkv, grad_bias, grad_scale, num_windows,
    num_masks, N: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, COSINE: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, OWN: tl.constexpr, OWN_TAIL: tl.constexpr,
):  # fmt: skip
    if OWN_TAIL == OWN or tl.program_id(0) < N // OWN:
        _backward_queries(
            qkv, bias, mask, scale, out, lse, grad, delta, grad_qkv, grad_bias, grad_scale,
            num_windows, num_masks, N, HEADS, D, COSINE, BLOCK, TAIL, OWN, OWN,
        )  # fmt: skip
    else:
        _backward_queries(
            qkv, bias, mask, scale, out, lse, grad, delta, grad_qkv, grad_bias, grad_scale,
            num_windows, num_masks, N, HEADS, D, COSINE, BLOCK, TAIL, OWN, OWN_TAIL,
        )  # fmt: skip


@triton.jit
def _backward_keys(
    qkv, bias, mask, scale, lse, grad, delta, grad_qkv, num_windows, num_masks, N: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values; tiles are [keys, rows], so that probabilities are a
    product's left side."""
    head = tl.program_id(1)
    keys = tl.program_id(0) * OWN + tl.arange(0, KEYS)
    of_scale = tl.load(scale + head)
    of_head = bias + head * (N * N)
    WIDTH: tl.constexpr = HEADS * D
    first, last = _split(num_windows)
    for step in tl.range(first, last, disable_licm=True):
        window, number = _window(step, num_windows, num_masks)
        start = window * (N * 3 * WIDTH) + head * D
        of_mask = None if mask is None else mask + number * (N * N)
        k, inverse = _unit(_vectors(qkv + start + WIDTH, 3 * WIDTH, keys, N, D), COSINE)
        v = _vectors(qkv + start + 2 * WIDTH, 3 * WIDTH, keys, N, D)
        grad_k = tl.zeros([KEYS, D], dtype=tl.float32)
        grad_v = tl.zeros([KEYS, D], dtype=tl.float32)
        for i in tl.static_range((N + BLOCK - 1) // BLOCK):
            rows = _tokens(i, N, BLOCK, TAIL)
            of_rows = (window * HEADS + head) * N + rows
            q, _ = _unit(_vectors(qkv + start, 3 * WIDTH, rows, N, D), COSINE)
            grads = _vectors(grad + window * (N * WIDTH) + head * D, WIDTH, rows, N, D)
            log2_sum = tl.load(lse + of_rows, mask=rows < N, other=0.0) * _LOG2E
            deltas = tl.load(delta + of_rows, mask=rows < N, other=0.0)
            scores = _scores(k, q, of_scale, of_head, of_mask, keys, rows, 1, N, N)
            p = tl.exp2(scores - log2_sum[None, :])
            grad_v = tl.dot(p.to(grads.dtype), grads, grad_v, input_precision="ieee")
            grad_scores = p * (tl.dot(v, tl.trans(grads), input_precision="ieee") - deltas[None, :])
            grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision="ieee")
        grad_k = _through_unit(grad_k, tl.sum(grad_k * k, 1), k, inverse, COSINE)
        _store(grad_qkv + start + WIDTH, 3 * WIDTH, keys, grad_k * of_scale, N, D)
        _store(grad_qkv + start + 2 * WIDTH, 3 * WIDTH, keys, grad_v, N, D)


@triton.jit(do_not_specialize=["num_windows", "num_masks"])
def _backward_keys_kernel(
    qkv, bias, mask, scale, lse, grad, delta, grad_qkv, num_windows, num_masks, N: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, COSINE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, OWN: tl.constexpr, OWN_TAIL: tl.constexpr,
):  # fmt: skip
    if OWN_TAIL == OWN or tl.program_id(0) < N // OWN:
        _backward_keys(
            qkv, bias, mask, scale, lse, grad, delta, grad_qkv, num_windows, num_masks, N, HEADS, D,
            COSINE, BLOCK, TAIL, OWN, OWN,
        )  # fmt: skip
    else:
        _backward_keys(
            qkv, bias, mask, scale, lse, grad, delta, grad_qkv, num_windows, num_masks, N, HEADS, D,
            COSINE, BLOCK, TAIL, OWN, OWN_TAIL,
        )  # fmt: skip


# 4. Launchers


def forward(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool
) -> tuple[Tensor, Tensor]:
    """out [B*W, N, h*D] and the log-sum-exp of the scores [B*W, h, N]."""
    qkv, *others = _contiguous(qkv, bias, mask, scale)
    windows, tokens, _, heads, channels = qkv.shape
    out = qkv.new_empty(windows, tokens, heads * channels)
    lse = qkv.new_empty(windows, heads, tokens, dtype=torch.float32)
    if windows:
        grid, sizes = _launch(qkv, mask, cosine)
        # narrower where the bias's rows do not begin at 16 bytes and it is loaded number by number
        own, of_keys = _blocks(tokens, _OWN), _blocks(tokens, 32 if tokens % 8 else 64)
        with torch.cuda.device_of(qkv):  # Triton launches on the current device
            _forward_kernel[grid](qkv, *others, out, lse, *sizes, *of_keys, *own, **_OPTIONS)
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
    grad, qkv, *others = _contiguous(grad, qkv, bias, mask, scale)
    tokens = qkv.shape[1]
    grid, sizes = _launch(qkv, mask, cosine)
    blocks, heads, splits = grid
    grad_qkv, delta = torch.empty_like(qkv), torch.empty_like(lse)
    grad_bias = bias.new_empty(splits, *bias.shape, dtype=torch.float32)
    grad_scale = bias.new_empty(splits * blocks, heads, dtype=torch.float32)
    if len(qkv):
        own, of_queries = _blocks(tokens, _OWN), _blocks(tokens, 32)
        # narrower for many tokens, since registers hold whole rows of the bias's gradient besides
        of_keys = _blocks(tokens, 32 if tokens <= 64 else 16)
        results = (delta, grad_qkv, grad_bias, grad_scale)
        with torch.cuda.device_of(qkv):
            _backward_queries_kernel[grid](
                qkv, *others, out, lse, grad, *results, *sizes, *of_keys, *own, **_OPTIONS
            )
            _backward_keys_kernel[grid](
                qkv, *others, lse, grad, delta, grad_qkv, *sizes, *of_queries, *own, **_OPTIONS
            )
    return grad_qkv, grad_bias.sum(0), grad_scale.sum(0)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


def _blocks(tokens: int, widest: int) -> tuple[int, int]:
    """Tokens of each block and of the last one."""
    block = min(widest, _padded(tokens))
    return block, _padded(tokens % block) if tokens % block else block


def _padded(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))  # a product takes 16 at least


def _launch(qkv: Tensor, mask: Tensor | None, cosine: bool) -> tuple[tuple[int, int, int], tuple]:
    """The grid (own blocks, heads, splits), and the sizes that every kernel takes.

    Splits follow from sizes alone, so that sums are the same on any GPU. They are of eight windows
    or more, beside which the buffers of the bias's gradient are small.
    """
    windows, tokens, _, heads, channels = qkv.shape
    blocks = triton.cdiv(tokens, _blocks(tokens, _OWN)[0])
    splits = min(triton.cdiv(_PROGRAMS, blocks * heads), max(windows // 8, 1), windows)
    return (blocks, heads, splits), (
        windows,
        1 if mask is None else len(mask),
        tokens,
        heads,
        channels,
        cosine,
    )
