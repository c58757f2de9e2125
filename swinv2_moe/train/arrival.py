"""The data of a run, checked on every rank.

`train --check-files`: every image is read before the first step, and copies are listed.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain

import numpy as np

from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.data import Sources
from swinv2_moe.data.build import Data, Loader, build_data, evaluation_loader, in_recorded_order
from swinv2_moe.data.copies import contradictions, digest, first_equal
from swinv2_moe.data.datasets import UnreadableImages
from swinv2_moe.data.images import is_of_the_machine, read_header
from swinv2_moe.data.samplers import ValSampler
from swinv2_moe.data.section import DataConfig
from swinv2_moe.data.sources import Source
from swinv2_moe.ranks.agreement import check_same_data
from swinv2_moe.ranks.world import World
from swinv2_moe.tables import Bar, Console


def load_data(
    config: DataConfig,
    sources: Sources,
    world: World,
    start: Checkpoint | None,
    stack: ExitStack,
    check_images: bool = False,
) -> Data:
    """The loaders of a run.

    Args:
        sources: the pictures that `config` names.
        start: the checkpoint that the run continues from.
        stack: an exit stack, which ends the data's workers.
        check_images: whether to read every image now.

    Raises:
        UserError: on every rank, if the data cannot be used on any rank; also what
            `check_same_data` and `check_files` raise.
    """
    if start is not None:
        sources = in_recorded_order(sources, start.meta["class_names"])
    data = world.on_every_rank(lambda: build_data(config, world.rank, world.size, sources))
    stack.callback(data.close)
    check_same_data(config.path, world, sources.train, sources.val, data.class_names)
    if check_images:
        loader_of = partial(evaluation_loader, config, rank=world.rank, world_size=world.size)
        check_files(sources, loader_of, config.max_bad_share, world)
    return data


def check_files(
    sources: Sources,
    loader_of: Callable[[Source], Loader[ValSampler]],
    max_bad_share: float,
    world: World,
) -> None:
    """Print one line for each image that cannot be read, and for each copy of another image that is
    in both splits or has another label; and the number of images of which a part is not used.
    Collective.

    The ranks share the work. It takes as long as reading the images of an epoch, twice.

    Args:
        loader_of: a loader of this rank's part of a source.
        max_bad_share: DATA.MAX_BAD_SHARE.

    Raises:
        UserError: more than DATA.MAX_BAD_SHARE of the images cannot be read.
    """
    console = Console(quiet=not world.is_main)
    splits = [sources.train, sources.val]
    unreadable: list[str] = []
    digests: list[np.ndarray] = []
    unused: list[tuple[str, str]] = []  # what is not used, and the name of the image
    for name, source in zip(("training", "validation"), splits, strict=True):
        loader = loader_of(source)
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
    _print_copies(console, splits, np.concatenate(digests))
    # padding repeats images
    paths = dict.fromkeys(path for paths in world.gather(unreadable) for path in paths)
    if not paths:
        return
    size = len(sources.train) + len(sources.val)
    console.print(f"warning: {len(paths):,} of {size:,} images cannot be read:")
    for path in paths:
        console.print(f"  {path}")
    UnreadableImages(size, max_bad_share).add(paths)


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
