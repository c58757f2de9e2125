"""Draw the detections in images, and the experts of their patches.

H x W pixels, h x w tokens, S scale, E experts
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.utils import get_test_pipeline_cfg
from mmdet.visualization import DetLocalVisualizer
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.structures import InstanceData

from moe_core import moe_layers, prepared
from swinv2_moe.data.images import decode, image_paths, read_file, to_mode
from swinv2_moe.detection.datasets import coco_datasets, metainfo
from swinv2_moe.detection.run import build_detector
from swinv2_moe.errors import UserError
from swinv2_moe.models import block_name
from swinv2_moe.output import printable
from swinv2_moe.plots import new_figure, save_png
from swinv2_moe.routing_pictures import expert_legend, paint
from swinv2_moe.train.routing import record_choices

if TYPE_CHECKING:  # importing matplotlib takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 6.0  # inches of the photograph with its boxes
_SIDE = 640  # pixels; a photograph with less is drawn enlarged


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
    dataset = next(coco_datasets(config.test_dataloader), None)
    meta = {}  # of another data set, whose classes are shown as numbers
    if dataset is not None:
        meta = metainfo(dataset)
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
    steps = copy.deepcopy(get_test_pipeline_cfg(config))  # transforms may write into them
    steps = [step for step in steps if step.type != "LoadAnnotations"]
    return [{"type": "mmdet.LoadImageFromNDArray"}] + steps[1:]


@torch.inference_mode()
def _look(
    detector: Any, pipeline: Compose, photo: np.ndarray, threshold: float
) -> tuple[InstanceData, dict[str, np.ndarray]]:
    """The detections in the photograph, and each MoE layer's first choices, int64 [h, w]."""
    data = pipeline({"img": photo[..., ::-1], "img_id": 0})
    data = {"inputs": [data["inputs"]], "data_samples": [data["data_samples"]]}
    instances = detector.test_step(data)[0].pred_instances
    detections = instances[instances.scores >= threshold].cpu()
    if not moe_layers(detector):
        return detections, {}
    pixels = detector.data_preprocessor(data)["inputs"]
    height, width = data["data_samples"][0].img_shape
    with record_choices(detector) as choices:  # without padding, which is not routed
        detector.backbone(pixels[..., :height, :width])
    return detections, {name: ids[0, ..., 0].cpu().numpy() for name, ids in choices.items()}


def draw(
    photo: np.ndarray, detections: InstanceData, experts: dict[str, np.ndarray], meta: dict
) -> "Figure":
    """The photograph with its detections, and its patches in the colours of their experts.

    Args:
        photo: uint8 [H, W, 3], RGB.
        detections: boxes, labels, scores and, of a detector with masks, masks.
        experts: experts of the patches, int64 [h, w], by MoE layer.
        meta: `classes`, their names, and `palette`, their colours. A class without a name is a
            number; without a colour for each class, mmdetection chooses them.
    """
    height, width = photo.shape[:2]
    rows = min(len(experts), 2) or 1
    columns = -(-len(experts) // rows)
    inches = _WIDTH * height / width + 0.3
    if experts:
        inches += 0.4  # for the legend
    figure = new_figure(_WIDTH * (1 + columns / rows), inches)
    grid = figure.add_gridspec(rows, 1 + columns, width_ratios=[rows] + [1] * columns)
    axes = figure.add_subplot(grid[:, 0])
    _picture(axes, draw_objects(photo, detections, meta), f"{len(detections)} objects")
    for number, (name, ids) in enumerate(experts.items()):
        axes = figure.add_subplot(grid[number // columns, 1 + number % columns])
        title = block_name(name.removeprefix("backbone.trunk."))
        _picture(axes, paint(photo[None], ids[None])[0], title)
    if experts:
        expert_legend(figure, 1 + max(int(ids.max()) for ids in experts.values()))
    return figure


def draw_objects(photo: np.ndarray, detections: InstanceData, meta: dict) -> np.ndarray:
    """The photograph with boxes, masks, classes and scores in percent, uint8 [S * H, S * W, 3]. S
    enlarges small photographs, so that the text is readable. Arguments as of `draw`."""
    scale = max(1, _SIDE // max(photo.shape[:2]))
    enlarged = InstanceData(labels=detections.labels, scores=detections.scores)
    enlarged.bboxes = detections.bboxes * scale
    if "masks" in detections:
        masks = detections.masks
        enlarged.masks = masks.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    visualizer = DetLocalVisualizer(line_width=2, alpha=0.5)
    count = 1 + int(max(detections.labels, default=-1))
    # a $ would begin a formula of matplotlib
    names = [printable(name).replace("$", r"\$") for name in meta.get("classes", ())]
    names += [f"class {label}" for label in range(len(names), count)]
    visualizer.dataset_meta = {"classes": names, "palette": _colours(meta.get("palette"), count)}
    sample = DetDataSample(pred_instances=enlarged)
    photo = photo.repeat(scale, 0).repeat(scale, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a text reaches over the edge
        visualizer.add_datasample("", photo, sample, draw_gt=False, pred_score_thr=-1)
    return visualizer.get_image()


def _colours(palette: object, count: int) -> list | None:
    """The palette, if it has a colour for each of `count` classes."""
    if not isinstance(palette, (list, tuple)) or len(palette) < count:
        return None
    for colour in palette:
        if not isinstance(colour, (list, tuple)) or len(colour) != 3:
            return None
        if not all(value in range(256) for value in colour):
            return None
    return list(palette)


def _picture(axes: "Axes", picture: np.ndarray, title: str) -> None:
    axes.imshow(picture, cmap="gray", vmin=0, vmax=1)
    axes.set_title(title, fontsize=9)
    axes.set_axis_off()
