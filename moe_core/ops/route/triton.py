"""Triton form of routing.

The forward kernel reads the logits once. It computes softmax, top-K, gate values and, for each
block of tokens, the sums of the auxiliary loss. The backward kernel reads its results once and
computes the gradient of the logits.

There are no atomic operations. The block sums are added in a fixed order afterwards, so runs repeat
bit by bit.
"""

# T tokens, E experts, K top-k
# A program handles BLOCK_T tokens and all E experts, padded to BLOCK_E.

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.ops.backend import KERNEL_LOSSES, on_its_device

_TILE = 2048  # logits that a program handles


@triton.jit
def _softmax(logits):
    """The softmax over axis 1. Padding is -inf."""
    exponentials = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return exponentials / tl.sum(exponentials, axis=1)[:, None]


@triton.jit
def choose(
    noisy_logits, clean_logits, t, block, ids, gates, probs, block_sums, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, LOSS: tl.constexpr,
    NOISE: tl.constexpr, HAS_CLEAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Choose experts for the tokens t of a block, from logits [BLOCK_T, BLOCK_E] in registers."""
    e = tl.arange(0, BLOCK_E)
    cells = t[:, None] * NUM_EXPERTS + e[None, :]
    mask = (t < num_tokens)[:, None] & (e < NUM_EXPERTS)[None, :]
    padding = (e >= NUM_EXPERTS)[None, :]
    noisy_logits = tl.where(padding, float("-inf"), noisy_logits)
    p = _softmax(noisy_logits)
    tl.store(probs + cells, p, mask=mask)

    # Logits are compared, because different logits may have equal probabilities after rounding. NaN
    # counts as the largest value, as in torch.topk. If logits are equal, the lower index comes
    # first. Every iteration removes one expert, even if all logits are -inf.
    key = tl.where(noisy_logits != noisy_logits, float("inf"), noisy_logits)
    available = (t >= 0)[:, None] & (e < NUM_EXPERTS)[None, :]
    k_index = tl.arange(0, BLOCK_K)[None, :]
    chosen_ids = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
    chosen_p = tl.zeros([BLOCK_T, BLOCK_K], dtype=p.dtype)
    first = tl.zeros([BLOCK_T], dtype=tl.int32)
    last = tl.zeros([BLOCK_T], dtype=tl.int32)
    for k in range(TOP_K):
        largest = tl.max(tl.where(available, key, float("-inf")), axis=1)
        last = tl.min(tl.where(available & (key == largest[:, None]), e[None, :], BLOCK_E), axis=1)
        hit = e[None, :] == last[:, None]
        chosen_ids = tl.where(k_index == k, last[:, None], chosen_ids)
        chosen_p = tl.where(k_index == k, tl.sum(tl.where(hit, p, 0.0), axis=1)[:, None], chosen_p)
        first = tl.where(k == 0, last, first)
        available = available & (e[None, :] != last[:, None])
    if NORMALIZE:
        chosen_p = chosen_p / tl.sum(chosen_p, axis=1)[:, None]
    chosen_cells = t[:, None] * TOP_K + k_index
    chosen_mask = (t < num_tokens)[:, None] & (k_index < TOP_K)
    tl.store(ids + chosen_cells, chosen_ids.to(tl.int64), mask=chosen_mask)
    tl.store(gates + chosen_cells, chosen_p, mask=chosen_mask)

    if LOSS == 1:  # GShard: probabilities and first choices of each expert
        sums_0 = tl.sum(tl.where(mask, p, 0.0), axis=0)
        is_first = mask & (e[None, :] == first[:, None])
        sums_1 = tl.sum(tl.where(is_first, 1.0, 0.0), axis=0).to(p.dtype)
    elif LOSS >= 2:  # importance and load of each expert, see losses.py
        q = p
        compared = noisy_logits
        if HAS_CLEAN:
            compared = tl.where(padding, float("-inf"), clean_logits)
            q = _softmax(compared)
        threshold = tl.sum(tl.where(e[None, :] == last[:, None], noisy_logits, 0.0), axis=1)
        if LOSS == 3:
            compared = q
        margin = compared - threshold[:, None]
        if NOISE > 0:
            chosen = 0.5 * (1 + tl.erf(margin * (0.7071067811865476 / NOISE)))
        else:
            chosen = tl.where(margin >= 0, 1.0, 0.0).to(p.dtype)
        sums_0 = tl.sum(tl.where(mask, q, 0.0), axis=0)
        sums_1 = tl.sum(tl.where(mask, chosen, 0.0), axis=0)
    if LOSS > 0:
        tl.store(block_sums + (2 * block) * NUM_EXPERTS + e, sums_0, mask=e < NUM_EXPERTS)
        tl.store(block_sums + (2 * block + 1) * NUM_EXPERTS + e, sums_1, mask=e < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    noisy, clean, ids, gates, probs, block_sums, num_tokens, NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, LOSS: tl.constexpr, NOISE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    cells = t[:, None] * NUM_EXPERTS + e[None, :]
    mask = (t < num_tokens)[:, None] & (e < NUM_EXPERTS)[None, :]
    noisy_logits = tl.load(noisy + cells, mask=mask, other=0.0)
    clean_logits = noisy_logits
    if clean is not None:
        clean_logits = tl.load(clean + cells, mask=mask, other=0.0)
    choose(
        noisy_logits, clean_logits, t, block, ids, gates, probs, block_sums, num_tokens,
        NUM_EXPERTS, TOP_K, NORMALIZE, LOSS, NOISE, clean is not None, BLOCK_T, BLOCK_E, BLOCK_K,
    )  # fmt: skip


@triton.jit
def grad_of_choice(
    t, noisy, clean, ids, probs, grad_gates, grad_probs, grad_sums, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, LOSS: tl.constexpr,
    NOISE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The gradients of the noisy and of the clean logits [BLOCK_T, BLOCK_E] of the tokens t.

    Without clean logits, the first gradient is the sum of both.
    """
    e = tl.arange(0, BLOCK_E)
    is_token = t < num_tokens
    cells = t[:, None] * NUM_EXPERTS + e[None, :]
    mask = is_token[:, None] & (e < NUM_EXPERTS)[None, :]
    p = tl.load(probs + cells, mask=mask, other=0.0)
    grad_p = tl.zeros([BLOCK_T, BLOCK_E], dtype=p.dtype)
    if grad_probs is not None:
        grad_p += tl.load(grad_probs + cells, mask=mask, other=0.0)
    if LOSS == 1:
        grad_p += tl.load(grad_sums + e, mask=e < NUM_EXPERTS, other=0.0)[None, :]

    if grad_gates is not None:
        # gate_k = p_k / s with s = sum_j p_j: dp_k = (dgate_k - sum_j dgate_j p_j / s) / s
        total = tl.zeros([BLOCK_T], dtype=p.dtype)
        weighted = tl.zeros([BLOCK_T], dtype=p.dtype)
        chosen_grad = tl.zeros([BLOCK_T, BLOCK_E], dtype=p.dtype)
        chosen = (t < 0)[:, None] & (e < NUM_EXPERTS)[None, :]  # all False
        for k in range(TOP_K):
            hit = e[None, :] == tl.load(ids + t * TOP_K + k, mask=is_token, other=0)[:, None]
            grad = tl.load(grad_gates + t * TOP_K + k, mask=is_token, other=0.0)
            gate = tl.sum(tl.where(hit, p, 0.0), axis=1)
            total += gate
            weighted += grad * gate
            chosen_grad = tl.where(hit, grad[:, None], chosen_grad)
            chosen = chosen | hit
        if NORMALIZE:
            total = tl.where(is_token, total, 1.0)  # avoids 0 / 0 past the last token
            chosen_grad = tl.where(
                chosen, (chosen_grad - (weighted / total)[:, None]) / total[:, None], 0.0
            )
        grad_p += chosen_grad
    grad_logits = p * (grad_p - tl.sum(p * grad_p, axis=1)[:, None])
    grad_clean = tl.zeros([BLOCK_T, BLOCK_E], dtype=p.dtype)

    if LOSS >= 2:
        last = tl.load(ids + t * TOP_K + TOP_K - 1, mask=is_token, other=0)
        if clean is None:
            clean_logits = tl.load(noisy + cells, mask=mask, other=0.0)
        else:
            clean_logits = tl.load(clean + cells, mask=mask, other=0.0)
        q = _softmax(tl.where((e < NUM_EXPERTS)[None, :], clean_logits, float("-inf")))
        grad_q = tl.zeros([BLOCK_T, BLOCK_E], dtype=p.dtype)
        grad_q += tl.load(grad_sums + e, mask=e < NUM_EXPERTS, other=0.0)[None, :]
        # The derivative of the load with respect to its argument, times the gradient of the load.
        slope = tl.zeros([BLOCK_T, BLOCK_E], dtype=p.dtype)
        if NOISE > 0:
            threshold = tl.load(noisy + t * NUM_EXPERTS + last, mask=is_token, other=0.0)
            compared = clean_logits
            if LOSS == 3:
                compared = q
            z = (compared - threshold[:, None]) * (1 / NOISE)
            slope += tl.exp(-0.5 * z * z) * (0.3989422804014327 / NOISE)
            slope *= tl.load(grad_sums + NUM_EXPERTS + e, mask=e < NUM_EXPERTS, other=0.0)[None, :]
            slope = tl.where(mask, slope, 0.0)
        if LOSS == 3:
            grad_q += slope
        q_grad = q * (grad_q - tl.sum(q * grad_q, axis=1)[:, None])
        if LOSS == 2:
            q_grad += slope
        grad_logits -= tl.where(e[None, :] == last[:, None], tl.sum(slope, axis=1)[:, None], 0.0)
        if clean is None:
            grad_logits += q_grad
        else:
            grad_clean = q_grad
    return grad_logits, grad_clean


@triton.jit(do_not_specialize=["num_tokens"])
def _route_backward_kernel(
    noisy, clean, ids, probs, grad_gates, grad_probs, grad_sums, grad_noisy, grad_clean, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, LOSS: tl.constexpr,
    NOISE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    noisy_tile, clean_tile = grad_of_choice(
        t, noisy, clean, ids, probs, grad_gates, grad_probs, grad_sums, num_tokens, NUM_EXPERTS,
        TOP_K, NORMALIZE, LOSS, NOISE, BLOCK_T, BLOCK_E,
    )  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    cells = t[:, None] * NUM_EXPERTS + e[None, :]
    mask = (t < num_tokens)[:, None] & (e < NUM_EXPERTS)[None, :]
    tl.store(grad_noisy + cells, noisy_tile, mask=mask)
    if clean is not None:
        tl.store(grad_clean + cells, clean_tile, mask=mask)


@on_its_device
def route(
    noisy: Tensor, clean: Tensor | None, top_k: int, normalize: bool, loss: str, noise_std: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Route by noisy logits [T, E].

    Args:
        clean: logits without noise [T, E], for the loss; None: the same as `noisy`.

    Returns:
        gates [T, K], ids [T, K] int64, probs [T, E], and the sums per expert [2, E] of `loss`.
    """
    noisy, clean = _logits(noisy, clean)
    num_tokens, num_experts = noisy.shape
    block_t, block_e = _route_block(num_experts)
    assert 1 <= top_k <= num_experts
    num_blocks = triton.cdiv(num_tokens, block_t)
    ids = noisy.new_empty(num_tokens, top_k, dtype=torch.int64)
    gates = noisy.new_empty(num_tokens, top_k)
    probs = torch.empty_like(noisy)
    num_block_sums = num_blocks
    if loss == "none":
        num_block_sums = 0
    block_sums = noisy.new_empty(num_block_sums, 2, num_experts)
    if num_blocks:
        _route_kernel[(num_blocks,)](
            noisy, clean, ids, gates, probs, block_sums, num_tokens, num_experts, top_k, normalize,
            KERNEL_LOSSES.index(loss), noise_std, block_t, block_e, triton.next_power_of_2(top_k),
            num_warps=_num_warps(block_e),
        )  # fmt: skip
    return gates, ids, probs, block_sums.sum(0)


@on_its_device
def route_backward(
    noisy: Tensor,
    clean: Tensor | None,
    ids: Tensor,
    probs: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor],
    normalize: bool,
    loss: str,
    noise_std: float,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `noisy` and of `clean`; the second one is None if `clean` is None.

    Args:
        grads: the gradients of gates, probs and sums; None means zeros.
    """
    noisy, clean = _logits(noisy, clean)
    grad_gates, grad_probs, grad_sums = (_contiguous(grad) for grad in grads)
    num_tokens, num_experts = noisy.shape
    block_t, block_e = _route_block(num_experts)
    grad_noisy = torch.empty_like(noisy)
    grad_clean = None
    if clean is not None:
        grad_clean = torch.empty_like(clean)
    if num_tokens:
        _route_backward_kernel[(triton.cdiv(num_tokens, block_t),)](
            noisy, clean, ids, probs, grad_gates, grad_probs, grad_sums, grad_noisy, grad_clean,
            num_tokens, num_experts, ids.shape[1], normalize, KERNEL_LOSSES.index(loss), noise_std,
            block_t, block_e, num_warps=_num_warps(block_e),
        )  # fmt: skip
    return grad_noisy, grad_clean


def _logits(noisy: Tensor, clean: Tensor | None) -> tuple[Tensor, Tensor | None]:
    assert noisy.dim() == 2
    assert noisy.dtype in (torch.float32, torch.float64)
    assert clean is None or (clean.shape, clean.dtype, clean.device) == (
        noisy.shape,
        noisy.dtype,
        noisy.device,
    )
    return noisy.contiguous(), _contiguous(clean)


def _contiguous(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return x.contiguous()


def _route_block(num_experts: int) -> tuple[int, int]:
    block_e = triton.next_power_of_2(num_experts)
    return max(min(_TILE // block_e, 64), 1), block_e


def _num_warps(block_e: int) -> int:
    if block_e <= _TILE:
        return 4
    return 16
