"""Swin Transformer V2 with mixtures of experts in chosen blocks: timm's trunk, moe_core's
feed-forward layers."""

from collections.abc import Sequence
from itertools import chain
from math import inf

from timm.models.swin_transformer_v2 import (
    SwinTransformerV2,
    SwinTransformerV2Block,
    checkpoint_filter_fn,
)
from torch import Tensor, nn

from swinv2_moe.model_types import Section, register_model_type
from swinv2_moe.models.attention import FusedWindowAttention
from swinv2_moe.models.norm_position import NORM_POSITIONS, set_norm_position
from swinv2_moe.models.positions import check_windows, windows_of_model, windows_of_tables
from swinv2_moe.models.protocol import MoEModel
from swinv2_moe.models.swinv2_checks import check_swinv2

SWINV2 = Section(
    "SWINV2",
    {
        "PATCH_SIZE": 4,
        "IN_CHANS": 3,
        "EMBED_DIM": 96,
        "DEPTHS": [2, 2, 18, 2],
        "NUM_HEADS": [3, 6, 12, 24],
        "WINDOW_SIZE": 12,
        "MLP_RATIO": 4.0,
        "QKV_BIAS": True,
        "PRETRAINED_WINDOW_SIZES": [0, 0, 0, 0],
    },
    ranges={
        "PATCH_SIZE": (1, inf),
        "EMBED_DIM": (1, inf),
        "WINDOW_SIZE": (1, inf),
        "MLP_RATIO": (0.1, inf),
    },
    check=check_swinv2,
    sizes={"dim": "EMBED_DIM", "depths": "DEPTHS"},
    meanings={
        "PATCH_SIZE": "side of a patch, pixels",
        "IN_CHANS": "channels of an image: 1 or 3",
        "EMBED_DIM": "channels of the first stage; each further stage has twice as many",
        "DEPTHS": "blocks of each stage",
        "NUM_HEADS": "attention heads of each stage; each number divides the stage's channels",
        "WINDOW_SIZE": "side of an attention window, patches",
        "MLP_RATIO": "hidden dim of an FFN, in units of its channels",
        "QKV_BIAS": "queries, keys and values have biases",
        "PRETRAINED_WINDOW_SIZES": "for each stage, the window side that the pretrained weights"
        " were trained with; 0: `WINDOW_SIZE`",
    },
)


@register_model_type("swinv2_moe", SWINV2)
class SwinTransformerV2MoE(MoEModel, SwinTransformerV2):
    """timm's SwinTransformerV2 (any of its arguments, by keyword) with fused attention and experts.

    Args:
        freeze_moe: with it Swin-MoE is better than its dense model on COCO (arXiv 2206.03382).
        mlp_ratio: hidden dim of the dense FFN and of each expert, in units of the block's channels.
        others: as in MoEModel and SwinTransformerV2.

    Raises:
        ValueError: as MoEModel.
    """

    attention: type[FusedWindowAttention] = FusedWindowAttention
    classifier = "head.fc"

    def _init_weights(self, m: nn.Module, needs_reset: bool = True) -> None:
        # meta tensors hold no values, and skipping them halves the time
        if not (isinstance(m, nn.Linear) and m.weight.is_meta):
            super()._init_weights(m, needs_reset)

    def adapt_block(self, block: SwinTransformerV2Block) -> None:
        """Replace timm's attention."""
        block.attn = self.attention.like(block.attn)

    def place_norm(self, block: SwinTransformerV2Block, position: str) -> None:
        """As MoEModel; one of NORM_POSITIONS.

        Raises:
            ValueError: another position; a router without gate values for "before_gate".
        """
        if position not in NORM_POSITIONS:
            raise ValueError(f"moe_norm ({position!r}) must be one of {', '.join(NORM_POSITIONS)}")
        config = block.mlp.moe.config
        if position == "before_gate" and config.routing != "token_choice":
            raise ValueError(
                f"moe_norm ('before_gate') needs tokens that choose experts, not router"
                f" {config.router!r}"
            )
        set_norm_position(block, position)

    def init_weights(self, needs_reset: bool = True) -> None:
        """As timm, but a norm before the FFN starts at one: only res-post-norm starts at zero."""
        super().init_weights(needs_reset=needs_reset)
        for block in chain.from_iterable(self.block_stages()):
            if getattr(block, "norm_position", "post") == "pre":
                block.norm2.reset_parameters()

    def block_stages(self) -> list[Sequence[nn.Module]]:
        """As MoEModel."""
        return [stage.blocks for stage in self.layers]

    def position_windows(self) -> list[int]:
        """As MoEModel."""
        return windows_of_model(self)

    def convert_dense(self, tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        """As MoEModel; takes timm's layout and Microsoft's."""
        check_windows(self, windows_of_tables(tensors, len(self.layers)), source)
        return checkpoint_filter_fn(tensors, self)
