"""Collectives through shared memory are bit-equal to torch.distributed's over gloo."""

# P ranks

import random
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from channel_cases import world
from torch import Tensor

from moe_core.comm import Collectives, collectives
from moe_core.parallel import CollectiveError

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
CASES = {2: 60, 4: 90, 8: 20}  # by number of ranks; five comparisons each
ALL_CASES = 10_000 // 3 + 1


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bits, also those of NaN and infinity."""
    numbers = torch.randint(-(2**62), 2**62, shape, generator=generator)
    if dtype == torch.float32:
        return numbers.to(torch.int32).view(dtype)
    if dtype == torch.bfloat16:
        return numbers.to(torch.int16).view(dtype)
    return numbers


def small_integers(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Their sums are exact, in any order."""
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def assert_same_bits(a: Tensor, b: Tensor, case: object) -> None:
    assert a.shape == b.shape, case
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), case


def splits(choice: random.Random, size: int) -> list[list[int]]:
    """Rows from each rank to each; sometimes none."""
    most = choice.choice([0, 1, 5, 50])
    table = [[choice.randint(0, most) for _ in range(size)] for _ in range(size)]
    if choice.random() < 0.3:
        table[choice.randrange(size)] = [0] * size
    if choice.random() < 0.05:  # in several pieces
        table[choice.randrange(size)][choice.randrange(size)] = 60_000
    return table


def one_case(collectives: Collectives, case: int) -> None:
    rank, size = collectives.ranks.rank, collectives.ranks.size
    choice = random.Random(case)  # the same on all ranks
    generator = torch.Generator().manual_seed(1000 * case + rank)
    dtype = choice.choice(DTYPES)
    width = choice.choice([(), (1,), (3,), (2, 4)])
    table = splits(choice, size)
    send, receive = table[rank], [row[rank] for row in table]
    rows = random_bits((sum(send), *width), dtype, generator)
    expected = rows.new_empty(sum(receive), *width)
    dist.all_to_all_single(expected, rows, receive, send)
    assert_same_bits(collectives.exchange(rows, send, receive), expected, case)

    num_rows = choice.choice([0, 1, 4, 33])
    rows = random_bits((size * num_rows, *width), dtype, generator)
    expected = torch.empty_like(rows)
    dist.all_to_all_single(expected, rows)
    assert_same_bits(collectives.all_to_all(rows), expected, case)
    gathered = [torch.empty_like(rows) for _ in range(size)]
    dist.all_gather(gathered, rows)
    assert_same_bits(collectives.all_gather(rows), torch.cat(gathered), case)

    terms = small_integers((size * max(num_rows, 1), *width), dtype, generator)
    summed = terms.clone()
    dist.all_reduce(summed)
    assert_same_bits(collectives.reduce_scatter(terms), summed.chunk(size)[rank], case)


def cases(rank: int, number: int) -> None:
    collectives = Collectives(world())
    for case in range(number):
        one_case(collectives, case)


@pytest.mark.parametrize("size", CASES)
def test_results_have_the_bits_of_torch_distributed(run_processes, size):
    run_processes(cases, size, CASES[size])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ten_thousand_results_have_the_bits_of_torch_distributed(run_processes, size):
    run_processes(cases, size, ALL_CASES, seconds=3600)


def message(source: int, target: int, turn: int) -> Tensor:
    """Of 0 to 700 numbers, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * turn + 100 * source + target)
    length = int(torch.randint(0, 700, (), generator=generator)) * (turn % 3)
    return torch.randint(0, 100, (length,), generator=generator)


def in_pieces(rank: int) -> None:
    with patch.object(collectives, "piece_bytes", lambda num_ranks: 512):  # 64 numbers
        of_ranks, size, n = Collectives(world()), world().size, 700
        for turn in range(9):
            sent = [message(rank, target, turn) for target in range(size)]
            expected = [message(source, rank, turn) for source in range(size)]
            splits = list(map(len, sent)), list(map(len, expected))
            received = of_ranks.exchange(torch.cat(sent), *splits)
            assert torch.equal(received, torch.cat(expected))
        own = torch.arange(size * n).view(size, n)
        for _ in range(3):
            summed = of_ranks.reduce_scatter(own * (rank + 1))
            assert torch.equal(summed, own[rank : rank + 1] * (size * (size + 1) // 2))
            gathered = of_ranks.all_gather(own[0] * (rank + 1)).view(size, n)
            assert torch.equal(gathered, own[0] * torch.arange(1, size + 1)[:, None])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_long_messages_arrive_in_pieces(run_processes, size):
    run_processes(in_pieces, size)


def other_lengths(rank: int) -> None:
    of_ranks = Collectives(world(), timedelta(seconds=1))
    rows = torch.zeros(4)
    if rank:
        of_ranks.exchange(rows, [2, 2], [2, 2])
        return
    with pytest.raises(CollectiveError, match=r"expects 4 bytes from rank 1, and 8 came"):
        of_ranks.exchange(rows, [2, 2], [2, 1])
    with pytest.raises(CollectiveError, match=r"out of step since: all-to-all: rank 0 expects"):
        of_ranks.exchange(rows, [2, 2], [2, 2])


def test_messages_of_other_lengths_get_one_line(run_processes):
    run_processes(other_lengths, 2)


def sums_in_order(rank: int) -> None:
    collectives = Collectives(world())
    size = collectives.ranks.size
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64):
        generator = torch.Generator().manual_seed(0)
        terms = (100 * torch.randn(size, size, 1000, generator=generator)).to(dtype)
        expected = terms[0].clone()
        for term in terms[1:]:
            expected += term
        scattered = collectives.reduce_scatter(terms[rank].view(-1))
        assert_same_bits(scattered, expected[rank], dtype)
    special = torch.tensor([float("nan"), float("inf"), 1e-40]).bfloat16()
    sums = collectives.reduce_scatter(special.repeat(size))
    assert sums[0].isnan()
    assert sums[1] == float("inf")
    assert_same_bits(sums[2:], special[2:] * size, "subnormal")


def test_sums_are_taken_in_the_order_of_the_ranks(run_processes):
    run_processes(sums_in_order, 3)


def bad_input(rank: int) -> None:
    collectives = Collectives(world())
    calls = [
        (lambda: collectives.all_to_all(torch.zeros(3)), r"rows \(3\) must be a multiple of 2"),
        (lambda: collectives.exchange(torch.zeros(3), [1, 1], [1, 1]), r"\(\[1, 1\]\) .* 3 rows"),
        (lambda: collectives.exchange(torch.zeros(0), [1, -1], [0, 0]), r"send \(\[1, -1\]\)"),
        (lambda: collectives.all_gather(torch.zeros(2, device="meta")), "CPU tensors, not meta"),
        (lambda: collectives.reduce_scatter(torch.zeros(2).half()), r"float16 are not supported"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    wrong = torch.empty(2)
    with pytest.raises(ValueError, match=r"out has shape \[2\].* not contiguous \[4\] and torch.f"):
        collectives.all_gather(torch.zeros(2), wrong)
    out = torch.empty(4, 2)
    gathered = collectives.all_gather(torch.full((2, 2), float(rank)), out)
    assert gathered.data_ptr() == out.data_ptr()
    assert out[:, 0].tolist() == [0, 0, 1, 1]
    rows = torch.arange(4.0).view(2, 2).T.requires_grad_()  # not contiguous
    assert torch.equal(collectives.all_gather(rows)[:2], rows)
    assert not collectives.all_gather(rows).requires_grad


def test_bad_input_is_refused_before_anything_is_sent(run_processes):
    run_processes(bad_input, 2)
