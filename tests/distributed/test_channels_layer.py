"""The all-to-all `channels` gives a layer what `linear` gives, to the bit."""

# E experts, W ranks

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gloo_processes import patches
from moe_cases import make_layer, step_of

from moe_core import ALL_TO_ALLS
from moe_core.comm import memory
from moe_core.parallel import (
    PROFILES,
    CollectiveError,
    ExpertGroup,
    ParallelStrategy,
    Ranks,
    Tuner,
    all_to_all,
    make_expert_groups,
    valid_r,
)
from moe_core.parallel import tuner as tuner_module
from moe_core.parallel.cost_model import LayerShape, candidates, layer_time

SHAPE = {"model_dim": 8, "hidden_dim": 16}


def equals_linear(rank: int, world_size: int) -> None:
    made = make_expert_groups(world_size)
    for group in (made, ExpertGroup(dist.group.WORLD)):
        for num_experts in (2 * world_size, world_size, world_size // 2):
            layer = make_layer(
                dtype=torch.float32, group=group, num_experts=num_experts, top_k=2, **SHAPE
            )
            strategies = list(itertools.product(valid_r(num_experts, world_size)[1:], (1, 3)))
            for r, degree in strategies:
                expected = step_of(layer, 7 + rank, ParallelStrategy(r, degree))
                received = step_of(layer, 7 + rank, ParallelStrategy(r, degree, "channels"))
                assert expected.keys() == received.keys()
                for name, value in expected.items():
                    assert torch.equal(received[name], value), (num_experts, r, degree, name)
        layer = make_layer(dtype=torch.float32, group=group, num_experts=world_size, **SHAPE)
        expected = step_of(layer, 7 + rank, ParallelStrategy(0))
        received = step_of(layer, 7 + rank, ParallelStrategy(0, 1, "channels"))
        for name, value in expected.items():  # gloo sums gradients in another order
            torch.testing.assert_close(received[name], value, rtol=1e-5, atol=1e-6)
        expected = step_of(layer, 8, ParallelStrategy(exchange="static"))
        received = step_of(layer, 8, ParallelStrategy(1, 1, "channels", exchange="static"))
        assert all(torch.equal(received[name], value) for name, value in expected.items())


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_layer_gives_what_it_gives_with_linear(run_processes, world_size):
    run_processes(equals_linear, world_size, world_size)


def refusals(rank: int) -> None:
    group = make_expert_groups(2)
    rows = torch.arange(4.0)
    patches.setattr(memory, "machine_identity", lambda: f"machine {rank}")
    strategy = ParallelStrategy(1, 1, "channels", ranks_per_node=2)
    with pytest.raises(ValueError, match=r"ranks 0 to 1 of .* and in one container.*another"):
        make_layer(group=group, num_experts=2, strategy=strategy)
    strategy = ParallelStrategy(1, 1, "channels", ranks_per_node=1)
    with pytest.raises(ValueError, match=r"one machine, not for 2 with ranks_per_node \(1\)"):
        make_layer(group=group, num_experts=2, strategy=strategy)
    patches.undo()
    # gloo remains usable, and so do channels where they work
    expected = all_to_all(rows + 10 * rank, group)
    assert torch.equal(all_to_all(rows + 10 * rank, group, algorithm="channels"), expected)


def test_ranks_on_other_machines_get_one_line(run_processes):
    run_processes(refusals, 2)


def refused_between_gpus(rank: int) -> None:
    group = make_expert_groups(2, ranks_per_node=2)
    patches.setattr(Ranks, "device", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"'channels' is for ranks on CPUs; on GPUs use 'linear'$"):
        make_layer(group=group, num_experts=2, strategy=ParallelStrategy(1, 1, "channels"))
    assert not ALL_TO_ALLS["channels"].is_available(group)


def test_ranks_on_gpus_get_one_line(run_processes):
    run_processes(refused_between_gpus, 2)


def a_rank_stays_away(rank: int) -> None:
    group = make_expert_groups(3, timedelta(seconds=1))
    x = torch.ones(5, 8).double()
    layer = make_layer(
        group=group, num_experts=3, strategy=ParallelStrategy(1, 1, "channels"), **SHAPE
    )
    layer(x)
    dist.barrier()
    if rank != 2:
        with pytest.raises(CollectiveError, match=rf"rank {rank} got no signal from rank \d"):
            all_to_all(x[:3], group, algorithm="channels")
    dist.barrier()


def test_a_rank_that_does_not_come_is_named_within_the_timeout_of_the_group(run_processes):
    run_processes(a_rank_stays_away, 3)


def tuned(rank: int) -> None:
    alone = make_expert_groups(2)
    available = Tuner(alone, PROFILES["h100"]).available
    assert "channels" not in available  # torchrun does not say who is near
    group = make_expert_groups(2, ranks_per_node=2)
    tuner = tuner_module.tuners[group] = Tuner(group, PROFILES["a100-hdr"], degrees=(1, 2))
    patches.setattr(
        tuner_module.Trial,
        "seconds",
        property(
            lambda trial: 1 + (trial.strategy.all_to_all != "channels") + 0.3 * trial.strategy.r
        ),
    )
    layer = make_layer(group=group, num_experts=4, strategy="auto", **SHAPE)
    for _ in range(80):
        x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
        layer(x)[0].sum().backward()
    (decision,) = tuner.decisions().values()
    assert decision.all_to_all == "channels"
    elsewhere = Tuner(alone, PROFILES["h100"])
    elsewhere.load_state_dict(tuner.state_dict())
    assert elsewhere.decisions() == {}  # a decision that cannot run here is not taken over


def test_the_tuner_tries_it_where_ranks_share_memory(run_processes):
    run_processes(tuned, 2)


def test_the_cost_model_prices_two_copies():
    assert {s.all_to_all for s in candidates(8, 8, 1)} == {"linear"}
    near = candidates(8, 8, 1, all_to_alls=["linear", "channels"])
    assert {s.all_to_all for s in near} == {"linear", "channels"}
    far = candidates(8, 8, 2, all_to_alls=["linear", "channels"])
    assert {s.all_to_all for s in far} == {"linear"}
    machine = PROFILES["h100"]
    shape = LayerShape(4096, 512, 2048, 8, 2, 1024.0, counts_first=False, training=False)
    rows_bytes = 8 * 1024 * 512 * 2
    seconds = layer_time(machine, shape, 8, ParallelStrategy(1, 1, "channels")).exchange
    copies = 2 * 2 * (2 * rows_bytes / machine.memory_bandwidth + machine.kernel_overhead)
    assert seconds == pytest.approx(copies)
