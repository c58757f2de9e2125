"""The auxiliary loss over the tokens of all ranks is that of one process with the same batch; so
are its gradients."""

# T tokens of a rank, W ranks

from unittest.mock import patch

import torch
import torch.distributed as dist
from moe_cases import make_layer, owned
from torch import Tensor
from trainer_cases import assert_same_steps, make_trainer, train_steps

from moe_core import MoELayer, average_expert_gradients
from moe_core.parallel import ExpertGroup, make_expert_groups

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
COUNTS = [7, 2, 5, 9]  # tokens of every rank
CONFIGS = [
    {"aux_loss": "gshard", "top_k": 2},
    {"aux_loss": "gshard", "top_k": 1, "gate_noise": 1.0, "normalize_gates": False},
    {"aux_loss": "load_importance", "top_k": 2, "router": "cosine"},
    {"aux_loss": "load_importance", "top_k": 2, "gate_noise": 1.0},
    {"aux_loss": "load_importance_tutel", "top_k": 1, "gate_noise": 1.0, "router": "cosine"},
    {"aux_loss": "none", "top_k": 2},
]


def global_batch(num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [T of all ranks, M], the weights of the task's loss, the router's noise [T of all
    ranks, E]."""
    generator = torch.Generator().manual_seed(0)
    shape = (sum(COUNTS[:num_ranks]), 6)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, weight, torch.randn(shape[0], 4, generator=generator, dtype=torch.float64)


def loss_and_gradients(
    layer: MoELayer, x: Tensor, weight: Tensor, noise: Tensor, share: float = 1.0
):
    """aux_loss and the gradients of `share * task + aux_loss`; the noise is given: the same
    everywhere."""
    x = x.clone().requires_grad_()
    with patch("torch.randn", lambda shape, dtype, device: noise.to(dtype)):
        y, aux_loss = layer(x)
    ((y * weight).sum() * share + aux_loss).backward()
    return aux_loss.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}


def on_one_rank(group: ExpertGroup, ranks: list[int], config: dict):
    """aux_loss and the gradients of the mean loss over `ranks`, as a training loop gets them on
    this rank."""
    place, size = ranks.index(dist.get_rank()), len(ranks)
    layer = make_layer(group=group, capacity_factor=0.0, **config)
    rows = [part.split(COUNTS[:size])[place] for part in global_batch(size)]
    aux_loss, x_grad, gradients = loss_and_gradients(layer, *rows)
    average_expert_gradients(layer)
    for parameter in layer.router.parameters():  # as DistributedDataParallel does
        for process_group in filter(None, (group.process_group, group.replicas.process_group)):
            dist.all_reduce(parameter.grad, group=process_group)
        parameter.grad /= size
    return layer, aux_loss, x_grad / size, gradients


def check_equals_one_process(group: ExpertGroup, ranks: list[int], config: dict) -> None:
    size = len(ranks)
    single = make_layer(capacity_factor=0.0, **config)
    expected_aux, expected_x, expected = loss_and_gradients(
        single, *global_batch(size), share=1 / size
    )

    layer, aux_loss, x_grad, gradients = on_one_rank(
        group, ranks, config | {"global_balance": True}
    )
    torch.testing.assert_close(aux_loss, expected_aux, **CLOSE)
    torch.testing.assert_close(
        x_grad, expected_x.split(COUNTS[:size])[ranks.index(dist.get_rank())], **CLOSE
    )
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, owned(expected[name], layer, name), **CLOSE)

    _, local_aux, _, local = on_one_rank(group, ranks, config | {"global_balance": False})
    if size > 1 and config["aux_loss"] != "none":
        assert (local_aux - expected_aux).abs() > 1e-4 * expected_aux
        assert any(
            not torch.allclose(local[name], g, rtol=1e-4)
            for name, g in expected.items()
            if "router" in name
        )
    else:
        torch.testing.assert_close(local_aux, expected_aux, **CLOSE)


def equals_one_process(rank: int) -> None:
    """W = 1, 2 and 4 ranks of one group; two groups of two and four of one that are replicas of
    each other."""
    pair = [0, 1] if rank < 2 else [2, 3]
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    groups = [
        (ExpertGroup(None), [rank]),
        (ExpertGroup(pairs), pair),
        (ExpertGroup(dist.group.WORLD), [0, 1, 2, 3]),
        (make_expert_groups(2), [0, 1, 2, 3]),
        (make_expert_groups(1), [0, 1, 2, 3]),
    ]
    for group, ranks in groups:
        for config in CONFIGS:
            check_equals_one_process(group, ranks, config)


def test_equals_one_process(run_processes):
    run_processes(equals_one_process, 4)


TRAINING = "MODEL.MOE.AUX_LOSS_WEIGHT 1.0 MODEL.MOE.AUX_LOSS"


def trains_like_one_process(rank: int, expected: dict[str, list[tuple]]) -> None:
    for loss, steps in expected.items():
        found = [
            train_steps(
                make_trainer(rank, 2, f"{TRAINING} {loss} MODEL.MOE.GLOBAL_BALANCE {on}"),
                len(steps),
            )
            for on in (True, False)
        ]
        assert_same_steps(found[0], steps)
        for local, whole in zip(found[1], steps, strict=True):
            assert abs(local[1] - whole[1]) > 1e-4 * whole[1], loss


def test_a_run_on_two_ranks_logs_what_one_process_logs(run_processes):
    """Loss, auxiliary loss and gradient norm of every step."""
    expected = {
        loss: train_steps(make_trainer(0, 1, f"{TRAINING} {loss}"), 4)
        for loss in ("gshard", "load_importance")
    }
    run_processes(trains_like_one_process, 2, expected)
