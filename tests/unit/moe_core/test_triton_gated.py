"""Gated experts in the Triton kernels against the specification, under Triton's interpreter where
there is no GPU."""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

from contextlib import nullcontext

import pytest
import torch
from gated_cases import FUNCTIONS, assert_close, gated_inputs, outcome
from moe_cases import make_layer
from triton_cases import INTERPRETED, run_interpreted

from moe_core import cast_ahead
from moe_core.ops import expert_ffn, make_plan, moe_ffn
from moe_core.ops.backend import Request, select
from moe_core.ops.ffn import reference
from moe_core.ops.ffn.dropout import seeded_noise

DEVICE = "cpu" if INTERPRETED else "cuda"
OPS = torch.ops.moe_core
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # numpy has no bf16
# T, E, K, capacity, M, H: one block; several, and odd widths; most dropped; no token
SIZES = [
    (7, 4, 1, None, 24, 40), (150, 3, 1, 40, 70, 130), (40, 6, 2, 3, 24, 40), (0, 4, 2, None, 8, 8),
]  # fmt: skip


class Case:
    """T tokens with a plan over E experts."""

    def __init__(
        self, num_tokens=40, num_experts=4, top_k=2, capacity=9, model_dim=24, hidden_dim=40,
        dtype=torch.float32, bias=True,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(5)
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        gates, ids = scores.to(DEVICE).topk(top_k)
        self.gates, self.plan = gates, make_plan(ids, num_experts, capacity)
        sizes = [num_tokens] + [0] * (num_experts - 1)
        dtypes = (dtype, torch.float32)
        tokens, weights, _, grad = gated_inputs(sizes, model_dim, hidden_dim, dtypes, bias)
        self.tokens, self.grad = tokens.to(DEVICE), grad.to(DEVICE)
        self.weights = weights.map(lambda weight: weight.to(DEVICE))

    def found(self, activation="silu", dropout=0.0) -> list[torch.Tensor]:
        def run(tokens, weights):
            return moe_ffn(tokens, self.gates, weights, self.plan, activation, dropout, "triton")

        return outcome(run, self.tokens, self.weights, self.grad)

    def expected(self, activation="silu", kept=None) -> list[torch.Tensor]:
        choices, offsets, slots, used, _ = self.plan
        gates = self.gates.double()
        if used is not None:
            gates = gates * used

        def run(tokens, weights):
            w1, b1, w2, b2, w3, b3 = weights
            rows = tokens[choices // slots.shape[1]]
            function = FUNCTIONS[activation]
            rows = reference.expert_ffn(rows, w1, b1, w2, b2, offsets, function, kept, w3, b3)
            if len(rows) == 0:
                return tokens * 1
            return (rows[slots] * gates.unsqueeze(2)).sum(1)

        doubles = self.weights.map(torch.Tensor.double)
        return outcome(run, self.tokens.double(), doubles, self.grad.double())


class TestKernels:
    __test__ = INTERPRETED or torch.cuda.is_available()

    @pytest.mark.parametrize(
        ("dtype", "sizes"),
        [*((torch.float32, s) for s in SIZES), *((HALF, s) for s in SIZES[:3])],
        ids=str,
    )
    def test_values_and_gradients_equal_the_specification(self, dtype, sizes):
        case = Case(*sizes, dtype=dtype)
        assert_close(case.found(), case.expected(), dtype)

    @pytest.mark.parametrize("activation", FUNCTIONS)
    def test_activations_without_bias(self, activation):
        case = Case(bias=False)
        case.tokens *= 4  # beyond the limits of the clamped one
        form = select("moe_ffn", Request("triton", DEVICE, torch.float32, activation=activation))
        assert form == "moe_ffn.triton"
        assert_close(case.found(activation), case.expected(activation), torch.float32)

    def test_dropout_is_the_same_in_both_directions(self):
        case = Case(33, 4, 2, None)
        torch.manual_seed(3)
        found = case.found(dropout=0.25)
        torch.manual_seed(3)
        seed = OPS.dropout_seed(case.tokens)
        kept = ((seeded_noise(seed, 66, 40) >= -16384) / 0.75).double()
        assert_close(found, case.expected(kept=kept), torch.float32)

    def test_sorted_rows(self):
        """expert_ffn: rows in the order of experts, and nothing past the last one's."""
        rows, weights, ends, grad = gated_inputs(
            [20, 0, 13], dtypes=(HALF, torch.float32), bias=True
        )
        rows, ends, grad = rows.to(DEVICE), ends.to(DEVICE), grad.to(DEVICE)
        weights = weights.map(lambda weight: weight.to(DEVICE))

        def run(rows, weights):
            return expert_ffn(rows, weights, ends, "silu", 0.0, "triton")

        def specification(rows, weights):
            w1, b1, w2, b2, w3, b3 = weights
            return reference.expert_ffn(rows, w1, b1, w2, b2, ends, FUNCTIONS["silu"], None, w3, b3)

        doubles = weights.map(torch.Tensor.double)
        expected = outcome(specification, rows.double(), doubles, grad.double())
        assert_close(outcome(run, rows, weights, grad), expected, HALF)

    def test_gradients_only_where_they_are_wanted(self):
        case = Case()
        expected = case.expected()
        for wanted in range(7):
            tensors = [case.tokens, *case.weights]
            inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
            weights = case.weights._make(inputs[1:])
            out = moe_ffn(inputs[0], case.gates, weights, case.plan, "silu", 0.0, "triton")
            out.backward(case.grad)
            assert_close([inputs[wanted].grad], [expected[1 + wanted]], torch.float32)
            assert all(t.grad is None for i, t in enumerate(inputs) if i != wanted)

    def test_gradients_of_gates(self):
        case = Case()
        case.gates.requires_grad_()
        out = moe_ffn(case.tokens, case.gates, case.weights, case.plan, "silu", 0.0, "triton")
        (found,) = torch.autograd.grad((out * case.grad).sum(), case.gates)
        out = moe_ffn(case.tokens, case.gates, case.weights, case.plan, "silu", 0.0, "torch")
        (expected,) = torch.autograd.grad((out * case.grad).sum(), case.gates)
        assert_close([found], [expected], torch.float32)

    def test_weights_cast_ahead(self):
        layer = make_layer(
            gated=True, activation="silu", dtype=torch.float32, kernels="triton", num_experts=2
        ).to(DEVICE)
        x = torch.randn(12, 6, device=DEVICE)
        outcomes = []
        for context in (nullcontext(), cast_ahead(layer, HALF)):
            layer.zero_grad()
            with context, torch.autocast(DEVICE, HALF):
                y = layer(x)[0]
                casts = layer.experts._casts
                y.sum().backward()
            outcomes.append([y, *(p.grad for p in layer.experts.parameters())])
        assert casts.w3.dtype == HALF
        assert casts.b3 is None
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))

    def test_opcheck(self):
        case = Case(7, 4, 2, 2)
        seed = OPS.dropout_seed(case.tokens)
        inputs = [t.requires_grad_() for t in (case.tokens, case.gates, *case.weights)]
        rest = (None, None, None, *case.plan[:4], seed, "silu", 0.5)
        torch.library.opcheck(OPS.moe_ffn.default, (*inputs, *rest, True))
        hidden = OPS.moe_ffn(*inputs, *rest, True)[1]
        inputs = [t.detach() for t in inputs]
        needs = [True, False, True, True, False, True, True, False]
        arguments = (case.grad, hidden, needs, *inputs, *rest)
        torch.library.opcheck(OPS.moe_ffn_backward.default, arguments)


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(280)
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__)
