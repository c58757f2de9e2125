"""Exchanges on a communication stream beside work: a side stream of a GPU, and its twin on a CPU, a
thread. The exchange is a fake one, slow on purpose, within one process."""

# N rows, M model dim, d chunks

import threading
import time

import pytest
import torch
from torch import Tensor

from moe_core.parallel.comm_stream import CommStream
from moe_core.parallel.row_exchange import PendingExchange

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]
)


def slow(tensor: Tensor) -> None:
    """Delay what follows on the current stream, or in this thread."""
    if tensor.is_cuda:
        matrix = torch.ones(4096, 4096, device=tensor.device)
        for _ in range(5):
            matrix = matrix @ matrix
    else:
        time.sleep(0.01)


class SlowReversal:
    """An exchange that reverses the order of the rows; as `RowExchange` to `PendingExchange`."""

    def __init__(self) -> None:
        self.stream = CommStream(concurrent=True)
        self.started: list[str] = []

    def start(self, rows: Tensor, counts: str, back: bool):
        self.started.append(f"{counts} {'back' if back else 'there'}")

        def run(rows: Tensor) -> tuple[Tensor]:
            slow(rows)
            return (rows.flip(0),)

        wait = self.stream.submit(run, rows.contiguous())
        return lambda: wait()[0]


@on_each_device
def test_results_come_in_order_and_may_outlive_their_input(device):
    stream = CommStream(concurrent=True)

    def run(tensor: Tensor) -> tuple[Tensor]:
        slow(tensor)
        return (2 * tensor,)

    waits = []
    for i in range(5):
        tensor = torch.full((1000, 100), float(i), device=device)
        waits.append(stream.submit(run, tensor))
        del tensor
        torch.full((1000, 100), -1.0, device=device)  # may take the memory, if it is free
    for i, wait in enumerate(waits):
        (result,) = wait()
        torch.full((1000, 100), -1.0, device=device)
        assert result.eq(2 * i).all()


@on_each_device
def test_the_pipeline_gives_what_one_pass_gives(device):
    """Two ways and the work between them in d chunks, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    rows, weight, target = (
        torch.randn(size, 8, generator=generator, dtype=torch.float64).to(device).requires_grad_()
        for size in (60, 8, 60)
    )
    expected = (rows @ weight).tanh()
    expected_grads = torch.autograd.grad(expected, [rows, weight], target)
    for num_chunks in (1, 2, 5):
        exchange = SlowReversal()
        chunks = rows.chunk(num_chunks)
        names = [str(i) for i in range(num_chunks)]
        there = [PendingExchange(exchange, name) for name in names]
        back = [PendingExchange(exchange, name, back=True) for name in names]
        sent = [there[i].depart(chunk) for i, chunk in enumerate(chunks)]
        returned = []
        for i in range(num_chunks):
            results = (there[i].arrive(sent[i])[0] @ weight).tanh()
            returned.append(back[i].depart(results))
        y = torch.cat([back[i].arrive(token)[0] for i, token in enumerate(returned)])
        torch.testing.assert_close(y, expected)
        grads = torch.autograd.grad(y, [rows, weight], target)
        torch.testing.assert_close(grads, expected_grads)
        forward = [f"{name} there" for name in names] + [f"{name} back" for name in names]
        assert exchange.started[: 2 * num_chunks] == forward
        # every gradient departs before the first one has to arrive
        assert sorted(exchange.started[2 * num_chunks : 3 * num_chunks]) == sorted(
            f"{name} there" for name in names
        )


def fail(tensor: Tensor) -> tuple[Tensor]:
    raise ValueError("no such rank")


@on_each_device
def test_a_failure_is_raised_where_the_caller_waits(device):
    wait = CommStream(concurrent=False).submit(fail, torch.ones(1, device=device))
    with pytest.raises(ValueError, match="no such rank"):
        wait()


def test_process_groups_run_at_the_same_time():
    """A step of one exchange waits for another process group; the next exchange goes on."""
    stream = CommStream(concurrent=True)
    inside, between = object(), object()
    later_began = threading.Event()

    def first(tensor: Tensor) -> tuple[Tensor]:
        assert later_began.wait(timeout=60), "the other process group does not run"
        return (tensor + 1,)

    def later(tensor: Tensor) -> tuple[Tensor]:
        later_began.set()
        return (tensor + 2,)

    waits = [
        stream.submit(first, torch.ones(1), process_group=between),
        stream.submit(later, torch.ones(1), process_group=inside),
    ]
    assert [wait()[0].item() for wait in waits] == [2, 3]


def test_a_failure_ends_the_work_of_all_process_groups():
    stream = CommStream(concurrent=True)
    for function in (fail, lambda tensor: (tensor,)):
        wait = stream.submit(function, torch.ones(1), process_group=object())
        with pytest.raises(ValueError, match="no such rank"):
            wait()
