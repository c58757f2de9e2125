"""Two ranks on one GPU, over gloo: `pytest -m gpu`. Skipped, with this reason, where there is
none."""

import itertools

import pytest
import torch
from moe_cases import make_layer, owned

from moe_core import average_expert_gradients
from moe_core.parallel import ParallelStrategy, make_expert_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = {"model_dim": 64, "hidden_dim": 128, "top_k": 2, "capacity_factor": 1.0}
STRATEGIES = [
    ParallelStrategy(0),
    ParallelStrategy(1),
    ParallelStrategy(1, 3),
    ParallelStrategy(1, 2, "2dh", 1),
]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # fp32


def equals_one_process_on_the_cpu(rank: int, num_experts: int, kernels: str) -> None:
    group = make_expert_groups(2, ranks_per_node=1)
    single = make_layer(dtype=torch.float32, num_experts=num_experts, kernels="torch", **SHAPE)
    layer = make_layer(
        dtype=torch.float32, group=group, num_experts=num_experts, kernels=kernels, **SHAPE
    ).cuda()
    inputs = [torch.randn(50, 64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    loss = sum(single(x)[0].square().sum() for x in inputs) / 2
    loss.backward()
    expected_y = single(inputs[rank])[0].detach()
    for strategy in STRATEGIES:
        layer.zero_grad()
        y, _ = layer(inputs[rank].cuda(), strategy=strategy)
        torch.testing.assert_close(y.cpu(), expected_y, **TOLERANCE)
        y.square().sum().backward()
        average_expert_gradients(layer)
        for name, parameter in layer.experts.named_parameters():
            expected = single.experts.get_parameter(name).grad
            expected = owned(expected, layer, f"experts.{name}")
            torch.testing.assert_close(parameter.grad.cpu(), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("num_experts", "kernels"), list(itertools.product([4, 2, 1], ["auto", "torch"]))
)
def test_every_strategy_on_the_gpu(run_processes, num_experts, kernels):
    run_processes(equals_one_process_on_the_cpu, 2, num_experts, kernels)
