"""Draw the detections in images, and the experts of their patches.

H x W pixels, h x w tokens, E experts
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from mmdet.utils import get_test_pipeline_cfg
from mmengine.config import Config
from mmengine.dataset import Compose
from torch import nn

from moe_core import moe_layers, prepared
from swinv2_moe.data.images import decode, image_paths, read_file, to_mode
from swinv2_moe.detection.run import build_detector
from swinv2_moe.errors import UserError
from swinv2_moe.models import block_name
from swinv2_moe.plots import new_figure, save_png
from swinv2_moe.routing_pictures import expert_legend, paint
from swinv2_moe.train.routing import record_choices

if TYPE_CHECKING:  # importing matplotlib takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 6.0  # inches of the photograph with its boxes
_LUMINANCE = np.array([0.299, 0.587, 0.114])  # Rec. 601


@dataclass
class Detections:
    """Detections in one image, the highest score first."""

    boxes: np.ndarray  # [N, 4] left, top, right, bottom in pixels
    masks: np.ndarray  # bool [N, H, W]; [0, H, W] of a detector without masks
    labels: np.ndarray  # int64 [N]
    scores: np.ndarray  # [N]


def show(
    config: Config, checkpoint: str, images: Sequence[str], output: Path, threshold: float = 0.3
) -> Iterator[tuple[Path, int]]:
    """Draw images (files or folders) to `output`/<name>.png.

    Yields:
        The path of each picture and its number of objects.

    Raises:
        UserError: no images, an unreadable image, a checkpoint that does not fit, or a file that
            cannot be written.
    """
    files = image_paths(images)
    detector = build_detector(config, checkpoint)
    meta = config.test_dataloader.dataset.get("metainfo") or detector.dataset_meta
    pipeline = Compose(_pipeline(config))
    with prepared(detector):
        for file, name in zip(files, _names(files), strict=True):
            photo = _read(file)
            detections, experts = _look(detector, pipeline, photo, threshold)
            save_png(draw(photo, detections, experts, meta), output / name)
            yield output / name, len(detections.scores)


def _names(files: Iterable[Path]) -> Iterator[str]:
    """A unique PNG name for each file: if a name is used, _2, _3, ... is appended."""
    used = set()
    for file in files:
        name = f"{file.stem}.png"
        number = 2
        while name in used:
            name = f"{file.stem}_{number}.png"
            number += 1
        used.add(name)
        yield name


def _read(file: Path) -> np.ndarray:
    """uint8 [H, W, 3], RGB."""
    try:
        return np.asarray(to_mode(decode(read_file(file)), "RGB"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not an image that can be read ({error})") from error


def _pipeline(config: Config) -> list[dict]:
    """The test pipeline, for arrays of pixels and without annotations."""
    steps = [step for step in get_test_pipeline_cfg(config) if step.type != "LoadAnnotations"]
    return [{"type": "mmdet.LoadImageFromNDArray"}] + steps[1:]


@torch.inference_mode()
def _look(
    detector: nn.Module, pipeline: Compose, photo: np.ndarray, threshold: float
) -> tuple[Detections, dict[str, np.ndarray]]:
    """The detections in the photograph, and each MoE layer's first choices, int64 [h, w]."""
    data = pipeline({"img": photo[..., ::-1], "img_id": 0})
    data = {"inputs": [data["inputs"]], "data_samples": [data["data_samples"]]}
    instances = detector.test_step(data)[0].pred_instances
    instances = instances[instances.scores >= threshold].cpu().numpy()
    masks = np.zeros((0,) + photo.shape[:2], bool)
    if "masks" in instances:
        masks = instances.masks
    detections = Detections(instances.bboxes, masks, instances.labels, instances.scores)
    if not moe_layers(detector):
        return detections, {}
    pixels = detector.data_preprocessor(data)["inputs"]
    height, width = data["data_samples"][0].img_shape
    with record_choices(detector) as choices:  # without padding, which is not routed
        detector.backbone(pixels[..., :height, :width])
    return detections, {name: ids[0, ..., 0].cpu().numpy() for name, ids in choices.items()}


def draw(
    photo: np.ndarray, detections: Detections, experts: dict[str, np.ndarray], meta: dict
) -> "Figure":
    """The photograph with its detections, and its patches in the colours of their experts.

    Args:
        photo: uint8 [H, W, 3].
        experts: experts of the patches, int64 [h, w], by MoE layer.
        meta: names and colours of the classes.
    """

    height, width = photo.shape[:2]
    rows = min(len(experts), 2) or 1
    columns = -(-len(experts) // rows)
    inches = _WIDTH * height / width + 0.3
    if experts:
        inches += 0.4  # for the legend
    figure = new_figure(_WIDTH * (1 + columns / rows), inches)
    grid = figure.add_gridspec(rows, 1 + columns, width_ratios=[rows] + [1] * columns)
    _draw_objects(figure.add_subplot(grid[:, 0]), photo, detections, meta)
    for number, (name, ids) in enumerate(experts.items()):
        axes = figure.add_subplot(grid[number // columns, 1 + number % columns])
        _draw_experts(axes, photo, ids, block_name(name.removeprefix("backbone.trunk.")))
    if experts:
        expert_legend(figure, 1 + max(int(ids.max()) for ids in experts.values()))
    return figure


def _draw_objects(axes: "Axes", photo: np.ndarray, detections: Detections, meta: dict) -> None:
    from matplotlib.patches import Rectangle

    colours = np.asarray(meta["palette"])[detections.labels].reshape(-1, 3) / 255
    picture = photo / 255
    for mask, colour in zip(detections.masks, colours, strict=False):
        picture[mask] = (picture[mask] + colour) / 2
    _picture(axes, picture, f"{len(detections.scores)} objects")
    for box, label, score, colour in zip(
        detections.boxes, detections.labels, detections.scores, colours, strict=True
    ):
        left, top, right, bottom = box
        size = (right - left, bottom - top)
        axes.add_patch(
            Rectangle((left, top), size[0], size[1], fill=False, edgecolor=colour, linewidth=1.5)
        )
        text = f"{meta['classes'][label]} {score:.2f}"
        text_colour = "white" if colour @ _LUMINANCE < 0.6 else "black"
        alignment = "bottom" if top > 0.05 * len(photo) else "top"  # inside the picture
        background = {"facecolor": colour, "edgecolor": "none", "pad": 1}
        axes.text(
            left,
            top,
            text,
            fontsize=8,
            color=text_colour,
            verticalalignment=alignment,
            bbox=background,
            clip_on=True,
        )


def _draw_experts(axes: "Axes", photo: np.ndarray, ids: np.ndarray, name: str) -> None:
    _picture(axes, paint(photo[None], ids[None])[0], name)


def _picture(axes: "Axes", picture: np.ndarray, title: str) -> None:
    axes.imshow(picture, cmap="gray", vmin=0, vmax=1)
    axes.set_title(title, fontsize=9)
    axes.set_axis_off()
