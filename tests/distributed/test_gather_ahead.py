"""Weights that are gathered one layer ahead (r = 0) give what weights gathered in place give."""

# T tokens, M model dim

from functools import partial

import pytest
import torch
import torch.distributed as dist
from gloo_processes import patches, recorded_calls
from moe_cases import make_layer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_core import gather_ahead, prepared, step
from moe_core.parallel import ParallelStrategy, make_expert_groups

LOCAL = ParallelStrategy(r=0)


class Network(nn.Module):
    """Three MoE layers and work between them."""

    def __init__(self, group, strategy=LOCAL, **options) -> None:
        super().__init__()
        layers = [make_layer(group=group, strategy=strategy, **options) for _ in range(3)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        loss = 0.0
        for layer in self.layers:
            y, aux_loss = layer(x.tanh())
            x = x + y
            loss = loss + aux_loss
        return x.square().sum() + loss


def gradients(network: Network, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(network(x), [x, *network.parameters()]))


def inputs(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(7 + rank, 6, dtype=torch.float64, generator=generator)


def equals_in_place(rank: int, world_size: int, num_experts: int) -> None:
    group = make_expert_groups(world_size)
    options = {"num_experts": num_experts, "capacity_factor": 0.0, "hidden_dim": 16}
    network = Network(group, **options, model_dim=6)
    x = inputs(rank)
    expected = gradients(network, x)
    x = x.requires_grad_()
    with gather_ahead(network):
        loss = network(x)
    actual = torch.autograd.grad(loss, [x, *network.parameters()])
    torch.testing.assert_close(list(actual), expected)


@pytest.mark.parametrize("num_experts", [4, 2])
def test_gradients(run_processes, num_experts):
    """Of 4 ranks; with 2 experts each expert is on two of them."""
    run_processes(equals_in_place, 4, 4, num_experts)


def order_of_calls(rank: int) -> None:
    """The next layer's weights are asked for before this layer computes, and gradients leave
    before the layers before it have theirs."""
    group = make_expert_groups(2)
    network = Network(group)
    began = []
    submit = group.comm_stream.submit

    def record(function, *tensors, process_group=None):
        began.append(f"{len(tensors)} tensors")
        return submit(function, *tensors, process_group=process_group)

    group.comm_stream.submit = record
    for number, layer in enumerate(network.layers):
        layer.experts.register_forward_hook(lambda *_, n=number: began.append(f"layer {n}"))
    x = inputs(0)
    with gather_ahead(network):
        loss = network(x)
    assert began == [
        "4 tensors",
        "4 tensors",
        "layer 0",
        "4 tensors",
        "layer 1",
        "layer 2",
    ]
    loss.backward()
    assert began[6:] == ["4 tensors"] * 3


def test_weights_leave_one_layer_ahead(run_processes):
    run_processes(order_of_calls, 2)


def several_passes(rank: int) -> None:
    """Each pass of a step begins again; a backward pass that recomputes gathers in place."""
    group = make_expert_groups(2)
    network, x = Network(group), inputs(rank)
    expected = [2 * gradient for gradient in gradients(network, x)]
    began = []
    submit = group.comm_stream.submit

    def record(function, *tensors, process_group=None):
        began.append(len(tensors))
        return submit(function, *tensors, process_group=process_group)

    group.comm_stream.submit = record
    x = x.requires_grad_()
    with step(network, torch.float64):
        for loss_of in (network, partial(checkpoint, network, use_reentrant=False)):
            loss_of(x).backward()
    assert group.take_gathered is None
    actual = [x.grad, *(parameter.grad for parameter in network.parameters())]
    torch.testing.assert_close(actual, expected)
    assert began == 4 * [4, 4, 4]  # forward and backward of both passes, without what is recomputed


def test_every_pass_of_a_step_gathers_ahead(run_processes):
    run_processes(several_passes, 2)


def kept_while_prepared(rank: int) -> None:
    group = make_expert_groups(2)
    network = Network(group).eval()
    x = inputs(0)
    with torch.no_grad():
        expected = network(x)
        calls = recorded_calls(["all_gather_into_tensor"])
        with prepared(network):
            for _ in range(3):
                torch.testing.assert_close(network(x), expected)
        patches.undo()
    assert len(calls) == 3 * 4  # w1, b1, w2 and b2 of each layer, once


def test_evaluation_gathers_once(run_processes):
    run_processes(kept_while_prepared, 2)


def another_order(rank: int) -> None:
    """A broken promise costs time, not correctness."""
    group = make_expert_groups(2)
    network = Network(group)
    x = inputs(0)
    reversed_network = Network(group)
    reversed_network.layers = nn.ModuleList(reversed(network.layers))
    expected = reversed_network(x)
    with gather_ahead(network):
        torch.testing.assert_close(reversed_network(x), expected)
    assert group.take_gathered is None
    # weights that were gathered in another dtype than that of the call
    network, x = network.float(), x.float()
    expected = network(x)
    half, full = torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)
    with half, gather_ahead(network), full:
        torch.testing.assert_close(network(x), expected)
    dist.barrier()


def test_layers_in_another_order(run_processes):
    run_processes(another_order, 2)
