"""From a source of images and an index to a training sample, and from samples to a batch.

B images per batch, C channels, S DATA.IMG_SIZE
"""

import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate

from swinv2_moe.config import DataConfig
from swinv2_moe.data.images import to_mode
from swinv2_moe.data.sources import Source
from swinv2_moe.data.transforms import build_transform
from swinv2_moe.errors import UserError
from swinv2_moe.imports import ImportedFiles

IGNORE = -1  # the target of an image that no metric may count
_MASK = 2**64 - 1

# Large photograph collections hold thousands of files with broken EXIF tags; each would print two
# lines. Set on import, so that loader workers have it too.
warnings.filterwarnings("ignore", module=r"PIL\.")


class Sample(NamedTuple):
    image: torch.Tensor  # float32 [C, S, S], normalised
    target: int
    unreadable: list[str]  # paths tried before this image was found


class Batch(NamedTuple):
    images: torch.Tensor  # float32 [B, C, S, S], normalised
    targets: torch.Tensor  # int64 [B]; IGNORE where the image does not count
    unreadable: list[str]  # paths of images that could not be read


def collate(samples: list[Sample]) -> Batch:
    """A list of B samples -> one batch."""
    return Batch(
        # straight into shared memory in a worker
        default_collate([sample.image for sample in samples]),
        torch.tensor([sample.target for sample in samples], dtype=torch.int64),
        [path for sample in samples for path in sample.unreadable],
    )


class ImageDataset(Dataset):
    """A source's images through a transform.

    Training: the augmentation of image `index` depends on (SEED, epoch, index) alone, whatever the
    number of ranks and workers; the process's own random states are left as they were. An
    unreadable image is replaced by the next readable one, or by a blank one if `max_tries` in a row
    cannot be read. Evaluation: index ~i is image i with target IGNORE (padding); an unreadable
    image is a blank one with target IGNORE.
    """

    def __init__(self, source: Source, config: DataConfig, is_train: bool, max_tries: int = 1):
        channels, size = config.in_chans, config.img_size
        if channels not in (1, 3):
            raise UserError(
                f"IN_CHANS is {channels}, images are read as 1 (grey) or 3 (RGB) channels"
            )
        # Before the source, whose class may be in one of these files: a spawned worker restores
        # attributes in this order.
        self.imported_files = ImportedFiles()
        self.source = source
        self.is_train = is_train
        self.transform = build_transform(config, is_train)
        self.mode = "L" if channels == 1 else "RGB"
        self.shape = (channels, size, size)
        self.seed, self.epoch = config.seed, 0
        self.max_tries = min(len(source), max_tries)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """A whole batch (the loader prefers this), so that the random states are saved and restored
        once for it."""
        if not self.is_train:
            return [self._sample(index) for index in indices]
        with preserved_random_states():
            return [self._sample(index) for index in indices]

    def _sample(self, index: int) -> Sample:
        first, is_padding = (index, False) if index >= 0 else (~index, True)
        if self.is_train:
            seed_random_states(self.seed, self.epoch, first)
        unreadable = []
        for position in range(first, first + self.max_tries):
            position %= len(self.source)
            image = read_image(self.source, position, self.mode)
            if image is not None:
                target = IGNORE if is_padding else int(self.source.targets[position])
                return Sample(self.transform(image), target, unreadable)
            unreadable.append(self.source.name(position))
        # A training loss takes no IGNORE; the run is about to be stopped anyway.
        target = int(self.source.targets[first]) if self.is_train else IGNORE
        return Sample(torch.zeros(self.shape), target, unreadable)


def read_image(source: Source, index: int, mode: str) -> Image.Image | None:
    """The image in `mode` ("RGB" or "L"), or None if it cannot be read."""
    try:
        return to_mode(source.open(index), mode)
    # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and more on broken
    # files
    except Exception:
        return None


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the states of `random`, `numpy.random` and torch's CPU generator on leaving."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (timm draws from it)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def seed_random_states(*numbers: int) -> None:
    """Seed `random`, `numpy.random` and torch's CPU generator from integers, in about 10 us."""
    key = 0
    # splitmix64's finaliser after each: neighbours in any number get unrelated streams
    for number in numbers:
        key = (key + number + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    random.seed(key)
    # Both are Mersenne Twisters seeded with 32 bits: with the same half they would draw the same
    # numbers.
    np.random.seed(key >> 32)  # noqa: NPY002
    # torch.manual_seed takes 100 us more, for other devices
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)


class UnreadableImages:
    """The distinct images that could not be read, out of `size`; stops the run beyond `max_share`
    of them.

    Args:
        size: training and validation images together.
        max_share: DATA.MAX_BAD_SHARE, 0 to 1.
    """

    def __init__(self, size: int, max_share: float):
        self.size, self.max_share = size, max_share
        self.paths: dict[str, None] = {}  # a set that keeps its order

    def add(self, paths: Iterable[str]) -> None:
        """Count the unreadable paths of some batches, of every rank.

        Raises:
            UserError: more than `max_share` of the images are unreadable, or all of them.
        """
        self.paths.update(dict.fromkeys(paths))
        count = len(self.paths)
        if count > self.max_share * self.size or count == self.size:
            raise UserError(
                f"{count} of {self.size} images could not be read, DATA.MAX_BAD_SHARE allows a"
                " share of"
                f" {self.max_share}; the first: {next(iter(self.paths))}"
            )

    def summary(self) -> str | None:
        """One line for the end of a run; None if every image could be read."""
        if not self.paths:
            return None
        return (
            f"{len(self.paths)} of {self.size} images could not be read; the first:"
            f" {next(iter(self.paths))}"
        )
