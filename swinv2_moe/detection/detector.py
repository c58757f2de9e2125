"""A trained detector applied to pictures.

D objects of a picture, H x W its pixels
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from swinv2_moe.detection import run as runs  # first: it reports missing packages in one line

# isort: split

import numpy as np
import pycocotools.mask
import torch
from mmdet.utils import get_test_pipeline_cfg
from mmengine.config import Config
from mmengine.dataset import Compose
from PIL import Image

from moe_core import prepared
from swinv2_moe.checkpoints.checkpoint import select_checkpoint
from swinv2_moe.data.images import decode, is_of_the_machine, read_file, to_mode, upright
from swinv2_moe.detection.recipe import mmengine_config, read_recipe
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.measure.average_precision import Detections
from swinv2_moe.measure.report_detection import THRESHOLD
from swinv2_moe.output import print_lines
from swinv2_moe.predict.objects import Found
from swinv2_moe.predict.predictor import Picture, find_pictures

BATCH_SIZE = 8
_READERS = 4  # threads that read pictures


def load_detector(run: str | os.PathLike, checkpoint: str = "best") -> "Detector":
    """The detector of a run of `swinv2-moe detect train FOLDER`.

    Args:
        checkpoint: "best", "latest" or the number of a step.

    Raises:
        UserError: no such run, or no complete checkpoint.
    """
    path = Path(os.path.expanduser(run))
    recipe = read_recipe(path)
    if not (path / "checkpoints").is_dir():
        raise UserError(f"RUN {path}: has no checkpoint yet")
    source, line = select_checkpoint(str(path), checkpoint)
    return Detector(mmengine_config(recipe, path), source, recipe.class_names, line)


class Detector:
    """A trained detector.

    Args:
        config: mmengine's configuration.
        source: a run, a checkpoint, or a .pth file.
        class_names: by label; empty: as the checkpoint names them.
        selected: a line about the choice of the checkpoint.
    """

    def __init__(
        self, config: Config, source: str, class_names: Sequence[str] = (), selected: str = ""
    ) -> None:
        self.class_names = list(class_names) or runs.trained_classes(source)
        self.checkpoint, self.selected = source, selected
        self.module: Any = runs.build_detector(config, source)
        if torch.cuda.is_available():
            self.module.cuda()
        self._pipeline = Compose(_pipeline(config))

    def detect(
        self,
        pictures: Picture | Iterable[Picture],
        threshold: float = THRESHOLD,
        batch_size: int = BATCH_SIZE,
    ) -> list[Found]:
        """The objects in pictures, in the order given.

        Args:
            pictures: files, folders, images of Pillow, bytes or arrays, as of `load(run).predict`.
            threshold: the lowest score.
            batch_size: pictures per forward pass.

        Raises:
            UserError: a file does not exist, a folder has no images, `batch_size` is below 1, or
                the outputs are not finite.
        """
        return list(self.stream(pictures, threshold, batch_size))

    def stream(
        self,
        pictures: Picture | Iterable[Picture],
        threshold: float = THRESHOLD,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[Found]:
        """As `detect`, one by one; a thousand pictures take no more memory than a few."""
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}, it must be at least 1")
        items = find_pictures(pictures)
        with ThreadPoolExecutor(_READERS) as pool, prepared(self.module):
            ahead = pool.map(_read, items[:batch_size])
            for start in range(0, len(items), batch_size):
                photos = list(ahead)
                end = start + batch_size
                ahead = pool.map(_read, items[end : end + batch_size])
                names = [str(item) if isinstance(item, Path) else "" for item in items[start:end]]
                yield from self._found(names, photos, threshold)

    @torch.inference_mode()
    def _found(
        self, names: Sequence[str], photos: Sequence[np.ndarray | str], threshold: float
    ) -> Iterator[Found]:
        read = [photo for photo in photos if not isinstance(photo, str)]
        packed = [self._pipeline({"img": photo, "img_id": 0}) for photo in read]
        results: Iterator[Any] = iter(())
        if packed:
            data = {key: [one[key] for one in packed] for key in ("inputs", "data_samples")}
            results = iter(self.module.test_step(data))
        for name, photo in zip(names, photos, strict=True):
            if isinstance(photo, str):
                yield Found(name, error=photo)
            else:
                yield self._one(name, photo, next(results).pred_instances, threshold)

    def _one(self, name: str, photo: np.ndarray, instances: Any, threshold: float) -> Found:
        height, width = photo.shape[:2]
        scores = instances.scores.float().cpu().numpy()
        if not np.isfinite(scores).all():
            raise UserError(f"checkpoint {self.checkpoint}: its outputs are not finite")
        chosen = np.argsort(-scores, kind="stable")
        chosen = chosen[scores[chosen] >= threshold]
        boxes = instances.bboxes.float().cpu().numpy()[chosen]
        boxes[:, ::2] = boxes[:, ::2].clip(0, width)
        boxes[:, 1::2] = boxes[:, 1::2].clip(0, height)
        labels = instances.labels.cpu().numpy()[chosen]
        names = tuple(self.name_of(label) for label in labels.tolist())
        masks = None
        if "masks" in instances:
            masks = [_run_lengths(mask) for mask in instances.masks.cpu().numpy()[chosen]]
        return Found(name, width, height, boxes, scores[chosen], labels, names, masks)

    def name_of(self, label: int) -> str:
        """The name of a class; its number if it has none."""
        return self.class_names[label] if label < len(self.class_names) else f"class {label}"

    def on_split(self, truth: dict[str, list[dict]], root: str) -> dict[int, Detections]:
        """Detections of any score in the pictures of a COCO file, by id. A picture that cannot be
        read is named on stderr, and has none."""
        files = [os.path.join(root, row["file_name"]) for row in truth["images"]]
        found = {}
        for row, one in zip(truth["images"], self.stream(files, threshold=0.0), strict=True):
            if one.error is not None:
                print_lines(f"{one.file}: cannot be read ({one.error})", file=sys.stderr)
            found[row["id"]] = Detections(one.boxes, one.scores, one.labels)
        return found


def _read(item: Any) -> np.ndarray | str:
    """uint8 [H, W, 3], BGR, upright; or why the picture cannot be read."""
    try:
        if isinstance(item, Image.Image):
            image = upright(item)
        else:
            image = decode(item if isinstance(item, bytes) else read_file(item))
        return np.ascontiguousarray(np.asarray(to_mode(image, "RGB"))[..., ::-1])
    except (OSError, ValueError) as error:
        if is_of_the_machine(error):
            raise
        return one_line(getattr(error, "strerror", None) or str(error))


def _run_lengths(mask: np.ndarray) -> dict:
    """COCO's form of a mask [H, W], ready for JSON."""
    rle = pycocotools.mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode()}


def _pipeline(config: Config) -> list[dict]:
    """The test pipeline, for arrays of pixels and without annotations."""
    steps = [dict(step) for step in get_test_pipeline_cfg(config)]
    steps = [step for step in steps if step["type"] != "LoadAnnotations"]
    if steps[0]["type"] != "LoadOnCanvas":
        steps[0] = {"type": "mmdet.LoadImageFromNDArray"}
    return steps
