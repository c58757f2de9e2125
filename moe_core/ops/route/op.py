"""Softmax, top-K and gate values of the router's logits.

The Triton form reads the logits once. It also computes the sums of the auxiliary losses in
`KERNEL_LOSSES`. It is a torch.library op with a backward op. Autograd differentiates the torch
form.
"""

# T tokens, E experts, K top-k

import torch
from torch import Tensor

from moe_core.context import in_transform
from moe_core.ops.autograd import is_differentiated_again, plain_gradients
from moe_core.ops.backend import KERNEL_LOSSES, Request, load, select
from moe_core.ops.route import reference


def route(
    logits: Tensor,
    noisy: Tensor,
    top_k: int,
    normalize: bool,
    loss: str,
    noise_std: float,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Choose the `top_k` experts with the largest noisy logits; differentiable in both logits.

    Args:
        logits: [T, E].
        noisy: [T, E], the logits with noise; without noise, `logits` itself.
        normalize: whether the gate values of a token sum to 1.
        loss: the name of the auxiliary loss.
        noise_std: the standard deviation of the noise, for the loss.
        kernels: see `backend.select`.

    Returns:
        Gate values [T, K], expert ids [T, K] int64, probabilities [T, E], and the sums per expert
        [2, E] of the loss as in `losses.expert_sums`, or None if the form does not compute them.
        If logits are equal, the expert with the lower index is chosen.
    """
    request = Request(kernels, logits.device.type, logits.dtype)
    if in_transform(logits) or select("route", request) == "route.reference":
        gates, ids, probs = reference.route(noisy, top_k, normalize)
        return gates, ids, probs, None
    computes_loss = loss in KERNEL_LOSSES
    fused_loss = "none"
    if computes_loss:
        fused_loss = loss
    # Only these losses read the logits without noise.
    has_clean = noisy is not logits and fused_loss.startswith("load_importance")
    dtype = torch.promote_types(noisy.dtype, torch.float32)
    clean = None
    if has_clean:
        clean = logits.to(dtype)
    gates, ids, probs, sums = torch.ops.moe_core.route(
        noisy.to(dtype), clean, top_k, normalize, fused_loss, noise_std
    )
    if not computes_loss:
        sums = None
    return gates, ids, probs, sums


@torch.library.custom_op("moe_core::route", mutates_args=())
def _route(
    noisy: Tensor,
    clean: Tensor | None,
    top_k: int,
    normalize: bool,
    loss: str,
    noise_std: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gates [T, K], ids [T, K], probs [T, E] and the sums [2, E] of the loss."""
    return load("route.triton").route(noisy, clean, top_k, normalize, loss, noise_std)


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
) -> tuple[Tensor, Tensor]:
    """Gradients of `noisy` and of `clean`; the second one is empty if `clean` is None."""
    if grad_sums is None:
        loss = "none"
    grads = (grad_gates, grad_probs, grad_sums)
    differentiate = load("route.triton").route_backward
    grad_noisy, grad_clean = differentiate(
        noisy, clean, ids, probs, grads, normalize, loss, noise_std
    )
    if grad_clean is None:
        grad_clean = noisy.new_empty(0)
    return grad_noisy, grad_clean


@_route.register_fake
def _(noisy, clean, top_k, normalize, loss, noise_std):
    num_tokens, num_experts = noisy.shape
    gates = noisy.new_empty(num_tokens, top_k)
    ids = noisy.new_empty(num_tokens, top_k, dtype=torch.int64)
    return gates, ids, noisy.new_empty(num_tokens, num_experts), noisy.new_empty(2, num_experts)


@_route_backward.register_fake
def _(noisy, clean, ids, probs, grad_gates, grad_probs, grad_sums, normalize, loss, noise_std):
    grad_clean = noisy.new_empty(0)
    if clean is not None:
        grad_clean = noisy.new_empty(clean.shape)
    return noisy.new_empty(noisy.shape), grad_clean


def _save(ctx, inputs, output) -> None:
    noisy, clean, _, ctx.normalize, ctx.loss, ctx.noise_std = inputs
    _, ids, probs, _ = output
    ctx.save_for_backward(noisy, clean, ids, probs)
    ctx.mark_non_differentiable(ids)
    # The gradients of unused outputs are None, so the kernel does not read zeros.
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_gates, grad_ids, grad_probs, grad_sums):
    noisy, clean, ids, probs = ctx.saved_tensors
    if is_differentiated_again(probs):

        def function(noisy, clean):
            return reference.route_and_sums(
                noisy, clean, ids.shape[1], ctx.normalize, ctx.loss, ctx.noise_std
            )

        needs, grads = ctx.needs_input_grad[:2], (grad_gates, grad_probs, grad_sums)
        return (*plain_gradients(function, (noisy, clean), needs, grads), None, None, None, None)
    grad_noisy, grad_clean = torch.ops.moe_core.route_backward(
        noisy,
        clean,
        ids,
        probs,
        grad_gates,
        grad_probs,
        grad_sums,
        ctx.normalize,
        ctx.loss,
        ctx.noise_std,
    )
    if clean is None:
        grad_clean = None
    return grad_noisy, grad_clean, None, None, None, None


torch.library.register_autograd("moe_core::route", _differentiate, setup_context=_save)
