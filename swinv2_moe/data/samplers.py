"""The images that each rank reads at each step. They depend only on (seed, epoch, rank).

N images, W ranks, B images per rank and step, G = B * W images per step over all ranks
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

WINDOW = 1024  # number of consecutive images that are shuffled among themselves

Order = Callable[[np.random.Generator], np.ndarray]  # -> int64 [N], every image once


def shard_order(counts: np.ndarray, streams: int, rng: np.random.Generator) -> np.ndarray:
    """A random order of all N images that reads shards almost sequentially, from `streams` places
    in turn.

    1. Shards are shuffled and their images put in a row.
    2. The row is cut into `streams` segments of equal length.
    3. In each segment, windows of WINDOW images are shuffled.
    4. Position p of the result is from segment p % streams. The last N % streams images of the row
       come at the end.

    If W divides `streams`, rank r reads only the segments r, r + W, ... (TrainSampler).

    Args:
        counts: images of each shard; shard s holds the images from counts[:s].sum() on.

    Returns:
        int64 [N].
    """
    stops = np.cumsum(counts)
    starts = stops - counts
    shards = rng.permutation(len(counts))
    row = np.concatenate([np.arange(starts[shard], stops[shard]) for shard in shards])
    streams = min(streams, len(row))
    length = len(row) // streams
    segments = row[: streams * length].reshape(streams, length)
    rest = row[streams * length :]
    in_windows = length // WINDOW * WINDOW
    for segment in segments:
        windows = segment[:in_windows].reshape(-1, WINDOW)
        rng.permuted(windows, axis=1, out=windows)
        rng.shuffle(segment[in_windows:])
    return np.concatenate([segments.T.ravel(), rest])


class TrainSampler(Sampler[int]):
    """A new order of all N images each epoch.

    Step s of all ranks reads the positions [s * G, (s + 1) * G) of the order. Rank r takes the
    positions r, r + W, r + 2 W, ... Images at the end that do not fill a step are dropped, so every
    rank has the same number of full batches. A single process with batches of G would read the same
    images at each step.

    Args:
        order: function that makes the order of an epoch from its random generator; default: a
            permutation.
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
        self.skip_steps = 0  # steps of this epoch that were done before a resume

    def __len__(self) -> int:
        return self.num_steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        order = self.order(np.random.default_rng([self.seed, self.epoch]))  # [N]
        full_steps = order[: len(self) * self.world_size]
        of_rank = full_steps[self.rank :: self.world_size]  # [num_steps * B]
        return iter(of_rank[self.skip_steps * self.batch_size :].tolist())


class ListSampler(Sampler[int]):
    """Reads the images of a list, in its order."""

    def __init__(self, indices: Sequence[int]):
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class ValSampler(Sampler[int]):
    """Reads every image exactly once over all ranks. Rank r takes the positions r, r + W, r + 2 W,
    ...

    Position p is image p, or with `shuffle` image `order[p]` of a permutation that depends only on
    the number of images.

    All ranks yield ceil(N / W) indices, since a forward pass with experts distributed over ranks is
    collective. A rank without a last image repeats an earlier image i as the negative index ~i, for
    which the dataset returns the target IGNORE. A blank image is not used for padding: its
    identical tokens would fill one expert and displace other tokens.
    """

    def __init__(self, size: int, rank: int, world_size: int, shuffle: bool = False):
        assert 0 <= rank < world_size, (rank, world_size)
        self.size, self.rank, self.world_size = size, rank, world_size
        self.order = np.arange(size)
        if shuffle:
            self.order = np.random.default_rng(0).permutation(size)

    def __len__(self) -> int:
        return -(-self.size // self.world_size)

    def __iter__(self) -> Iterator[int]:
        for position in range(self.rank, len(self) * self.world_size, self.world_size):
            if position < self.size:
                yield int(self.order[position])
            else:
                yield ~int(self.order[position % self.size])
