"""Swin Transformer V2 with mixtures of experts in chosen blocks: timm's trunk, moe_core's
feed-forward layers."""

from typing import TYPE_CHECKING, Any

from timm.models.swin_transformer_v2 import (
    SwinTransformerV2,
    checkpoint_filter_fn,
)
from torch import Tensor, nn

from swinv2_moe.models.attention import FusedWindowAttention
from swinv2_moe.models.positions import check_windows, windows_of_model, windows_of_tables
from swinv2_moe.models.protocol import MoEModel
from swinv2_moe.models.section import SwinV2Config, register_model_type


@register_model_type("swinv2_moe", SwinV2Config)
class SwinTransformerV2MoE(MoEModel, SwinTransformerV2):
    """timm's SwinTransformerV2 (any of its arguments, by keyword) with fused attention and experts.

    Args:
        freeze_moe: the MoE layers are not trained. With frozen layers, Swin-MoE is better than its
            dense model on COCO (arXiv 2206.03382).
        mlp_ratio: hidden dim of the dense FFN and of each expert, in units of the block's channels.
        others: as in MoEModel and SwinTransformerV2.

    Raises:
        ValueError: as MoEModel.
    """

    attention: type[FusedWindowAttention] = FusedWindowAttention
    classifier_name = "head.fc"

    if TYPE_CHECKING:  # TorchScript reads annotations
        layers: Any  # timm's stages

    def _init_weights(self, m: nn.Module, needs_reset: bool = True) -> None:
        # meta tensors hold no values, and skipping the initialisation halves the time
        if not (isinstance(m, nn.Linear) and m.weight.is_meta):
            super()._init_weights(m, needs_reset)

    def adapt_block(self, block: Any) -> None:
        """Replace timm's attention."""
        block.attn = self.attention.like(block.attn)

    def block_stages(self) -> list[nn.ModuleList | nn.Sequential]:
        """As MoEModel."""
        return [stage.blocks for stage in self.layers]

    def tokens_of_image(self, block: Any) -> int:
        """As MoEModel."""
        height, width = block.input_resolution
        return height * width

    def token_maps(self, values: Tensor, output: Tensor) -> Tensor:
        """As MoEModel. `output` is [B, h, w, M], of any image size."""
        return values.unflatten(0, output.shape[:3])

    def position_windows(self) -> list[int]:
        """As MoEModel."""
        return windows_of_model(self)

    def convert_dense(self, tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        """As MoEModel; accepts timm's and Microsoft's layouts."""
        check_windows(self, windows_of_tables(tensors, len(self.layers)), source)
        return checkpoint_filter_fn(tensors, self)
