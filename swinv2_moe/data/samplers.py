"""Which image each rank reads at each step, from (seed, epoch, rank) alone.

N images, W ranks, B images per rank and step, G = B * W images per step over all ranks
"""

from collections.abc import Callable, Iterator

import numpy as np
from torch.utils.data import Sampler

WINDOW = 1024  # consecutive images of a shard that are shuffled among themselves

Order = Callable[[np.random.Generator], np.ndarray]  # -> int64 [N], every image once


def shard_order(counts: np.ndarray, streams: int, rng: np.random.Generator) -> np.ndarray:
    """An order of all N images, int64 [N], that reads shards from `streams` places in turn, almost
    sequentially.

    The shards' images in a row, shards shuffled, are cut into equal segments, one a stream; inside
    a segment windows of WINDOW images are shuffled. Position p is of segment p % streams; the N %
    streams last images come at the end. So where W divides `streams`, rank r reads segments r, r +
    W, ... alone (TrainSampler).

    Args:
        counts: images of each shard; shard s holds the images from counts[:s].sum() on.
    """
    starts = np.cumsum(counts) - counts
    sequence = np.concatenate(
        [np.arange(starts[s], starts[s] + counts[s]) for s in rng.permutation(len(counts))]
    )
    streams = min(streams, len(sequence))
    length = len(sequence) // streams
    segments = sequence[: streams * length].reshape(streams, length)
    for segment in segments:
        whole = length // WINDOW * WINDOW
        windows = segment[:whole].reshape(-1, WINDOW)
        rng.permuted(windows, axis=1, out=windows)
        rng.shuffle(segment[whole:])
    return np.concatenate([segments.T.ravel(), sequence[streams * length :]])


class TrainSampler(Sampler[int]):
    """A fresh order of all N images each epoch; step s over all ranks is its positions [s * G, (s +
    1) * G).

    Rank r takes positions r, r + W, r + 2 W, ... and the tail that does not fill a step is dropped,
    so every rank runs the same number of full batches, and the stream of images is that of one
    process with batches of G.

    Args:
        order: what an epoch's generator makes of the images; default: a permutation of all of them.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        order: Order | None = None,
    ):
        assert 0 <= rank < world_size, (rank, world_size)
        self.size, self.rank, self.world_size = size, rank, world_size
        self.batch_size, self.seed = batch_size, seed
        self.order = order or (lambda rng: rng.permutation(size))
        self.num_steps = size // (batch_size * world_size)
        self.epoch = 0
        self.skip_steps = 0  # already done in this epoch, before a resume

    def __len__(self) -> int:
        return self.num_steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        order = self.order(np.random.default_rng([self.seed, self.epoch]))  # [N]
        whole_steps = order[: len(self) * self.world_size]
        mine = whole_steps[self.rank :: self.world_size]  # [num_steps * B]
        yield from mine[self.skip_steps * self.batch_size :].tolist()


class ValSampler(Sampler[int]):
    """Every image exactly once over all ranks; rank r takes r, r + W, r + 2 W, ...

    All ranks yield the same number of indices, ceil(N / W), since a forward pass with experts
    spread over ranks is collective: those short of one repeat an earlier image i, written ~i
    (negative), which a dataset gives the target IGNORE. A repeat rather than a blank: identical
    blank tokens would fill one expert and push real ones out.
    """

    def __init__(self, size: int, rank: int, world_size: int):
        assert 0 <= rank < world_size, (rank, world_size)
        self.size, self.rank, self.world_size = size, rank, world_size

    def __len__(self) -> int:
        return -(-self.size // self.world_size)

    def __iter__(self) -> Iterator[int]:
        for position in range(self.rank, len(self) * self.world_size, self.world_size):
            yield position if position < self.size else ~(position % self.size)
