"""SwinV2 blocks for batches of images of any size, which ignore padding.

1. The images of a batch lie in the top left corner of one canvas. Each stage gets a `TokenMask`. It
   says which tokens of the stage's map belong to an image, and holds the attention masks of its
   windows.
2. A block pads its map to a multiple of the window before it shifts it. A window then holds the
   same tokens on any canvas. Within a window, tokens attend to each other if they belong to the
   same image and lie on the same side of the shift's seam. Padding attends to padding, so that no
   row of attention weights is empty.
3. MoE layers ignore padding: it uses no capacity and has no part in their loss. After each stage
   padding is set to zero.

timm's blocks also accept any size. But they attend to the padding of windows, and shift before they
pad.
"""

# B images on a canvas, H x W tokens of a stage's map, W windows of a map, N tokens of a window

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import SwinTransformerV2Block, window_partition, window_reverse
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swinv2_moe.models.moe_mlp import MoEMlp
from swinv2_moe.models.swin_moe import PreNormBlock
from swinv2_moe.models.swinv2_moe import SwinTransformerV2MoE

Size = tuple[int, int]  # height, width


class TokenMask(NamedTuple):
    """The tokens of a stage's map that belong to an image, and the attention masks for them."""

    tokens: Tensor | None  # bool [B, H, W]; None: all tokens belong to an image
    num_tokens: int  # tokens of all images together
    # Attention masks of 0 and -inf, [W, N, N] or [B*W, N, N]; None: no mask.
    windows: Tensor | None
    shifted_windows: Tensor | None

    def keep(self, x: Tensor) -> Tensor:
        """x [B, H, W, C] with padding set to 0."""
        if self.tokens is None:
            return x
        return x.masked_fill(~self.tokens.unsqueeze(-1), 0)


class _MaskedBlock:
    """Attention and FFN of a block on a map [B, H, W, C] with padding."""

    window_size: Any
    shift_size: Any
    window_area: int
    attn: Any
    mlp: Any

    def _masked_attention(self, x: Tensor, token_mask: TokenMask) -> Tensor:
        _, height, width, channels = x.shape
        window, shift = self.window_size, self.shift_size
        x = F.pad(x, (0, 0, 0, -width % window[1], 0, -height % window[0]))
        padded = x.shape[1:3]
        attention_mask = token_mask.windows
        if any(shift):
            x = x.roll((-shift[0], -shift[1]), (1, 2))
            attention_mask = token_mask.shifted_windows
        windows = window_partition(x, window).view(-1, self.window_area, channels)
        windows = self.attn(windows, attention_mask)
        x = window_reverse(windows.view(-1, *window, channels), window, padded)
        if any(shift):
            x = x.roll(shift, (1, 2))
        return x[:, :height, :width]

    def _ffn_mask(self, token_mask: TokenMask) -> dict[str, object]:
        """The mask as arguments of the FFN; none of a dense one."""
        if isinstance(self.mlp, MoEMlp) and token_mask.tokens is not None:
            return {"mask": token_mask.tokens, "num_tokens": token_mask.num_tokens}
        return {}


class MaskedBlock(_MaskedBlock, SwinTransformerV2Block):
    """`x + norm1(attn(x))`, then `x + norm2(mlp(x))`."""

    def forward(self, x: Tensor, token_mask: TokenMask) -> Tensor:  # type: ignore[override]
        x = x + self.drop_path1(self.norm1(self._masked_attention(x, token_mask)))
        return x + self.drop_path2(self.norm2(self.mlp(x, **self._ffn_mask(token_mask))))


class MaskedPreNormBlock(_MaskedBlock, PreNormBlock):
    """`x + attn(norm1(x))`, then `x + mlp(norm2(x))`."""

    def forward(self, x: Tensor, token_mask: TokenMask) -> Tensor:  # type: ignore[override]
        x = x + self.drop_path1(self._masked_attention(self.norm1(x), token_mask))
        return x + self.drop_path2(self.mlp(self.norm2(x), **self._ffn_mask(token_mask)))


def mask_blocks(model: SwinTransformerV2MoE) -> SwinTransformerV2MoE:
    """Change the model's blocks in place, so that they take a `TokenMask`, and return the model.

    Afterwards only `stage_maps` can run the model. Parameters and their names do not change. The
    model needs `always_partition=True`, so that its windows have the same size on any canvas.
    """
    for stage in model.layers:
        for block in stage.blocks:
            assert block.always_partition, "padding needs a model with always_partition=True"
            # Only the forward method changes, not the state, as in swin_moe.
            if isinstance(block, PreNormBlock):
                block.__class__ = MaskedPreNormBlock
            else:
                block.__class__ = MaskedBlock
    return model


def stage_maps(
    model: SwinTransformerV2MoE,
    images: Tensor,
    sizes: Sequence[Size] | None = None,
    recompute: bool = False,
) -> Iterator[tuple[Tensor, TokenMask]]:
    """Yield each stage's output [B, H, W, C], with padding set to 0, and its `TokenMask`.

    Args:
        model: as `mask_blocks` returns it.
        images: [B, 3, height, width], any size.
        sizes: (height, width) of each image in pixels, from the top left corner; None: each fills
            the canvas. A token belongs to an image if any pixel of the image is in it; pixels of
            the token outside of the image count as 0.
        recompute: activation checkpointing. Blocks store only their input, and run again in the
            backward pass.
    """
    canvas: Size = (images.shape[-2], images.shape[-1])
    patch = model.patch_embed.patch_size
    if sizes is None or _fill(sizes, canvas):
        sizes = [canvas]
    pixels = _inside(sizes, canvas, images.device)
    if pixels is not None:
        images = images.masked_fill(~pixels.unsqueeze(1), 0)
    x = model.patch_embed(F.pad(images, (0, -canvas[1] % patch[1], 0, -canvas[0] % patch[0])))
    sizes = _divided(sizes, patch)
    recompute = recompute and torch.is_grad_enabled()
    for stage in model.layers:
        x = stage.downsample(x)
        if not isinstance(stage.downsample, nn.Identity):
            sizes = _divided(sizes, (2, 2))
        token_mask = _token_mask(sizes, x, stage.blocks)
        for block in stage.blocks:
            if recompute:
                x = checkpoint(block, x, token_mask, use_reentrant=False)
            else:
                x = block(x, token_mask)
        x = token_mask.keep(x)
        yield x, token_mask


def _divided(sizes: Sequence[Size], factor: Size) -> list[Size]:
    """The sizes divided by `factor`, rounded up."""
    return [(-(-h // factor[0]), -(-w // factor[1])) for h, w in sizes]


def _token_mask(sizes: list[Size], x: Tensor, blocks: Any) -> TokenMask:
    """The mask of a stage with the map x [B, H, W, C].

    Args:
        sizes: of the images, in tokens; a single one if all images fill the canvas.
    """
    size: Size = (x.shape[1], x.shape[2])
    window = blocks[0].window_size
    padded = (size[0] + -size[0] % window[0], size[1] + -size[1] % window[1])
    images_per_size = len(x) // len(sizes)
    num_tokens = sum(h * w for h, w in sizes) * images_per_size
    inside = _inside(sizes, padded, x.device)
    windows = None
    if inside is not None:
        windows = _window_mask(torch.where(inside, 0, -1), window)
    shifted_windows = None
    shifts = [block.shift_size for block in blocks if any(block.shift_size)]
    if shifts:
        sides = _sides(padded, shifts[0], inside, x.device)
        shifted_windows = _window_mask(sides, window)
    return TokenMask(_inside(sizes, size, x.device), num_tokens, windows, shifted_windows)


def _fill(sizes: Sequence[Size], canvas: Size) -> bool:
    """Whether every image fills the canvas."""
    return all(tuple(size) == tuple(canvas) for size in sizes)


def _inside(sizes: Sequence[Size], canvas: Size, device: torch.device) -> Tensor | None:
    """bool [len(sizes), height, width], True inside of the image; None if all fill the canvas."""
    if _fill(sizes, canvas):
        return None
    heights, widths = torch.tensor(list(sizes), device=device).unsqueeze(-1).unbind(1)  # [B, 1]
    rows = torch.arange(canvas[0], device=device)
    columns = torch.arange(canvas[1], device=device)
    return (rows < heights).unsqueeze(2) & (columns < widths).unsqueeze(1)


def _sides(padded: Size, shift: Size, inside: Tensor | None, device: torch.device) -> Tensor:
    """The side of the shift's seams that each token of a shifted map is on, -1 for padding.

    The shift rolls the first rows (columns) to the end, next to rows that are not their neighbours.
    The seam separates the two.

    Returns:
        [1 or B, height, width], of size `padded`.
    """
    height, width = padded
    rows = torch.arange(height, device=device) >= height - shift[0]
    columns = torch.arange(width, device=device) >= width - shift[1]
    sides = (2 * rows.long().unsqueeze(1) + columns).unsqueeze(0)
    if inside is None:
        return sides
    return torch.where(inside.roll((-shift[0], -shift[1]), (1, 2)), sides, -1)


def _window_mask(labels: Tensor, window: Size) -> Tensor:
    """labels [B, H, W] -> [B*W, N, N]: 0 between tokens with the same label, else -inf."""
    labels = window_partition(labels.unsqueeze(-1), window).flatten(1)  # [B*W, N]
    return torch.zeros((), device=labels.device).where(
        labels.unsqueeze(1) == labels.unsqueeze(2), float("-inf")
    )
