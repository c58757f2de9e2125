"""An all-to-all algorithm from a file outside of the package runs wherever the built-in ones do."""

# W ranks, E experts, T tokens of a rank

import copy
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_processes import patches
from moe_cases import make_layer, step_of

from moe_core import register_all_to_all
from moe_core.parallel import (
    PROFILES,
    ExpertGroup,
    Linear,
    ParallelStrategy,
    Tuner,
    all_to_all,
    make_expert_groups,
    valid_r,
)
from moe_core.parallel import tuner as tuner_module
from moe_core.parallel.cost_model import LayerShape, candidates, layer_time, ranked
from moe_core.registry import ALL_TO_ALLS
from swinv2_moe.config import load_config
from swinv2_moe.errors import UserError

SHAPE = {"model_dim": 8, "hidden_dim": 16, "capacity_factor": 0.0}

RING = '''
"""An all-to-all in W - 1 steps: in step k every rank sends to the rank k places ahead."""

import torch
import torch.distributed as dist

from moe_core import register_all_to_all
from moe_core.parallel import AllToAll, ExchangeCost, LinkTraffic


@register_all_to_all("ring")
class Ring(AllToAll):
    def send(self, rows, counts):
        rank, size = self.group.rank, self.group.size
        outgoing = rows.split(counts.send.tolist())
        received = [rows.new_empty(n, *rows.shape[1:]) for n in counts.receive.tolist()]
        received[rank] = outgoing[rank]
        for step in range(1, size):
            target, source = (rank + step) % size, (rank - step) % size
            operations = []
            if len(outgoing[target]):
                operations.append(self.message(dist.isend, outgoing[target], target))
            if len(received[source]):
                operations.append(self.message(dist.irecv, received[source], source))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        return torch.cat(received)

    def message(self, operation, rows, rank):
        return dist.P2POp(operation, rows, group=self.ranks.process_group, group_peer=rank)

    @staticmethod
    def cost(elements, group_size, ranks_per_node):
        return ExchangeCost((LinkTraffic(intra=elements / 1000, intra_messages=1),))
'''

LOSSY = '''
from moe_core import register_all_to_all
from moe_core.parallel import Linear


@register_all_to_all("lossy")
class Lossy(Linear):
    """Loses the last row."""

    def send(self, rows, counts):
        return super().send(rows, counts)[:-1]


@register_all_to_all("lossy_back")
class LossyBack(Linear):
    def send_back(self, rows, counts):
        return super().send_back(rows, counts)[:-1]


@register_all_to_all("miscounting")
class Miscounting(Linear):
    def exchange_counts(self, counts):
        received, _ = super().exchange_counts(counts)
        return received[:-1], None
'''


@pytest.fixture
def ring_file(tmp_path) -> Path:
    path = tmp_path / "ring.py"
    path.write_text(RING)
    return path


@pytest.fixture
def lossy_file(tmp_path) -> Path:
    path = tmp_path / "lossy.py"
    path.write_text(LOSSY)
    return path


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch):
    monkeypatch.setattr(ALL_TO_ALLS, "_values", dict(ALL_TO_ALLS))


def import_on_rank(path: Path) -> None:
    patches.setattr(ALL_TO_ALLS, "_values", dict(ALL_TO_ALLS))
    import_file(path)


def import_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def equals_linear(rank: int, world_size: int, path: Path) -> None:
    import_on_rank(path)
    made = make_expert_groups(world_size)
    for group in (made, ExpertGroup(dist.group.WORLD)):
        for num_experts in (2 * world_size, world_size // 2):
            layer = make_layer(group=group, num_experts=num_experts, top_k=2, **SHAPE)
            layer = copy.deepcopy(layer)
            for r, d in itertools.product(valid_r(num_experts, world_size)[1:], (1, 3)):
                expected = step_of(layer, 7 + rank, ParallelStrategy(r, d))
                found = step_of(layer, 7 + rank, ParallelStrategy(r, d, "ring"))
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        send = [1 + (rank + other) % 3 for other in range(world_size)]
        rows = torch.arange(sum(send), dtype=torch.float64) + 100 * rank
        assert torch.equal(all_to_all(rows, group, send, "ring"), all_to_all(rows, group, send))
        equal = torch.arange(2 * world_size) + 100 * rank
        assert torch.equal(all_to_all(equal, group, None, "ring"), all_to_all(equal, group))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_layer_gives_what_it_gives_with_linear(run_processes, ring_file, world_size):
    run_processes(equals_linear, world_size, world_size, ring_file)


def is_found_by_the_tuner(rank: int, path: Path) -> None:
    import_on_rank(path)
    group = make_expert_groups(2)
    tuner = tuner_module.tuners[group] = Tuner(group, PROFILES["a100-hdr"], degrees=(1, 2))
    patches.setattr(
        tuner_module.Trial,
        "seconds",
        property(lambda trial: 1 + (trial.strategy.all_to_all != "ring") + 0.3 * trial.strategy.r),
    )
    layer = make_layer(group=group, num_experts=4, strategy="auto", **SHAPE)
    for _ in range(40):
        x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
        layer(x)[0].sum().backward()
    (decision,) = tuner.decisions().values()
    assert decision.all_to_all == "ring"


def test_the_tuner_tries_it(run_processes, ring_file):
    run_processes(is_found_by_the_tuner, 2, ring_file)


def test_the_cost_model_ranks_it_by_its_cost(ring_file):
    shape = LayerShape(65536, 2048, 2048, 16, 1, rows_per_expert=4096)
    machine = PROFILES["a100-hdr"]
    assert {s.all_to_all for s in candidates(16, 16, 2)} == {"linear", "2dh"}
    import_file(ring_file)
    assert {s.all_to_all for s in candidates(16, 16, 2)} == {"linear", "2dh", "ring"}
    assert {s.all_to_all for s in candidates(16, 16, 1)} == {"linear", "ring"}
    assert ranked(machine, shape, 16, 8)[0][0].all_to_all == "ring"
    time = layer_time(machine, shape, 16, ParallelStrategy(1, 1, "ring", 8))
    elements = 16 * 4096 * 2048
    one_way = machine.intra.seconds(1, 2 * elements / 1000)
    counts = machine.intra.latency
    # two ways forward and two backward, and the counts of rows
    assert time.exchange == pytest.approx(4 * one_way + counts)


def loses_rows(rank: int, path: Path) -> None:
    import_on_rank(path)
    group = make_expert_groups(2)
    layer = make_layer(group=group, num_experts=2, **SHAPE)
    x = torch.randn(40, 8, dtype=torch.float64)
    called = []
    layer.experts.register_forward_pre_hook(lambda *args: called.append(args))
    for name, degree in itertools.product(("lossy", "lossy_back"), (1, 2)):
        with pytest.raises(ValueError, match=rf"^all_to_all '{name}' returned rows of shape \["):
            layer(x, strategy=ParallelStrategy(1, degree, name))
        assert bool(called) == (name == "lossy_back")
    with pytest.raises(
        ValueError,
        match=r"^all_to_all 'miscounting' returned counts of shape \[1, 5\], not \[2, 5\]$",
    ):
        layer(x, strategy=ParallelStrategy(1, 1, "miscounting"))
    with pytest.raises(
        ValueError, match=r"^all_to_all 'lossy' returned rows of shape \[3, 1\], not \[4, 1\]$"
    ):
        all_to_all(torch.ones(4, 1), group, algorithm="lossy")
    layer(x)[0].sum()  # the ranks still agree


def test_lost_rows_are_noticed_before_they_are_used(run_processes, lossy_file):
    run_processes(loses_rows, 2, lossy_file)


def test_a_name_is_registered_once(ring_file):
    import_file(ring_file)
    with pytest.raises(ValueError, match=r"^all_to_all 'ring' is registered already: ring\.Ring$"):
        register_all_to_all("ring")
    message = r"^all_to_all 'linear' is registered already: moe_core\.parallel\.algorithm\.Linear$"
    with pytest.raises(ValueError, match=message):
        register_all_to_all("linear")(Linear)


def test_an_unknown_name_is_refused_with_the_nearest(ring_file):
    import_file(ring_file)
    names = "linear, 2dh, channels, ring"
    message = rf"^all_to_all \('rings'\) must be one of {names}; did you mean 'ring'\?$"
    with pytest.raises(ValueError, match=message):
        ParallelStrategy(all_to_all="rings")


def test_the_configuration_takes_it(ring_file):
    opts = ["MODEL.MOE.STRATEGY", "r1 ring"]
    message = r"MODEL.MOE.STRATEGY is 'r1 ring': all_to_all \('ring'\) must be one of linear, 2dh"
    with pytest.raises(UserError, match=message):
        load_config(None, opts)
    import_file(ring_file)
    assert load_config(None, opts).MODEL.MOE.STRATEGY == "r1 d1 ring"
    with pytest.raises(UserError, match="did you mean 'ring'"):
        load_config(None, ["MODEL.MOE.STRATEGY", "rinq"])


def test_an_algorithm_without_send_cannot_be_used():
    @register_all_to_all("empty")
    class Empty(Linear.__base__):
        @staticmethod
        def cost(elements, group_size, ranks_per_node):
            raise AssertionError

    with pytest.raises(TypeError, match=r"Empty.*send"):
        all_to_all(torch.ones(4, 1), ExpertGroup(), algorithm="empty")
