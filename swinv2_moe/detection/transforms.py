"""Loading of pictures for a detector of fixed image size, with random zoom in training."""

import math

import cv2
import numpy as np
from mmcv.transforms import BaseTransform
from mmdet.registry import TRANSFORMS
from mmengine.logging import MMLogger
from PIL import Image

from swinv2_moe.data.images import decode, is_of_the_machine, read_file, to_mode
from swinv2_moe.errors import one_line

GREY = 114  # around a picture
_VISIBLE = 0.4  # share of an object that a crop must show for it to be learned
_LARGER = 1.25  # than the canvas: how large a picture is kept in memory
_KEPT = 1 << 30  # bytes of pictures that a process keeps


@TRANSFORMS.register_module()
class LoadOnCanvas(BaseTransform):
    """Read a picture upright, as everywhere in this project, and put it on a canvas of fixed size.

    Evaluation: the picture is scaled to fit and lies in the top left corner. Training: it is zoomed
    by a random factor and lies at a random place; objects of which less than 40% are left are
    ignored. What does not cover the canvas is grey. Pictures are kept in memory, up to 1 GiB.

    A picture that cannot be read is replaced by another one in training, and is grey in evaluation.

    Args:
        size: width and height of the canvas.
        zoom: smallest and largest factor; None: evaluation.
    """

    def __init__(self, size: tuple[int, int], zoom: tuple[float, float] | None = None) -> None:
        self.size = (int(size[0]), int(size[1]))
        self.zoom = zoom
        self._kept: dict[str, tuple[np.ndarray, tuple[int, int]]] = {}
        self._bytes = 0

    def transform(self, results: dict) -> dict | None:
        """As mmcv's transforms. `img` becomes uint8 [H, W, 3], BGR."""
        if "img" in results:  # a picture in memory, upright, BGR
            picture, original = self._ready(results["img"])
        else:
            try:
                picture, original = self._read(results["img_path"])
            except ValueError as error:
                line = f"{results['img_path']}: cannot be read ({one_line(str(error))})"
                MMLogger.get_current_instance().warning(line)
                if self.zoom:
                    return None
                original = (results["height"], results["width"])
                picture = np.full((*self.size[::-1], 3), GREY, np.uint8)
        width, height = self.size
        fit = min(width / original[1], height / original[0])
        if self.zoom:
            fit *= math.exp(np.random.uniform(*np.log(self.zoom)))  # noqa: NPY002 (mmcv's)
            room = np.array(self.size) - fit * np.array(original[::-1])
            shift = room * np.random.uniform(size=2)  # noqa: NPY002
            scale = fit * np.array(original[::-1]) / picture.shape[1::-1]
            matrix = np.array([[scale[0], 0, shift[0]], [0, scale[1], shift[1]]])
            matrix[:, 2] += (scale - 1) / 2  # warpAffine counts from the middles of pixels
            picture = cv2.warpAffine(
                picture, matrix, self.size, flags=cv2.INTER_LINEAR, borderValue=(GREY,) * 3
            )
            self._move_boxes(results, fit, shift)
        elif results.get("gt_bboxes") is not None:
            results["gt_bboxes"].rescale_((fit, fit))
        results["img"] = picture
        results["img_shape"] = (height, width)
        results["ori_shape"] = original
        results["scale_factor"] = (fit, fit)
        return results

    def _move_boxes(self, results: dict, fit: float, shift: np.ndarray) -> None:
        boxes = results["gt_bboxes"]
        boxes.rescale_((fit, fit))
        boxes.translate_(shift.tolist())
        areas = boxes.areas.numpy()
        boxes.clip_((self.size[1], self.size[0]))
        left = boxes.areas.numpy()
        ignored = results["gt_ignore_flags"] | (left < _VISIBLE * areas)
        keep = (left > 4) & (boxes.widths.numpy() > 1) & (boxes.heights.numpy() > 1)
        results["gt_bboxes"] = boxes[keep]
        results["gt_bboxes_labels"] = results["gt_bboxes_labels"][keep]
        results["gt_ignore_flags"] = ignored[keep]

    def _read(self, path: str) -> tuple[np.ndarray, tuple[int, int]]:
        """The picture as `_ready` makes it, and the height and width of the file's.

        Raises:
            ValueError: it cannot be read.
        """
        if path in self._kept:
            return self._kept[path]
        try:
            rgb = np.asarray(to_mode(decode(read_file(path)), "RGB"))
        except OSError as error:
            if is_of_the_machine(error):
                raise
            raise ValueError(str(error)) from error
        found = self._ready(np.ascontiguousarray(rgb[..., ::-1]))
        if self._bytes + found[0].nbytes <= _KEPT:
            self._bytes += found[0].nbytes
            self._kept[path] = found
        return found

    def _ready(self, picture: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """The picture as it is kept, and its height and width: in training a little larger than
        the canvas, otherwise on the canvas, resized as examples/detect.py does it."""
        height, width = picture.shape[:2]
        fit = min(self.size[0] / width, self.size[1] / height)
        if self.zoom is None:
            size = [max(1, round(fit * side)) for side in (width, height)]
            how = Image.Resampling.BILINEAR if fit > 1 else Image.Resampling.BOX
            canvas = np.full((self.size[1], self.size[0], 3), GREY, np.uint8)
            resized = Image.fromarray(picture).resize((size[0], size[1]), how)
            canvas[: size[1], : size[0]] = np.asarray(resized)
            return canvas, (height, width)
        if _LARGER * fit < 1:
            size = [max(1, round(_LARGER * fit * side)) for side in (width, height)]
            picture = cv2.resize(picture, size, interpolation=cv2.INTER_AREA)
        return picture, (height, width)
