"""Routing and the dispatch plan on an x86 CPU, in C++: one pass over memory each, for fp32
logits."""

# T tokens, E experts, K top-k, N rows

from ctypes import c_float, c_long

import torch
from torch import Tensor

from moe_core.kernels.library_x86 import library, pointer

# in the order of routing_x86.cpp
LOSSES = ("none", "gshard", "load_importance", "load_importance_tutel")


def route(
    noisy: Tensor, clean: Tensor | None, top_k: int, normalize: bool, loss: str, noise_std: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """noisy and clean logits [T, E], clean None where they are the same -> gates and ids [T, K],
    probs [T, E] and the sums [2, E] of `loss`; the same bits with any number of threads."""
    num_tokens, num_experts = noisy.shape
    assert 1 <= top_k <= num_experts
    ids = noisy.new_empty(num_tokens, top_k, dtype=torch.int64)
    gates, probs, sums = (
        noisy.new_empty(shape) for shape in (ids.shape, noisy.shape, (2, num_experts))
    )
    settings = (top_k, normalize, LOSSES.index(loss), torch.get_num_threads())
    _call(
        "route_forward",
        (noisy, clean, ids, gates, probs, sums),
        (*noisy.shape, *settings),
        noise_std,
    )
    return gates, ids, probs, sums


def route_backward(
    noisy: Tensor,
    clean: Tensor | None,
    ids: Tensor,
    probs: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    normalize: bool,
    loss: str,
    noise_std: float,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of noisy and of clean (None for None), from those of gates, probs (None: zeros) and
    sums."""
    new = [None if logits is None else logits.new_empty(logits.shape) for logits in (noisy, clean)]
    settings = (ids.shape[1], normalize, LOSSES.index(loss), torch.get_num_threads())
    _call(
        "route_backward",
        (noisy, clean, ids, probs, *grads, *new),
        (*noisy.shape, *settings),
        noise_std,
    )
    return tuple(new)


def make_plan(
    expert_ids: Tensor,
    num_experts: int,
    limits: Tensor | None,
    priority: Tensor | None,
    num_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """What dispatch.make_plan returns with the capacities `limits` [E] and so many rows, number for
    number."""
    assert expert_ids.numel() < 2**31, "offsets are int32"
    order = None if priority is None else priority.t().argsort(descending=True, stable=True)
    # [K, T], or [T] for every k
    order_stride = len(expert_ids) if order is not None and order.dim() == 2 else 0
    kept = None if limits is None else expert_ids.new_empty(expert_ids.shape, dtype=torch.bool)
    choices, slots, counts = (
        expert_ids.new_empty(shape) for shape in (num_rows, expert_ids.shape, num_experts)
    )
    offsets = expert_ids.new_empty(num_experts, dtype=torch.int32)
    tensors = (expert_ids, order, limits, choices, offsets, slots, kept, counts)
    if _call("make_plan", tensors, (*expert_ids.shape, num_experts, num_rows, order_stride)):
        raise ValueError(
            f"expert_ids must be at least 0 and below num_experts ({num_experts}), and num_rows"
            f" ({num_rows}) at least"
            " the number of choices that are kept"
        )
    return choices, offsets, slots, kept, counts


def _call(
    function: str, tensors: tuple[Tensor | None, ...], numbers: tuple[int, ...], *last: float
) -> int:
    tensors = [None if t is None else t.contiguous() for t in tensors]  # the new ones are
    return getattr(library(), function)(
        *map(pointer, tensors), *map(c_long, numbers), *map(c_float, last)
    )
