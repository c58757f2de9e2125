"""How the data of a run arrive.

DATA.STAGE: shards are copied to the disk of each node while the first epoch reads them. One process
of each node copies, in a thread. With several nodes, one node reads a shard from DATA.PATH and
sends it to the others. The order of the images does not change: reading an image waits until its
shard has arrived. The shards are copied in the order of their first use.

`train --check-files`: every image is read before the first step, and copies are listed.
"""

import contextlib
import io
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from moe_core.parallel import Ranks
from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.data import Sources
from swinv2_moe.data.build import Data, build_data, evaluation_loader, in_recorded_order
from swinv2_moe.data.copies import contradictions, digest, first_equal
from swinv2_moe.data.datasets import UnreadableImages
from swinv2_moe.data.images import is_of_the_machine, read_header
from swinv2_moe.data.prepare.shard_exchange import ShardExchange
from swinv2_moe.data.prepare.staging import Stager, StagingStopped
from swinv2_moe.data.section import DataConfig
from swinv2_moe.data.shards import FAILED, ShardedImages, ShardFile, load_shards
from swinv2_moe.data.sources import Source, load_sources
from swinv2_moe.errors import UserError, one_line, short
from swinv2_moe.files import new_file, read_json
from swinv2_moe.ranks.agreement import check_same_data
from swinv2_moe.ranks.world import World
from swinv2_moe.tables import Bar, Console

# A slow source is no error. If another node has ended, the collectives of training report it.
_TIMEOUT = timedelta(days=1)
_LAST_SECONDS = 60  # to finish the current chunks when training ends
_MAX_STAGING_BYTES = 4096  # of staging.json


class Staging(NamedTuple):
    """The content of staging.json: when the data were copied to this disk, and how."""

    started: float  # seconds since 1970
    seconds: float
    bytes: int
    overlapped: bool = False  # training read the data meanwhile

    @property
    def rate(self) -> float | None:
        """Bytes/s; None if the duration was measured as zero."""
        if self.seconds:
            return self.bytes / self.seconds
        return None


def read_staging(data_path: str) -> Staging | None:
    """The record of staging in the data's directory; None if there is none.

    Raises:
        UserError: the record cannot be read.
    """
    if not data_path:
        return None
    path = Path(data_path).expanduser() / "staging.json"
    try:
        content = read_json(path, _MAX_STAGING_BYTES)
        overlapped = content.get("overlapped", False) is True
        staging = Staging(
            float(content["started"]), float(content["seconds"]), int(content["bytes"]), overlapped
        )
        if not all(math.isfinite(number) and number >= 0 for number in staging):
            raise ValueError(short(content))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path} is not what `swinv2-moe stage` writes ({type(error).__name__}: {error})"
        ) from error
    return staging


def load_data(
    config: DataConfig,
    world: World,
    start: Checkpoint | None,
    stack: ExitStack,
    check_images: bool = False,
    with_classes: Callable[[Sources], Sources] | None = None,
) -> tuple[Data, Staging | None]:
    """The data, and the record of an earlier staging.

    Args:
        start: the checkpoint that the run continues from.
        stack: an exit stack, which ends the data's workers and the staging that DATA.STAGE asks
            for.
        check_images: whether to read every image now.
        with_classes: changes the classes of the images; None: they stay.

    Raises:
        UserError: on every rank, if the data cannot be used on any rank; also what
            `check_same_data` and `check_files` raise.
    """
    staging = world.on_every_rank(lambda: read_staging(config.path))
    background = stack.enter_context(background_staging(config.path, config.stage, world))

    def load() -> Data:
        sources = background.sources() if background is not None else load_sources(config)
        if with_classes is not None:
            sources = with_classes(sources)
        if start is not None:
            sources = in_recorded_order(sources, start.meta["class_names"])
        return build_data(config, world.rank, world.size, sources)

    data = world.on_every_rank(load)
    stack.callback(data.close)
    if background is not None:
        epoch = 0
        if start is not None and start.meta["training"] is not None:
            epoch = start.meta["training"]["epoch"]
        background.start(data, epoch)
    train_images = data.train_loader.dataset.source
    val_images = data.val_loader.dataset.source
    check_same_data(config.path, world, train_images, val_images, data.class_names)
    if check_images:
        check_files(config, data, world)
    return data, staging


class BackgroundStaging:
    """The staging of one run, on every rank.

    Args:
        directory: where the shards are copied to.
        stager: the stager, on the process of each node that copies; None on the others.
    """

    def __init__(self, directory: str, stager: Stager | None) -> None:
        self.directory = directory
        self._stager = stager
        self._thread: threading.Thread | None = None

    def sources(self) -> Sources:
        """The images. Some of their shards may not have arrived yet.

        Raises:
            UserError: see `load_shards`.
        """
        shards = load_shards(self.directory, arriving=True)
        return Sources(*shards)

    def start(self, data: Data, epoch: int) -> None:
        """Start copying the shards in the order in which `epoch` (from 0) reads them."""
        if self._stager is None:
            return
        order = data.order_of_epoch(epoch)
        source = data.train_loader.dataset.source
        assert isinstance(source, ShardedImages)
        files = in_order_of_use(self._stager.files, source.members["shard"][order])
        arguments = (self._stager, files, os.path.join(self.directory, FAILED))
        # A daemon: when training fails, the thread may wait for a node that has ended.
        self._thread = threading.Thread(target=_copy, args=arguments, name="staging", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop copying, even if it is not finished."""
        if self._stager is not None and self._thread is not None:
            self._stager.stopped.set()
            self._thread.join(_LAST_SECONDS)


@contextmanager
def background_staging(path: str, stage: str, world: World) -> Iterator[BackgroundStaging | None]:
    """Start the staging from DATA.PATH to DATA.STAGE; yield None if that is empty. Collective.

    The files that describe the shards are copied first.

    Raises:
        UserError: on all ranks, see `swinv2_moe.data.prepare.staging.stage`.
    """
    if not stage:
        yield None
        return
    source, target = os.path.expanduser(path), os.path.expanduser(stage)
    stager = _stager_of_node(source, target, world)
    with contextlib.ExitStack() as stack:
        problem = None
        try:
            if stager is not None:
                stack.enter_context(stager)
                stager.copy([file for file in stager.files if not file.name.endswith(".tar")])
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(stager.target, FAILED))
        except UserError as error:
            problem = str(error)
        for message in world.gather(problem):
            if message is not None:
                raise UserError(message)
        staging = BackgroundStaging(target, stager)
        stack.callback(staging.stop)
        yield staging


def _stager_of_node(source: str, target: str, world: World) -> Stager | None:
    """The stager of this node on its first rank; None on the others."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_ranks = world.gather(local_rank)
    first_ranks = [rank for rank, local in enumerate(local_ranks) if local == 0]
    exchange = None
    if len(first_ranks) > 1:
        group = dist.new_group(first_ranks, _TIMEOUT, "gloo")
        if local_rank == 0:
            node = first_ranks.index(world.rank)
            exchange = ShardExchange(Ranks(group, f"node {node} of {len(first_ranks)}"))
    if local_rank > 0:
        return None
    return Stager(source, target, trust=True, exchange=exchange)


def in_order_of_use(files: Sequence[ShardFile], shards: np.ndarray) -> list[ShardFile]:
    """The shards of `train` in the order of their first use, and then all other files.

    Args:
        files: the files of all splits; the shards of `train` in the order of their numbers.
        shards: the number of the shard of each image, in the order of reading [N].
    """
    train = [file for file in files if _is_train_shard(file)]
    numbers, first_uses = np.unique(shards, return_index=True)
    used = [train[number] for number in numbers[np.argsort(first_uses)]]
    rest = [file for file in files if file not in set(used)]
    return used + rest


def _is_train_shard(file: ShardFile) -> bool:
    return file.name.startswith("train/") and file.name.endswith(".tar")


def _copy(stager: Stager, files: list[ShardFile], failed: str) -> None:
    """Copy the files. On failure, write the reason to the file that the readers check."""
    try:
        stager.copy(files)
        stager.finish(overlapped=True)
    except StagingStopped:
        pass
    # After any error the readers must not wait forever.
    except Exception as error:
        with contextlib.suppress(UserError), new_file(failed) as file:
            file.write(one_line(str(error)).encode())


def check_files(config: DataConfig, data: Data, world: World) -> None:
    """Print one line for each image that cannot be read, and for each copy of another image that is
    in both splits or has another label; and the number of images of which a part is not used.
    Collective.

    The ranks share the work. It takes as long as reading the images of an epoch, twice.

    Raises:
        UserError: more than DATA.MAX_BAD_SHARE of the images cannot be read.
    """
    console = Console(quiet=not world.is_main)
    sources = [data.train_loader.dataset.source, data.val_loader.dataset.source]
    unreadable: list[str] = []
    digests: list[np.ndarray] = []
    unused: list[tuple[str, str]] = []  # what is not used, and the name of the image
    for name, source in zip(("training", "validation"), sources, strict=True):
        loader = evaluation_loader(config, source, world.rank, world.size)
        title = f"checking {name} images"
        with Bar(console, title, len(loader), visible=world.is_main) as bar:
            for batch in loader:
                unreadable += batch.unreadable
                bar.advance("")
        rows = range(world.rank, len(source), world.size)
        title = f"comparing {name} images"
        with Bar(console, title, len(rows), visible=world.is_main) as bar:
            found = _compare(source, rows, bar, world)
        digests.append(found[0])
        unused += [(part, source.name(row)) for row, part in found[1]]
    for part in dict.fromkeys(part for part, _ in unused):
        names = [name for other, name in unused if other == part]
        console.print(f"{len(names):,} images have {part}, not used; the first: {names[0]}")
    _print_copies(console, sources, np.concatenate(digests))
    # padding repeats images
    paths = dict.fromkeys(path for paths in world.gather(unreadable) for path in paths)
    if not paths:
        return
    size = data.train_size + data.val_size
    console.print(f"warning: {len(paths):,} of {size:,} images cannot be read:")
    for path in paths:
        console.print(f"  {path}")
    UnreadableImages(size, config.max_bad_share).add(paths)


def _compare(
    source: Source, rows: range, bar: Bar, world: World
) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """Checksums of the images of a source [N], 0 for those that cannot be read, and the images of
    which a part is not used, with the part. Collective.

    Args:
        rows: the images that this rank reads.
    """
    digests = np.zeros(len(source), np.uint64)
    unused = []
    for row in rows:
        content = _content(source, row)
        digests[row] = digest(content)
        with contextlib.suppress(ValueError):
            part = read_header(io.BytesIO(content)).unused
            if part:
                unused.append((row, part))
        bar.advance("")
    for rank, part_of_rank in enumerate(world.gather(digests[rows.start :: rows.step])):
        digests[rank :: world.size] = part_of_rank
    return digests, sorted(chain.from_iterable(world.gather(unused)))


def _content(source: Source, row: int) -> bytes:
    """The content of an image; empty if it cannot be read."""
    try:
        return source.read(row)
    except Exception as error:  # a source of another program may raise any type
        if is_of_the_machine(error):
            raise
        return b""


def _print_copies(console: Console, sources: Sequence[Source], digests: np.ndarray) -> None:
    """Print the images whose label or split contradicts that of a copy, one a line.

    Args:
        sources: training and validation.
        digests: checksums of their images [N].
    """
    train, val = sources
    targets = np.concatenate([train.targets, val.targets])
    first = first_equal(digests)
    rows = contradictions(first, targets, len(train)).tolist()
    if not rows:
        return

    def name(row: int) -> str:
        if row < len(train):
            return train.name(row)
        return val.name(row - len(train))

    console.print(f"{len(rows):,} copies (equal bytes) in both splits, or with another label:")
    for row in rows:
        console.print(f"  {name(row)} = {name(int(first[row]))}")
