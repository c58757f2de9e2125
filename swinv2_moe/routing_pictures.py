"""Pictures of routing: photographs painted with the expert of each patch, and their legend.

Each expert has a colour and a hatching, the same in every picture. There are eight colours, which
the colour-blind can distinguish, and seven hatchings (including none), so 56 experts can be
distinguished.

B images, C channels, S pixels a side, h x w tokens, K choices of a token, E experts
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from swinv2_moe.output import printable
from swinv2_moe.plots import disable_formulas, new_figure
from swinv2_moe.tables import block_place

if TYPE_CHECKING:  # importing matplotlib takes half a second
    from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design", 2008; grey in place of black.
_COLOURS = ("e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7", "707070")
_HATCHES = ("", "///", "\\\\\\", "---", "|||", "xxx", "...")  # as matplotlib names them
_SIDE = 128  # minimum side of a picture, in pixels
_GAP = 4  # pixels between two pictures
_HATCH_PERIOD = 8  # pixels
_OUTLINE = 25  # grey value of the line between two experts
_LEGEND_ENTRY = 0.8  # inches
_DPI = 96


def expert_colours(count: int) -> np.ndarray:
    """The colour of each expert, uint8 [count, 3]; they repeat after eight."""
    colours = [tuple(bytes.fromhex(colour)) for colour in _COLOURS]
    return np.array([colours[expert % len(colours)] for expert in range(count)], np.uint8)


def expert_hatch(expert: int) -> str:
    """The hatching of an expert, in matplotlib's notation; empty for none."""
    return _HATCHES[expert % len(_HATCHES)]


def columns(
    images: Tensor, choices: dict[str, Tensor], mean: Sequence[float], std: Sequence[float]
) -> list[np.ndarray]:
    """The columns of a routing picture: the images, then the images painted with each layer's
    choices.

    Args:
        images: normalised, [B, C, S, S].
        choices: the choices of each layer [B, h, w, K].

    Returns:
        uint8 [B, s, s, 3] for each column, as `pictures_figure` takes them.
    """
    photos = to_pixels(images, mean, std)
    painted = [paint(photos, ids[..., 0].cpu().numpy()) for ids in choices.values()]
    return [photos] + painted


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
    offset, scale = (images.new_tensor(values[:channels]).view(-1, 1, 1) for values in (mean, std))
    return (images.float() * scale + offset).clamp(0, 1).expand(-1, 3, -1, -1)


def paint(photos: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """Paint each patch in the colour and hatching of its expert, with lines between experts.

    Where the photograph has a brightness of 0 to 100%, the colour has 45 to 100% of its own
    brightness. So colours can be distinguished on black and on white.

    Args:
        photos: uint8 [B, H, W, 3].
        experts: integers [B, h, w].

    Returns:
        uint8 [B, H, W, 3].
    """
    _, height, width, _ = photos.shape
    rows = np.arange(height) * experts.shape[1] // height
    cols = np.arange(width) * experts.shape[2] // width
    by_pixel = experts[:, rows][:, :, cols]  # [B, H, W]
    count = int(experts.max()) + 1
    brightness = photos.mean(-1) / 255
    shade = 0.45 + 0.55 * brightness
    shade[_hatching(by_pixel)] *= 0.6
    painted = expert_colours(count)[by_pixel] * shade[..., None]
    painted[_borders(by_pixel)] = _OUTLINE
    return painted.astype(np.uint8)


def _hatching(by_pixel: np.ndarray) -> np.ndarray:
    """Mask of the pixels on a line of their expert's hatching: bool [B, H, W]."""
    height, width = by_pixel.shape[1:]
    y, x = np.mgrid[:height, :width]
    rising = (x + y) % _HATCH_PERIOD == 0
    falling = (x - y) % _HATCH_PERIOD == 0
    level = y % _HATCH_PERIOD == 0
    upright = x % _HATCH_PERIOD == 0
    dots = (x % _HATCH_PERIOD < 2) & (y % _HATCH_PERIOD < 2)
    patterns = np.stack(
        [np.zeros_like(level), rising, falling, level, upright, rising | falling, dots]
    )
    return patterns[by_pixel % len(_HATCHES), y, x]


def _borders(by_pixel: np.ndarray) -> np.ndarray:
    """Mask of the pixels whose right or lower neighbour has another expert: bool [B, H, W]."""
    borders = np.zeros(by_pixel.shape, bool)
    borders[:, :, :-1] |= by_pixel[:, :, :-1] != by_pixel[:, :, 1:]
    borders[:, :-1] |= by_pixel[:, :-1] != by_pixel[:, 1:]
    return borders


def montage(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Join columns of pictures, each uint8 [B, s, s, 3], to one picture with white gaps: uint8 [B *
    (s + 4) - 4, columns * (s + 4) - 4, 3]."""
    cells = np.pad(
        np.stack(columns, 1), [(0, 0)] * 2 + [(0, _GAP)] * 2 + [(0, 0)], constant_values=255
    )
    rows, cols, side = cells.shape[:3]  # [B, columns, s + gap, s + gap, 3]
    return cells.swapaxes(1, 2).reshape(rows * side, cols * side, 3)[:-_GAP, :-_GAP]


def pictures_figure(
    pictures: Sequence[np.ndarray], labels: Sequence[str], layers: Sequence[str], num_experts: int
) -> "Figure":
    """A grid with a row for each image and a column for each layer, with a legend.

    Args:
        pictures: as `columns` returns them.
        labels: labels of the images.
        layers: names of the MoE layers or of their blocks.
    """
    picture, side = montage(pictures), pictures[0].shape[1]
    height, width = picture.shape[:2]
    names = [shorten(label) for label in labels]
    titles = [""] + [block_place(layer) for layer in layers]
    inches = 1.5 * len(pictures) + 0.1 * max(map(len, names)) + 0.3
    figure = new_figure(inches, 1.5 * len(labels) + 1.0 + legend_height(num_experts, inches))
    axes = figure.add_subplot()
    axes.imshow(picture)
    axes.set_xticks(np.linspace(side / 2, width - side / 2, len(pictures)), titles)
    axes.set_yticks(np.linspace(side / 2, height - side / 2, len(names)), names)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_anchor("SE")  # leave the remaining space to the labels
    expert_legend(figure, num_experts)
    return figure


def figure_pixels(figure: "Figure") -> np.ndarray:
    """The figure as a picture, uint8 [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    disable_formulas(figure)
    figure.set_dpi(_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def expert_legend(figure: "Figure", num_experts: int) -> None:
    """Add the colours and hatchings of the experts below the figure."""
    from matplotlib.patches import Patch

    handles = []
    for expert, colour in enumerate(expert_colours(num_experts) / 255):
        edge = 0.45 * colour
        patch = Patch(
            facecolor=colour, edgecolor=edge, hatch=expert_hatch(expert), label=str(expert)
        )
        handles.append(patch)
    cols = math.ceil(num_experts / _legend_rows(num_experts, figure.get_figwidth()))
    figure.legend(
        handles=handles, title="expert", ncols=cols, loc="outside lower center", frameon=False
    )


def legend_height(num_experts: int, width: float) -> float:
    """Height of the legend in inches, below a figure `width` inches wide."""
    return 0.2 * _legend_rows(num_experts, width)


def _legend_rows(num_experts: int, width: float) -> int:
    return math.ceil(num_experts / int(width / _LEGEND_ENTRY))


def shorten(label: str) -> str:
    """At most 18 characters of a label."""
    label = printable(label)
    if len(label) <= 18:
        return label
    return f"{label[:17]}…"
