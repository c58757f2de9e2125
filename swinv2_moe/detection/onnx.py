"""Export of a detector to ONNX, for onnxruntime without this project (examples/detect.py).

B pictures, H x W their canvas, N places on the maps, C classes
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swinv2_moe.detection.detector import Detector
from swinv2_moe.detection.recipe import Recipe
from swinv2_moe.detection.transforms import GREY
from swinv2_moe.errors import UserError
from swinv2_moe.export.programs import check_packages, load_program, write_program
from swinv2_moe.files import new_directory, writing

OUTPUT = "boxes_and_scores"
_CLOSE = 0.02  # pixels and scores; fp32 sums in another order, through a softmax of 17 distances


class Program(nn.Module):
    """A detector without the choice among its boxes.

    Input: images float32 [B, 3, H, W], RGB, 0 to 255, on the canvas of the recipe. Output: float32
    [B, N, 4 + C]: left, top, right, bottom in pixels of the canvas, and a score for each class.
    """

    points: Tensor  # [N, 2]
    strides: Tensor  # [N, 1]
    limits: Tensor  # [4]

    def __init__(self, detector: Any, size: tuple[int, int]) -> None:
        super().__init__()
        self.backbone, self.neck, self.head = detector.backbone, detector.neck, detector.bbox_head
        for name in ("mean", "std"):
            values = getattr(detector.data_preprocessor, name).detach().cpu()
            self.register_buffer(name, values.view(1, 3, 1, 1).float())
        width, height = size
        generator = self.head.prior_generator
        maps = [(-(-height // stride), -(-width // stride)) for _, stride in generator.strides]
        points, strides = [], []
        for anchors, (stride, _) in zip(
            generator.grid_priors(maps, device="cpu"), generator.strides, strict=True
        ):
            points.append((anchors[:, :2] + anchors[:, 2:]) / 2)
            strides.append(torch.full((len(anchors), 1), float(stride)))
        self.register_buffer("points", torch.cat(points))
        self.register_buffer("strides", torch.cat(strides))
        self.register_buffer("limits", torch.tensor([width, height] * 2, dtype=torch.float32))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.neck(self.backbone((images - self.mean) / self.std))
        scores, distances = [], []
        for score, distance in zip(*self.head(maps), strict=True):
            scores.append(score.flatten(2).transpose(1, 2).sigmoid())  # [B, n, C]
            places = distance.flatten(2).transpose(1, 2)  # [B, n, 4 * 17]
            shares = places.unflatten(2, (4, -1)).softmax(3)
            distances.append(shares @ self.head.integral.project)
        sides = torch.cat(distances, 1) * self.strides  # left, top, right, bottom of the point
        low, high = self.points - sides[..., :2], self.points + sides[..., 2:]
        boxes = torch.cat([low, high], 2).relu().minimum(self.limits)
        return torch.cat([boxes, torch.cat(scores, 1)], 2)


def export_onnx(detector: Detector, recipe: Recipe, output: Path) -> float:
    """Write `model.onnx` and `model.json` to a new directory, after comparing the program with the
    detector on noise.

    Returns:
        The largest difference, in pixels or scores.

    Raises:
        UserError: packages of the export extra are missing, `output` exists or cannot be written,
            or the program differs from the detector.
    """
    check_packages("onnx")
    if output.exists():
        raise UserError(f"{output} already exists")
    size = (recipe.size[0], recipe.size[1])
    program = Program(detector.module.cpu().eval(), size).eval()
    generator = torch.Generator().manual_seed(0)
    images = 255 * torch.rand((1, 3, size[1], size[0]), generator=generator)
    with new_directory(output) as directory, writing(output):
        write_program("onnx", program, images, "float32", False, directory, OUTPUT)  # type: ignore[arg-type]
        with torch.inference_mode():
            expected = program(images).numpy()
        actual = load_program("onnx", directory)(images).numpy()
        difference = float(np.abs(actual - expected).max())
        if not difference <= _CLOSE:
            raise UserError(f"{output}: the program differs from the detector by {difference:g}")
        content = describe(recipe, detector) | {"max_abs_difference": difference}
        (directory / "model.json").write_text(json.dumps(content, indent=1) + "\n")
        directory.rename(output)
    return difference


def describe(recipe: Recipe, detector: Detector) -> dict[str, Any]:
    """What a program needs to know to use the file."""
    test = detector.module.test_cfg
    return {
        "input": {
            "name": "images",
            "shape": [1, 3, recipe.size[1], recipe.size[0]],
            "colours": "RGB, 0 to 255",
            "placing": "scaled to fit, in the top left corner",
            "background": GREY,
        },
        "output": {"name": OUTPUT, "columns": "left, top, right, bottom, a score for each class"},
        "class_names": detector.class_names,
        "least_score": test.score_thr,
        "iou_threshold": test.nms.iou_threshold,
        "max_objects": test.max_per_img,
    }
