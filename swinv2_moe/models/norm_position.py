"""The position of the norm in the FFN branch of Swin blocks with experts (MODEL.MOE.NORM).

SwinV2 normalises the FFN's result (res-post-norm). With one expert per token, the expert's output
is multiplied by the gate value, and the norm removes this factor again. So the router's gradient
from the task is almost zero, and the router learns little besides balance.
"""

from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from torch import Tensor

NORM_POSITIONS = ("post", "before_gate")


class ExpertBlock(SwinTransformerV2Block):
    """SwinV2's block with the FFN's norm at another position, given by the attribute
    `norm_position`. Its state is the same.

    - "post": `norm2(mlp(x))`, as in SwinV2.
    - "before_gate": the experts' results are normalised, then multiplied by their gate value.
    """

    norm_position: str

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> the same."""
        x = x + self.drop_path1(self.norm1(self._attn(x)))
        tokens = x.flatten(1, 2)
        tokens = tokens + self.drop_path2(ffn_branch(self, tokens))
        return tokens.view_as(x)


def set_norm_position(block: SwinTransformerV2Block, position: str) -> None:
    """Change a block with experts in place. Parameters and their names do not change."""
    if position != "post":
        # Only the forward method changes, not the state, as in swin_moe.
        block.__class__ = ExpertBlock
        assert isinstance(block, ExpertBlock)
        block.norm_position = position


def ffn_branch(block: SwinTransformerV2Block, tokens: Tensor, **mask) -> Tensor:
    """Compute the block's FFN and its norm: tokens [..., C] -> [..., C].

    Args:
        mask: `mask` and `num_tokens` of MoELayer, for a block with experts.
    """
    position = getattr(block, "norm_position", "post")
    if position == "before_gate":
        return block.mlp(tokens, output_norm=block.norm2, **mask)
    return block.norm2(block.mlp(tokens, **mask))
