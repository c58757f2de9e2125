"""How often a layer waits for its device: the reads of device tensors on the host."""

import functools

import pytest
import torch
import torch.distributed as dist
from host_reads import count_reads
from moe_cases import make_layer
from triton_cases import INTERPRETED

from moe_core import MoELayer, equal_tokens
from moe_core.parallel import ExpertGroup, ParallelStrategy

CONFIGS = [
    {"capacity_factor": 1.25, "top_k": 2},
    {"capacity_factor": 0.0, "top_k": 2},
    {"capacity_factor": 0.5, "batch_prioritized": True},
]


def step(layer: MoELayer, x: torch.Tensor, strategy: ParallelStrategy) -> None:
    y, aux_loss = layer(x, strategy=strategy)
    (y.sum() + aux_loss).backward()


def waits_at_most_once(rank: int) -> None:
    group = ExpertGroup(dist.group.WORLD)
    chunks, hierarchical = ParallelStrategy(1, 3), ParallelStrategy(1, 2, "2dh", 1)
    one, weights = ParallelStrategy(1), ParallelStrategy(0)
    # each step takes seconds in the interpreter: not every strategy with every configuration
    strategies = ([one, chunks, hierarchical, weights], [chunks, weights], [one, hierarchical])
    for config, num_experts, chosen in zip(CONFIGS, (4, 4, 1), strategies, strict=True):
        shape = {"model_dim": 16, "hidden_dim": 16, "num_experts": num_experts}
        layer = make_layer(dtype=torch.float32, group=group, kernels="triton", **shape, **config)
        x = torch.randn(6 + rank, 16)
        for strategy in chosen:
            reads = count_reads(functools.partial(step, layer, x, strategy))
            assert len(reads) == strategy.r, (config, num_experts, strategy, reads)
        if num_experts > 1 and config["capacity_factor"] > 0:
            strategy = ParallelStrategy(1, 2, exchange="static")
            with equal_tokens(layer):
                reads = count_reads(functools.partial(step, layer, x[:6], strategy))
            assert reads == []


@pytest.mark.skipif(not INTERPRETED, reason="in a process that test_verify.py starts")
class TestKernels:
    """They read no offsets on the host, as the loop over experts on a CPU does."""

    def test_several_ranks_wait_once_in_forward_and_backward(self, run_processes):
        run_processes(waits_at_most_once, 2)


def test_one_rank_never_waits():
    for config in CONFIGS:
        layer = make_layer(dtype=torch.float32, kernels="torch", **config)
        # the loop over experts on a CPU reads where their rows end
        layer.experts = RowsThemselves()
        x = torch.randn(6, 6, requires_grad=True)
        assert count_reads(functools.partial(step, layer, x, ParallelStrategy())) == []


class RowsThemselves(torch.nn.Module):
    def forward(self, rows, offsets):
        return rows


@pytest.mark.parametrize(
    "read",
    [int, float, bool, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.nonzero],
)
def test_reads_are_noticed(read):
    values = torch.ones(1)
    assert len(count_reads(lambda: read(values.max()))) == 1
    assert len(count_reads(lambda: read(torch.ones(1, device="cpu") * 2))) == 0
