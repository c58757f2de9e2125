"""Triton form of routing, from logits or from the tokens of a linear router.

The forward kernel reads its logits or tokens once. With a router's weight it casts the tokens and
multiplies them; the logits stay in registers. It computes softmax, top-K, gate values and, for each
block of tokens, the sums of the auxiliary loss. The backward kernel reads these results once. It
computes the gradients of the logits and, with a weight, of the tokens.

A product is three TF32 products ("tf32x3") on tensor cores, whose error is about that of a product
in fp32, so that the choices are those of fp32. One in fp32 took three times as long on an H100.

There are no atomic operations. The block sums are added in a fixed order afterwards, so runs repeat
bit by bit.
"""

# T tokens, E experts, K top-k, M model dim
# A program handles BLOCK_T tokens and all E experts, padded to BLOCK_E, BLOCK_M channels at a time.

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.ops.backend import KERNEL_LOSSES, on_device_of, on_its_device
from moe_core.ops.blocks import cdiv, next_power_of_2
from moe_core.ops.launch import recordable
from moe_core.ops.route.inputs import RouteGradients, RouteSettings, SavedRoute

_TILE = 2048  # logits that a program handles, if it does not compute them
_BLOCK_T = 32  # tokens of a program that computes logits
_BLOCK_M = 64
_LEAST_EXPERTS = 16  # the smallest dim of a tile in a matrix product


@triton.jit
def _softmax(logits):
    """The softmax over axis 1. Padding is -inf."""
    exponentials = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return exponentials / tl.sum(exponentials, axis=1)[:, None]


@triton.jit
def _choose(
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


@triton.jit
def _add_noise(logits, noise, cells, mask, NOISE_STD: tl.constexpr):
    if noise is not None:
        logits += NOISE_STD * tl.load(noise + cells, mask=mask, other=0.0).to(logits.dtype)
    return logits


@recordable
@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    x, weight, noise, inputs, logits, ids, gates, probs, block_sums, num_tokens, M: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, LOSS: tl.constexpr,
    NOISE_STD: tl.constexpr, LOSS_NOISE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    cells = t[:, None] * NUM_EXPERTS + e[None, :]
    mask = (t < num_tokens)[:, None] & (e < NUM_EXPERTS)[None, :]
    if weight is None:
        clean = tl.load(x + cells, mask=mask, other=0.0)
    else:
        clean = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
        for start in range(0, M, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            channels = t[:, None] * M + m[None, :]
            inside = (t < num_tokens)[:, None] & (m < M)[None, :]
            tokens = tl.load(x + channels, mask=inside, other=0.0)
            if inputs is not None:
                tl.store(inputs + channels, tokens.to(inputs.dtype.element_ty), mask=inside)
            weight_mask = (m < M)[:, None] & (e < NUM_EXPERTS)[None, :]
            columns = tl.load(weight + e[None, :] * M + m[:, None], mask=weight_mask, other=0.0)
            clean = tl.dot(tokens.to(tl.float32), columns, clean, input_precision="tf32x3")
        if logits is not None:
            tl.store(logits + cells, clean, mask=mask)
    noisy = _add_noise(clean, noise, cells, mask, NOISE_STD)
    _choose(
        noisy, clean, t, block, ids, gates, probs, block_sums, num_tokens, NUM_EXPERTS, TOP_K,
        NORMALIZE, LOSS, LOSS_NOISE, noise is not None, BLOCK_T, BLOCK_E, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _grad_of_choice(
    t, logits, noise, ids, probs, grad_gates, grad_probs, grad_sums, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, LOSS: tl.constexpr,
    NOISE_STD: tl.constexpr, LOSS_NOISE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits [BLOCK_T, BLOCK_E] of the tokens t."""
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

    if LOSS >= 2:
        last = tl.load(ids + t * TOP_K + TOP_K - 1, mask=is_token, other=0)
        is_last = e[None, :] == last[:, None]
        clean = tl.load(logits + cells, mask=mask, other=0.0)
        q = _softmax(tl.where((e < NUM_EXPERTS)[None, :], clean, float("-inf")))
        grad_q = tl.zeros([BLOCK_T, BLOCK_E], dtype=p.dtype)
        grad_q += tl.load(grad_sums + e, mask=e < NUM_EXPERTS, other=0.0)[None, :]
        # The derivative of the load with respect to its argument, times the gradient of the load.
        slope = tl.zeros([BLOCK_T, BLOCK_E], dtype=p.dtype)
        if LOSS_NOISE > 0:
            noisy = _add_noise(clean, noise, cells, mask, NOISE_STD)
            threshold = tl.sum(tl.where(is_last, noisy, 0.0), axis=1)
            compared = clean
            if LOSS == 3:
                compared = q
            z = (compared - threshold[:, None]) * (1 / LOSS_NOISE)
            slope += tl.exp(-0.5 * z * z) * (0.3989422804014327 / LOSS_NOISE)
            slope *= tl.load(grad_sums + NUM_EXPERTS + e, mask=e < NUM_EXPERTS, other=0.0)[None, :]
            slope = tl.where(mask, slope, 0.0)
        if LOSS == 3:
            grad_q += slope
        q_grad = q * (grad_q - tl.sum(q * grad_q, axis=1)[:, None])
        if LOSS == 2:
            q_grad += slope
        grad_logits -= tl.where(is_last, tl.sum(slope, axis=1)[:, None], 0.0)
        grad_logits += q_grad
    return grad_logits


@recordable
@triton.jit(do_not_specialize=["num_tokens"])
def route_backward_kernel(
    weight, logits, noise, ids, probs, grad_gates, grad_probs, grad_sums, grad_inputs, grad_logits,
    grad_x, num_tokens, M: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr, LOSS: tl.constexpr, NOISE_STD: tl.constexpr, LOSS_NOISE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    gradient = _grad_of_choice(
        t, logits, noise, ids, probs, grad_gates, grad_probs, grad_sums, num_tokens, NUM_EXPERTS,
        TOP_K, NORMALIZE, LOSS, NOISE_STD, LOSS_NOISE, BLOCK_T, BLOCK_E,
    )  # fmt: skip
    is_expert = (e < NUM_EXPERTS)[None, :]
    gradient = tl.where(is_expert, gradient, 0.0)
    cells = t[:, None] * NUM_EXPERTS + e[None, :]
    tl.store(grad_logits + cells, gradient, mask=(t < num_tokens)[:, None] & is_expert)
    if weight is not None:
        for start in range(0, M, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            channels = t[:, None] * M + m[None, :]
            inside = (t < num_tokens)[:, None] & (m < M)[None, :]
            weight_mask = (e < NUM_EXPERTS)[:, None] & (m < M)[None, :]
            rows = tl.load(weight + e[:, None] * M + m[None, :], mask=weight_mask, other=0.0)
            of_tokens = tl.dot(gradient, rows, input_precision="tf32x3")
            if grad_inputs is not None:
                of_tokens += tl.load(grad_inputs + channels, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_x + channels, of_tokens.to(grad_x.dtype.element_ty), mask=inside)


@on_its_device
def forward(
    x: Tensor,
    weight: Tensor | None,
    noise: Tensor | None,
    cast_to: torch.dtype | None,
    settings: RouteSettings,
) -> tuple[Tensor, ...]:
    """As the op `moe_core::route`."""
    top_k, normalize, loss, noise_std, loss_noise_std, *_ = settings
    x, weight, noise = x.contiguous(), _contiguous(weight), _contiguous(noise)
    num_tokens, num_experts, model_dim, like = _sizes(x, weight)
    assert 1 <= top_k <= num_experts
    block_t, block_e, num_warps = _block(num_experts, weight is not None)
    if weight is not None:
        num_warps = 2  # 33 us in place of 42 us on an H100, for 18,432 tokens
    num_blocks = cdiv(num_tokens, block_t)
    gates = like.new_empty(num_tokens, top_k)
    ids = like.new_empty(num_tokens, top_k, dtype=torch.int64)
    probs = like.new_empty(num_tokens, num_experts)
    inputs, logits = None, None
    if cast_to is not None:
        inputs = torch.empty_like(x, dtype=cast_to)
    if weight is not None and loss.startswith("load_importance"):
        logits = torch.empty_like(probs)
    num_block_sums = num_blocks
    if loss == "none":
        num_block_sums = 0
    block_sums = like.new_empty(num_block_sums, 2, num_experts)
    if num_blocks:
        route_kernel[(num_blocks,)](
            x, weight, noise, inputs, logits, ids, gates, probs, block_sums, num_tokens, model_dim,
            num_experts, top_k, normalize, KERNEL_LOSSES.index(loss), noise_std, loss_noise_std,
            block_t, block_e, next_power_of_2(top_k), _BLOCK_M, num_warps=num_warps,
        )  # fmt: skip
    if inputs is None:
        inputs = x.new_empty(0)
    if logits is None:
        logits = like.new_empty(0)
    return gates, ids, probs, block_sums.sum(0), inputs, x.new_empty(0), logits


def backward(
    saved: SavedRoute, grads: RouteGradients, settings: RouteSettings
) -> tuple[Tensor, Tensor]:
    """As the op `moe_core::route_backward`."""
    with on_device_of(saved.x):
        return _backward(saved, grads, settings)


def _backward(
    saved: SavedRoute, grads: RouteGradients, settings: RouteSettings
) -> tuple[Tensor, Tensor]:
    x, weight, noise, ids, _, probs, _, logits = saved
    _, normalize, loss, noise_std, loss_noise_std, *_ = settings
    if grads.sums is None:
        loss = "none"
    x, weight, noise = x.contiguous(), _contiguous(weight), _contiguous(noise)
    grad_gates, grad_probs, grad_sums, grad_inputs = (_contiguous(grad) for grad in grads)
    num_tokens, num_experts, model_dim, _ = _sizes(x, weight)
    block_t, block_e, num_warps = _block(num_experts, weight is not None)
    grad_logits = torch.empty_like(probs)
    grad_x = None
    if weight is None:
        logits = x
    else:
        grad_x = torch.empty_like(x)
    if num_tokens:
        route_backward_kernel[(cdiv(num_tokens, block_t),)](
            weight, logits, noise, ids, probs, grad_gates, grad_probs, grad_sums, grad_inputs,
            grad_logits, grad_x, num_tokens, model_dim, num_experts, ids.shape[1], normalize,
            KERNEL_LOSSES.index(loss), noise_std, loss_noise_std, block_t, block_e, _BLOCK_M,
            num_warps=num_warps,
        )  # fmt: skip
    if grad_x is None:
        return grad_logits, x.new_empty(0)
    return grad_x, grad_logits.t() @ x.float()


def _contiguous(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return x.contiguous()


def _sizes(x: Tensor, weight: Tensor | None) -> tuple[int, int, int, Tensor]:
    """T, E, M (1 without a weight), and a tensor of the dtype of the logits."""
    if weight is None:
        return x.shape[0], x.shape[1], 1, x
    return x.shape[0], weight.shape[0], x.shape[1], weight


def _block(num_experts: int, has_weight: bool) -> tuple[int, int, int]:
    """BLOCK_T, BLOCK_E and the number of warps."""
    block_e = next_power_of_2(num_experts)
    if has_weight:
        return _BLOCK_T, max(block_e, _LEAST_EXPERTS), 4
    num_warps = 4
    if block_e > _TILE:
        num_warps = 16
    return max(min(_TILE // block_e, 64), 1), block_e, num_warps
