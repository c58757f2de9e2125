"""Swin Transformer V2 with mixtures of experts in chosen blocks: timm's trunk, moe_core's
feed-forward layers."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from timm.models import register_notrace_module
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block
from torch import Tensor, nn

from moe_core import MoEConfig, MoELayer
from moe_core.parallel import ExpertGroup, ParallelStrategy
from swinv2_moe.config import PUBLISHED_MOE
from swinv2_moe.models.attention import FusedWindowAttention


@register_notrace_module  # reason: routing depends on the input
class MoEMlp(nn.Module):
    """An MoE layer in the place of a block's FFN: a tensor in, a tensor out.

    timm's block has no way for a second result, so the auxiliary loss waits here until
    `take_aux_loss`. If `frozen`, the layer always works as in evaluation (no noise, the capacity of
    evaluation) and has no auxiliary loss.
    """

    def __init__(self, moe: MoELayer, eval_capacity_factor: float, frozen: bool = False) -> None:
        super().__init__()
        self.moe = moe.requires_grad_(not frozen)
        self.eval_capacity_factor = eval_capacity_factor
        self.frozen = frozen
        self.aux_loss: Tensor | None = None
        self.train(self.training)

    def forward(self, x: Tensor, **mask) -> Tensor:
        """`mask` and `num_tokens`, if any, are MoELayer's."""
        y, aux_loss = self.moe(
            x, capacity_factor=None if self.training else self.eval_capacity_factor, **mask
        )
        self.aux_loss = None if self.frozen else aux_loss
        return y

    def train(self, mode: bool = True) -> "MoEMlp":
        return super().train(mode and not self.frozen)

    def __getstate__(self) -> dict:
        # part of a graph, which neither copy nor pickle can take
        return self.__dict__ | {"aux_loss": None}


def frozen_moe(model: nn.Module) -> nn.ModuleList:
    """The MoE layers that are not trained: their weights do not change during training, either."""
    return nn.ModuleList(
        layer for layer in model.modules() if isinstance(layer, MoEMlp) and layer.frozen
    )


def take_aux_loss(model: nn.Module) -> Tensor:
    """The sum of the auxiliary losses that the forward pass just done has left behind; 0 for a
    dense model."""
    layers = [module for module in model.modules() if isinstance(module, MoEMlp)]
    losses = [layer.aux_loss for layer in layers if layer.aux_loss is not None]
    for layer in layers:
        layer.aux_loss = None
    return (
        torch.stack(losses).sum()
        if losses
        else torch.zeros((), device=next(model.parameters()).device)
    )


class SwinTransformerV2MoE(SwinTransformerV2):
    """timm's SwinTransformerV2 (any of its arguments, by keyword), fused attention, experts in
    `moe_blocks`.

    Args:
        num_experts: of each MoE layer, over the whole `expert_group`; 0: the dense model.
        moe_blocks: per stage, the blocks (from 0) whose FFN becomes a mixture of experts.
        moe: further MoEConfig fields, over the published recipe (`PUBLISHED_MOE`).
        eval_capacity_factor: in evaluation mode; None: as in training.
        freeze_moe: the MoE layers are not trained, and route as in evaluation: with that Swin-MoE
            beats its dense model on COCO (arXiv 2206.03382).
        expert_group: the ranks over which the experts are spread; None: all here.
        expert_strategy: how they use each other; "auto" finds out while training.
        mlp_ratio: hidden dim of the dense FFN and of each expert, in units of the block's channels.
        device, dtype: of every parameter; None: torch's defaults.

    Raises:
        ValueError: moe_blocks that name a stage or block which is not there; what MoEConfig and
            MoELayer raise.
    """

    attention: type[FusedWindowAttention] = FusedWindowAttention

    def __init__(
        self,
        *,
        num_experts: int = 0,
        moe_blocks: Sequence[Sequence[int]] = (),
        moe: dict | None = None,
        eval_capacity_factor: float | None = None,
        freeze_moe: bool = False,
        expert_group: ExpertGroup | dist.ProcessGroup | None = None,
        expert_strategy: ParallelStrategy | str = ParallelStrategy(),  # noqa: B008 - frozen
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **kwargs)
        # one for all layers: they share what it sets up
        expert_group = ExpertGroup.of(expert_group)
        if num_experts:
            _check_moe_blocks(moe_blocks, [len(stage.blocks) for stage in self.layers])
        for i, stage in enumerate(self.layers):
            for j, block in enumerate(stage.blocks):
                self.adapt_block(block)
                if num_experts and i < len(moe_blocks) and j in moe_blocks[i]:
                    config = MoEConfig(
                        block.dim,
                        int(block.dim * block.mlp_ratio),
                        num_experts,
                        **PUBLISHED_MOE | (moe or {}),
                    )
                    capacity = (
                        config.capacity_factor
                        if eval_capacity_factor is None
                        else eval_capacity_factor
                    )
                    moe_layer = MoELayer(
                        config, expert_group, strategy=expert_strategy, device=device
                    )
                    block.mlp = MoEMlp(moe_layer.to(dtype), capacity, freeze_moe)
        self.init_weights(needs_reset=False)

    def _init_weights(self, m: nn.Module, needs_reset: bool = True) -> None:
        # there it changes nothing, in half of the time
        if not (isinstance(m, nn.Linear) and m.weight.is_meta):
            super()._init_weights(m, needs_reset)

    def adapt_block(self, block: SwinTransformerV2Block) -> None:
        """Replace what this model does otherwise than timm's."""
        block.attn = self.attention.like(block.attn)

    def forward_with_aux(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """images [B, 3, H, W] -> logits [B, classes] and the sum of the layers' auxiliary
        losses."""
        return self(images), take_aux_loss(self)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """timm's exceptions, the cosine router and the experts' biases (2-D, so timm would not see
        them as biases)."""
        moe = (
            "router.temperature",
            "router.sim_matrix",
            "router.projector",
            "experts.b1",
            "experts.b2",
        )
        return super().no_weight_decay() | {
            n for n, _ in self.named_parameters() if any(part in n for part in moe)
        }


class WithAuxLoss(nn.Module):
    """The model with its auxiliary loss as a second output: what DistributedDataParallel and
    torch.compile wrap."""

    def __init__(self, model: SwinTransformerV2MoE) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.forward_with_aux(images)


def _check_moe_blocks(moe_blocks: Sequence[Sequence[int]], depths: list[int]) -> None:
    if not any(moe_blocks):
        raise ValueError(f"moe_blocks ({moe_blocks}) names no block for the experts")
    if len(moe_blocks) > len(depths):
        raise ValueError(
            f"moe_blocks ({moe_blocks}) has {len(moe_blocks)} stages, the model has {len(depths)}"
        )
    for stage, blocks in enumerate(moe_blocks):
        for block in blocks:
            if not 0 <= block < depths[stage]:
                raise ValueError(
                    f"moe_blocks names block {block} of stage {stage}, which has {depths[stage]}"
                    " blocks"
                )
