"""Samples of a source, batches of samples, and a counter of unreadable images.

B images per batch, C channels, S DATA.IMG_SIZE
"""

import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate

from swinv2_moe.data.images import decode, is_of_the_machine, read_file, to_mode
from swinv2_moe.data.section import DataConfig
from swinv2_moe.data.sources import Source
from swinv2_moe.data.transforms import build_transform
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.imports import ImportedFiles

IGNORE = -1  # target of an image that no metric counts
_MASK = 2**64 - 1


class Sample(NamedTuple):
    image: torch.Tensor  # float32 [C, S, S], normalised
    target: int
    unreadable: list[str]  # paths of unreadable images, in whose place this image is used
    number: int  # index in the dataset


class Batch(NamedTuple):
    images: torch.Tensor  # float32 [B, C, S, S], normalised
    targets: torch.Tensor  # int64 [B]; IGNORE for images that do not count
    unreadable: list[str]  # paths of images that could not be read
    indices: torch.Tensor | None = None  # int64 [B], of the dataset


def collate(samples: list[Sample]) -> Batch:
    """Make a batch of B samples."""
    # In a worker, default_collate stacks directly into shared memory.
    images = default_collate([sample.image for sample in samples])
    targets = torch.tensor([sample.target for sample in samples], dtype=torch.int64)
    indices = torch.tensor([sample.number for sample in samples], dtype=torch.int64)
    unreadable = []
    for sample in samples:
        unreadable += sample.unreadable
    return Batch(images, targets, unreadable, indices)


class ImageDataset(Dataset):
    """The images of a source, with the transform of training or evaluation.

    Training: the augmentation of an image depends only on (SEED, epoch, index), not on the number
    of ranks and workers. The random states of the process are restored afterwards. An unreadable
    image is replaced by the next readable one, or by a blank one after `max_tries` attempts.

    Evaluation: index ~i is image i with target IGNORE, for padding. An unreadable image is replaced
    by a blank one with target IGNORE.
    """

    def __init__(self, source: Source, config: DataConfig, is_train: bool, max_tries: int = 1):
        channels, size = config.channels, config.img_size
        # This must come before the source, whose class may be defined in one of these files: a
        # spawned worker restores attributes in this order.
        self.imported_files = ImportedFiles()
        self.source = source
        self.is_train = is_train
        self.transform = build_transform(config, is_train)
        self.mode = "RGB"
        if channels == 1:
            self.mode = "L"
        self.shape = (channels, size, size)
        self.seed = config.seed
        self.epoch_number = torch.zeros(1, dtype=torch.int64)  # in memory shared with the workers
        self.max_tries = min(len(source), max_tries)

    @property
    def epoch(self) -> int:
        """The number of the augmentation, in this process and in its workers. It may change
        between two epochs."""
        return int(self.epoch_number)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.epoch_number.fill_(epoch)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """The samples of a batch. The loader calls this instead of `__getitem__`, so that random
        states are saved and restored once per batch."""
        if not self.is_train:
            return [self._sample(index) for index in indices]
        with preserved_random_states():
            return [self._sample(index) for index in indices]

    def _sample(self, index: int) -> Sample:
        is_padding = index < 0
        if is_padding:
            index = ~index
        if self.is_train:
            seed_random_states(self.seed, self.epoch, index)
        unreadable = []
        for offset in range(self.max_tries):
            position = (index + offset) % len(self.source)
            image = read_image(self.source, position, self.mode)
            if image is None:
                unreadable.append(self.source.name(position))
                continue
            target = IGNORE
            if not is_padding:
                target = int(self.source.targets[position])
            return Sample(self.transform(image), target, unreadable, index)
        target = IGNORE
        if self.is_train:
            # The training loss does not support IGNORE, and UnreadableImages then stops the run.
            target = int(self.source.targets[index])
        return Sample(torch.zeros(self.shape), target, unreadable, index)


def read_image(source: Source, index: int, mode: str) -> Image.Image | None:
    """The image in `mode` ("RGB" or "L"), or None if it cannot be read.

    Raises:
        OSError, MemoryError: this process or machine has too many open files, or no memory.
    """
    try:
        return to_mode(source.open(index), mode)
    # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and others on broken
    # files.
    except Exception as error:
        if is_of_the_machine(error):
            raise
        return None


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the states of `random`, `numpy.random` and torch's CPU generator on leaving."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 (timm draws from it)
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)


def seed_random_states(*numbers: int) -> None:
    """Seed `random`, `numpy.random` and torch's CPU generator from integers, in about 10 us."""
    key = 0
    # The final mixing of splitmix64 after each number makes the streams of neighbouring numbers
    # unrelated.
    for number in numbers:
        key = (key + number + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    random.seed(key)
    # numpy and torch both use a Mersenne Twister with a seed of 32 bits. With different halves of
    # the key they draw different numbers.
    np.random.seed(key >> 32)  # noqa: NPY002
    # torch.manual_seed seeds every device, which takes 100 us.
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)


def _reason(path: str) -> str:
    """Why a file cannot be read as an image, for the end of a message; "" if that is not found."""
    if not os.path.exists(path):
        return ""
    try:
        to_mode(decode(read_file(path)), "RGB")
    except Exception as error:  # see `read_image`
        return f" ({one_line(str(error))})"
    return ""


class UnreadableImages:
    """The set of images that could not be read. It stops a run if there are too many.

    Args:
        size: total number of training and validation images.
        max_share: DATA.MAX_BAD_SHARE, 0 to 1.
    """

    def __init__(self, size: int, max_share: float):
        self.size = size
        self.max_share = max_share
        self.paths: dict[str, None] = {}  # an ordered set

    def add(self, paths: Iterable[str]) -> None:
        """Add paths of unreadable images, from batches of every rank.

        Raises:
            UserError: more than `max_share` of the images are unreadable, or all of them.
        """
        self.paths.update(dict.fromkeys(paths))
        count = len(self.paths)
        if count > self.max_share * self.size or count == self.size:
            first = next(iter(self.paths))
            raise UserError(
                f"{count} of {self.size} images could not be read, DATA.MAX_BAD_SHARE allows a"
                f" share of {self.max_share}; the first: {first}{_reason(first)}"
            )

    def summary(self) -> str | None:
        """A message for the end of a run; None if every image could be read."""
        if not self.paths:
            return None
        return (
            f"{len(self.paths)} of {self.size} images could not be read; the first:"
            f" {next(iter(self.paths))}"
        )
