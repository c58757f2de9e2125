"""Experts in models of timm's families, beside the dense models."""

import copy

import pytest
import torch
import torch.nn.functional as F
from timm_families import FAMILIES, REFUSED, create, page
from tool_cases import ROOT
from torch import nn

from moe_core import moe_layers
from swinv2_moe import add_experts
from swinv2_moe.models import separate_aux_loss, take_aux_loss
from swinv2_moe.models.ffn import as_expert, find_blocks
from swinv2_moe.models.protocol import AdaptedModel

# fp64: sums of up to a thousand products in another order, through a few layers
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
NEW = set(dir(AdaptedModel)) - set(dir(nn.Module))  # what a MoEModel has beyond a module


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


def spread(model: nn.Module) -> nn.Module:
    """The model in fp64, with vectors from N(1, 0.1): scales of layers start at 1e-5, and norms
    at 0, which hides what a block computes."""
    model = model.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(1 + 0.1 * values)
    return model


def gradients(model: nn.Module, images, targets) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a training step, without the auxiliary loss."""
    model.train()
    torch.manual_seed(0)  # a stem may drop
    with separate_aux_loss(model):
        loss = F.cross_entropy(model(images), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_no_name_is_hidden(model: nn.Module) -> None:
    """A model's attribute of the same name as a method of MoEModel would be hidden by it."""
    own = set(model.__dict__) | set(model._modules) | set(model._parameters) | set(dir(type(model)))
    overridden = {"no_weight_decay", "init_weights", "set_grad_checkpointing"}
    assert (own - set(dir(nn.Module))) & NEW <= overridden


def test_outputs_loss_and_gradients_are_the_dense_models(family):
    """Each expert's gradient is that of the tokens that it got, weighted by their gates, whose sum
    is 1: the sum over experts is the dense gradient."""
    torch.manual_seed(0)
    dense = spread(create(family))
    assert_no_name_is_hidden(dense)
    model = add_experts(copy.deepcopy(dense), "last 2", num_experts=4)
    generator = torch.Generator().manual_seed(2)
    shape = (2, 3, family.size, family.size)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    targets = torch.tensor([1, 3])
    with torch.no_grad():
        expected = dense.eval()(images)
        assert expected.std() > 1e-6
        torch.testing.assert_close(model.eval()(images), expected, **CLOSE)
        maps = dense.forward_features(images)
        torch.testing.assert_close(model.forward_features(images), maps, **CLOSE)
    (loss, found), (dense_loss, expected) = (gradients(m, images, targets) for m in (model, dense))
    assert loss == pytest.approx(dense_loss, rel=1e-9)
    assert take_aux_loss(model) > 0
    replaced = [name.removesuffix("moe") for name in moe_layers(model)]
    assert len(replaced) == 2
    scale = max(float(grad.abs().max()) for grad in expected.values())
    close = {"rtol": 1e-7, "atol": 1e-9 * scale}
    for name, grad in expected.items():
        if not name.startswith(tuple(replaced)):
            torch.testing.assert_close(found[name], grad, **close)
    for ffn in replaced:
        own = {name.removeprefix(ffn): expected[name] for name in expected if name.startswith(ffn)}
        mlp = model.get_submodule(ffn.rstrip("."))
        assert own
        for name, grad in as_expert(own, mlp.gate_last).items():
            torch.testing.assert_close(found[f"{ffn}moe.experts.{name}"].sum(0), grad, **close)


@pytest.mark.parametrize("family", FAMILIES[::4], ids=lambda family: family.name)
def test_the_attached_loss_trains_the_routers(family):
    torch.manual_seed(0)
    model = add_experts(spread(create(family)), "last 1", num_experts=4, upcycle=False).train()
    images = torch.randn(2, 3, family.size, family.size, dtype=torch.float64)
    features = model.forward_features(images)  # some classifiers start at 0
    maps = features if isinstance(features, list) else [features]
    sum((one * torch.randn_like(one)).sum() for one in maps).backward()
    (layer,) = moe_layers(model).values()
    assert layer.router.weight.grad.abs().sum() > 0
    assert layer.experts.w1.grad.abs().sum() > 0


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_what_experts_cannot_replace_is_refused_and_unchanged(family):
    with torch.device("meta"):
        model = create(family)
    before = [block.ffn for block in find_blocks(model)]
    with pytest.raises(ValueError, match=r"no block with an MLP|experts") as raised:
        add_experts(model, "all", num_experts=4)
    assert "\n" not in str(raised.value)
    assert [block.ffn for block in find_blocks(model)] == before


def test_the_page_says_what_was_tried():
    written = (ROOT / "docs" / "reference" / "experts-in-timm.md").read_text()
    assert written == page(), "python tests/timm_families.py > docs/reference/experts-in-timm.md"
