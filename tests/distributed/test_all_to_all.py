"""Both all-to-alls against plain enumeration, and what each strategy sends against its formula."""

# W ranks of the group, g ranks per node, N nodes, E experts, C rows per expert and rank, M model
# dim T tokens of a rank, s ranks of an expert: r hidden parts, each on s / r ranks; d chunks

import itertools
import os
import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_cases import make_layer
from torch import Tensor, nn
from traffic import count_traffic

from moe_core import MoELayer
from moe_core.parallel import (
    ExpertGroup,
    ParallelStrategy,
    all_to_all,
    make_expert_groups,
    valid_r,
)

# rows by (source - destination) mod W
UNSORTED_SPLITS = ([0, 1, 5, 2, 0, 0, 7, 3], [4, 0, 0, 0, 1, 9, 0, 2])
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.uint8)
SHAPES = ((), (2, 3), (2, 0), (1,))  # of one row


def block(
    source: int, destination: int, count: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """`count` rows [count, *shape] whose values tell source, destination and number."""
    numbers = torch.arange(count * torch.Size(shape).numel()).view(count, *shape)
    values = (source * 11 + destination) * 1009 + numbers
    # small dtypes hold no larger integers
    return (values % 241 if dtype.itemsize < 4 else values).to(dtype)


def ways(size: int) -> list[tuple[str, int | None]]:
    return [("linear", None), *(("2dh", g) for g in range(1, size + 1) if size % g == 0)]


def check(
    group: ExpertGroup,
    counts: list[list[int]],
    way: tuple,
    shape=(3,),
    dtype=torch.float64,
    equal=False,
) -> None:
    """`counts` [W][W] by source and destination; `equal`: leave them to all_to_all to find out."""
    here, size = group.rank, group.size
    rows = torch.cat([block(here, d, counts[here][d], shape, dtype) for d in range(size)])
    expected = torch.cat([block(s, here, counts[s][here], shape, dtype) for s in range(size)])
    sent = rows.clone().requires_grad_(dtype.is_floating_point)
    received = all_to_all(sent, group, None if equal else counts[here], *way)
    assert received.dtype == dtype
    assert torch.equal(received, expected), (way, counts, shape, dtype)
    if dtype.is_floating_point:
        received.backward(expected + 1)  # the gradient of an element goes where it came from
        assert torch.equal(sent.grad, rows + 1), (way, counts, shape, dtype)


def split_tables(size: int) -> list[list[list[int]]]:
    rotated = [
        [[row[(s - d) % size] for d in range(size)] for s in range(size)] for row in UNSORTED_SPLITS
    ]
    one_sender = [[2 if s == size - 1 else 0] * size for s in range(size)]
    one_receiver = [[5] + [0] * (size - 1) for _ in range(size)]
    nothing = [[0] * size for _ in range(size)]
    return [*rotated, one_sender, one_receiver, nothing]


def check_group(group: ExpertGroup) -> None:
    size = group.size
    for way in ways(size):
        for table in split_tables(size):
            check(group, table, way)
        for each in (0, 1, 3):
            check(group, [[each] * size] * size, way, equal=True)
        for dtype, shape in zip(DTYPES, SHAPES, strict=True):
            check(group, split_tables(size)[1], way, shape, dtype)


def subgroups(world_size: int) -> list[list[int]]:
    """Partitions and parts of the world that are neither consecutive nor of equal steps."""
    strided = [list(range(i, world_size, 2)) for i in (0, 1)]
    return [*strided, [0, world_size - 1], sorted({0, 1, 3, world_size - 2}), [2]]


def equals_enumeration(rank: int, world_size: int, random_tables: list) -> None:
    world = make_expert_groups(world_size, ranks_per_node=2)
    for group in (world, ExpertGroup(dist.group.WORLD)):
        check_group(group)
    for i, table in enumerate(random_tables):
        for way in ways(world_size)[i % 2 :: 2]:
            check(world, table, way, shape=(1 + i % 2,))
    for ranks in subgroups(world_size):
        process_group = dist.new_group(ranks)
        if rank in ranks:
            group = ExpertGroup(process_group)
            check_group(group)


def examples_of(strategy: st.SearchStrategy, number: int) -> list:
    """The same for all ranks, who must not search on their own."""
    found = []

    # on a busy machine the first example is slow
    unhurried = [HealthCheck.too_slow]

    @settings(max_examples=number, derandomize=True, database=None, suppress_health_check=unhurried)
    @given(strategy)
    def collect(example) -> None:
        found.append(example)

    collect()
    return found


def tables(size: int) -> st.SearchStrategy:
    few = st.integers(0, 3) | st.sampled_from([0, 0, 17])
    return st.lists(st.lists(few, min_size=size, max_size=size), min_size=size, max_size=size)


@pytest.mark.parametrize("world_size", [4, 6, pytest.param(8, marks=pytest.mark.slow)])
def test_every_element_arrives_and_its_gradient_returns(run_processes, world_size):
    run_processes(equals_enumeration, world_size, world_size, examples_of(tables(world_size), 4))


def with_local_world_size(value: str | None, group: ExpertGroup) -> int:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if value is not None:
        os.environ["LOCAL_WORLD_SIZE"] = value
    return group.ranks_per_node()


def reads_torchruns_variables(rank: int) -> None:
    for local, per_node in (("1", 1), ("2", 2), ("4", 4), ("8", 4)):
        world = ExpertGroup(dist.group.WORLD)  # it asks once
        assert with_local_world_size(local, world) == per_node
        with count_traffic(world) as traffic:
            check(world, [[1, 2, 3, 4]] * 4, ("2dh", None))
        beside = {r for r in range(4) if r // per_node == rank // per_node}
        across = {r for r in range(4) if r % per_node == rank % per_node}
        assert set(traffic.messages) == (beside | across) - {rank}
    for local in (None, "", "0", "two"):
        world = ExpertGroup(dist.group.WORLD)
        with pytest.raises(
            ValueError, match=r"ranks_per_node .*LOCAL_WORLD_SIZE of .* is \[0, 0, 0, 0\]"
        ):
            with_local_world_size(local, world)
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE of .* is \[0, 0, 0, 0\]"):
        all_to_all(torch.ones(4, 4, 1), world, algorithm="2dh")
    with pytest.raises(ValueError, match=r"nodes \[0, 0, 0, 1\] \(LOCAL_WORLD_SIZE 3\)"):
        with_local_world_size("3", ExpertGroup(dist.group.WORLD))
    for ranks, local, per_node in (
        ([0, 2], "2", 1),
        ([1, 3], "2", 1),
        ([0, 2], "4", 2),
        ([1, 2, 3], "4", 3),
    ):
        process_group = dist.new_group(ranks)
        if rank in ranks:
            assert with_local_world_size(local, ExpertGroup(process_group)) == per_node
    odd = dist.new_group([0, 1, 2])
    if rank < 3:
        with pytest.raises(ValueError, match=r"nodes \[0, 0, 1\] \(LOCAL_WORLD_SIZE 2\)"):
            with_local_world_size("2", ExpertGroup(odd))
    refuses_what_does_not_divide(world)


def refuses_what_does_not_divide(world: ExpertGroup) -> None:
    with pytest.raises(ValueError, match=r"ranks_per_node \(3\) .*size \(4\)"):
        all_to_all(torch.ones(4, 1), world, algorithm="2dh", ranks_per_node=3)
    with pytest.raises(ValueError, match=r"rows \(6\) .*size \(4\)"):
        all_to_all(torch.ones(6, 1), world)
    for send in ([1, 2, 3], [1, 1, 1, 1], [7, 0, 0, -1]):
        with pytest.raises(ValueError, match=rf"send \({re.escape(str(send))}\).* 6 rows"):
            all_to_all(torch.ones(6, 1), world, send)
    for group in (world, ExpertGroup()):
        with pytest.raises(ValueError, match=r"all_to_all \('3dh'\)"):
            all_to_all(torch.ones(4, 1), group, algorithm="3dh")


def test_node_shapes_come_from_torchrun_or_are_refused(run_processes):
    run_processes(reads_torchruns_variables, 4)


def uneven_nodes(rank: int, locals_of_ranks: list[str | None]) -> None:
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        with_local_world_size(locals_of_ranks[rank], ExpertGroup(dist.group.WORLD))


@pytest.mark.parametrize(
    "locals_of_ranks", [["3", "3", "3", "1"], ["1", "2", "2", "1"], ["2", "2", "2", None]]
)
def test_nodes_of_unequal_size_are_refused_on_every_rank(run_processes, locals_of_ranks):
    run_processes(uneven_nodes, 4, locals_of_ranks, seconds=60)


# What each strategy sends


class InTurn(nn.Module):
    """Token t to expert t mod E, surely."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, tokens: Tensor) -> Tensor:
        expert = torch.arange(len(tokens)) % self.num_experts
        return nn.functional.one_hot(expert, self.num_experts).double() * 9 + 0 * tokens.sum()


def formula(
    strategy: ParallelStrategy, layer: MoELayer, num_tokens: int, exchanges: int, gathers: int
) -> tuple:
    """(elements, messages) by receiver, of so many exchanges of rows and gathers (or scatters) of
    weights."""
    size, here, r, g = layer.group.size, layer.group.rank, strategy.r, strategy.ranks_per_node
    elements, messages = Counter(), Counter()
    # ranks that gather weights
    block = size if r == 0 else max(size // layer.config.num_experts, 1) // r
    own = [p.numel() for p in layer.experts.parameters()]
    for peer in (p for p in range(size) if p != here):
        if peer // block == here // block:
            elements[peer] += gathers * sum(own)
            if r == 0:
                elements[peer] += 2  # which layer it is, in fp64, with the gather of its weights
            messages[peer] += gathers * len(own)
        # from one rank to one other, in one exchange
        pair = r * num_tokens // size * layer.config.model_dim
        if strategy.all_to_all == "linear":
            rows = pair
        else:
            inside, same_local = peer // g == here // g, peer % g == here % g
            rows = pair * (size // g if inside else g if same_local else 0)
        if r and rows:
            elements[peer] += exchanges * rows
            messages[peer] += exchanges * strategy.pipeline_degree
    return elements, messages


def sends_what_the_formula_says(rank: int, world_size: int) -> None:
    group, num_tokens = (
        make_expert_groups(world_size, ranks_per_node=2),
        48,
    )  # divisible by W * s * d, so that all splits are equal
    for num_experts in (2 * world_size, world_size // 2, 1):
        config = make_layer(
            model_dim=8, hidden_dim=16, num_experts=num_experts, capacity_factor=0.0
        ).config
        layer = MoELayer(config, group, router=InTurn(num_experts)).double()
        # degree and ranks per node; None: linear
        for r, (d, g) in itertools.product(
            valid_r(num_experts, world_size), ((3, None), (1, 2), (3, 1))
        ):
            strategy = ParallelStrategy(r, d, "2dh" if g else "linear", g)
            x = torch.randn(num_tokens, 8, dtype=torch.float64, requires_grad=True)
            with torch.no_grad(), count_traffic(group) as forward:
                layer(x, strategy=strategy)
            with count_traffic(group) as both:
                layer(x, strategy=strategy)[0].sum().backward()
            layer(x, strategy=strategy)  # of which nothing is counted
            for traffic, exchanges, gathers in ((forward, 2, 1), (both, 4, 2)):
                expected = formula(strategy, layer, num_tokens, exchanges, gathers)
                assert (+traffic.elements, +traffic.messages) == expected, (num_experts, strategy)


def test_each_strategy_sends_what_its_formula_says(run_processes):
    run_processes(sends_what_the_formula_says, 4, 4)


def fewer_messages_leave_a_node(rank: int) -> None:
    """2DH, 8 ranks as 2 x 4: g - 1 + N - 1 messages instead of W - 1, and N - 1 to other nodes
    instead of (N - 1) g."""
    g = 4
    group = make_expert_groups(8, ranks_per_node=g)
    counts = {}
    for way in (("linear", None), ("2dh", g)):
        with count_traffic(group) as traffic:
            check(group, [[2] * 8] * 8, way)  # forward and backward: two exchanges
        sent = traffic.messages
        counts[way[0]] = (
            sent.total(),
            sum(n for peer, n in sent.items() if peer // g != rank // g),
        )
    assert counts == {"linear": (2 * 7, 2 * 4), "2dh": (2 * (3 + 1), 2 * 1)}


def test_2dh_sends_fewer_messages_between_nodes(run_processes):
    run_processes(fewer_messages_leave_a_node, 8)
