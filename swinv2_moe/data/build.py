"""`build_data(config, rank, world_size)` makes the loaders of a run."""

import atexit
import signal
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from swinv2_moe.data.datasets import ImageDataset, collate
from swinv2_moe.data.samplers import (
    ListSampler,
    Order,
    TrainSampler,
    ValSampler,
    shard_order,
)
from swinv2_moe.data.section import DATASETS, DataConfig
from swinv2_moe.data.shards import ShardedImages
from swinv2_moe.data.sources import Source, Sources, load_sources
from swinv2_moe.data.sources.base import Subset, relabelled
from swinv2_moe.errors import UserError

S = TypeVar("S", bound=Sampler[int])
# Places from which an epoch reads shards in turn. Where the number of ranks divides it, each rank
# reads its own shards.
SHARD_STREAMS = 64


@dataclass(frozen=True)
class Data:
    """Loaders of `Batch`es for this rank, and properties of the data for the model and the reports.

    `len(train_loader)` and `len(val_loader)` are the same on every rank.
    """

    train_loader: "Loader[TrainSampler]"
    val_loader: "Loader[ValSampler]"
    num_classes: int
    class_names: list[str]
    train_size: int  # images over all ranks
    val_size: int
    notes: tuple[str, ...] = ()  # messages of the dataset, for the log
    views: int = 0  # augmentations of each image, in turn; 0: a new one in each epoch

    def set_epoch(self, epoch: int, skip_steps: int = 0) -> None:
        """Choose the order and the augmentation of `epoch` (from 0); call it before each
        `iter(train_loader)`.

        The first `skip_steps` batches are skipped without being read, to resume in the middle of an
        epoch. `len(train_loader)` still counts them.
        """
        self.train_loader.dataset.epoch = self.view_of_epoch(epoch)
        self.train_loader.sampler.epoch = epoch
        self.train_loader.sampler.skip_steps = skip_steps

    def view_of_epoch(self, epoch: int) -> int:
        """The number of the augmentation in `epoch`."""
        if self.views:
            return epoch % self.views
        return epoch

    def close(self) -> None:
        """End the workers of training. Python would not end those of a loader to which a traceback
        refers."""
        self.train_loader.end_workers()


def build_data(
    config: DataConfig, rank: int = 0, world_size: int = 1, sources: Sources | None = None
) -> Data:
    """Check the data that `config` names and build this rank's loaders.

    Args:
        sources: the images; None: the images that `config` names.

    Raises:
        UserError: the data are missing, malformed, contradict MODEL.NUM_CLASSES or are too small
            for one step.
    """
    if sources is None:
        sources = load_sources(config)
    num_classes = len(sources.class_names)
    if config.num_classes not in (0, num_classes):
        raise UserError(
            f"MODEL.NUM_CLASSES is {config.num_classes}, the data has {num_classes} classes (0"
            " takes what the data has)"
        )
    train_size, val_size = len(sources.train), len(sources.val)
    _check_step(config.batch_size, world_size, train_size)
    # One more than the allowed number of unreadable images: if so many in a row are unreadable,
    # UnreadableImages stops the run.
    max_tries = int(config.max_bad_share * (train_size + val_size)) + 1
    sampler = TrainSampler(
        train_size,
        config.batch_size,
        rank,
        world_size,
        config.seed,
        _shard_order(sources.train),
    )
    train_loader = _loader(
        config, sources.train, sampler, max_tries, is_train=True, keep_workers=True
    )
    return Data(
        train_loader=train_loader,
        val_loader=evaluation_loader(config, sources.val, rank, world_size, config.shuffle_val),
        num_classes=num_classes,
        class_names=sources.class_names,
        train_size=train_size,
        val_size=val_size,
        notes=sources.notes,
    )


def _check_step(batch_size: int, world_size: int, train_size: int) -> None:
    step_size = batch_size * world_size
    if train_size >= step_size:
        return
    ranks = f"{world_size} ranks"
    if world_size == 1:
        ranks = "1 rank"
    raise UserError(
        f"DATA.BATCH_SIZE is {batch_size}: a step over {ranks} takes {step_size} images, the"
        f" training set has {train_size}"
    )


def evaluation_loader(
    config: DataConfig,
    source: Source,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = False,
) -> "Loader[ValSampler]":
    """A loader of all images of a source with the evaluation transform. Each image is read once, by
    one of the ranks.

    Every rank has the same number of batches. The images are in the source's order or, with
    `shuffle`, in a fixed permutation of it (`ValSampler.order`).
    """
    sampler = ValSampler(len(source), rank, world_size, shuffle)
    return _loader(config, source, sampler)


def _shard_order(source: Source) -> Order | None:
    """An order that reads shards almost sequentially; None for other sources.

    The workers of a rank take its batches in turn. So the pages that one worker reads ahead are in
    the page cache for the others.
    """
    if isinstance(source, ShardedImages):
        return partial(shard_order, source.counts, SHARD_STREAMS)
    return None


def training_loader(
    config: DataConfig, dataset: ImageDataset, view: int, indices: Sequence[int]
) -> "Loader[ListSampler]":
    """A loader of some images of a training set, in the order of `indices`.

    Args:
        config: its transform and batch size may differ from those of the training.
        view: number of the augmentation.
    """
    sampler = ListSampler(indices)
    loader = _loader(config, dataset.source, sampler, dataset.max_tries, is_train=True)
    loader.dataset.epoch = view
    return loader


def relabel(sources: Sources, numbers: Sequence[int], class_names: list[str]) -> Sources:
    """The sources with other classes.

    Args:
        numbers: for each class its number in `class_names`.
    """
    splits: list[Source] = []
    for source in (sources.train, sources.val):
        if isinstance(source, ShardedImages):
            splits.append(source.relabelled(numbers))
        else:
            splits.append(relabelled(source, numbers))
    return sources._replace(train=splits[0], val=splits[1], class_names=class_names)


def in_recorded_order(sources: Sources, recorded: list[str]) -> Sources:
    """The sources with their classes, and images, in the order of a checkpoint of the same classes:
    earlier versions sorted numbered folders as text.

    Args:
        recorded: the checkpoint's class names.
    """
    names = sources.class_names
    if names == recorded or sorted(names) != sorted(recorded):
        return sources
    number = {name: i for i, name in enumerate(recorded)}
    ordered = relabel(sources, [number[name] for name in names], recorded)
    splits = []
    for source in (ordered.train, ordered.val):
        if not isinstance(source, ShardedImages):
            source = Subset(source, np.argsort(source.targets, kind="stable"))
        splits.append(source)
    return ordered._replace(train=splits[0], val=splits[1])


def _loader(
    config: DataConfig,
    source: Source,
    sampler: S,
    max_tries: int = 1,
    is_train: bool = False,
    keep_workers: bool = False,
) -> "Loader[S]":
    """A loader. torch gives each of its workers one thread.

    Args:
        keep_workers: start the workers once, not for each pass. After each start training is
            slower: the workers share the pages of its memory, and it copies those that it writes.
    """
    dataset = ImageDataset(source, config, is_train, max_tries)
    num_workers = 0
    if DATASETS[config.dataset].use_workers:
        num_workers = config.num_workers
    keep_workers = keep_workers and num_workers > 0
    if keep_workers:
        dataset.epoch_number.share_memory_()
    return Loader(
        dataset,
        batch_size=config.batch_size,
        sampler=sampler,
        num_workers=num_workers,
        persistent_workers=keep_workers,
        collate_fn=collate,
        pin_memory=config.device != "cpu" and torch.cuda.is_available(),
        # Without a generator, each epoch would draw from torch's global generator.
        generator=torch.Generator().manual_seed(config.seed),
    )


class Loader(DataLoader, Generic[S]):
    """A loader whose workers ignore the signals that make a run save.

    Schedulers send signals to every process of a job, and Ctrl-C sends one to every process in the
    foreground. The run needs its workers until it has saved; then it ends them.
    """

    dataset: ImageDataset
    sampler: S

    def end_workers(self) -> None:
        """End the workers that are kept from pass to pass. The next pass starts new ones."""
        iterator: Any = self._iterator
        if iterator is not None:
            iterator.__del__()
            self._iterator = None

    def __iter__(self) -> Any:
        if self.num_workers == 0:
            return super().__iter__()
        # Started here, because starting it unblocks the signals. Under spawn and forkserver, the
        # first worker would start it.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(
            signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        )
        try:
            iterator = super().__iter__()  # starts the workers, which inherit the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        iterators.add(iterator)
        # Functions registered last run first, so this runs before torch's own.
        atexit.unregister(end_workers)
        atexit.register(end_workers)
        return iterator


iterators: weakref.WeakSet = weakref.WeakSet()  # iterators of `Loader`s with workers


def end_workers() -> None:
    """End the workers of the iterators that still exist when Python exits.

    Python would send them SIGTERM, which they block, and then wait forever.
    """
    for iterator in list(iterators):
        iterator.__del__()
