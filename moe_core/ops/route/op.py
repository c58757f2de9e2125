"""Softmax, top-K and gate values of the router's logits.

The Triton form and the C++ form read the logits once, and add the noise. They also compute the sums
of the auxiliary losses in `KERNEL_LOSSES`. They are a torch.library op with a backward op. For a
linear router it computes the logits and casts the tokens too; in Triton in the same pass, for at
most 64 experts and softmax gates. Autograd differentiates the torch form.

On a CPU the product is torch's, which is as fast as one in C++. So both forms there read the same
logits, and choose the same experts.
"""

# T tokens, E experts, K top-k, M model dim

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.context import without_autocast
from moe_core.ops.autograd import (
    is_differentiated_again,
    op,
    plain_gradients,
    schema_of,
)
from moe_core.ops.backend import KERNEL_LOSSES, Kernels, chosen, load
from moe_core.ops.route import reference
from moe_core.ops.route.inputs import RouteGradients, RouteSettings, SavedRoute
from moe_core.registry import LOSSES

_MOST_EXPERTS = 64  # a program holds the logits of its tokens in registers
_TOKEN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LinearLogits(NamedTuple):
    """The logits of a linear router, not computed yet."""

    tokens: Tensor  # [T, M]
    weight: Tensor  # [E, M]
    dtype: torch.dtype  # of the experts

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.shape[0], self.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def value(self) -> Tensor:
        """`tokens weight^T` [T, E] in at least fp32."""
        with without_autocast(self.tokens):
            tokens = self.tokens.to(torch.promote_types(self.tokens.dtype, torch.float32))
            return F.linear(tokens, self.weight.to(tokens.dtype))


class RoutedTokens(NamedTuple):
    gates: Tensor  # [T, K]
    ids: Tensor  # [T, K] int64
    probs: Tensor  # [T, E]
    # [2, E] sums per expert of the loss; None: the form does not compute them
    sums: Tensor | None
    # [T, E] without and with noise; None: not computed, or only within the kernel
    logits: Tensor | None
    noisy: Tensor | None
    inputs: Tensor | None  # [T, M] the tokens in the dtype of the experts, from the same kernel
    # a kernel that computes the loss from its name, the sums and the number of tokens
    loss_of_sums: Callable[[str, Tensor, int | Tensor], Tensor] | None = None


def route(
    logits: Tensor | LinearLogits,
    noise: Tensor | None,
    settings: RouteSettings,
    kernels: Kernels | None = None,
) -> RoutedTokens:
    """Choose the `top_k` experts with the largest noisy logits, `logits + noise_std * noise`.

    Differentiable in the logits [T, E], or in the tokens and the weight. If noisy logits are equal,
    the expert with the lower index is chosen.

    Args:
        noise: [T, E]; None: no noise.
        kernels: those chosen before; None: by the name in the settings.
    """
    top_k, normalize, loss, noise_std, *_, activation = settings
    x = logits.tokens if isinstance(logits, LinearLogits) else logits
    language, name = kernels or chosen(settings.kernels, x)
    if language == "cpp" and x.dtype == torch.float64:
        language = "torch"
    weight: Tensor | None = None
    cast_to: torch.dtype | None = None
    if isinstance(logits, LinearLogits):
        if _fuses_product(logits, settings, language):
            weight = logits.weight
            cast_to = None if logits.dtype == x.dtype else logits.dtype
        else:
            x = logits.value()
    if language == "torch":
        noisy_logits = reference.add_noise(x, noise, noise_std)
        gates, ids, probs = reference.route(noisy_logits, top_k, normalize, activation)
        return RoutedTokens(gates, ids, probs, None, x, noisy_logits, None)
    if weight is None:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    computes_loss = loss in KERNEL_LOSSES
    settings = settings._replace(kernels=name, loss=loss if computes_loss else "none")
    gates, ids, probs, sums, inputs, *_ = _route(x, weight, noise, cast_to, language, *settings)
    noisy: Tensor | None = None
    if activation != "softmax" and language == "triton":  # whose gate values are of softmax
        noisy = reference.add_noise(x, noise, noise_std)
        scores = reference.gate_scores(noisy, activation)
        gates = reference.gates_of(scores, noisy, ids, activation, normalize)
    value = loss_of_sums if computes_loss and language == "triton" else None
    return RoutedTokens(
        gates,
        ids,
        probs,
        sums if computes_loss else None,
        logits=x if weight is None else None,
        noisy=noisy,
        inputs=None if weight is None else inputs if cast_to else x,
        loss_of_sums=value,
    )


def _fuses_product(logits: LinearLogits, settings: RouteSettings, language: str) -> bool:
    """Whether the form computes these logits from the tokens."""
    tokens, weight, _ = logits
    if language == "torch" or settings.loss not in KERNEL_LOSSES:
        return False
    if weight.dtype != torch.float32:
        return False
    if tokens.dtype not in _TOKEN_DTYPES:
        return False
    fits_triton = weight.shape[0] <= _MOST_EXPERTS and settings.activation == "softmax"
    return fits_triton or language != "triton"


@op(
    "moe_core::route",
    "(Tensor x, Tensor? weight, Tensor? noise, ScalarType? cast_to, str language,"
    f" {schema_of(RouteSettings)}) -> ({', '.join(['Tensor'] * 7)})",
)
def _route(x, weight, noise, cast_to, language, *settings):
    """gates [T, K], ids [T, K], probs [T, E], sums [2, E], the cast tokens, scores and logits.

    x is the logits [T, E], or with a `weight` the tokens [T, M]. The last three results may be
    empty. The cast tokens exist with `cast_to`. The other two are for the backward pass: the scores
    of the chosen experts [T, K], in C++ if they are not the gate values, and the logits [T, E], if
    they are computed here and the loss reads them.
    """
    form = load("route", language)
    return form.forward(x, weight, noise, cast_to, RouteSettings(*settings))


@op(
    "moe_core::route_backward",
    f"({schema_of(SavedRoute)}, {schema_of(RouteGradients, 'grad_')}, str language,"
    f" {schema_of(RouteSettings)}) -> (Tensor, Tensor)",
)
def _route_backward(*arguments):
    """Gradients of x and weight; the second one is empty without a weight."""
    saved, grads = SavedRoute(*arguments[:8]), RouteGradients(*arguments[8:12])
    language, *settings = arguments[12:]
    return load("route", language).backward(saved, grads, RouteSettings(*settings))


@_route.register_fake
def _(x, weight, noise, cast_to, language, *settings):
    top_k, normalize, loss, _, _, _, activation = settings
    num_tokens, num_experts = x.shape[0], x.shape[1]
    like = x
    if weight is not None:
        like, num_experts = weight, weight.shape[0]
    gates = like.new_empty(num_tokens, top_k)
    ids = like.new_empty(num_tokens, top_k, dtype=torch.int64)
    probs = like.new_empty(num_tokens, num_experts)
    inputs, scores, logits = x.new_empty(0), like.new_empty(0), like.new_empty(0)
    if cast_to is not None:
        inputs = x.new_empty(x.shape, dtype=cast_to)
    if weight is not None and loss.startswith("load_importance"):
        logits = torch.empty_like(probs)
    if language == "cpp" and activation == "sigmoid" and normalize:
        scores = torch.empty_like(gates)
    return gates, ids, probs, like.new_empty(2, num_experts), inputs, scores, logits


@_route_backward.register_fake
def _(x, weight, *_):
    if weight is None:
        return x.new_empty(x.shape), x.new_empty(0)
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output) -> None:
    x, weight, noise, ctx.cast_to, ctx.language, *ctx.settings = inputs
    gates, ids, probs, _, _, scores, logits = output
    ctx.save_for_backward(*SavedRoute(x, weight, noise, ids, gates, probs, scores, logits))
    ctx.mark_non_differentiable(ids, scores, logits)
    # The gradients of unused outputs are None, so the kernel does not read zeros.
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_gates, grad_ids, grad_probs, grad_sums, grad_inputs, *unused):
    grads = RouteGradients(grad_gates, grad_probs, grad_sums, grad_inputs)
    saved = SavedRoute(*ctx.saved_tensors)
    nothing = (None,) * (len(RouteSettings._fields) + 3)
    if is_differentiated_again(saved.x):
        top_k, normalize, loss, noise_std, loss_noise_std, _, activation = ctx.settings

        def function(x, weight):
            clean = x
            if weight is not None:
                clean = LinearLogits(x, weight, x.dtype).value()
            noisy = reference.add_noise(clean, saved.noise, noise_std)
            settings = (top_k, normalize, loss, loss_noise_std, activation)
            routed = reference.route_and_sums(noisy, clean, *settings)
            return *routed, x.to(ctx.cast_to or x.dtype)

        needs = ctx.needs_input_grad[:2]
        return (*plain_gradients(function, saved[:2], needs, grads), *nothing)
    grad_x, grad_weight = _route_backward(*saved, *grads, ctx.language, *ctx.settings)
    if saved.weight is None:
        grad_weight = None
    return (grad_x, grad_weight, *nothing)


_route.register_autograd(_differentiate, _save)


@register_flop_formula(torch.ops.moe_core.route)
def _flops(x_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    if weight_shape is None:
        return 0
    num_experts, model_dim = weight_shape
    return 2 * x_shape[0] * num_experts * model_dim


@register_flop_formula(torch.ops.moe_core.route_backward)
def _backward_flops(x_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    return 2 * _flops(x_shape, weight_shape)


# --- the auxiliary losses from their sums. The formulas are those of moe_core.losses, whose torch
# operations would be ten launches on a GPU. Here each pass is one.


def loss_of_sums(loss: str, sums: Tensor, num_tokens: int | Tensor) -> Tensor:
    """The loss, a scalar, from its sums [2, E] over `num_tokens` tokens; differentiable in sums.

    Args:
        loss: one of `KERNEL_LOSSES`.
        num_tokens: a number, or a scalar tensor if the sums are over several ranks.
    """
    total = None
    if isinstance(num_tokens, Tensor):
        total, num_tokens = num_tokens.detach(), 0
    return _loss_of_sums(sums, total, num_tokens, loss)


@op("moe_core::loss_of_sums")
def _loss_of_sums(sums: Tensor, total: Tensor | None, num_tokens: int, loss: str) -> Tensor:
    return load("route", "loss_triton").loss_of_sums(sums, total, num_tokens, loss)


@op("moe_core::loss_of_sums_backward")
def _loss_of_sums_backward(
    grad: Tensor, sums: Tensor, total: Tensor | None, num_tokens: int, loss: str
) -> Tensor:
    differentiate = load("route", "loss_triton").loss_of_sums_backward
    return differentiate(grad, sums, total, num_tokens, loss)


@_loss_of_sums.register_fake
def _(sums, total, num_tokens, loss):
    return sums.new_empty(())


@_loss_of_sums_backward.register_fake
def _(grad, sums, total, num_tokens, loss):
    return sums.new_empty(sums.shape)


def _save_loss(ctx, inputs, output) -> None:
    sums, total, ctx.num_tokens, ctx.loss = inputs
    ctx.save_for_backward(sums, total)


def _differentiate_loss(ctx, grad):
    sums, total = ctx.saved_tensors
    if is_differentiated_again(grad):

        def function(sums):
            return (LOSSES[ctx.loss]().value(sums, ctx.num_tokens if total is None else total),)

        return (*plain_gradients(function, (sums,), (True,), [grad]), None, None, None)
    grad_sums = _loss_of_sums_backward(grad, sums, total, ctx.num_tokens, ctx.loss)
    return grad_sums, None, None, None


_loss_of_sums.register_autograd(_differentiate_loss, _save_loss)
