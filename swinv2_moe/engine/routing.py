"""Which expert each token of an image goes to: recorded in a forward pass, and painted over the
image.

B images, C channels, S pixels a side, h x w tokens, K choices of a token, E experts
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core import MoELayer, moe_layers

_SIDE = 128  # pixels that a picture of an image has at least
_GAP = 4  # pixels between pictures


@contextmanager
def record_choices(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The experts that the tokens of the latest forward pass chose, in each MoE layer, until the
    end of the block.

    A layer's name gives int64 [B, h, w, K] on the model's device: each token at its place in the
    image, its first choice first. Forward hooks write this down and change nothing. It is what the
    router wants, whether or not the expert has room. In evaluation mode only: in training noise
    comes after the router. Not for a compiled model: what was compiled earlier has no hooks.
    """
    choices: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name, layer in moe_layers(model).items():
            _watch(model.get_submodule(name.removesuffix(".mlp.moe")), layer, name, choices, hooks)
        yield choices


def _watch(
    block: nn.Module, layer: MoELayer, name: str, choices: dict[str, Tensor], hooks: ExitStack
) -> None:
    def chosen(router: nn.Module, args: tuple, logits: Tensor) -> None:  # logits [T, E]
        assert not layer.training, "the noise of training is not in these logits"
        choices[name] = logits.topk(min(layer.config.top_k, logits.shape[1])).indices

    # x [B, h, w, M]; tokens are in this order
    def placed(block: nn.Module, args: tuple, x: Tensor) -> None:
        choices[name] = choices[name].unflatten(0, x.shape[:3])

    for module, hook in ((layer.router, chosen), (block, placed)):
        hooks.callback(module.register_forward_hook(hook).remove)


@dataclass
class RoutingSample:
    """Some of the images that went through a model, and the choices of their tokens."""

    images: list[Tensor] = field(default_factory=list)  # float32 [C, S, S], normalised
    choices: dict[str, list[Tensor]] = field(default_factory=dict)  # of each layer int64 [h, w, K]

    def picture(self, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
        """uint8 [height, width, 3]: a row an image; the photograph, then its experts in one layer
        after the other."""
        choices = {name: torch.stack(ids) for name, ids in self.choices.items()}
        return montage(columns(torch.stack(self.images), choices, mean, std))


@contextmanager
def sample_choices(model: nn.Module, num_images: int, count: int) -> Iterator[RoutingSample]:
    """Keeps up to `count` images, spread evenly over the `num_images` that are about to go through
    `model`, and their choices, on the CPU; as `record_choices`."""
    wanted, sample, seen = spread(num_images, count), RoutingSample(), 0

    def keep(model: nn.Module, args: tuple, output: Tensor) -> None:
        nonlocal seen
        images = args[0]
        for row in [i - seen for i in wanted if seen <= i < seen + len(images)]:
            sample.images.append(images[row].cpu())
            for name, ids in choices.items():
                sample.choices.setdefault(name, []).append(ids[row].cpu())
        seen += len(images)

    with record_choices(model) as choices:
        hook = model.register_forward_hook(keep)
        try:
            yield sample
        finally:
            hook.remove()


def spread(size: int, count: int) -> list[int]:
    """Up to `count` of the numbers below `size`, evenly apart, from 0 on."""
    count = min(size, count)
    return [i * size // count for i in range(count)]


def columns(
    images: Tensor, choices: dict[str, Tensor], mean: Sequence[float], std: Sequence[float]
) -> list[np.ndarray]:
    """Pictures uint8 [B, s, s, 3] of normalised images [B, C, S, S], then the same painted by each
    layer's choices [B, h, w, K]; `montage` puts them side by side."""
    photos = to_pixels(images, mean, std)
    return [photos, *(paint(photos, ids[..., 0].cpu().numpy()) for ids in choices.values())]


def to_pixels(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Normalised images [B, C, S, S] (C 1 or 3) -> uint8 [B, s, s, 3], by a whole factor larger or
    smaller, so that 128 <= s < 256."""
    pixels = denormalise(images, mean, std)
    size = pixels.shape[-1]
    if size < _SIDE:
        pixels = F.interpolate(pixels, scale_factor=-(-_SIDE // size), mode="nearest")
    else:
        pixels = F.avg_pool2d(pixels, size // _SIDE)
    return (255 * pixels).round().byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()


def denormalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """[B, C, S, S] normalised by `mean` and `std` -> [B, 3, S, S] in 0 to 1."""
    channels = images.shape[1]
    mean, std = (images.new_tensor(values[:channels]).view(-1, 1, 1) for values in (mean, std))
    return (images.float() * std + mean).clamp(0, 1).expand(-1, 3, -1, -1)


def paint(photos: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """uint8 [B, s, s, 3]: the luminance of `photos` (uint8 [B, s, s, 3]), each patch in the colour
    of its expert (integers [B, h, w])."""
    side, (_, height, width) = photos.shape[1], experts.shape
    rows, cols = np.arange(side) * height // side, np.arange(side) * width // side
    tint = expert_colours(int(experts.max()) + 1)[experts][:, rows][:, :, cols]
    luminance = photos @ np.array([0.299, 0.587, 0.114], np.float32)  # Rec. 601
    return ((luminance[..., None] + tint) / 2).astype(np.uint8)


def montage(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Columns of pictures, each uint8 [B, s, s, 3] -> one picture uint8 [B * (s + 4) - 4, columns *
    (s + 4) - 4, 3], white between them."""
    cells = np.pad(
        np.stack(columns, 1), [(0, 0)] * 2 + [(0, _GAP)] * 2 + [(0, 0)], constant_values=255
    )
    rows, cols, side = cells.shape[:3]  # [B, columns, s + gap, s + gap, 3]
    return cells.swapaxes(1, 2).reshape(rows * side, cols * side, 3)[:-_GAP, :-_GAP]


@cache
def expert_colours(count: int) -> np.ndarray:
    """uint8 [count, 3], a colour for each expert, the same whatever `count` is.

    Each is the one that differs most, in Oklab, from all before (Glasbey et al., Color Research and
    Application 32, 2007), among the light and vivid ones. Lightness counts a tenth: that of a
    painted patch is the photograph's.
    """
    levels = np.arange(0, 256, 15)
    candidates = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    lab = _oklab(candidates)
    vivid = (lab[:, 0] > 0.6) & (np.hypot(lab[:, 1], lab[:, 2]) > 0.15)
    candidates, lab = candidates[vivid], lab[vivid] * [0.1, 1, 1]
    # orange; from there the first eight are the best
    chosen = [int((candidates == [255, 120, 0]).all(1).argmax())]
    distance = np.full(len(lab), np.inf)
    while len(chosen) < count:
        distance = np.minimum(distance, np.linalg.norm(lab - lab[chosen[-1]], axis=1))
        chosen.append(int(distance.argmax()))
    return candidates[chosen[:count]].astype(np.uint8)


def _oklab(colours: np.ndarray) -> np.ndarray:
    """sRGB of 0 to 255 [N, 3] -> lightness and two colour axes [N, 3] (B. Ottosson, 2020)."""
    srgb = colours / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    cones = np.cbrt(linear @ np.array(_TO_CONES).T)
    return cones @ np.array(_TO_LAB).T


_TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
_TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
