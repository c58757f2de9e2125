"""Adapter that makes MoELayer usable as the FFN of a timm block."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from moe_core import MoELayer

EXPERTS = ".moe.experts."  # between the name of a block's FFN and that of an expert's parameter


@register_notrace_module  # reason: routing depends on the input
class MoEMlp(nn.Module):
    """An MoE layer with the interface of a block's FFN, which maps a tensor to a tensor.

    timm's block expects one result, so in training mode the gradient of `aux_loss_weight` times the
    auxiliary loss is attached to the output: any loss of the output also balances the experts.
    Within `separate_aux_loss` it is not attached. `take_aux_loss` collects the losses. If `frozen`,
    the layer stays in evaluation mode (no noise, the capacity of evaluation) and has no auxiliary
    loss.

    Attributes:
        channels_first: x is [B, M, h, w], as between convolutions.
        dropout: of the result, in training mode.
        gate_last: of the dense FFN that was replaced: the gate is the second half of its fc1; None:
            its fc1 is not two layers in one.
        aux_loss_weight: factor of the attached gradient, a number or a scalar tensor. It includes
            the factor by which the loss of the output is scaled, if any.
    """

    def __init__(
        self,
        moe: MoELayer,
        frozen: bool = False,
        aux_loss_weight: float | Tensor = 0.0,
        *,
        channels_first: bool = False,
        dropout: float = 0.0,
        gate_last: bool | None = None,
    ) -> None:
        super().__init__()
        self.channels_first, self.dropout, self.gate_last = channels_first, dropout, gate_last
        self.moe = moe.requires_grad_(not frozen)
        self.frozen = frozen
        self.aux_loss_weight = aux_loss_weight
        self.attaches_aux_loss = True
        self.aux_loss: Tensor | None = None
        self.train(self.training)

    def forward(self, x: Tensor, **options) -> Tensor:
        """x [..., M] (or [B, M, h, w] with `channels_first`) -> the same.

        Args:
            options: `mask` and `num_tokens` of MoELayer.
        """
        if not self.channels_first:
            return self._forward(x, **options)
        return self._forward(x.movedim(1, -1), **options).movedim(-1, 1)

    def _forward(self, x: Tensor, **options) -> Tensor:
        y, aux_loss = self.moe(x, **options)
        if self.frozen:
            self.aux_loss = None
            return y
        if self.training and self.attaches_aux_loss and aux_loss.requires_grad:
            attach: type[torch.autograd.Function] = _AttachedLoss
            if torch.compiler.is_compiling():
                attach = _CompiledAttachedLoss
            y = attach.apply(y, aux_loss, self.aux_loss_weight)
            aux_loss = aux_loss.detach()
        self.aux_loss = aux_loss
        if self.training and self.dropout:
            y = F.dropout(y, self.dropout)
        return y

    def train(self, mode: bool = True) -> "MoEMlp":
        """Set the mode; a frozen layer stays in evaluation mode."""
        return super().train(mode and not self.frozen)

    def __getstate__(self) -> dict:
        # The loss is part of an autograd graph, which cannot be copied or pickled.
        return self.__dict__ | {"aux_loss": None}


class _CompiledAttachedLoss(torch.autograd.Function):
    """y [..., M] unchanged. Its backward pass adds `weight` to the gradient of a scalar loss.

    torch.compile accepts no function with a jvp. Source: Megatron-LM, MoEAuxLossAutoScaler.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, loss: Tensor, weight: float | Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        _, loss, ctx.weight = inputs
        ctx.dtype = loss.dtype

    @staticmethod
    def backward(ctx, y_grad: Tensor) -> tuple:
        return y_grad, y_grad.new_ones((), dtype=ctx.dtype) * ctx.weight, None


class _AttachedLoss(_CompiledAttachedLoss):
    """The same; the forward derivative is that of y."""

    @staticmethod
    def jvp(ctx, y_tangent: Tensor, loss_tangent: Tensor | None, _) -> Tensor:
        return y_tangent.view_as(y_tangent)


@contextmanager
def separate_aux_loss(model: nn.Module) -> Iterator[None]:
    """In a forward pass in this context, the layers do not attach their auxiliary losses. The
    caller adds `take_aux_loss` to the loss."""
    layers = [module for module in model.modules() if isinstance(module, MoEMlp)]
    for layer in layers:
        layer.attaches_aux_loss = False
    try:
        yield
    finally:
        for layer in layers:
            layer.attaches_aux_loss = True


def frozen_moe(model: nn.Module) -> nn.ModuleList:
    """The MoE layers that are not trained. Their weights do not change during training."""
    layers = [module for module in model.modules() if isinstance(module, MoEMlp)]
    return nn.ModuleList(layer for layer in layers if layer.frozen)


def take_aux_loss(model: nn.Module) -> Tensor:
    """Return and clear the unweighted sum of the auxiliary losses of the latest forward pass.

    It has a gradient only after a pass within `separate_aux_loss`: an attached loss is not counted
    twice. The sum is 0 for a dense model.
    """
    layers = [module for module in model.modules() if isinstance(module, MoEMlp)]
    losses = [layer.aux_loss for layer in layers if layer.aux_loss is not None]
    for layer in layers:
        layer.aux_loss = None
    if losses:
        return torch.stack(losses).sum()
    return torch.zeros((), device=next(model.parameters()).device)


def block_name(layer: str) -> str:
    """The name of the block that an MoE layer is in: "blocks.1.mlp.moe" -> "blocks.1"."""
    return layer.rsplit(".", 2)[0]
