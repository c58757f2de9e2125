"""The data of a run, checked on every rank.

`train --check-files`: every image is read before the first step, and copies are listed.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain

import numpy as np

from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.data import Sources
from swinv2_moe.data.build import Data, build_data, evaluation_loader, in_recorded_order
from swinv2_moe.data.copies import contradictions, digest, first_equal
from swinv2_moe.data.datasets import UnreadableImages
from swinv2_moe.data.images import is_of_the_machine, read_header
from swinv2_moe.data.prepare.staging import Staging, read_staging
from swinv2_moe.data.section import DataConfig
from swinv2_moe.data.sources import Source, load_sources
from swinv2_moe.ranks.agreement import check_same_data
from swinv2_moe.ranks.world import World
from swinv2_moe.tables import Bar, Console


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
        stack: an exit stack, which ends the data's workers.
        check_images: whether to read every image now.
        with_classes: changes the classes of the images; None: they stay.

    Raises:
        UserError: on every rank, if the data cannot be used on any rank; also what
            `check_same_data` and `check_files` raise.
    """
    staging = world.on_every_rank(lambda: read_staging(config.path))

    def load() -> Data:
        sources = load_sources(config)
        if with_classes is not None:
            sources = with_classes(sources)
        if start is not None:
            sources = in_recorded_order(sources, start.meta["class_names"])
        return build_data(config, world.rank, world.size, sources)

    data = world.on_every_rank(load)
    stack.callback(data.close)
    train_images = data.train_loader.dataset.source
    val_images = data.val_loader.dataset.source
    check_same_data(config.path, world, train_images, val_images, data.class_names)
    if check_images:
        check_files(config, data, world)
    return data, staging


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
