"""Auxiliary losses against hand-computed values and a plain evaluation of their formulas."""

# T tokens, E experts, K top-k

import math

import pytest
import torch
from moe_cases import make_layer

from moe_core import MoEConfig
from moe_core.losses import (
    RoutingScores,
    auxiliary_loss,
    expected_load,
    expert_sums,
    gshard_loss,
    gshard_sums,
    squared_variation,
)
from moe_core.routing import route_by_tokens

# Three tokens, two experts: probabilities .75 / .25, .75 / .25 and .5 / .5, all of them choose
# expert 0.
LOGITS = torch.tensor([[math.log(3), 0.0], [math.log(3), 0.0], [0.0, 0.0]], dtype=torch.float64)
FIRST = torch.zeros(3, dtype=torch.long)


def plain_load_loss(clean: list[list[float]], threshold: list[float], std: float) -> float:
    """arXiv 1701.06538, appendix A, in Python numbers."""
    load = []
    for column in zip(*clean, strict=True):
        margins = [t - c for c, t in zip(column, threshold, strict=True)]
        load.append(sum(0.5 * math.erfc(margin / (std * math.sqrt(2))) for margin in margins))
    mean = sum(load) / len(load)
    return sum((x - mean) ** 2 for x in load) / (len(load) - 1) / (mean**2 + 1e-10)


def test_three_tokens_by_hand_gshard_and_importance():
    probs = LOGITS.softmax(1)
    # mean probability of expert 0: 2/3; its share: 1; times E = 2
    assert gshard_loss(gshard_sums(probs, FIRST), 3).item() == pytest.approx(4 / 3)
    # importance 2 and 1: unbiased variance 1/2, mean 3/2
    assert squared_variation(probs.sum(0)).item() == pytest.approx(0.5 / 1.5**2)
    # without noise every clean logit at or above the largest one counts: loads 3 and 1 (the tie of
    # token 2)
    load = expected_load(LOGITS, LOGITS.amax(1), 0.0)
    assert squared_variation(load).item() == pytest.approx(2 / 2**2)


def test_losses_when_balanced_and_collapsed():
    """GShard's is 1 and E, those of importance and load are 0 and E."""
    for num_experts in (1, 2, 5):
        ids = torch.arange(num_experts * 3) % num_experts
        uniform = torch.full((num_experts * 3, num_experts), 1 / num_experts)
        assert gshard_loss(gshard_sums(uniform, ids), len(ids)).item() == pytest.approx(1)
        first = torch.zeros(7, dtype=torch.long)
        collapsed = gshard_sums(torch.eye(num_experts)[first], first)
        assert gshard_loss(collapsed, 7).item() == pytest.approx(num_experts)
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
    load = squared_variation(expected_load(clean, threshold, std)).item()
    assert load == pytest.approx(expected, rel=1e-12)
    ids = noisy.topk(top_k).indices
    scores = RoutingScores(clean, noisy, noisy.softmax(1), ids, std)
    both = auxiliary_loss("load_importance", expert_sums("load_importance", scores), 17)
    importance = squared_variation(clean.softmax(1).sum(0)).item()
    assert both.item() == pytest.approx((importance + expected) / 2, rel=1e-12)


def test_tutel_variant_compares_probabilities_with_a_logit():
    noise = torch.tensor([[0.1, -0.2], [0.0, 0.3], [0.2, 0.1]], dtype=torch.float64)
    clean, noisy = LOGITS, LOGITS + noise
    probs = clean.softmax(1)
    load = plain_load_loss(probs.tolist(), noisy.amax(1).tolist(), 0.5)
    scores = RoutingScores(clean, noisy, noisy.softmax(1), noisy.topk(1).indices, 0.5)
    sums = expert_sums("load_importance_tutel", scores)
    importance = squared_variation(probs.sum(0)).item()
    loss = auxiliary_loss("load_importance_tutel", sums, 3).item()
    assert loss == pytest.approx((importance + load) / 2, rel=1e-12)


def test_load_loss_tends_to_its_no_noise_limit():
    clean = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    threshold = clean.amax(1) - 1e-3  # no margin is exactly 0
    noisy, limit = (expected_load(clean, threshold, std).tolist() for std in (1e-6, 0.0))
    assert noisy == pytest.approx(limit)


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
        return route_by_tokens(logits, config, top_k, training=True).aux_loss

    logits = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


def test_noise_has_the_stated_scale():
    config = MoEConfig(4, 4, 4, gate_noise=2.0)
    torch.manual_seed(0)
    logits = torch.zeros(20000, 4, dtype=torch.float64)
    noise = route_by_tokens(logits, config, 1, training=True).probs.log()
    # softmax leaves the noise less its mean: 3/4 of the variance
    noise = noise - noise.mean(1, keepdim=True)
    assert noise.std().item() == pytest.approx(2.0 / 4 * math.sqrt(3 / 4), rel=0.02)


@pytest.mark.parametrize("kind", ["gshard", "load_importance"])
def test_reduced_sums_give_the_loss_of_all_tokens(kind):
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(11, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    noisy = clean + torch.randn(11, 4, dtype=torch.float64, generator=generator)

    def sums(part: slice) -> torch.Tensor:
        probs = noisy[part].softmax(1)
        scores = RoutingScores(clean[part], noisy[part], probs, probs.topk(2).indices, 1.0)
        return expert_sums(kind, scores)

    messages = []

    def add_the_other_rank(message: torch.Tensor) -> torch.Tensor:
        messages.append(message)
        return message + torch.cat([sums(slice(3, 11)).flatten(), message.new_tensor([8])])

    loss = auxiliary_loss(kind, sums(slice(3)), 3, add_the_other_rank)
    expected = auxiliary_loss(kind, sums(slice(11)), 11)
    assert len(messages) == 1
    assert messages[0][-1] == 3
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, clean, retain_graph=True) for value in (loss, expected))
    )


def test_losses_of_nothing_are_0():
    nothing = torch.zeros(2, 4)
    for reduce in (None, lambda message: pytest.fail("no loss needs no message")):
        assert auxiliary_loss("none", nothing, 3, reduce=reduce) == 0
    assert auxiliary_loss("gshard", nothing, 0, reduce=lambda message: message) == 0
