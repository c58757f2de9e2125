"""Channels between GPUs. The kernels run in Triton's interpreter, between processes that share CPU
memory; on a GPU the same functions run with `pytest -m gpu`."""

# P ranks

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from channel_cases import world
from gloo_processes import patches
from moe_cases import make_layer

from moe_core.comm import all_to_all as channels
from moe_core.comm import gpu_memory, switch
from moe_core.comm.memory import share_memory
from moe_core.parallel import (
    CollectiveError,
    ExpertGroup,
    ParallelStrategy,
    Ranks,
    all_to_all,
    make_expert_groups,
)


def share_cpu_memory(ranks: Ranks, num_bytes: int, purpose: str):
    """In place of share_gpu_memory: every rank's bytes in memory that all processes map."""
    rows = share_memory(ranks, range(ranks.size), ranks.size * num_bytes, purpose).view(
        ranks.size, num_bytes
    )
    return gpu_memory.GpuMemory(rows[ranks.rank], [row.data_ptr() for row in rows])


def in_the_interpreter(rank: int, function: Callable[[int, str], None]) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from moe_core.comm import cuda

    for module in (cuda, switch):
        patches.setattr(module, "share_gpu_memory", share_cpu_memory)
    function(rank, "cpu")


def on_the_gpu(rank: int, function: Callable[[int, str], None]) -> None:
    """All ranks share one, which torch refuses otherwise."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    function(rank, "cuda")


def puts_and_signals(rank: int, device: str) -> None:
    from moe_core.comm.cuda import CudaMemoryGroup

    group = CudaMemoryGroup(world(), 1000)
    assert group.buffer.shape == (1024,)
    ahead = group.channel((rank + 1) % group.size)
    behind = group.channel((rank - 1) % group.size)
    for turn in range(5):
        source = torch.full((3,), 100 * turn + rank, device=device)
        ahead.put(8, source, signal=False)
        ahead.put(100, source.to(torch.uint8)[:1])  # a byte; its signal is for both
        behind.wait()
        behind_rank = (rank - 1) % group.size
        received = group.buffer[8:32].view(torch.int64)
        assert received.tolist() == [100 * turn + behind_rank] * 3
        assert group.buffer[100] == (100 * turn + behind_rank) % 256
        ahead.flush()
        group.barrier()
    for _ in range(3):  # signals that nobody waits for yet are counted
        ahead.signal()
    group.barrier()
    for _ in range(3):
        behind.wait()
    group.synchronize()
    with pytest.raises(ValueError, match=r"bytes 1020 to 1028 .* buffer of rank .* \(1024 bytes"):
        ahead.put(1020, torch.zeros(1, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="contiguous tensor on"):
        ahead.put(0, torch.zeros(4, 4, device=device).T)
    with pytest.raises(ValueError, match=rf"peer \({rank}\) must be another rank"):
        group.channel(rank)


def equals_torch(rank: int, device: str) -> None:
    """All-to-alls against torch.distributed's over gloo, to the bit; some in several rounds."""
    from moe_core.comm.cuda_collectives import CudaAllToAll

    exchange = CudaAllToAll(world(), buffer_bytes=1024)
    size = exchange.group.size
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for shape in ((size, 3), (2 * size, 5), (3 * size, 211), (0, 4)):
            rows = torch.randint(-100, 100, shape, generator=generator).to(dtype)
            expected = torch.empty_like(rows)
            dist.all_to_all_single(expected, rows)
            received = exchange.all_to_all(rows.to(device))
            assert torch.equal(received.cpu(), expected)
    for capacity, width in ((4, 3), (7, 100)):
        counts = torch.randint(0, capacity + 1, (size,), generator=generator)
        rows = torch.randn(size, capacity, width, generator=generator)
        for peer, count in enumerate(counts.tolist()):
            rows[peer, count:] = 0  # is not sent, and arrives as zeros
        expected, expected_counts = torch.empty_like(rows), torch.empty_like(counts)
        dist.all_to_all_single(expected, rows)
        dist.all_to_all_single(expected_counts, counts)
        rows += 1.5 * (rows == 0)  # so what is not sent is not zero here
        received, received_counts = exchange.all_to_all_v(rows.to(device), counts.to(device))
        assert torch.equal(received_counts.cpu(), expected_counts)
        assert torch.equal(received.cpu(), expected)
    exchange.synchronize()


def failures(rank: int, device: str) -> None:
    from moe_core.comm import triton_channel
    from moe_core.comm.cuda_collectives import CudaAllToAll

    limit = timedelta(microseconds=1)  # a thousand looks in the interpreter
    if device == "cuda":
        limit = timedelta(seconds=2)
    exchange = CudaAllToAll(world(), limit)
    if rank == 0:
        expected = r"rank 0 got no signal from rank 1 within .* has it ended\?"
        with pytest.raises(CollectiveError, match=expected):  # at once in the interpreter
            _ = (exchange.all_to_all(torch.ones(4, 2, device=device)), exchange.synchronize())
        with pytest.raises(CollectiveError, match="out of step since: wait: rank 0"):
            exchange.all_to_all(torch.ones(4, 2, device=device))
        group = exchange.group  # what is enqueued before the failure is known
        out = torch.ones(2, 8, device=device)
        triton_channel.read(
            group.buffer.view(torch.int64),
            out.view(torch.int64),
            None,
            group._failed,
            4,
            (0, 4, 4),
            1,
        )
        assert out.isnan().all()
    dist.barrier()
    exchange = CudaAllToAll(world(), timedelta(seconds=60))
    counts = torch.tensor([1, 3], device=device)
    rows = torch.ones(2, 2, 3, device=device)
    with pytest.raises(CollectiveError, match=f"rank {rank} has more rows for rank 1 than the"):
        _ = (exchange.all_to_all_v(rows, counts), exchange.synchronize())
    dist.barrier()


def bad_input(rank: int, device: str) -> None:
    from moe_core.comm.cuda_collectives import CudaAllToAll

    exchange = CudaAllToAll(world())
    rows = torch.zeros(2, 3, 4, device=device)
    for bad, message in (
        (torch.zeros(3, device=device), "must be int64"),
        (torch.zeros(2, device=device), "not torch.float32"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            exchange.all_to_all_v(rows, bad)
    with pytest.raises(ValueError, match=r"\(3\) must be a multiple of 2 ranks"):
        exchange.all_to_all(torch.zeros(3, device=device))
    with pytest.raises(ValueError, match=r"need tensors on .*, not meta"):
        exchange.all_to_all(torch.zeros(2, device="meta"))


def a_layer_equals_linear(rank: int, device: str) -> None:
    """Static exchange; other exchanges are refused by name."""
    patches.setattr(channels, "_between_gpus", lambda group: True)
    group = make_expert_groups(2)
    options = {"num_experts": 4, "top_k": 2, "model_dim": 8, "hidden_dim": 16}
    layer = make_layer(dtype=torch.float32, group=group, kernels="torch", **options).to(device)
    x = torch.randn(9, 8, generator=torch.Generator().manual_seed(rank)).to(device)
    results = []
    for name in ("linear", "channels"):
        layer.zero_grad()
        y, aux_loss = layer(x, strategy=ParallelStrategy(1, 2, name, exchange="static"))
        (y.square().sum() + aux_loss).backward()
        results.append([y.detach(), *(parameter.grad for parameter in layer.parameters())])
    for expected, received in zip(*results, strict=True):
        assert torch.equal(received, expected)
    with pytest.raises(ValueError, match=r"needs equal splits \(exchange static\)"):
        layer(x, strategy=ParallelStrategy(1, 1, "channels"))
    ragged = ExpertGroup(dist.group.WORLD)  # runs on this thread
    with pytest.raises(ValueError, match=r"equal splits .*: it does not exchange counts"):
        all_to_all(x[:3], ragged, [1, 2], "channels")
    assert not channels.Channels.is_available(group)


def no_switch(rank: int, device: str) -> None:
    """One line, with the device and what is missing."""
    with pytest.raises(RuntimeError, match=r"needs a multicast address, and rank 0 of 2 \(.*NVLS"):
        switch.SwitchChannel(world(), 1024)


CASES = [
    (a_layer_equals_linear, 2),
    (no_switch, 2),
    (puts_and_signals, 2),
    (equals_torch, 2),
    (failures, 2),
    (bad_input, 2),
]


@pytest.mark.parametrize(("function", "size"), [*CASES, (equals_torch, 3)])
def test_between_processes_in_the_interpreter(run_processes, function, size):
    pytest.importorskip("triton")
    run_processes(in_the_interpreter, size, function)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("function", "size"), CASES)
def test_between_processes_on_one_gpu(run_processes, function, size):
    run_processes(on_the_gpu, size, function)


def without_a_gpu(rank: int) -> None:
    from moe_core.comm.cuda_collectives import CudaAllToAll

    patches.setattr(torch.cuda, "is_available", lambda: rank == 0)
    with pytest.raises(RuntimeError, match=r"failed on rank 1 of 2: there is no CUDA device$"):
        CudaAllToAll(world())
    dist.barrier()  # gloo remains usable
    cuda_problem = "rank 0 asks for slots of an all-to-all of .* and rank 1 for"
    patches.setattr(gpu_memory, "_problem", lambda: "")
    with pytest.raises(ValueError, match=cuda_problem):
        CudaAllToAll(world(), buffer_bytes=1024 * (rank + 1))
    patches.setattr(gpu_memory, "machine_identity", lambda: f"machine {rank}")
    with pytest.raises(ValueError, match="need all ranks on one machine and in one container"):
        CudaAllToAll(world())


def test_without_a_gpu_there_is_one_line_on_every_rank(run_processes):
    run_processes(without_a_gpu, 2)


def through_the_switch(rank: int, size: int) -> None:
    torch.cuda.set_device(rank)
    try:
        channel = switch.SwitchChannel(world(), 2**16)
    except RuntimeError as error:  # on all ranks: these devices have none
        if "needs a multicast address" not in str(error):
            raise
        return
    values = torch.arange(64.0).cuda() + rank
    expected = size * torch.arange(64.0) + sum(range(size))
    assert torch.equal(channel.all_reduce(values).cpu(), expected)
    gathered = [torch.arange(64.0) + r for r in range(size)]
    assert torch.equal(channel.all_gather(values).cpu(), torch.cat(gathered))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_through_the_switch(run_processes):
    run_processes(through_the_switch, 2, 2)
