"""Routing and planning in C++ against the torch forms: every output, every gradient, the plan
number for number."""

# T tokens, E experts, K top-k

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import make_layer

from moe_core import MoEConfig
from moe_core.ops import make_plan
from moe_core.kernels import library_x86, routing
from moe_core.router import _route_by_torch, route

pytestmark = pytest.mark.skipif(
    not library_x86.usable(torch.float32), reason="this CPU or compiler lacks the instructions"
)
OPS = torch.ops.moe_core
LOSSES = [("none", 0.0), ("gshard", 0.0), ("load_importance", 0.0), ("load_importance", 0.3)]
LOSSES = [*LOSSES, ("load_importance_tutel", 0.3)]
NUMBERS_OF_TOKENS = [0, 1, 15, 16, 17, 100, 256, 600]  # groups are of 16, blocks of 256


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_x86(*arguments):
    return routing.route(*arguments, "x86")


def routed(function, dtype, logits, noise, arguments, outputs=slice(None)) -> list[torch.Tensor]:
    """ids, and the outputs wanted with the gradients of the clean logits and of the noise that only
    they have."""
    clean, noise = (x.to(dtype).requires_grad_() for x in (logits, noise))
    noisy = clean + noise if arguments[-1] else clean
    gates, ids, *others = function(clean, noisy, *arguments)
    wanted = [gates, *others][outputs]
    loss = sum((y * random(*y.shape, seed=3 + i).to(dtype)).sum() for i, y in enumerate(wanted))
    return [ids, *wanted, *torch.autograd.grad(loss, (clean, noise), materialize_grads=True)]


def assert_like_torch(
    logits, noise, arguments, outputs=slice(None), tolerance: float = 5e-6
) -> None:
    """To a few roundings of fp32, beside fp64."""
    ids, *got = routed(by_x86, torch.float32, logits, noise, arguments, outputs)
    expected_ids, *expected = routed(
        _route_by_torch, torch.float64, logits, noise, arguments, outputs
    )
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(got, [x.float() for x in expected], rtol=tolerance, atol=tolerance)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_route_equals_torch(data):
    num_experts = data.draw(st.integers(1, 9) | st.sampled_from([16, 17, 40]))
    num_tokens = data.draw(st.sampled_from(NUMBERS_OF_TOKENS))
    top_k, normalize = data.draw(st.integers(1, min(num_experts, 5))), data.draw(st.booleans())
    loss = data.draw(st.sampled_from(LOSSES))
    logits, noise = random(num_tokens, num_experts), 0.3 * random(num_tokens, num_experts, seed=1)
    assert_like_torch(logits, noise, (top_k, normalize, *loss))


@pytest.mark.parametrize(
    "outputs", [slice(0, 1), slice(1, 2), slice(2, 3)], ids=["gates", "probs", "sums"]
)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_each_output_alone_has_its_gradient(loss, normalize, outputs):
    if outputs == slice(2, 3) and loss[0] == "none":
        pytest.skip("there are no sums")
    assert_like_torch(random(19, 5), random(19, 5, seed=1), (2, normalize, *loss), outputs)


def test_many_experts_far_logits_and_large_margins():
    """Margins of hundreds of standard deviations, probabilities that are 0; the noisy logits are
    already rounded."""
    for loss in LOSSES:
        arguments = (8, True, *loss)
        assert_like_torch(
            40 * random(20, 1024), random(20, 1024, seed=1), arguments, tolerance=5e-5
        )


def test_a_tie_goes_to_the_expert_of_the_lowest_number():
    logits = torch.tensor(
        [[0.0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [-torch.inf, -torch.inf, 0, -torch.inf, 0]]
    )
    for top_k in range(1, 6):
        ids = by_x86(logits, logits, top_k, False, "gshard", 0.0)[1].tolist()
        assert ids == [
            order[:top_k] for order in ([1, 2, 3, 0, 4], [0, 1, 2, 3, 4], [2, 4, 0, 1, 3])
        ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("whole_row", [True, False])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_logits_that_are_no_numbers(loss, whole_row, value):
    """They choose experts that exist, each once, and spoil no other token."""
    logits = random(40, 5)
    logits[7, 0 if whole_row else 2 :] = value
    others = torch.arange(40) != 7
    noise = torch.full((40, 5), 0.1)
    arguments = (3, True, *loss)
    ids, gates, probs, sums, *grads = routed(by_x86, torch.float32, logits, noise, arguments)
    expected_ids, expected_gates, expected_probs, expected_sums, *expected_grads = routed(
        _route_by_torch, torch.float32, logits, noise, arguments
    )
    assert ((ids >= 0) & (ids < 5)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert torch.equal(ids[others], expected_ids[others])
    close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    # the second sum depends on token 7's ids
    comparable = slice(None) if torch.equal(ids, expected_ids) else slice(1)
    torch.testing.assert_close(
        (probs, sums[comparable]), (expected_probs, expected_sums[comparable]), **close
    )
    torch.testing.assert_close(gates[others], expected_gates[others], **close)
    if torch.isfinite(expected_sums).all():
        torch.testing.assert_close(
            [g[others] for g in grads], [g[others] for g in expected_grads], **close
        )


def test_nan_is_the_largest():
    logits = torch.tensor([[0.0, torch.nan, torch.inf, 5.0], [0.0, torch.inf, torch.nan, 5.0]])
    assert by_x86(logits, logits, 4, False, "none", 0.0)[1].tolist() == [[1, 2, 3, 0], [1, 2, 3, 0]]


def test_any_strides():
    logits = random(5, 40).t().requires_grad_()  # [40, 5], by columns
    outcomes = []
    for function in (by_x86, _route_by_torch):
        outputs = function(logits, logits, 2, True, "gshard", 0.0)
        # sum() has no strides
        loss = outputs[0][:, 0].sum() + outputs[2].t()[0].sum() + outputs[3][0].sum() * 2
        outcomes.append([*outputs, *torch.autograd.grad(loss, logits)])
    torch.testing.assert_close(*outcomes)
    ids = torch.stack([torch.arange(40) % 4, torch.arange(40) % 3], 0).t()
    assert_same_plan(ids, 4, 9, torch.arange(80).remainder(7)[::2])


def test_any_number_of_threads_gives_the_same_bits():
    logits, noisy = random(5000, 8).requires_grad_(), random(5000, 8, seed=1).requires_grad_()
    threads, outcomes = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            outputs = by_x86(logits, noisy, 2, True, "load_importance", 0.3)
            loss = outputs[0][:, 0].sum() + outputs[3].square().sum()
            outcomes.append([*outputs, *torch.autograd.grad(loss, (logits, noisy))])
    finally:
        torch.set_num_threads(threads)
    for outcome in outcomes[1:]:
        assert all(torch.equal(*pair) for pair in zip(outcome, outcomes[0], strict=True))


@pytest.mark.parametrize("aux_loss", ["gshard", "load_importance", "load_importance_tutel", "none"])
def test_router_gives_the_same_routing(aux_loss):
    config = MoEConfig(4, 4, 6, aux_loss=aux_loss, gate_noise=1.0)
    outcomes = []
    for kernels in ("auto", "torch"):
        logits = random(33, 6).requires_grad_()
        torch.manual_seed(0)  # the noise is torch's own
        outcome = route(logits, config, 2, training=True, kernels=kernels)
        (gradient,) = torch.autograd.grad(outcome.aux_loss + outcome.gates[:, 0].sum(), logits)
        outcomes.append([*outcome, gradient])
    torch.testing.assert_close(*outcomes)


# The plan


def assert_same_plan(ids, num_experts, capacity, priority, num_rows: int | None = None) -> None:
    got = routing.make_plan(ids, num_experts, capacity, priority, num_rows, "x86")
    expected = make_plan(ids, num_experts, capacity, priority, "torch", num_rows)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (torch.equal(ours, theirs) and ours.dtype == theirs.dtype)


def draw_ids(data) -> tuple[torch.Tensor, int, torch.Generator]:
    """Expert ids [T, K], the number of experts, and what draws the rest."""
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, min(num_experts, 3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.rand(data.draw(st.integers(0, 70)), num_experts, generator=generator)
    return scores.topk(top_k).indices, num_experts, generator


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_plan_equals_torch(data):
    ids, num_experts, generator = draw_ids(data)
    capacity = data.draw(st.none() | st.integers(0, 30))
    priority = torch.randint(5, (len(ids),), generator=generator)  # with ties
    assert_same_plan(ids, num_experts, capacity, data.draw(st.sampled_from([None, priority])))


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_plan_with_a_capacity_for_each_expert_and_a_priority_for_each_choice(data):
    ids, num_experts, generator = draw_ids(data)
    limits = torch.randint(30, (num_experts,), generator=generator)
    priority = torch.randint(5, ids.shape, generator=generator)
    kept = torch.minimum(ids.flatten().bincount(minlength=num_experts), limits).sum()
    assert_same_plan(ids, num_experts, limits, priority, int(kept) + data.draw(st.integers(0, 9)))


def test_plan_of_many_experts():
    ids = random(40, 1024).topk(8).indices
    for capacity in (None, 1):
        assert_same_plan(ids, 1024, capacity, None)


@pytest.mark.parametrize("expert", [-1, 4])
def test_an_expert_that_does_not_exist(expert):
    with pytest.raises(ValueError, match=r"below num_experts \(4\)"):
        make_plan(torch.tensor([[0], [expert]]), 4, None)


def test_ids_and_capacities_in_32_bits():
    ids, capacity = torch.randint(4, (30, 2)), torch.tensor([3, 0, 9, 2])
    expected = make_plan(ids, 4, capacity, kernels="torch", num_rows=20)
    found = make_plan(ids.int(), 4, capacity.int(), num_rows=20)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_fewer_rows_than_choices_that_are_kept():
    with pytest.raises(ValueError, match=r"num_rows \(1\) at least"):
        make_plan(torch.tensor([[0], [1]]), 4, torch.tensor([1, 1, 1, 1]), num_rows=1)


# As ops, and which of them run


@pytest.mark.parametrize("capacity", [None, 2])
def test_opcheck(capacity):
    logits, noisy = random(7, 8), random(7, 8, seed=1)
    gates, ids, probs, sums = by_x86(logits, noisy, 2, True, "load_importance", 0.2)
    loss = (True, "load_importance", 0.2, "x86")
    limits = None if capacity is None else ids.new_full((8,), capacity)
    for op, inputs in (
        (OPS.make_plan, (ids, 8, limits, probs.amax(1), 14, "x86")),
        (OPS.route, (noisy.requires_grad_(), logits.requires_grad_(), 2, *loss)),
        (OPS.route, (noisy, None, 2, True, "gshard", 0.0, "x86")),
        (OPS.route_backward, (noisy.detach(), None, ids, probs, gates, None, sums, *loss)),
        (
            OPS.route_backward,
            (noisy.detach(), logits.detach(), ids, probs, None, probs, None, *loss),
        ),
    ):
        torch.library.opcheck(op.default, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [{"capacity_factor": 0.0}, {"top_k": 2, "batch_prioritized": True}], ids=str
)
def test_layer_equals_the_one_by_torch(config, dtype):
    outcomes = []
    x = random(30, 6).requires_grad_()
    for kernels in ("auto", "torch"):
        layer = make_layer(dtype=torch.float32, kernels=kernels, **config)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y, aux_loss = layer(x)
        gradients = torch.autograd.grad(
            y.float().square().sum() + aux_loss, [x, *layer.parameters()]
        )
        outcomes.append([y, aux_loss, *gradients, *layer.last_routing])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*outcomes, rtol=tolerance, atol=tolerance)


def test_which_kernels_run(monkeypatch):
    assert routing.choose("auto", "cpu") == "x86"
    assert routing.choose("auto", "cpu", torch.float64) == "torch"
    assert routing.choose("torch", "cpu") == "torch"
    assert routing.choose("auto", "meta") == "torch"
    with pytest.raises(ValueError, match=r"kernels \('x86'\) must be one of auto, triton, torch"):
        routing.choose("x86", "cpu")
    monkeypatch.setattr(library_x86, "_cpu_flags", lambda: frozenset({"avx2"}))
    assert routing.choose("auto", "cpu") == "torch"
