"""The form in which Swin-MoE was released: pre-norm blocks, dot-product attention, V1 patch
merging.

The paper (arXiv 2206.03382, section 5) calls the model SwinV2-MoE. This form is needed to load the
released weights.
"""

from itertools import chain
from typing import Any

from timm.layers import Mlp
from timm.models import swin_transformer, swin_transformer_v2
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from torch import Tensor, nn

from swinv2_moe.models.attention import DotProductWindowAttention
from swinv2_moe.models.section import SwinV2Config, register_model_type
from swinv2_moe.models.swinv2_moe import SwinTransformerV2MoE


class PreNormBlock(SwinTransformerV2Block):
    """`x + attn(norm1(x))`, then `x + mlp(norm2(x))`."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> the same."""
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        tokens = x.flatten(1, 2)
        tokens = tokens + self.drop_path2(self.mlp(self.norm2(tokens)))
        return tokens.view_as(x)


class PreNormMerging(swin_transformer_v2.PatchMerging):
    """V1's patch merging (norm, then reduction). It is a subclass of V2's, because timm's
    `set_input_size` requires that."""

    def __init__(self, dim: int, out_dim: int, device=None, dtype=None) -> None:
        super().__init__(dim, out_dim, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(4 * dim, device=device, dtype=dtype)

    forward = swin_transformer.PatchMerging.forward


@register_model_type("swin_moe", SwinV2Config)
class SwinTransformerMoE(SwinTransformerV2MoE):
    """The released architecture, with the arguments of SwinTransformerV2MoE. FFNs and experts have
    no second bias."""

    attention = DotProductWindowAttention

    def __init__(self, *, moe: dict | None = None, device=None, dtype=None, **kwargs) -> None:
        super().__init__(
            moe={"output_bias": False} | (moe or {}), device=device, dtype=dtype, **kwargs
        )
        for stage in self.layers:
            if not isinstance(stage.downsample, nn.Identity):
                stage.downsample = PreNormMerging(
                    stage.downsample.dim, stage.downsample.out_dim, device, dtype
                )
        self.init_weights(needs_reset=False)

    def adapt_block(self, block: Any) -> None:
        super().adapt_block(block)
        # The state is the same and the order of the norms differs, so the class is the only
        # difference between the two blocks.
        block.__class__ = PreNormBlock
        fc1 = block.mlp.fc1
        block.mlp = Mlp(
            fc1.in_features,
            fc1.out_features,
            drop=block.mlp.drop1.p,
            bias=(True, False),
            device=fc1.weight.device,
            dtype=fc1.weight.dtype,
        )

    def init_weights(self, needs_reset: bool = True) -> None:
        """As timm, but norm weights start at one. timm starts them at zero, for res-post-norm."""
        super().init_weights(needs_reset=needs_reset)
        block: Any
        for block in chain.from_iterable(self.block_stages()):
            block.norm1.reset_parameters()
            block.norm2.reset_parameters()
