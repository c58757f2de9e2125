"""`build_data(config, rank, world_size)` makes the loaders of a run."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.data import DataLoader, Sampler

from swinv2_moe.config import DataConfig
from swinv2_moe.data.datasets import Batch, ImageDataset, collate
from swinv2_moe.data.samplers import Order, TrainSampler, ValSampler, shard_order
from swinv2_moe.data.shards import ShardedImages
from swinv2_moe.data.sources import Source, load_sources
from swinv2_moe.dataset_registry import datasets
from swinv2_moe.errors import UserError


@dataclass(frozen=True)
class Data:
    """Loaders of `Batch`es for this rank, and what a model and a report need to know of the data.

    `len(train_loader)` and `len(val_loader)` are the same on every rank.
    """

    train_loader: DataLoader
    val_loader: DataLoader
    num_classes: int
    class_names: list[str]
    train_size: int  # images over all ranks
    val_size: int

    def set_epoch(self, epoch: int, skip_steps: int = 0) -> None:
        """Choose the order and the augmentation of `epoch` (from 0); call it before each
        `iter(train_loader)`.

        `skip_steps` leaves out the first batches, unread, to resume in the middle of an epoch;
        `len(train_loader)` still counts them.
        """
        self.train_loader.dataset.epoch = epoch
        self.train_loader.sampler.epoch = epoch
        self.train_loader.sampler.skip_steps = skip_steps


def build_data(config: DataConfig, rank: int = 0, world_size: int = 1) -> Data:
    """Check the data that `config` names and build this rank's loaders.

    Raises:
        UserError: data that is missing, malformed, contradicts MODEL.NUM_CLASSES or is too small
            for one step.
    """
    sources = load_sources(config)
    num_classes = _check_num_classes(config, len(sources.class_names))
    size, batch = len(sources.train), config.batch_size
    if size < batch * world_size:
        raise UserError(
            f"DATA.BATCH_SIZE is {batch}: a step over {world_size}"
            f" {'rank' if world_size == 1 else 'ranks'} takes"
            f" {batch * world_size} images, the training set has {size}"
        )
    # One more than may be bad in all: where so many in a row are, UnreadableImages stops the run.
    max_tries = int(config.max_bad_share * (size + len(sources.val))) + 1
    train_set = ImageDataset(sources.train, config, is_train=True, max_tries=max_tries)
    order = _shard_order(config, sources.train)
    return Data(
        _loader(config, train_set, TrainSampler(size, batch, rank, world_size, config.seed, order)),
        evaluation_loader(config, sources.val, rank, world_size),
        num_classes,
        sources.class_names,
        train_size=size,
        val_size=len(sources.val),
    )


def evaluation_loader(
    config: DataConfig, source: Source, rank: int = 0, world_size: int = 1
) -> DataLoader:
    """Every image of a source once over all ranks, through the evaluation transform, in `Batch`es;
    as many of them on each rank."""
    dataset = ImageDataset(source, config, is_train=False)
    return _loader(config, dataset, ValSampler(len(dataset), rank, world_size))


def _check_num_classes(config: DataConfig, found: int) -> int:
    wanted = config.num_classes
    if wanted not in (0, found):
        raise UserError(
            f"MODEL.NUM_CLASSES is {wanted}, the data has {found} classes (0 takes what the data"
            " has)"
        )
    return found


def _shard_order(config: DataConfig, source: Source) -> Order | None:
    """For shards an order that reads them almost sequentially; a rank's workers share its part of
    it, batch by batch, so that what one reads ahead serves the others from the machine's page
    cache."""
    if isinstance(source, ShardedImages):
        return partial(shard_order, source.counts, config.shard_streams)
    return None


def _loader(config: DataConfig, dataset: ImageDataset, sampler: Sampler[int]) -> DataLoader:
    """Workers are started for each epoch, so that they get the dataset with its epoch; torch gives
    each one thread."""
    num_workers = 0
    if datasets()[config.dataset].use_workers:
        num_workers = config.num_workers
    return Loader(
        dataset,
        batch_size=config.batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=config.pin_memory and config.device != "cpu" and torch.cuda.is_available(),
        # or each epoch would draw from the global one
        generator=torch.Generator().manual_seed(config.seed),
    )


class Loader(DataLoader):
    """Its workers hear no signal that makes a run save.

    Schedulers signal every process of a job, and Ctrl-C every process in the foreground; the run
    needs its workers until it has saved, and then ends them.
    """

    def __iter__(self) -> Iterator[Batch]:
        mask = signal.pthread_sigmask(
            signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        )
        try:
            return super().__iter__()  # from their first moment on: processes inherit the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
