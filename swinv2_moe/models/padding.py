"""Images of any size through a trunk: what only fills windows up is neither attended to, nor
routed, nor merged.

1. The images of a batch lie in the top left corner of one canvas. Each stage gets a `Presence`:
   which tokens of its map belong to an image, and the masks of its windows that follow from that.
2. A block pads its map to whole windows before it shifts them, so that a window holds the same
   tokens on any canvas. Within a window tokens attend to each other if they are of the same image
   and side of the shift's seam; padding attends to padding, which gives no row without a weight.
3. MoE layers do not see padding, so it costs no capacity and has no part in their loss; after each
   stage it is zero, as it is in the canvas that fits.

timm's blocks take any size too, but they attend to what fills the windows up, and shift before they
fill.
"""

# B images on a canvas, H x W tokens of a stage's map, h x w of them one image's, W windows of a
# map, N tokens of each

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import SwinTransformerV2Block, window_partition, window_reverse
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swinv2_moe.models.moe_mlp import MoEMlp
from swinv2_moe.models.swin_moe import PreNormBlock
from swinv2_moe.models.swinv2_moe import SwinTransformerV2MoE

Size = tuple[int, int]  # height, width


class Presence(NamedTuple):
    """Which tokens of a stage's map belong to an image."""

    tokens: Tensor | None  # bool [B, H, W]; None: all
    count: int  # how many, of all images
    # [W, N, N] or [B*W, N, N], 0 or -inf: for windows as they lie; None: no mask
    plain: Tensor | None
    shifted: Tensor | None  # the same for shifted windows

    def keep(self, x: Tensor) -> Tensor:
        """x [B, H, W, C] with 0 for what belongs to no image."""
        if self.tokens is None:
            return x
        return x.masked_fill(~self.tokens.unsqueeze(-1), 0)


class _MaskedBlock:
    """The two halves of a block on a map [B, H, W, C] of which only a part may be present."""

    def _masked_attention(self, x: Tensor, presence: Presence) -> Tensor:
        _, height, width, channels = x.shape
        window, shift = self.window_size, self.shift_size
        x = F.pad(x, (0, 0, 0, -width % window[1], 0, -height % window[0]))
        padded = x.shape[1:3]
        if any(shift):
            x = x.roll((-shift[0], -shift[1]), (1, 2))
        windows = window_partition(x, window).view(-1, self.window_area, channels)
        windows = self.attn(windows, presence.shifted if any(shift) else presence.plain)
        x = window_reverse(windows.view(-1, *window, channels), window, padded)
        if any(shift):
            x = x.roll(shift, (1, 2))
        return x[:, :height, :width]

    def _masked_ffn(self, x: Tensor, presence: Presence) -> Tensor:
        if isinstance(self.mlp, MoEMlp) and presence.tokens is not None:
            return self.mlp(x, mask=presence.tokens, num_tokens=presence.count)
        return self.mlp(x)


class MaskedBlock(_MaskedBlock, SwinTransformerV2Block):
    """`x + norm1(attn(x))`, then `x + norm2(mlp(x))`."""

    def forward(self, x: Tensor, presence: Presence) -> Tensor:
        x = x + self.drop_path1(self.norm1(self._masked_attention(x, presence)))
        return x + self.drop_path2(self.norm2(self._masked_ffn(x, presence)))


class MaskedPreNormBlock(_MaskedBlock, PreNormBlock):
    """`x + attn(norm1(x))`, then `x + mlp(norm2(x))`."""

    def forward(self, x: Tensor, presence: Presence) -> Tensor:
        x = x + self.drop_path1(self._masked_attention(self.norm1(x), presence))
        return x + self.drop_path2(self._masked_ffn(self.norm2(x), presence))


def mask_blocks(model: SwinTransformerV2MoE) -> SwinTransformerV2MoE:
    """The model, whose blocks now want a Presence: for `stage_maps` alone. Parameters and their
    names stay.

    Its windows must be whole whatever the map (`always_partition`).
    """
    for stage in model.layers:
        for block in stage.blocks:
            assert block.always_partition, (
                "a window smaller than configured has no place on another canvas"
            )
            # same state, another forward: as swin_moe does it
            block.__class__ = MaskedPreNormBlock if isinstance(block, PreNormBlock) else MaskedBlock
    return model


def stage_maps(
    model: SwinTransformerV2MoE,
    images: Tensor,
    sizes: Sequence[Size] | None = None,
    recompute: bool = False,
) -> Iterator[tuple[Tensor, Presence]]:
    """Each stage's output [B, H, W, C], 0 where no image is, from a model of `mask_blocks`.

    Args:
        images: [B, 3, height, width], any size.
        sizes: each image's own, in pixels from the top left corner; None: the whole canvas. A
            patch, and on the way up a token, is present if any pixel of the image is in it; the
            rest of it counts as 0.
        recompute: blocks keep their input alone, and run again in the backward pass.
    """
    canvas, (ph, pw) = images.shape[-2:], model.patch_embed.patch_size
    sizes = (
        [canvas] if sizes is None or all(tuple(size) == tuple(canvas) for size in sizes) else sizes
    )
    pixels = _present(sizes, canvas, images.device)
    images = images if pixels is None else images.masked_fill(~pixels.unsqueeze(1), 0)
    x = model.patch_embed(F.pad(images, (0, -canvas[1] % pw, 0, -canvas[0] % ph)))
    sizes = [(-(-h // ph), -(-w // pw)) for h, w in sizes]
    for stage in model.layers:
        x = stage.downsample(x)
        if not isinstance(stage.downsample, nn.Identity):
            sizes = [(-(-h // 2), -(-w // 2)) for h, w in sizes]
        presence = _presence(sizes, x, stage.blocks)
        for block in stage.blocks:
            recomputed = recompute and torch.is_grad_enabled()
            x = (
                checkpoint(block, x, presence, use_reentrant=False)
                if recomputed
                else block(x, presence)
            )
        x = presence.keep(x)
        yield x, presence


def _presence(sizes: list[Size], x: Tensor, blocks: nn.ModuleList) -> Presence:
    """Of images of `sizes` (in tokens; one for all where they fill the map alike) on the map x [B,
    H, W, C]."""
    size, window = x.shape[1:3], blocks[0].window_size
    padded = tuple(length + -length % side for length, side in zip(size, window, strict=True))
    tokens = _present(sizes, size, x.device)
    count = sum(h * w for h, w in sizes) * (len(x) // len(sizes))
    present = _present(sizes, padded, x.device)
    plain = None
    if present is not None:
        plain = _window_mask(torch.where(present, 0, -1), window)
    shift = next((block.shift_size for block in blocks if any(block.shift_size)), None)
    shifted = (
        None if shift is None else _window_mask(_sides(padded, shift, present, x.device), window)
    )
    return Presence(tokens, count, plain, shifted)


def _present(sizes: Sequence[Size], canvas: Size, device: torch.device) -> Tensor | None:
    """bool [len(sizes), *canvas]: inside of each image; None: everywhere."""
    if all(tuple(size) == tuple(canvas) for size in sizes):
        return None
    heights, widths = torch.tensor(list(sizes), device=device).unsqueeze(-1).unbind(1)  # [B, 1]
    rows, columns = (torch.arange(length, device=device) for length in canvas)
    return (rows < heights).unsqueeze(2) & (columns < widths).unsqueeze(1)


def _sides(padded: Size, shift: Size, present: Tensor | None, device: torch.device) -> Tensor:
    """[1 or B, *padded] of a shifted map: which side of the seams a token is on, -1 for padding.

    Rolled to the end, the first rows (columns) meet the last ones there, which they are no
    neighbours of.
    """
    rows, columns = (
        torch.arange(p, device=device) >= p - s for p, s in zip(padded, shift, strict=True)
    )
    sides = (2 * rows.long().unsqueeze(1) + columns).unsqueeze(0)
    if present is None:
        return sides
    return torch.where(present.roll((-shift[0], -shift[1]), (1, 2)), sides, -1)


def _window_mask(labels: Tensor, window: Size) -> Tensor:
    """labels [B, H, W] of tokens -> [B*W, N, N]: 0 between tokens of the same label, -inf between
    others."""
    labels = window_partition(labels.unsqueeze(-1), window).flatten(1)  # [B*W, N]
    return torch.zeros((), device=labels.device).where(
        labels.unsqueeze(1) == labels.unsqueeze(2), float("-inf")
    )
