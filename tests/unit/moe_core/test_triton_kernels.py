"""Triton's kernels of rows, routing, auxiliary losses and the dispatch plan against the torch ones:
values, every gradient, and which of them run.

On a CUDA device `TestKernels` runs there. `TRITON_INTERPRET=1 pytest <this file>` runs it on a CPU,
in Triton's interpreter; a variable that counts when Triton is first imported, so
`test_under_the_interpreter` starts a process.
"""

# T tokens, E experts, K top-k, N rows, M model dim

import logging
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import make_layer, route_by_torch, route_by_triton
from triton_cases import CHEAP_CHECKS, INTERPRETED, compile_launches, run_interpreted

from moe_core import LOSSES as REGISTERED_LOSSES
from moe_core import MoEConfig, MoELayer
from moe_core.ops import (
    DispatchPlan,
    backend,
    combine,
    dispatch,
    loss_of_sums,
    make_plan,
)
from moe_core.ops.native import library
from moe_core.ops.native.instruction_sets import SETS
from moe_core.ops.route.inputs import RouteGradients, RouteSettings, SavedRoute
from moe_core.router import LinearRouter
from moe_core.routing import logits_of, route_by_tokens, router_logits

DEVICE = "cpu" if INTERPRETED else "cuda"
OPS = torch.ops.moe_core
LOSSES = [("none", 0.0), ("gshard", 0.0), ("load_importance", 0.0), ("load_importance", 0.3)]
LOSSES = [*LOSSES, ("load_importance_tutel", 0.3)]
KINDS = ("none", "gshard", "load_importance", "load_importance_tutel")
# T, E, K: several blocks, E and K no powers of two; one of each; several blocks; as many experts as
# a tile holds tokens; every expert; no token
SIZES = [(70, 6, 3), (1, 1, 1), (150, 8, 1), (5, 1024, 8), (9, 5, 5), (0, 4, 2)]


def random(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(DEVICE, dtype)


ROUTES = (route_by_triton, route_by_torch)


def plan_for(
    num_tokens: int, top_k: int, capacity: int | None, num_experts: int = 8
) -> DispatchPlan:
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices
    return make_plan(ids.to(DEVICE), num_experts, capacity)


def tolerance(*dtypes: torch.dtype) -> dict[str, float]:
    size = max(torch.finfo(dtype).eps for dtype in dtypes)
    return {"rtol": 8 * size, "atol": 8 * size}


def with_gradients(function, inputs, seed: int = 3) -> list[torch.Tensor]:
    """Floating-point outputs of `function`, weighted at random, and the gradients of the inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    if isinstance(outputs, torch.Tensor):
        outputs = [outputs]
    outputs = [y for y in outputs if y.is_floating_point()]
    loss = sum(
        (y * random(*y.shape, dtype=y.dtype, seed=seed + i)).sum() for i, y in enumerate(outputs)
    )
    return [*outputs, *torch.autograd.grad(loss, inputs, materialize_grads=True)]


@pytest.fixture(autouse=True)
def nothing_said_yet():
    backend.language.cache_clear()
    backend._log_once.cache_clear()


@pytest.mark.gpu
class TestKernels:
    __test__ = INTERPRETED or torch.cuda.is_available()

    # T, M, K, capacity: one tile; several in each direction; everything dropped; nothing there
    @pytest.mark.parametrize(
        ("num_tokens", "width", "top_k", "capacity", "dtype"),
        [
            (7, 3, 2, 2, torch.float64),
            (130, 40, 1, None, torch.float32),
            (9, 1100, 3, 4, torch.float32),
            (5, 8, 2, 0, torch.float32),
            (0, 4, 1, 3, torch.float32),
            (7, 3, 2, 2, torch.bfloat16),
            (9, 1100, 3, 4, torch.float16),
        ],
    )
    def test_rows_equal_torch(self, num_tokens, width, top_k, capacity, dtype):
        plan = plan_for(num_tokens, top_k, capacity)
        num_used, num_rows = int(plan.offsets[-1]), len(plan.choices)
        gates_dtype = torch.promote_types(dtype, torch.float32)
        tokens = random(num_tokens, width, dtype=dtype)
        rows = random(num_rows, width, dtype=dtype, seed=1)
        gates = random(num_tokens, top_k, dtype=gates_dtype, seed=2)

        def run(kernels):
            return [
                *with_gradients(lambda x: dispatch(x, plan, kernels)[:num_used], [tokens]),
                *with_gradients(lambda r, g: combine(r, g, plan, kernels), [rows, gates]),
            ]

        got, expected = run("triton"), run("torch")
        assert [x.dtype for x in got] == [dtype, dtype, gates_dtype, dtype, gates_dtype]
        assert torch.equal(got[0], expected[0])
        bound = tolerance(dtype, gates_dtype)
        bound["atol"] *= max(width, 1) ** 0.5  # the gradient of a gate is a sum over the width
        torch.testing.assert_close(got, expected, **bound)

    def test_rows_that_hold_no_choice_may_hold_anything_or_be_missing(self):
        plan = plan_for(20, 2, 6)
        num_used = int(plan.kept.sum())
        assert num_used < len(plan.choices)
        rows, gates = random(len(plan.choices), 5), random(20, 2, seed=1)
        rows[num_used:] = float("nan")

        def run(kernels, rows):
            y, *grads = with_gradients(lambda r, g: combine(r, g, plan, kernels), [rows, gates])
            assert grads[0][num_used:].eq(0).all()
            return y, grads[0][:num_used], grads[1]

        expected = run("torch", rows)
        torch.testing.assert_close(run("triton", rows), expected)
        torch.testing.assert_close(run("triton", rows[:num_used]), expected)

    def test_gradients_of_any_strides(self):
        plan = plan_for(20, 2, 3)
        rows, gates = random(len(plan.choices), 5), random(20, 2, seed=1)
        rows, gates = rows.t().contiguous().t().requires_grad_(), gates.requires_grad_()
        got, expected = (  # sum() gives a gradient without strides
            torch.autograd.grad(combine(rows, gates, plan, kernels).sum(), (rows, gates))
            for kernels in ("triton", "torch")
        )
        torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize(
        ("sizes", "loss"),
        [(SIZES[0], loss) for loss in LOSSES]
        + [(sizes, loss) for sizes in SIZES[1:] for loss in LOSSES[1:4:2]],
        ids=str,
    )
    def test_route_equals_torch(self, sizes, loss):
        num_tokens, num_experts, top_k = sizes
        for dtype, bound in (
            (torch.float64, {"rtol": 1e-9, "atol": 1e-11}),
            (torch.float32, {"rtol": 1e-4, "atol": 1e-5}),
        ):
            logits = random(num_tokens, num_experts, dtype=dtype)
            noise = None
            if loss[1]:
                noise = random(num_tokens, num_experts, seed=1)
            for normalize in (False, True) if top_k > 1 else (False,):
                (ids, *got), (expected_ids, *expected) = (
                    self.routed(route, logits, noise, top_k, normalize, *loss) for route in ROUTES
                )
                assert torch.equal(ids, expected_ids)
                torch.testing.assert_close(got, expected, **bound)

    @staticmethod
    def routed(
        function, logits, noise, top_k, normalize, loss, noise_std, outputs=slice(None)
    ) -> list[torch.Tensor]:
        """ids, and the outputs wanted with the gradient of the logits that only they have."""

        def forward(logits):
            outcome = function(logits, noise, top_k, normalize, loss, noise_std)
            ids.append(outcome[1])
            return (outcome[0], *outcome[2:])[outputs]

        ids = []
        results = with_gradients(forward, [logits])
        return [*ids, *results]

    @pytest.mark.parametrize("loss", LOSSES, ids=str)
    def test_each_output_of_route_alone_has_its_gradient(self, loss):
        """Gate values, probabilities and the sums of the loss, if there are any."""
        logits = random(9, 5, dtype=torch.float64)
        noise = random(9, 5, seed=1) if loss[1] else None
        for i in range(2 if loss[0] == "none" else 3):
            only = slice(i, i + 1)
            got, expected = (self.routed(f, logits, noise, 2, True, *loss, only) for f in ROUTES)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)

    def test_a_tie_goes_to_the_expert_of_the_lowest_number(self):
        logits = torch.tensor([[0.0, 1, 1, 1, 0], [0, 0, 0, 0, 0]], device=DEVICE)
        ids = route_by_triton(logits, None, 4, False, "gshard", 0.0)[1]
        assert ids.tolist() == [[1, 2, 3, 0], [0, 1, 2, 3]]

    # numpy's, in the interpreter
    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("whole_row", [True, False])
    def test_logits_that_are_no_numbers_choose_experts_that_exist(self, whole_row, value):
        logits = random(4, 5)
        logits[1, 0 if whole_row else 2 :] = value
        for loss, noise_std in LOSSES:
            x, noise = logits.clone().requires_grad_(), None
            if noise_std:
                noise = torch.full_like(logits, 0.1)
            gates, ids, probs, sums = route_by_triton(x, noise, 3, True, loss, noise_std)
            assert all(sorted(set(row)) == sorted(row) for row in ids.tolist())
            assert ((ids >= 0) & (ids < 5)).all()
            torch.testing.assert_close(probs, logits.softmax(1), equal_nan=True)
            (gates.sum() + sums.sum()).backward()
            assert torch.isfinite(x.grad[[0, 2, 3]]).all()

    def test_route_takes_halves(self):
        logits = random(6, 4, dtype=torch.bfloat16).requires_grad_()
        gates, _, _, _ = route_by_triton(logits, None, 2, True, "gshard", 0.0)
        assert gates.dtype == torch.float32
        gates[:, 0].sum().backward()
        assert logits.grad.dtype == torch.bfloat16

    @given(st.data())
    @settings(max_examples=20)
    def test_plan_equals_torch(self, data):
        num_experts = data.draw(st.integers(1, 9))
        top_k = data.draw(st.integers(1, min(num_experts, 3)))
        num_tokens = data.draw(st.sampled_from([0, 1, 7, 127, 128, 129, 300]))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        ids = scores.topk(top_k).indices.to(DEVICE)
        capacity = data.draw(st.none() | st.integers(0, 60))
        if capacity is not None and data.draw(st.booleans()):
            capacity = torch.tensor(capacity, device=DEVICE)
        # with ties
        priority = torch.randint(5, (num_tokens, top_k), generator=generator).to(DEVICE)
        priority = data.draw(st.sampled_from([None, priority[:, 0], priority]))
        got = make_plan(ids, num_experts, capacity, priority, "triton")
        expected = make_plan(ids, num_experts, capacity, priority, "torch")
        for ours, theirs in zip(got, expected, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or (torch.equal(ours, theirs) and ours.dtype == theirs.dtype)

    def test_plan_of_many_experts(self):
        # more than a program of the count compares at a time (64), and no multiple of it; 40 counts
        # of blocks and choices, of which a program adds up 32 at a time
        generator = torch.Generator().manual_seed(0)
        ids = torch.rand(520, 100, generator=generator).topk(8).indices.to(DEVICE)
        got, expected = (make_plan(ids, 100, 1, None, kernels) for kernels in ("triton", "torch"))
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))

    def test_runs_repeat_bit_by_bit(self):
        def run():
            logits, rows = random(150, 8).requires_grad_(), random(240, 16, seed=1).requires_grad_()
            gates, ids, _, sums = route_by_triton(logits, None, 2, True, "gshard", 0.0)
            plan = make_plan(ids, 8, 30, None, "triton")
            y = combine(rows, gates, plan, "triton")
            loss = y.square().sum() + sums[0].square().sum()
            return [y, sums, *torch.autograd.grad(loss, (logits, rows))]

        assert all(torch.equal(*pair) for pair in zip(run(), run(), strict=True))

    def test_opcheck(self):
        plan = plan_for(7, 2, 2)
        choices, slots, kept = plan.choices, plan.slots, plan.kept
        tokens, gates, rows = random(7, 3), random(7, 2), random(len(choices), 3)
        logits, logits_noise = random(7, 8), random(7, 8, seed=1)
        _, ids, probs, sums = route_by_triton(logits, logits_noise, 2, True, "load_importance", 0.2)
        nothing = logits.new_empty(0)
        routed = (logits, None, logits_noise, ids, gates, probs, nothing, nothing)
        priority = probs.amax(1)
        noisy = ("triton", 2, True, "load_importance", 0.2, 0.2, "triton", "softmax")
        plain = ("triton", 2, True, "gshard", 0.25, 0.25, "triton", "softmax")
        grad_gates = torch.ones_like(gates)
        leaves = [t.clone().requires_grad_() for t in (tokens, rows, gates, logits)]
        x, weight = random(20, 16).requires_grad_(), random(4, 16, seed=1).requires_grad_()
        noise = random(20, 4, seed=2)
        loss_sums = (100 * random(2, 6).abs()).requires_grad_()
        for op, inputs in (
            (OPS.dispatch_rows, (leaves[0], choices, slots, kept, "triton")),
            (OPS.combine_rows, (*leaves[1:3], choices, slots, kept, "triton")),
            (OPS.make_plan, (ids, 8, None, ids.new_full((), 2), priority, 14, "triton")),
            (OPS.route, (leaves[3], None, logits_noise, None, *noisy)),
            (OPS.route, (leaves[3], None, None, None, *plain)),
            (OPS.route_backward, (*routed, grad_gates, None, sums, None, *noisy)),
            (OPS.route_backward, (*routed, None, probs, None, None, *noisy)),
            (OPS.route, (x, weight, noise, torch.float16, *plain)),
            (OPS.loss_of_sums, (loss_sums, None, 40, "load_importance")),
        ):
            torch.library.opcheck(op.default, inputs, test_utils=CHEAP_CHECKS)

    @pytest.mark.parametrize(
        ("config", "compiled"),
        [
            ({"capacity_factor": 0.0}, False),
            ({"capacity_factor": 1.0, "top_k": 2, "batch_prioritized": True}, False),
            ({"capacity_factor": 1.0, "top_k": 2, "aux_loss": "load_importance"}, True),
        ],
        ids=str,
    )
    def test_layer_equals_torch(self, config, compiled):
        torch.compiler.reset()
        x = random(13, 6).requires_grad_()
        outcomes = []
        for kernels in ("triton", "torch"):
            layer = make_layer(dtype=torch.float32, gate_noise=0.5, kernels=kernels, **config)
            function = layer.to(DEVICE)
            if compiled and kernels == "triton":
                function = torch.compile(layer, fullgraph=True, backend="aot_eager")
            # the last two: the number is a symbol
            for num_tokens in (13, 9, 11) if compiled else (13,):
                torch.manual_seed(0)
                y, aux_loss = function(x[:num_tokens])
            gradients = torch.autograd.grad(y.square().sum() + aux_loss, [x, *layer.parameters()])
            outcomes.append([y, aux_loss, *gradients])
        # fp32 (eps 6e-8): sums of at most 13 * 10 terms in another order, in four products
        torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-5)

    def test_the_log_names_triton(self, caplog):
        caplog.set_level(logging.INFO, "moe_core")
        assert {backend.language("triton", DEVICE) for _ in range(3)} == {"triton"}
        (line,) = caplog.messages
        version = sys.modules["triton"].__version__
        interpreted = " (interpreted)" if INTERPRETED else ""
        assert line == f"moe_core kernels: triton {version}{interpreted} on {DEVICE}"

    @pytest.mark.parametrize("num_experts", [1, 5, 64])
    @pytest.mark.parametrize("kind", KINDS)
    def test_loss_of_sums_equals_torch(self, kind, num_experts):
        total = torch.tensor(300.0, dtype=torch.float64, device=DEVICE)
        sums = (100 * random(2, num_experts, dtype=torch.float64).abs()).requires_grad_()
        for num_tokens in (300, 0, total, total * 0):
            value = loss_of_sums(kind, sums, num_tokens)
            expected = REGISTERED_LOSSES[kind]().value(sums, num_tokens)
            torch.testing.assert_close(value, expected)
            if kind != "none":
                (found,) = torch.autograd.grad(3 * value, sums)
                torch.testing.assert_close(found, torch.autograd.grad(3 * expected, sums)[0])
        no_sums = torch.zeros(2, 4, device=DEVICE, requires_grad=True)
        value = loss_of_sums("gshard", no_sums, 0)
        value.backward()
        assert value.item() == 0
        assert no_sums.grad.eq(0).all()


def tokens_of(num_tokens: int, model_dim: int, dtype=torch.float32) -> torch.Tensor:
    return random(num_tokens, model_dim, dtype=dtype, seed=num_tokens).requires_grad_()


@pytest.mark.gpu
class TestKernelsOfALinearRouter:
    """A linear router, its choice and the cast of the tokens in one kernel, against the layer's
    plain path."""

    __test__ = INTERPRETED or torch.cuda.is_available()

    @staticmethod
    def compare(config: MoEConfig, top_k: int, x: torch.Tensor, half: torch.dtype | None) -> None:
        """Choices, gate values, loss, probabilities and inputs in training, and the gradients of
        all of them; under autocast to `half`."""
        torch.manual_seed(1)
        router = LinearRouter(config).to(DEVICE)

        def fused():
            with torch.autocast(DEVICE, half, enabled=half is not None):
                routing = route_by_tokens(logits_of(router, x, config), config, top_k, True)
            assert routing.inputs is not None
            return routing, routing.inputs

        def plain():
            logits = router_logits(router, x)
            return route_by_tokens(logits, config, top_k, True), x.to(half or x.dtype)

        results = []
        for function in (fused, plain):
            torch.manual_seed(2)  # the noise is torch's own
            routing, inputs = function()
            total = routing.aux_loss * 0.7
            for seed, values in enumerate((routing.gates, routing.probs, inputs)):
                total = total + (values * random(*values.shape, seed=seed)).sum()
            gradients = torch.autograd.grad(total, [x, router.weight])
            outputs = [routing.expert_ids, routing.gates, routing.aux_loss, routing.probs]
            results.append([*outputs, inputs, *gradients])
        got, expected = results
        assert [t.dtype for t in got] == [t.dtype for t in expected]
        assert torch.equal(got[0], expected[0])
        # fp32 (eps 6e-8): logits are sums of at most 130 terms, gradients of the weight of 70
        tolerance = {"rtol": 2e-4, "atol": 2e-5}
        if x.dtype != torch.float32 or half is not None:
            tolerance = {"rtol": 1e-2, "atol": 1e-2}  # gradients of halves are added in fp32 here
        torch.testing.assert_close(got[1:4], expected[1:4], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[4:], expected[4:], **tolerance)

    # T, E, K, M: several blocks; one of each; the most experts; no token
    @pytest.mark.parametrize(
        ("sizes", "loss", "noise"),
        [
            *(((70, 6, 2, 100), kind, 1.0) for kind in KINDS),
            *(((33, 8, 1, 130), kind, 0.0) for kind in KINDS[:3]),
            ((1, 1, 1, 1), "gshard", 0.0),
            ((40, 64, 3, 64), "load_importance", 1.0),
            ((0, 4, 2, 16), "load_importance", 0.0),
        ],
        ids=str,
    )
    def test_equals_torch(self, sizes, loss, noise):
        num_tokens, num_experts, top_k, model_dim = sizes
        config = MoEConfig(
            model_dim, 4, num_experts, aux_loss=loss, gate_noise=noise, kernels="triton"
        )
        self.compare(config, top_k, tokens_of(num_tokens, model_dim), None)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_casts_the_tokens(self, dtype):
        config = MoEConfig(48, 4, 5, kernels="triton")
        self.compare(config, 2, tokens_of(50, 48, dtype), torch.float16)

    @pytest.mark.parametrize(
        "options",
        [
            {"router": "cosine"},
            {"gate_activation": "sigmoid"},
            {"balance": "bias"},
            {"z_loss_weight": 0.1},
            {"num_experts": 65},
            {"kernels": "torch"},
        ],
        ids=str,
    )
    def test_what_it_does_not_compute(self, options):
        config = MoEConfig(16, 8, **{"num_experts": 4, "kernels": "triton"} | options)
        layer = MoELayer(config).to(DEVICE)
        x = tokens_of(6, 16)
        logits = logits_of(layer.router, x, config)
        routing = route_by_tokens(logits, config, 1, True, balance=layer.balance)
        assert routing.inputs is None

    def test_hooks_of_the_router_run(self):
        """As those that record its logits."""
        layer = MoELayer(MoEConfig(16, 8, 4, kernels="triton")).to(DEVICE)
        seen = []
        layer.router.register_forward_hook(lambda *values: seen.append(values[2].shape))
        layer(tokens_of(6, 16))
        assert seen == [(6, 4)]


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(1260)  # on a busy machine
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__)


@pytest.mark.skipif(INTERPRETED, reason="compiles, which the interpreter does not")
@pytest.mark.parametrize(
    "architecture", [90, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (80, 100))]
)
def test_kernels_compile_without_a_gpu(architecture, monkeypatch):
    pytest.importorskip("triton")
    from moe_core.ops.combine import triton as triton_rows
    from moe_core.ops.plan import triton as triton_plan
    from moe_core.ops.route import loss_triton
    from moe_core.ops.route import triton as triton_route

    compiled = compile_launches(monkeypatch, architecture)
    plan = make_plan(torch.arange(40).view(20, 2) % 8, 8, 3)
    tokens, gates = torch.zeros(20, 64, dtype=torch.bfloat16), torch.zeros(20, 2)
    rows = triton_rows.dispatch_rows(tokens, plan.choices, 2)
    grad = triton_rows.sum_rows(rows, plan.slots, plan.kept, gates)
    triton_rows.combine_rows_backward(grad, rows, gates, plan.choices, plan.slots, plan.kept)
    for limit, priority in ((None, None), (3, None), (torch.tensor(3), torch.zeros(20))):
        triton_plan.make_plan(plan.slots, 24, limit, priority, 40)
    total = torch.zeros(())
    logits, tokens, weight = torch.zeros(20, 100), torch.zeros(40, 64), torch.zeros(8, 64)
    for x, w, noise, loss, cast_to in (
        (logits, None, None, "gshard", None),
        (logits, None, logits, "load_importance", None),
        (tokens, weight, torch.zeros(40, 8), "load_importance", torch.bfloat16),
    ):
        settings = RouteSettings(2, True, loss, 0.1, 0.1)
        gates, ids, probs, sums, inputs, *kept = triton_route.forward(
            x, w, noise, cast_to, settings
        )
        grads = RouteGradients(gates, None, sums, inputs if cast_to else None)
        saved = SavedRoute(x, w, noise, ids, gates, probs, *kept)
        triton_route.backward(saved, grads, settings)
        for count in (None, total):
            loss_triton.loss_of_sums(sums, count, 40, loss)
            loss_triton.loss_of_sums_backward(total, sums, count, 40, loss)
    assert len(compiled) == 10
    # nothing atomic
    assert not any(re.search(r"\b(atom|red)\.", kernel.asm["ptx"]) for kernel in compiled.values())


# Which kernels run


@pytest.mark.parametrize(
    ("kernels", "has_library", "named"),
    [
        ("torch", True, "torch"),
        ("auto", False, "torch"),
        ("auto", True, "C++ (AVX2) and torch"),
    ],
)
def test_the_log_names_what_runs_on_a_cpu_once(kernels, has_library, named, caplog, monkeypatch):
    found = None
    if has_library:
        (avx2,) = [known for known in SETS if known.name == "avx2"]
        found = avx2, None
    monkeypatch.setattr(library, "chosen", lambda kernels="auto": found)
    caplog.set_level(logging.INFO, "moe_core")
    expected = "cpp" if "C++" in named else "torch"
    assert [backend.language(kernels, "cpu") for _ in range(2)] == [expected] * 2
    assert caplog.messages == [f"moe_core kernels: {named} on cpu"]


def test_auto_says_why_it_is_not_triton(caplog, monkeypatch):
    # what importing it does where it is not installed
    monkeypatch.setitem(sys.modules, "triton", None)
    assert [backend.language("auto", "cuda") for _ in range(2)] == ["torch"] * 2
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "moe_core kernels: torch on cuda, since Triton cannot run there: "
    )
    assert "ModuleNotFoundError" in record.getMessage()
    with pytest.raises(ValueError, match=r"'triton'.*'cuda'.*ModuleNotFoundError"):
        backend.language("triton", "cuda")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes a CPU")
def test_triton_forced_on_a_cpu_without_the_interpreter():
    layer = make_layer(kernels="triton")
    with pytest.raises(ValueError, match=r"'triton'.*'cpu'.*TRITON_INTERPRET=1"):
        layer(torch.zeros(3, 6, dtype=torch.float64))


def test_shapes_alone_need_no_kernels(caplog):
    caplog.set_level(logging.INFO, "moe_core")
    assert backend.language("triton", "meta") == "torch"
    assert caplog.messages == []


def test_moe_core_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import moe_core"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
