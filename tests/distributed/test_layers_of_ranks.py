"""Ranks of an expert group that call different layers, or run other passes, are told so."""

import copy
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from moe_cases import make_layer
from torch.utils.checkpoint import checkpoint

from moe_core import MoELayer, equal_tokens, finish_gradients, ignore_experts, prepared
from moe_core.parallel import ParallelStrategy, make_expert_groups

STRATEGIES = [
    ParallelStrategy(),
    ParallelStrategy(1, 2, "2dh", 1),
    ParallelStrategy(1, 2, exchange="static"),
    ParallelStrategy(0),
    ParallelStrategy(1, 1, "channels", 2),
    "auto",
]
ROUTINGS = [
    {"capacity_factor": 1.25},
    {"capacity_factor": 1.0, "router": "expert_choice"},
    {"capacity_factor": 1.0, "router": "soft", "slots_per_expert": 2},
]
DIFFERENT = r"called different MoE layers \(rank 0: {}; rank 1: {}\): all ranks .* one seed"


def tokens() -> torch.Tensor:
    """The same on all ranks: also the numbers of rows are then equal."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(6, 6, dtype=torch.float64, generator=generator)


def layers_of(group, number: int = 2, twins: bool = False, **config) -> list[MoELayer]:
    """`twins`: all have the same weights."""
    seeds = [0] * number if twins else range(number)
    return [make_layer(seed, group=group, **config) for seed in seeds]


def different_layers(rank: int) -> None:
    group = make_expert_groups(2)
    places = DIFFERENT.format("MoELayer [0-9]+ in order .*", "MoELayer [0-9]+ in order .*")
    for strategy in STRATEGIES:
        for config in ROUTINGS if strategy == ParallelStrategy() else ROUTINGS[:1]:
            for training in (True, False):
                check_different(rank, group, places, training, strategy=strategy, **config)
    # parts of experts, and a process group in place of an ExpertGroup
    check_different(rank, group, places, True, strategy=ParallelStrategy(2), num_experts=1)
    check_different(rank, dist.group.WORLD, places, False)
    check_different(rank, group, places, False, strategy=ParallelStrategy(0), bias=False)
    check_different(rank, group, places, True, twins=True)


def check_different(rank: int, group, match: str, training: bool, **config) -> None:
    """In the first pass and in later ones. After the error all ranks may go on."""
    for warm in (0, 3):
        layers = [layer.train(training) for layer in layers_of(group, **config)]
        for layer in warm * layers:
            expected, _ = layer(tokens())
        with pytest.raises(ValueError, match=match):
            layers[rank](tokens())
        if warm:
            y, _ = layers[1](tokens())
            torch.testing.assert_close(y, expected)


def test_different_layers(run_processes):
    run_processes(different_layers, 2)


def named_layers(rank: int) -> None:
    """The names are those in the model; a copy, such as an averaged model, is another layer."""
    model = ignore_experts(torch.nn.ModuleList(layers_of(make_expert_groups(2))))
    with pytest.raises(ValueError, match=DIFFERENT.format("0", "1")):
        model[rank](tokens())
    average = copy.deepcopy(model)
    model[0](tokens())
    average[0](tokens())
    with pytest.raises(ValueError, match="called different MoE layers"):
        (model, average)[rank][0](tokens())


def test_named_layers(run_processes):
    run_processes(named_layers, 2)


def right_programs(rank: int) -> None:
    """Layers that ranks create in different orders, that one rank alone creates, that share their
    experts, that are called twice, and passes that are computed again."""
    group = make_expert_groups(2)
    first, second = (1, 0) if rank else (0, 1)
    layers = {}
    for seed in (first, second):
        layers[seed] = make_layer(seed, group=group)
    if rank == 0:
        make_layer(group=group)
    third = copy.deepcopy(layers[0])
    shared = MoELayer(third.config, group, experts=layers[1].experts).double()
    averages = [copy.deepcopy(layers[i]) for i in (first, second)]
    for _ in range(3):
        x = tokens().requires_grad_()
        y = layers[1](checkpoint(lambda x: layers[0](x)[0], x, use_reentrant=False))[0]
        y = y + layers[0](third(y)[0])[0]
        y.sum().backward()
        for seed in (1, 0):
            averages[(first, second).index(seed)](tokens())
    with torch.no_grad():
        (shared if rank else layers[1]).eval()(tokens())
    finish_gradients(torch.nn.ModuleList([*layers.values(), third]))


def test_right_programs(run_processes):
    run_processes(right_programs, 2)


def weights_that_are_gathered_once(rank: int) -> None:
    """Ranks with gathered weights may run different numbers of batches."""
    (layer,) = layers_of(make_expert_groups(2), 1, strategy=ParallelStrategy(0))
    with prepared(layer.eval()), torch.no_grad():
        for _ in range(2 + rank):
            layer(tokens())
    layer(tokens())


def test_weights_that_are_gathered_once(run_processes):
    run_processes(weights_that_are_gathered_once, 2)


def different_backward_passes(rank: int) -> None:
    """They are found before the update, or in the next pass."""
    model = torch.nn.ModuleList(layers_of(make_expert_groups(2), aux_loss="none"))
    static = ParallelStrategy(exchange="static")
    for finish in (True, False):
        with equal_tokens(model):  # all numbers of rows are equal, so no exchange fails
            outputs = [layer(tokens(), strategy=static, capacity_factor=2.0)[0] for layer in model]
            outputs[rank].sum().backward()
        with pytest.raises(ValueError, match="the ranks ran different passes of MoE layers"):
            finish_gradients(model) if finish else model[0](tokens())


def test_different_backward_passes(run_processes):
    run_processes(different_backward_passes, 2)


def without_messages(rank: int) -> None:
    """A static exchange within `equal_tokens` has no message: the next one tells."""
    model = torch.nn.ModuleList(layers_of(make_expert_groups(2))).eval()
    static = ParallelStrategy(exchange="static")
    with equal_tokens(model):
        for layer in (*model, model[rank]):
            layer(tokens(), strategy=static, capacity_factor=2.0)
        with pytest.raises(ValueError, match="ran different passes of MoE layers before this call"):
            model[0](tokens())


def test_without_messages(run_processes):
    run_processes(without_messages, 2)


def process_groups_end(rank: int) -> None:
    process_group = dist.new_group([0, 1])
    make_layer(group=process_group)(tokens())
    reference = weakref.ref(process_group)
    dist.destroy_process_group(process_group)
    del process_group
    while reference() is not None:  # a thread of gloo may hold its last work for a moment
        gc.collect()
        time.sleep(0.01)


def test_process_groups_end_with_their_last_reference(run_processes):
    run_processes(process_groups_end, 2)
