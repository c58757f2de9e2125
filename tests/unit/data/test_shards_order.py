"""The order in which shards are read, as properties: over ranks, workers, shard sizes, streams and
resumes."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swinv2_moe.data import samplers
from swinv2_moe.data.samplers import TrainSampler, shard_order

counts = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum)
streams = st.sampled_from([1, 2, 3, 4, 6, 8, 64])
worlds = st.sampled_from([1, 2, 3, 4, 8])
windows = st.sampled_from([1, 5, 1024])


@pytest.fixture(autouse=True)
def restore_window(monkeypatch):
    monkeypatch.setattr(samplers, "WINDOW", samplers.WINDOW)  # the tests set it; this takes it back


def read(counts, streams, batch, rank, world, skip=0, epoch=0, seed=0) -> list[int]:
    """What a rank reads in an epoch."""
    order = partial(shard_order, np.array(counts), streams)
    sampler = TrainSampler(sum(counts), batch, rank, world, seed, order)
    sampler.epoch, sampler.skip_steps = epoch, skip
    return list(sampler)


def workers_batches(indices, batch, workers):
    """What each worker of a loader reads: batches are dealt to workers in turn."""
    batches = [indices[i : i + batch] for i in range(0, len(indices), batch)]
    return [[i for own in batches[worker::workers] for i in own] for worker in range(workers)]


@settings(max_examples=60, deadline=None)
@given(counts, streams, worlds, st.integers(1, 6), st.integers(1, 3), windows, st.data())
def test_every_image_once_an_epoch_and_equal_steps_also_after_a_resume(
    counts, streams, world, batch, workers, window, data
):
    samplers.WINDOW = window
    size, step = sum(counts), batch * world
    skip = data.draw(st.integers(0, size // step), "steps before the resume")
    divisors = [ranks for ranks in (1, 2, 3, 4, 8) if step % ranks == 0]
    later = data.draw(st.sampled_from(divisors), "ranks after the resume")
    before = [read(counts, streams, batch, rank, world) for rank in range(world)]
    assert {len(indices) for indices in before} == {size // step * batch}
    dealt = [workers_batches(indices, batch, workers) for indices in before]
    seen = [i for rank in dealt for own in rank for i in own]
    assert len(seen) == len(set(seen)) > size - step
    assert set(seen) <= set(range(size))
    done = [i for indices in before for i in indices[: skip * batch]]
    rest = [read(counts, streams, step // later, rank, later, skip) for rank in range(later)]
    assert {len(indices) for indices in rest} == {(size // step - skip) * step // later}
    assert sorted(done + [i for indices in rest for i in indices]) == sorted(seen)


@settings(max_examples=60, deadline=None)
@given(counts, st.sampled_from([4, 8, 16]), st.sampled_from([1, 2, 4]), windows, st.integers(0, 5))
def test_ranks_that_divide_the_streams_share_shards_at_segment_borders_alone(
    counts, streams, world, window, epoch
):
    samplers.WINDOW = window
    size = sum(counts)
    if size < streams:
        return
    shard_of = np.repeat(np.arange(len(counts)), counts)
    whole = size // streams * streams  # what follows is of no segment
    order = shard_order(np.array(counts), streams, np.random.default_rng([0, epoch]))[:whole]
    read_by = [set(shard_of[order[rank::world]]) for rank in range(world)]
    shared = sum(len(shards) for shards in read_by) - len(set.union(*read_by))
    # there are so many borders between segments, and each divides one shard at most
    assert shared <= streams - 1
    segment = [set(shard_of[order[s::streams]].tolist()) for s in range(streams)]
    for rank in range(world):
        assert read_by[rank] == set.union(*segment[rank::world])


def test_within_a_segment_no_image_moves_further_than_a_window():
    order = shard_order(np.full(40, 1000), 8, np.random.default_rng(3))
    for stream in range(8):
        mine = order[stream::8]  # [5000]
        shards = mine // 1000
        middle = [np.median(np.flatnonzero(shards == s)) if s in shards else -1 for s in range(40)]
        in_a_row = np.lexsort((mine, np.array(middle)[shards]))  # the positions, shard by shard
        moved = np.abs(in_a_row - np.arange(len(mine)))
        assert moved.max() < samplers.WINDOW
        assert moved.mean() > samplers.WINDOW / 10


def test_epochs_and_seeds_differ_and_the_order_is_mixed():
    counts = [50] * 20
    pairs = [(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    orders = [read(counts, 4, 10, 0, 1, epoch=epoch, seed=seed) for seed, epoch in pairs]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] != sorted(orders[0])
    ascending = np.mean(np.diff(np.array(orders[0])[::4]) == 1)  # inside a segment
    assert ascending < 0.2
    again = read(counts, 4, 10, 0, 1, epoch=1, seed=1)
    assert again == orders[3]
