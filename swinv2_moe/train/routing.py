"""Which expert each token of an image goes to: recorded in a forward pass, and painted over the
image.

B images, C channels, S pixels a side, h x w tokens, K choices of a token, E experts
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core import MoELayer, moe_layers
from swinv2_moe.models import MoEModel, block_name

_SIDE = 128  # pixels that a picture of an image has at least
_GAP = 4  # pixels between pictures
_COLOUR_MAPS = ("Set1", "tab20", "tab20b", "tab20c")


@contextmanager
def record_choices(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the experts chosen in the latest forward pass, in each MoE layer.

    Forward hooks record what the router chose, whether or not the expert has room. They work in
    evaluation mode only, since the noise of training is added after the router, and not for a
    compiled model, which was compiled without the hooks.

    Args:
        model: a MoEModel, or a module that contains one.

    Yields:
        By the layer's name, int64 [B, h, w, K] on the model's device: each token at its place in
        the image, its first choice first.
    """
    choices: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for prefix, backbone in model.named_modules():
            if isinstance(backbone, MoEModel):
                _watch(backbone, f"{prefix}." if prefix else "", choices, hooks)
        yield choices


def _watch(backbone: MoEModel, prefix: str, choices: dict[str, Tensor], hooks: ExitStack) -> None:
    for name, layer in moe_layers(backbone).items():
        block = backbone.get_submodule(block_name(name))
        record, place = _hooks(backbone, layer, prefix + name, choices)
        hooks.callback(layer.router.register_forward_hook(record).remove)
        hooks.callback(block.register_forward_hook(place).remove)


def _hooks(
    backbone: MoEModel, layer: MoELayer, name: str, choices: dict[str, Tensor]
) -> tuple[Callable, Callable]:
    """Forward hooks of a layer's router and of its block."""

    def record(router: nn.Module, args: tuple, logits: Tensor) -> None:  # logits [T, E]
        assert not layer.training, "the noise of training is not in these logits"
        logits = layer.expert_logits(logits)
        choices[name] = logits.topk(min(layer.config.top_k, logits.shape[1])).indices

    def place(block: nn.Module, args: tuple, output: Tensor) -> None:
        choices[name] = backbone.token_maps(choices[name], output)

    return record, place


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
    """Keep some of the images that go through `model`, and their choices, on the CPU.

    Up to `count` images are kept, spread evenly over the `num_images` of the forward passes to
    come. Conditions as in `record_choices`.
    """
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
    """Up to `count` evenly spaced numbers below `size`, from 0 on."""
    count = min(size, count)
    return [i * size // count for i in range(count)]


def columns(
    images: Tensor, choices: dict[str, Tensor], mean: Sequence[float], std: Sequence[float]
) -> list[np.ndarray]:
    """The columns of a routing picture: the images, then these painted by each layer's choices.

    Args:
        images: normalised, [B, C, S, S].
        choices: of each layer [B, h, w, K].

    Returns:
        uint8 [B, s, s, 3] for each column, as `montage` takes them.
    """
    photos = to_pixels(images, mean, std)
    return [photos, *(paint(photos, ids[..., 0].cpu().numpy()) for ids in choices.values())]


def to_pixels(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Normalised images [B, C, S, S] (C 1 or 3) -> uint8 [B, s, s, 3].

    The side is scaled by an integer factor such that 128 <= s < 256.
    """
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
    """Paint each patch of `photos` in the colour of its expert.

    Args:
        photos: uint8 [B, s, s, 3].
        experts: integers [B, h, w].

    Returns:
        uint8 [B, s, s, 3]: the mean of the photographs in grey and the colours.
    """
    side, (_, height, width) = photos.shape[1], experts.shape
    rows, cols = np.arange(side) * height // side, np.arange(side) * width // side
    tint = expert_colours(int(experts.max()) + 1)[experts][:, rows][:, :, cols]
    grey = photos.mean(-1, keepdims=True)
    return ((grey + tint) / 2).astype(np.uint8)


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
    """uint8 [count, 3]: a colour for each expert, the same whatever `count` is.

    The colours are those of matplotlib's qualitative maps. They repeat after 69 experts.
    """
    from matplotlib import colormaps  # importing it takes half a second

    colours = np.concatenate([colormaps[name].colors for name in _COLOUR_MAPS])
    return (255 * np.resize(colours, (count, 3))).round().astype(np.uint8)
