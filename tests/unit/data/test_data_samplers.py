"""The order of images over ranks, epochs and resumes, as properties."""

from hypothesis import given
from hypothesis import strategies as st

from swinv2_moe.data.samplers import TrainSampler, ValSampler

worlds = st.sampled_from([1, 2, 4])
sizes = st.integers(1, 300)
batches = st.integers(1, 20)
seeds = st.integers(0, 2**40)


def train_order(size, batch, rank, world, seed, epoch, skip=0):
    sampler = TrainSampler(size, batch, rank, world, seed)
    sampler.epoch, sampler.skip_steps = epoch, skip
    return list(sampler)


@given(sizes, batches, worlds, seeds, st.integers(0, 1000))
def test_train_steps_over_all_ranks_are_those_of_one_process(size, batch, world, seed, epoch):
    step_size = batch * world
    one = train_order(size, step_size, 0, 1, seed, epoch)
    ranks = [train_order(size, batch, rank, world, seed, epoch) for rank in range(world)]
    assert {len(order) for order in ranks} == {size // step_size * batch}
    for step in range(size // step_size):
        together = sorted(i for order in ranks for i in order[step * batch : (step + 1) * batch])
        assert together == sorted(one[step * step_size : (step + 1) * step_size])


@given(sizes, batches, worlds, seeds)
def test_train_reads_no_image_twice_and_drops_less_than_a_step(size, batch, world, seed):
    ranks = [train_order(size, batch, rank, world, seed, epoch=0) for rank in range(world)]
    read = [i for order in ranks for i in order]
    assert len(read) == len(set(read))
    assert set(read) <= set(range(size))
    assert size - len(read) < batch * world


@given(sizes, batches, worlds, st.integers(0, 5))
def test_a_resume_in_mid_epoch_continues_the_same_order(size, batch, world, skip):
    whole = train_order(size, batch, world - 1, world, 3, 7)
    assert train_order(size, batch, world - 1, world, 3, 7, skip) == whole[skip * batch :]


def test_epochs_and_seeds_shuffle_differently_and_leave_out_different_images():
    orders = [train_order(1001, 100, 0, 1, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert len({frozenset(order) for order in orders}) > 1
    assert orders[0] != sorted(orders[0])


@given(sizes, worlds)
def test_val_reads_every_image_once_and_pads_ranks_to_equal_length(size, world):
    ranks = [list(ValSampler(size, rank, world)) for rank in range(world)]
    assert {len(order) for order in ranks} == {-(-size // world)}
    real = [[i for i in order if i >= 0] for order in ranks]
    assert sorted(i for order in real for i in order) == list(range(size))
    assert all(order == sorted(order) for order in real)
    padding = [~i for order in ranks for i in order if i < 0]
    assert len(padding) < world
    assert all(0 <= i < size for i in padding)


@given(sizes, worlds)
def test_a_shuffled_val_reads_the_same_images_in_one_order(size, world):
    samplers = [ValSampler(size, rank, world, shuffle=True) for rank in range(world)]
    ranks = [list(sampler) for sampler in samplers]
    by_position = [i for row in zip(*ranks, strict=True) for i in row]
    order = samplers[0].order.tolist()
    assert by_position[:size] == order == ValSampler(size, 0, 1, shuffle=True).order.tolist()
    assert sorted(order) == list(range(size))
    assert all(i < 0 for i in by_position[size:])
    assert size < 10 or order != sorted(order)


def test_lengths_match_what_is_yielded():
    for sampler in (TrainSampler(103, 4, 1, 2, 0), ValSampler(103, 1, 2)):
        assert len(sampler) == len(list(sampler))
