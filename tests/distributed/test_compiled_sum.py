"""Compiled sums and exchanges over a group have the gradient of eager mode.

torch 2.11 loses it where the forward of an autograd.Function writes into the tensor that it
returns, as a collective does: dynamo makes the written tensor a second output of the traced
forward, and autograd sends the gradient there (https://github.com/pytorch/pytorch/issues/180642).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.parallel import ExpertGroup


class InPlace(torch.autograd.Function):
    """The smallest program with the defect; no rank but this one takes part."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        out.copy_(2 * x)
        return out

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def gradient(function, backend: str | None) -> list[float]:
    torch.compiler.reset()
    x = torch.ones(3, requires_grad=True)
    if backend is not None:
        function = torch.compile(function, backend=backend)
    return torch.autograd.grad(function(x).sum(), x)[0].tolist()


def test_the_defect_of_torch():
    """Once this fails for every torch that pyproject.toml allows, collectives can be compiled."""
    assert gradient(InPlace.apply, None) == [2, 2, 2]
    if torch.__version__ < "2.12":
        assert gradient(lambda x: InPlace.apply(x), "eager") == [0, 0, 0]


@torch.library.custom_op("tests::all_to_all", mutates_args=())
def all_to_all_op(x: Tensor) -> Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


all_to_all_op.register_fake(lambda x: torch.empty_like(x))
all_to_all_op.register_autograd(lambda ctx, grad: all_to_all_op(grad.contiguous()))


def compiled_sum(rank: int) -> None:
    group = ExpertGroup(dist.group.WORLD)
    for backend in (None, "eager", "aot_eager"):
        # the sum of what both ranks send back, 1 and 2, times 2
        assert gradient(lambda x: (rank + 1) * group.sum(2 * x), backend) == [6, 6, 6], backend


def test_the_sum_over_a_group(run_processes):
    run_processes(compiled_sum, 2)


def compiled_op(rank: int) -> None:
    for backend in (None, "eager", "aot_eager"):
        # each rank gets half of its gradient from each rank
        found = gradient(lambda x: (rank + 1) * all_to_all_op(x.repeat(2)), backend)
        assert found == [3, 3, 3], backend


def test_a_collective_as_an_op(run_processes):
    run_processes(compiled_op, 2)
