"""A trained model, its transform and its classes, applied to pictures.

B pictures of a batch, C channels, S DATA.IMG_SIZE, K classes of a prediction
"""

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from moe_core import moe_layers, prepared
from swinv2_moe.checkpoints.checkpoint import select_checkpoint
from swinv2_moe.checkpoints.deployed import Deployed, check_alone, open_deployed
from swinv2_moe.checkpoints.novelty import num_features, read_novelty, with_features
from swinv2_moe.data.images import (
    NOT_DECODED,
    decode,
    image_paths,
    is_of_the_machine,
    read_file,
    read_header,
    to_mode,
    upright,
)
from swinv2_moe.data.transforms import build_transform
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.predict.prediction import BATCH_SIZE, TOP_K, ClassProbability, Prediction
from swinv2_moe.train.graph import PassGraph

Readable = str | os.PathLike | bytes | Image.Image
Picture = Readable | np.ndarray
_MAX_READERS = 8  # threads that read pictures
_DROPLESS = ("MODEL.MOE.EVAL_CAPACITY_FACTOR", "0.0")


def load_predictor(
    run: str | os.PathLike,
    checkpoint: str = "best",
    opts: Sequence[str] = (),
    name: str = "run",
) -> "Predictor":
    """Load the model of a run, of a checkpoint or of this package.

    The model has no capacity limit. No token is dropped, so that a prediction does not depend on
    the other pictures of its batch. Where experts choose tokens, each picture is a batch of its
    own. MODEL.MOE.EVAL_CAPACITY_FACTOR in `opts` sets another capacity.

    Args:
        checkpoint: the checkpoint of a run: "best", "latest" or a step.
        opts: KEY VALUE pairs that override the checkpoint's configuration.
        name: the name of `run` in messages.

    Raises:
        UserError: several processes, no complete checkpoint, or options that cannot be used.
    """
    check_alone()
    path, selected = select_checkpoint(str(run), checkpoint)
    # before the user's keys, which override it; checkpoints may have been trained with a capacity
    with open_deployed(path, opts=[*_DROPLESS, *opts], name=name) as deployed:
        predictor = Predictor(deployed)
    predictor.facts["selected"] = selected
    return predictor


class Predictor:
    """A trained model that predicts the classes of pictures with the transform of validation.

    Attributes:
        class_names: in the order of the logits.
        checkpoint: directory of the checkpoint.
        module: the model, in evaluation mode.
        facts: values that identify the checkpoint in results, ready for JSON.
    """

    def __init__(self, deployed: Deployed):
        config = deployed.data
        self.class_names = deployed.class_names()
        self.checkpoint = deployed.source.directory
        self.module: nn.Module = deployed.model(len(self.class_names))
        self._novelty = None
        if "novelty" in deployed.source.meta:
            where = f"checkpoint {self.checkpoint}"
            self._novelty = read_novelty(deployed.source.meta, num_features(self.module), where)
        self._device = deployed.world.device
        self._autocast = deployed.autocast
        self._transform = build_transform(config, is_train=False)
        self._mode = "RGB"
        if config.channels == 1:
            self._mode = "L"
        facts = deployed.facts()
        # Experts that choose tokens choose from all pictures of a batch.
        self._one_by_one = any(
            layer.config.routing == "expert_choice" for layer in moe_layers(self.module).values()
        )
        names = ("checkpoint", "step", "passed_over", "image_size", "torch")
        self.facts = {name: facts[name] for name in names}

    def predict(
        self,
        pictures: Picture | Iterable[Picture],
        top_k: int = TOP_K,
        batch_size: int = BATCH_SIZE,
    ) -> list[Prediction]:
        """The most probable classes of each picture, in the order given.

        A picture that cannot be read has a Prediction with its `error`.

        Args:
            pictures: a file, a folder, an image of Pillow, the content of an image file (bytes), an
                array (uint8 [H, W] or, as RGB, [H, W, 3]), or several of these. Images of a folder
                and its subfolders are sorted by name.
            top_k: number of classes of a prediction, at most all classes.
            batch_size: pictures per forward pass; with expert choice always 1.

        Raises:
            UserError: a file does not exist, a folder has no images, something else than a picture
                or an array of another form, `top_k` or `batch_size` is
                below 1, or the model's outputs are not finite.
        """
        return list(self.stream(find_pictures(pictures), top_k, batch_size))

    def stream(
        self, pictures: Sequence[Readable], top_k: int = TOP_K, batch_size: int = BATCH_SIZE
    ) -> Iterator[Prediction]:
        """As `predict`, but yields the predictions one by one. `pictures` may be only files and
        images.

        Threads read the pictures of the next batch while the model runs.
        """
        for name, value in (("top_k", top_k), ("batch_size", batch_size)):
            if value < 1:
                raise UserError(f"{name} is {value}, it must be at least 1")
        if self._one_by_one:
            batch_size = 1
        forward = PassGraph(self.module, self._logits, self._device)
        num_readers = min(_MAX_READERS, os.cpu_count() or 1)
        with ThreadPoolExecutor(num_readers) as readers, prepared(self.module):

            def submit(start: int) -> list[Future]:
                batch = pictures[start : start + batch_size]
                return [readers.submit(self._read, picture) for picture in batch]

            ahead = submit(0)
            for start in range(0, len(pictures), batch_size):
                inputs = [future.result() for future in ahead]
                ahead = submit(start + batch_size)
                names = [_name(picture) for picture in pictures[start : start + batch_size]]
                yield from self._predictions(names, inputs, top_k, forward)

    def _read(self, picture: Readable) -> tuple[Tensor | str, str]:
        """The model's input, float32 [C, S, S], or the reason why the picture cannot be read; and
        what of its file is not used."""
        unused = ""
        try:
            if isinstance(picture, Image.Image):
                image = upright(picture)
            else:
                content = picture if isinstance(picture, bytes) else read_file(picture)
                image = decode(content)
                unused = read_header(io.BytesIO(content)).unused
            return self._transform(to_mode(image, self._mode)), unused
        # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and others.
        except Exception as error:
            if is_of_the_machine(error):
                raise
            needed = NOT_DECODED.get(Path(_name(picture)).suffix.lower())
            return needed or one_line(getattr(error, "strerror", None) or str(error)), ""

    def _predictions(
        self,
        names: list[str],
        inputs: list[tuple[Tensor | str, str]],
        top_k: int,
        forward: PassGraph,
    ) -> Iterator[Prediction]:
        """Yield a Prediction for each of B pictures, from the results of `_read`."""
        images = [item for item, _ in inputs if isinstance(item, Tensor)]
        rows: Iterator[tuple[tuple[ClassProbability, ...], bool | None]] = iter(())
        if images:
            rows = iter(self._top(torch.stack(images), top_k, forward))
        for name, (item, unused) in zip(names, inputs, strict=True):
            if isinstance(item, Tensor):
                top, is_unlike = next(rows)
                yield Prediction(name, top, unused=unused, is_unlike=is_unlike)
            else:
                yield Prediction(name, error=item)

    def _logits(self, images: Tensor) -> Tensor:
        with self._autocast():
            if self._novelty is not None:
                return with_features(self.module, images)
            return self.module(images)

    @torch.inference_mode()
    def _top(
        self, images: Tensor, top_k: int, forward: PassGraph
    ) -> list[tuple[tuple[ClassProbability, ...], bool | None]]:
        """Of each image of a batch, float32 [B, C, S, S], the K most probable classes, and whether
        it is unlike the training's."""
        outputs = forward(images.to(self._device))
        logits = outputs[:, : len(self.class_names)]
        if not logits.isfinite().all():
            raise UserError(f"checkpoint {self.checkpoint}: its outputs are not finite")
        probabilities = logits.float().softmax(1).cpu()  # [B, classes]
        best = probabilities.topk(min(top_k, probabilities.shape[1]))
        unlike: list[bool | None] = [None] * len(images)
        if self._novelty is not None and outputs.shape[1] > logits.shape[1]:
            features = outputs[:, logits.shape[1] :].double().cpu().numpy()
            unlike = self._novelty.is_unlike(features, logits.double().cpu().numpy()).tolist()
        rows = []
        for indices, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            row = []
            for index, probability in zip(indices, values, strict=True):
                row.append(ClassProbability(self.class_names[index], index, probability))
            rows.append(tuple(row))
        return list(zip(rows, unlike, strict=True))


def find_pictures(pictures: Picture | Iterable[Picture]) -> list[Path | bytes | Image.Image]:
    """Replace folders by the images in them, and arrays by images. Other pictures are unchanged.

    Raises:
        UserError: a file or directory does not exist, a directory has no images, or what is given
            is no picture.
    """
    several: Any = pictures
    is_batch = isinstance(pictures, np.ndarray) and pictures.ndim == 4
    if (isinstance(pictures, Picture) and not is_batch) or not isinstance(pictures, Iterable):
        several = [pictures]
    found: list[Path | bytes | Image.Image] = []
    for number, picture in enumerate(several):
        if isinstance(picture, (bytes, Image.Image)):
            found.append(picture)
        elif isinstance(picture, (str, os.PathLike)):
            if not os.fspath(picture):
                raise UserError(f"picture {number} is {picture!r}, it must name a file or folder")
            found += image_paths([picture])
        else:
            found.append(_image_of(picture, number))
    return found


def _image_of(picture: object, number: int) -> Image.Image:
    """The image of an array. Raises UserError for anything else; `number`: its place."""
    given = type(picture).__name__
    if isinstance(picture, np.ndarray):
        is_image = picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] == 3)
        if is_image and picture.dtype == np.uint8 and picture.size:
            return Image.fromarray(picture)
        given = f"an array of {picture.dtype} {list(picture.shape)}"
    raise UserError(
        f"picture {number} is {given}: predict takes a path, an image of Pillow, the bytes of an"
        " image file, or an array of uint8 [H, W] or [H, W, 3] (0 to 255, RGB); values from 0 to 1:"
        " (255 * x).round().astype('uint8'), channels first: x.transpose(1, 2, 0)"
    )


def _name(picture: Readable) -> str:
    if isinstance(picture, (str, os.PathLike)):
        return os.fspath(picture)
    return ""
