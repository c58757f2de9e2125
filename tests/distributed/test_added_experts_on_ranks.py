"""`add_experts` under DistributedDataParallel, its experts whole on each rank or distributed."""

import pytest
import timm
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from moe_core import moe_layers
from moe_core.parallel import make_expert_groups
from swinv2_moe import add_experts

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # fp64: other orders of sums


def model_of(**arguments):
    torch.manual_seed(0)
    dense = timm.create_model("vit_tiny_patch16_224", num_classes=3, **VIT).double()
    torch.manual_seed(1)
    return add_experts(dense, "last 1", 4, upcycle=False, aux_loss_weight=0.0, **arguments).train()


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64)


def check(rank: int, size: int) -> None:
    alone = model_of()
    alone(batch()).square().mean().backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    group = make_expert_groups(size)
    model = model_of(expert_group=group)
    parallel = DistributedDataParallel(model)
    parallel(batch()[2 * rank : 2 * rank + 2]).square().mean().backward()
    ((name, layer),) = moe_layers(model).items()
    first, count, *_ = layer.shard
    assert count == 4 // size
    for key, parameter in model.named_parameters():
        grad = expected[key]
        if key.startswith(f"{name}.experts."):
            grad = grad[first : first + count]
        torch.testing.assert_close(parameter.grad, grad, **CLOSE)
    dist.barrier()


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_those_of_one_process(run_processes, size):
    """Also with new weights, which do not depend on the number of ranks."""
    run_processes(check, 2, size)
