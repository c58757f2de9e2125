"""Masked tokens with experts on several ranks: other numbers of them on each, down to none at
all."""

import torch
from moe_cases import all_gradients, make_layer, owned

from moe_core.parallel import ParallelStrategy, make_expert_groups


def check_masked_ranks(rank: int, strategy: ParallelStrategy) -> None:
    group = make_expert_groups(2)
    group.for_torch_tools = False  # the backward pass sums, `average_expert_gradients` averages
    layer = make_layer(
        group=group, strategy=strategy, capacity_factor=1.0, top_k=2, aux_loss="none"
    )
    alone = make_layer(capacity_factor=1.0, top_k=2, aux_loss="none")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(owned(alone.get_parameter(name), layer, name))
    masks = [[1, 0, 1, 1, 0, 1, 1], [0] * 7]
    for first in range(2):  # either rank in turn has no token
        torch.manual_seed(5)
        whole = torch.randn(2, 7, 6, dtype=torch.float64)
        mask = torch.tensor([masks[first], masks[1 - first]], dtype=torch.bool)
        x = whole[rank].clone().requires_grad_()
        y, _ = layer(x, mask=mask[rank])
        gradients = all_gradients(y.square().sum(), x, layer)
        # all tokens are there: the group's largest count is theirs
        expected = whole[first].clone().requires_grad_()
        wanted, _ = alone(expected[mask[first]])
        wanted_gradients = all_gradients(wanted.square().sum(), expected, alone)
        torch.testing.assert_close(y[mask[rank]], wanted if rank == first else wanted[:0])
        assert not y[~mask[rank]].any()
        torch.testing.assert_close(
            gradients["x"],
            wanted_gradients["x"] if rank == first else torch.zeros_like(gradients["x"]),
        )
        for name in gradients:
            if name.startswith("experts."):
                torch.testing.assert_close(
                    gradients[name], owned(wanted_gradients[name], layer, name)
                )


def check_capacity_of_the_fullest_rank(rank: int, strategy: ParallelStrategy) -> None:
    """Of 8 tokens and 4 experts, an expert takes 2 of each rank's, also where a rank has only 2."""
    layer = make_layer(group=make_expert_groups(2), strategy=strategy, capacity_factor=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()  # every token chooses the first expert
    layer(torch.randn([8, 2][rank], 6, dtype=torch.float64))
    assert layer.last_routing.dropped_share == [0.75, 0.0][rank]


def masked_ranks(rank: int) -> None:
    for strategy in (
        ParallelStrategy(),
        ParallelStrategy(r=0),
        ParallelStrategy(pipeline_degree=2),
    ):
        check_masked_ranks(rank, strategy)
        check_capacity_of_the_fullest_rank(rank, strategy)


def test_masked_ranks(run_processes):
    run_processes(masked_ranks, 2)
