"""Routing and the dispatch plan, by Triton or C++, as torch.library ops; router.py and dispatch.py
have the torch form.

Only running an op imports Triton: the ops, their fake kernels and their gradients are known
everywhere.
"""

# T tokens, E experts, K top-k, N rows

import torch
from torch import Tensor

from moe_core.kernels import backend, routing_x86
from moe_core.kernels.library_x86 import usable

LOSSES = ("none", "gshard", "load_importance", "load_importance_tutel")  # that the kernels compute


@torch.compiler.assume_constant_result  # it may compile, which torch.compile cannot trace
def choose(kernels: str, device_type: str, dtype: torch.dtype = torch.float32) -> str:
    """Whose kernels route logits of this dtype or plan: "triton", "x86" (C++, where "auto" finds
    it) or "torch".

    `kernels` and what it raises: see backend.choose.
    """
    x86 = kernels == "auto" and device_type == "cpu" and dtype == torch.float32 and usable(dtype)
    return "x86" if x86 else backend.choose(kernels, device_type)


def route(
    logits: Tensor,
    noisy: Tensor,
    top_k: int,
    normalize: bool,
    loss: str,
    noise_std: float,
    kernels: str = "triton",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax, top-K, gate values and the loss's sums in one pass over the logits; differentiable
    in both logits.

    Args:
        logits: [T, E]; halves are computed in fp32.
        noisy: [T, E], what the choice is made by; `logits` itself where there is no noise.
        normalize: gate values of a token sum to 1.
        loss: one of LOSSES.
        noise_std: of that loss.
        kernels: "triton" or "x86".

    Returns:
        gates [T, K], ids [T, K] int64, probs [T, E], sums [2, E] as losses.expert_sums gives them.
        Equal logits go to the expert of the lowest number.
    """
    # only these losses look at the clean logits
    same = noisy is logits or not loss.startswith("load_importance")
    dtype = torch.promote_types(noisy.dtype, torch.float32)
    clean = None if same else logits.to(dtype)
    return torch.ops.moe_core.route(
        noisy.to(dtype), clean, top_k, normalize, loss, noise_std, kernels
    )


def make_plan(
    expert_ids: Tensor,
    num_experts: int,
    capacity: int | Tensor | None,
    priority: Tensor | None = None,
    num_rows: int | None = None,
    kernels: str = "triton",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """dispatch.make_plan's choices, offsets, slots, kept and counts for the same arguments, number
    for number."""
    limits = capacity
    if num_rows is None:
        num_rows = (
            expert_ids.numel()
            if capacity is None
            else min(expert_ids.numel(), num_experts * capacity)
        )
    if capacity is not None and not isinstance(capacity, Tensor):
        limits = expert_ids.new_full((num_experts,), capacity)
    limits = None if limits is None else limits.long()  # the kernels know no other integers
    choices, offsets, slots, kept, counts = torch.ops.moe_core.make_plan(
        expert_ids.long(), num_experts, limits, priority, num_rows, kernels
    )
    return choices, offsets, slots, None if capacity is None else kept, counts


@torch.library.custom_op("moe_core::route", mutates_args=())
def _route(
    noisy: Tensor,
    clean: Tensor | None,
    top_k: int,
    normalize: bool,
    loss: str,
    noise_std: float,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _module(kernels).route(noisy, clean, top_k, normalize, loss, noise_std)


@torch.library.custom_op("moe_core::route_backward", mutates_args=())
def _route_backward(
    noisy: Tensor,
    clean: Tensor | None,
    ids: Tensor,
    probs: Tensor,
    grad_gates: Tensor | None,
    grad_probs: Tensor | None,
    grad_sums: Tensor | None,
    normalize: bool,
    loss: str,
    noise_std: float,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of noisy and of clean, the latter empty where clean is None."""
    if grad_sums is None:
        loss = "none"
    grads = (grad_gates, grad_probs, grad_sums)
    differentiate = _module(kernels).route_backward
    grad_noisy, grad_clean = differentiate(
        noisy, clean, ids, probs, grads, normalize, loss, noise_std
    )
    return grad_noisy, noisy.new_empty(0) if grad_clean is None else grad_clean


@torch.library.custom_op("moe_core::make_plan", mutates_args=())
def _make_plan(
    expert_ids: Tensor,
    num_experts: int,
    limits: Tensor | None,
    priority: Tensor | None,
    num_rows: int,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`limits`: each expert's capacity [E]; `kept` is empty where there is none."""
    found = _module(kernels).make_plan(expert_ids, num_experts, limits, priority, num_rows)
    choices, offsets, slots, kept, counts = found
    return (
        choices,
        offsets,
        slots,
        expert_ids.new_empty(0, dtype=torch.bool) if kept is None else kept,
        counts,
    )


def _module(kernels: str):
    if kernels == "x86":
        return routing_x86
    from moe_core.kernels import triton_routing

    return triton_routing


@_route.register_fake
def _(noisy, clean, top_k, normalize, loss, noise_std, kernels):
    num_tokens, num_experts = noisy.shape
    gates, ids = (
        noisy.new_empty(num_tokens, top_k),
        noisy.new_empty(num_tokens, top_k, dtype=torch.int64),
    )
    return gates, ids, noisy.new_empty(num_tokens, num_experts), noisy.new_empty(2, num_experts)


@_route_backward.register_fake
def _(
    noisy, clean, ids, probs, grad_gates, grad_probs, grad_sums, normalize, loss, noise_std, kernels
):
    return noisy.new_empty(noisy.shape), noisy.new_empty(0 if clean is None else clean.shape)


@_make_plan.register_fake
def _(expert_ids, num_experts, limits, priority, num_rows, kernels):
    num_tokens, top_k = expert_ids.shape
    kept = expert_ids.new_empty(0 if limits is None else (num_tokens, top_k), dtype=torch.bool)
    offsets, counts = (
        expert_ids.new_empty(num_experts, dtype=torch.int32),
        expert_ids.new_empty(num_experts),
    )
    return (
        expert_ids.new_empty(num_rows),
        offsets,
        expert_ids.new_empty(num_tokens, top_k),
        kept,
        counts,
    )


def _save_route(ctx, inputs, output) -> None:
    noisy, clean, _, *ctx.settings = inputs
    _, ids, probs, _ = output
    ctx.save_for_backward(noisy, clean, ids, probs)
    ctx.mark_non_differentiable(ids)
    ctx.set_materialize_grads(False)  # nothing, for outputs that led nowhere, not zeros to read


def _route_backward_formula(ctx, grad_gates, grad_ids, grad_probs, grad_sums):
    noisy, clean, ids, probs = ctx.saved_tensors
    grad_noisy, grad_clean = torch.ops.moe_core.route_backward(
        noisy, clean, ids, probs, grad_gates, grad_probs, grad_sums, *ctx.settings
    )
    return grad_noisy, None if clean is None else grad_clean, *5 * (None,)


torch.library.register_autograd(
    "moe_core::route", _route_backward_formula, setup_context=_save_route
)
