"""Auxiliary losses against hand-computed values and a plain evaluation of their formulas."""

# T tokens, E experts, K top-k

import math

import pytest
import torch
from moe_cases import make_layer

from moe_core import MoEConfig
from moe_core.losses import auxiliary_loss, gshard_loss, importance_loss, load_loss, squared_variation
from moe_core.router import route

# Three tokens, two experts: probabilities .75 / .25, .75 / .25 and .5 / .5, all of them choose expert 0.
LOGITS = torch.tensor([[math.log(3), 0.0], [math.log(3), 0.0], [0.0, 0.0]], dtype=torch.float64)
FIRST = torch.zeros(3, dtype=torch.long)


def plain_load_loss(clean: list[list[float]], threshold: list[float], std: float) -> float:
    """arXiv 1701.06538, appendix A, in Python numbers."""
    columns = list(zip(*clean, strict=True))
    load = [
        sum(0.5 * math.erfc((t - c) / (std * math.sqrt(2))) for c, t in zip(column, threshold, strict=True))
        for column in columns
    ]
    mean = sum(load) / len(load)
    return sum((x - mean) ** 2 for x in load) / (len(load) - 1) / (mean**2 + 1e-10)


def test_three_tokens_by_hand_gshard_and_importance():
    probs = LOGITS.softmax(1)
    # mean probability of expert 0: 2/3; its share: 1; times E = 2
    assert gshard_loss(probs, FIRST).item() == pytest.approx(4 / 3)
    # importance 2 and 1: unbiased variance 1/2, mean 3/2
    assert importance_loss(probs).item() == pytest.approx(0.5 / 1.5**2)
    # without noise every clean logit at or above the largest one counts: loads 3 and 1 (the tie of token 2)
    assert load_loss(LOGITS, LOGITS.amax(1), 0.0).item() == pytest.approx(2 / 2**2)


@pytest.mark.parametrize("num_experts", [1, 2, 5])
def test_gshard_is_1_when_balanced_and_e_when_collapsed(num_experts):
    ids = torch.arange(num_experts * 3) % num_experts
    uniform = torch.full((num_experts * 3, num_experts), 1 / num_experts)
    assert gshard_loss(uniform, ids).item() == pytest.approx(1)
    collapsed = torch.eye(num_experts)[torch.zeros(7, dtype=torch.long)]
    assert gshard_loss(collapsed, torch.zeros(7, dtype=torch.long)).item() == pytest.approx(num_experts)


def test_importance_and_load_are_0_when_balanced_and_e_when_collapsed():
    assert squared_variation(torch.full((4,), 3.0)) == 0
    assert squared_variation(torch.tensor([8.0, 0, 0, 0])).item() == pytest.approx(4)


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("std", [0.25, 1e-3])
def test_load_loss_equals_its_formula(top_k, std):
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(17, 4, dtype=torch.float64, generator=generator)
    noisy = clean + std * torch.randn(17, 4, dtype=torch.float64, generator=generator)
    threshold = noisy.sort(1, descending=True).values[:, top_k - 1]
    expected = plain_load_loss(clean.tolist(), threshold.tolist(), std)
    assert load_loss(clean, threshold, std).item() == pytest.approx(expected, rel=1e-12)
    ids = noisy.topk(top_k).indices
    both = auxiliary_loss("load_importance", clean, noisy, noisy.softmax(1), ids, std)
    assert both.item() == pytest.approx((importance_loss(clean.softmax(1)).item() + expected) / 2, rel=1e-12)


def test_tutel_variant_compares_probabilities_with_a_logit():
    clean, noisy = LOGITS, LOGITS + torch.tensor([[0.1, -0.2], [0.0, 0.3], [0.2, 0.1]], dtype=torch.float64)
    probs = clean.softmax(1)
    expected = plain_load_loss(probs.tolist(), noisy.amax(1).tolist(), 0.5)
    ids = noisy.topk(1).indices
    loss = auxiliary_loss("load_importance_tutel", clean, noisy, noisy.softmax(1), ids, 0.5)
    assert loss.item() == pytest.approx((importance_loss(probs).item() + expected) / 2, rel=1e-12)


def test_load_loss_tends_to_its_no_noise_limit():
    clean = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    threshold = clean.amax(1) - 1e-3  # no margin is exactly 0
    assert load_loss(clean, threshold, 1e-6).item() == pytest.approx(load_loss(clean, threshold, 0.0).item())


@pytest.mark.parametrize("kind", ["gshard", "load_importance", "load_importance_tutel", "none"])
@pytest.mark.parametrize("training", [True, False])
def test_one_expert_gives_finite_losses_and_gradients(kind, training):
    layer = make_layer(num_experts=1, aux_loss=kind, gate_noise=1.0).train(training)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    y, loss = layer(x)
    (y.sum() + loss).backward()
    assert loss == (1 if kind == "gshard" else 0)
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(layer.router.weight.grad).all()


@pytest.mark.parametrize("aux_loss", ["load_importance", "load_importance_tutel"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_load_importance_gradient(aux_loss, top_k):
    config = MoEConfig(4, 4, 4, aux_loss=aux_loss, gate_noise=1.0)

    def loss(logits):
        torch.manual_seed(0)  # the same noise every time
        return route(logits, config, top_k, training=True).aux_loss

    logits = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


def test_noise_has_the_stated_scale():
    config = MoEConfig(4, 4, 4, gate_noise=2.0)
    torch.manual_seed(0)
    logits = torch.zeros(20000, 4, dtype=torch.float64)
    noise = route(logits, config, 1, training=True).probs.log()
    noise = noise - noise.mean(1, keepdim=True)  # softmax leaves the noise less its mean: 3/4 of the variance
    assert noise.std().item() == pytest.approx(2.0 / 4 * math.sqrt(3 / 4), rel=0.02)
