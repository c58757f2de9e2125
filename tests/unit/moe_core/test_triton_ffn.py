"""Triton's kernels for plain and gated experts, between tokens and tokens, against plain torch:
values, first and second derivatives, what they keep, and weights that are cast ahead.

They run on a GPU, and under the interpreter in a process that `test_under_the_interpreter` starts.
"""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from ffn_cases import assert_close, ffn_inputs, plain_experts, seeded_noise
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import make_layer
from torch.utils.flop_counter import FlopCounterMode
from triton_cases import CHEAP_CHECKS, INTERPRETED, compile_launches, run_interpreted

from moe_core import MoEConfig, MoELayer, cast_ahead
from moe_core.experts import Experts
from moe_core.ops import ExpertWeights, expert_ffn, make_plan, moe_ffn
from moe_core.ops.ffn.inputs import MoEFFNInputs
from moe_core.ops.ffn.op import kernels_for

DEVICE = "cpu" if INTERPRETED else "cuda"
OPS = torch.ops.moe_core
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # numpy has no bf16
# T, E, K, capacity, M, H: one block; several, and odd widths; most dropped; all dropped; one
# expert; no token; as many choices as experts
SIZES = {
    "one block": (7, 4, 1, None, 24, 40),
    "several blocks": (150, 3, 1, 40, 70, 130),
    "most dropped": (40, 6, 2, 3, 24, 40),
    "all dropped": (9, 4, 2, 0, 6, 10),
    "one expert": (70, 1, 1, None, 16, 16),
    "no token": (0, 4, 2, None, 8, 8),
    "every expert": (20, 8, 8, None, 24, 40),
}
PRODUCTS = ("hidden_kernel", "model_kernel", "hidden_grad_kernel", "weight_grad_kernel")
each_kind = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


class Case:
    """Inputs of one call: tokens, gate values and weights, and a plan of the tokens."""

    def __init__(
        self, num_tokens=40, num_experts=4, top_k=2, capacity=9, model_dim=24, hidden_dim=40,
        dtype=torch.float32, gated=False, bias=True,
    ) -> None:  # fmt: skip
        scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(5))
        gates, ids = scores.to(DEVICE).topk(top_k)
        self.gates, self.plan = gates, make_plan(ids, num_experts, capacity)
        sizes = [num_tokens] + [0] * (num_experts - 1)
        dtypes = (dtype, torch.float32)
        tokens, weights, _, grad = ffn_inputs(sizes, model_dim, hidden_dim, dtypes, bias, gated)
        self.tokens, self.grad = tokens.to(DEVICE), grad.to(DEVICE)
        self.weights = weights.map(lambda weight: weight.to(DEVICE))

    def tensors(self) -> list[torch.Tensor]:
        """What a call is differentiated in."""
        gates = [] if self.gates is None else [self.gates]
        return [self.tokens, *self.weights.tensors(), *gates]

    def outcome(self, run, inputs) -> list[torch.Tensor]:
        """The output of `run(tokens, weights, gates)` and the gradients of `inputs`, as
        `tensors`."""
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        values = iter(inputs[1:])
        weights = self.weights.map(lambda _: next(values))
        y = run(inputs[0], weights, next(values, None))
        return [y, *torch.autograd.grad(y, inputs, self.grad.to(y.dtype), materialize_grads=True)]

    def found(self, activation="silu", dropout=0.0, inputs=None) -> list[torch.Tensor]:
        def run(tokens, weights, gates):
            return moe_ffn(tokens, gates, weights, self.plan, activation, dropout, "triton")

        return self.outcome(run, inputs or self.tensors())

    def expected(self, activation="silu", kept=None) -> list[torch.Tensor]:
        """In fp64, expert by expert; `kept` [N, H]: dropout's factors."""
        choices, offsets, slots, used, _ = self.plan

        def run(tokens, weights, gates):
            rows = tokens[choices // slots.shape[1]]
            used_rows = plain_experts(rows, weights, offsets, activation, kept)
            rows = F.pad(used_rows, (0, 0, 0, len(rows) - len(used_rows)))
            factors = torch.ones_like(slots, dtype=torch.float64) if gates is None else gates
            if used is not None:
                factors = factors * used
            if len(rows) == 0:
                return tokens * 0 + factors.sum() * 0
            return (rows[slots] * factors.unsqueeze(2)).sum(1)

        return self.outcome(run, [tensor.double() for tensor in self.tensors()])


def small_layer(kernels: str = "triton", **options) -> MoELayer:
    torch.manual_seed(0)
    config = MoEConfig(8, 16, num_experts=4, capacity_factor=1.25, kernels=kernels, **options)
    return MoELayer(config).to(DEVICE)


def in_halves(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(DEVICE, HALF):
        return layer(x)[0]


def train(layer: MoELayer, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of accumulated batches, computed in half precision."""
    for x in batches:
        with torch.autocast(DEVICE, HALF):
            y, aux_loss = layer(x)
        (y.float().square().sum() + aux_loss).backward()
    return [parameter.grad for parameter in layer.parameters()]


@pytest.mark.gpu
class TestKernels:
    __test__ = INTERPRETED or torch.cuda.is_available()

    @pytest.mark.parametrize(
        ("name", "dtype", "gated"),
        [
            *((name, torch.float32, False) for name in SIZES),
            ("several blocks", HALF, False),
            ("several blocks", torch.float32, True),
            ("most dropped", HALF, True),
            ("no token", torch.float32, True),
        ],
        ids=str,
    )
    def test_values_and_gradients_equal_the_reference(self, name, dtype, gated):
        case = Case(*SIZES[name], dtype=dtype, gated=gated)
        found = case.found()
        others = [torch.float32] * len(case.tensors()[1:])
        assert [t.dtype for t in found] == [torch.float32, dtype, *others]
        assert_close(found, case.expected(), dtype)

    @pytest.mark.parametrize(
        ("activation", "gated"),
        [("relu", False), ("gelu", False), ("relu", True), ("gelu", True),
         ("clamped_swiglu", True)],
    )  # fmt: skip
    def test_activations_without_bias(self, activation, gated):
        case = Case(33, capacity=10, bias=False, gated=gated)
        case.tokens *= 4  # beyond the limits of the clamped one
        used = kernels_for("triton", case.weights.w1, torch.float32, activation)
        assert used.language == "triton"
        assert_close(case.found(activation), case.expected(activation), torch.float32)

    @pytest.mark.slow
    @given(st.data())
    @settings(max_examples=20)
    def test_any_sizes(self, data):
        num_experts, num_tokens = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 140))
        top_k = data.draw(st.integers(1, num_experts))
        capacity = data.draw(st.none() | st.integers(0, 80))
        widths = [data.draw(st.integers(1, 140)) for _ in range(2)]
        kind = {"bias": data.draw(st.booleans()), "gated": data.draw(st.booleans())}
        case = Case(num_tokens, num_experts, top_k, capacity, *widths, **kind)
        assert_close(case.found(), case.expected(), torch.float32)

    @each_kind
    def test_dropout_follows_the_seed_and_is_the_same_in_both_directions(self, gated):
        case, outputs = Case(33, 4, 2, None, gated=gated), []
        for seed in (3, 4):
            torch.manual_seed(seed)
            inputs = (case.tokens, case.gates, case.weights, case.plan)
            outputs.append(moe_ffn(*inputs, "gelu", 0.25, "triton"))
        torch.manual_seed(3)
        found = case.found("gelu", 0.25)
        assert torch.equal(found[0], outputs[0])
        assert not torch.equal(*outputs)
        torch.manual_seed(3)
        seed = OPS.dropout_seed(case.tokens)
        kept = ((seeded_noise(seed, 66, 40) >= -16384) / 0.75).double()
        assert_close(found, case.expected("gelu", kept), torch.float32)

    def test_rows_without_gates_come_back_in_their_order(self):
        """As they come from other ranks: the plan only reorders."""
        case = Case(70, 3, 1, None)
        case.gates = None
        assert_close(case.found(), case.expected(), torch.float32)

    @pytest.mark.parametrize(
        ("dtype", "dropout", "gated"),
        [(torch.float32, 0.25, False), (HALF, 0.0, False), (HALF, 0.25, True)],
    )
    def test_sorted_rows(self, dtype, dropout, gated):
        """expert_ffn: the rows past the last expert's have no meaning and no gradient."""
        case = Case(90, 4, 1, 20, dtype=dtype, gated=gated)
        case.gates, used = None, int(case.plan.offsets[-1])
        case.tokens = case.tokens[case.plan.choices]
        case.grad = case.grad[:used]
        assert kernels_for("triton", case.weights.w1, dtype, "gelu").language == "triton"
        torch.manual_seed(3)
        seed = OPS.dropout_seed(case.tokens)
        kept = None
        if dropout:
            kept = ((seeded_noise(seed, len(case.tokens), 40) >= -16384) / 0.75).double()
        torch.manual_seed(3)

        def by_triton(rows, weights, gates):
            ends = case.plan.offsets
            return expert_ffn(rows, weights, ends, "gelu", dropout, "triton")[:used]

        def specification(rows, weights, gates):
            return plain_experts(rows, weights, case.plan.offsets, "gelu", kept)

        found = case.outcome(by_triton, case.tensors())
        expected = case.outcome(specification, [t.double() for t in case.tensors()])
        expected[1] = expected[1][:used]
        assert_close(found, expected, dtype)

    @each_kind
    def test_gradients_only_where_they_are_wanted(self, gated):
        case = Case(20, 3, 2, 9, gated=gated)
        expected = case.expected()
        tensors = case.tensors()
        for wanted in range(len(tensors)):
            inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
            weights = ExpertWeights(*inputs[1:-1])
            y = moe_ffn(inputs[0], inputs[-1], weights, case.plan, "silu", 0.0, "triton")
            y.backward(case.grad)
            assert_close([inputs[wanted].grad], [expected[1 + wanted]], torch.float32)
            assert all(t.grad is None for i, t in enumerate(inputs) if i != wanted)

    def test_any_strides(self):
        case = Case()
        case.grad = torch.ones(1, 1, device=DEVICE).expand_as(case.grad)
        turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in case.tensors()]
        assert_close(case.found(inputs=turned), case.expected(), torch.float32)

    def test_tokens_of_dropped_choices_may_hold_anything(self):
        case = Case(40, 4, 1, 5)
        dropped = ~case.plan.kept[:, 0]
        assert dropped.any()
        expected = case.expected()
        case.tokens[dropped], case.grad[dropped] = float("nan"), float("nan")
        found = case.found()
        assert found[0][dropped].eq(0).all()
        for i in (0, 1, -1):  # of each token
            found[i], expected[i] = found[i][~dropped], expected[i][~dropped]
        assert_close(found, expected, torch.float32)

    def test_runs_repeat_bit_by_bit(self):
        case = Case(70, 3, 2, 40)
        assert all(torch.equal(*pair) for pair in zip(case.found(), case.found(), strict=True))

    @each_kind
    def test_opcheck(self, gated):
        case = Case(7, 4, 2, 2, gated=gated)
        seed = OPS.dropout_seed(case.tokens)
        inputs = (case.tokens, case.gates, *case.weights)
        leaves = [None if t is None else t.clone().requires_grad_() for t in inputs]
        kernels = ("triton", "triton")
        rest = (None, None, None, *case.plan[:4], seed, "silu", 0.5, True, *kernels)
        torch.library.opcheck(OPS.moe_ffn.default, (*leaves, *rest), test_utils=CHEAP_CHECKS)
        hidden = OPS.moe_ffn(*inputs, *rest)[1]
        needs = [True, False, True, True, False, True, gated, False]
        arguments = (case.grad, needs, *inputs, *rest, hidden)
        torch.library.opcheck(OPS.moe_ffn_backward.default, arguments, test_utils=CHEAP_CHECKS)

    def test_the_backward_pass_keeps_tokens_and_one_hidden_layer(self):
        layer = make_layer(dtype=torch.float32, top_k=2, capacity_factor=0.0, kernels="triton")
        layer, x, saved = layer.to(DEVICE), torch.randn(13, 6, device=DEVICE), {}

        def pack(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with FlopCounterMode(display=False) as counter:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = layer(x.requires_grad_())[0]
            y.sum().backward()
        of_rows = [t.shape for t in saved.values() if t.is_floating_point() and t.shape[0] == 26]
        assert of_rows == [(26, 10)]
        router, experts = 2 * 13 * 6 * 4, 2 * 2 * 13 * 2 * 6 * 10
        assert counter.get_total_flops() == 3 * (router + experts)

    def test_layer_takes_them_for_the_dtypes_they_are_for(self):
        for kernels, dtype, taken in (
            ("triton", torch.float32, True),
            ("triton", HALF, True),
            ("triton", torch.float64, False),
            ("torch", HALF, False),
            ("auto", torch.float32, not INTERPRETED),
            ("auto", HALF, not INTERPRETED),
        ):
            weight = torch.zeros(1, dtype=dtype, device=DEVICE)
            assert (kernels_for(kernels, weight, dtype, "gelu").language == "triton") == taken

    @pytest.mark.parametrize(
        "options",
        [
            {"capacity_factor": 0.5, "bias": False, "aux_loss": "load_importance"},
            {"gated": True, "activation": "silu", "num_shared_experts": 1},
            {"router": "soft", "slots_per_expert": 2},
            {"router": "cosine"},
        ],
        ids=str,
    )
    def test_second_derivatives(self, options):
        """Those of the torch forms, up to far more than rounding and far less than a term."""
        gradients = {}
        for kernels in ("torch", "triton"):
            torch.manual_seed(0)
            config = MoEConfig(6, 5, 3, top_k=2, gate_noise=1.0, kernels=kernels, **options)
            layer = MoELayer(config).to(DEVICE)
            x = torch.randn(7, 6, generator=torch.Generator().manual_seed(7)).to(DEVICE)
            inputs = [x.requires_grad_(), *layer.parameters()]
            torch.manual_seed(0)
            y, aux_loss = layer(x)
            loss = (y * y.detach().cos()).sum() + aux_loss  # no gradient that is symmetric
            first = torch.autograd.grad(loss, inputs, create_graph=True)
            gradients[kernels] = torch.autograd.grad(
                sum(g.sin().sum() for g in first),
                inputs,
                materialize_grads=True,  # a shared expert's last bias has none
            )
        for found, expected in zip(gradients["triton"], gradients["torch"], strict=True):
            atol = 1e-3 * expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.gpu
class TestKernelsWithCastsAhead:
    """Weights that are cast once for several passes."""

    __test__ = INTERPRETED or torch.cuda.is_available()

    @pytest.mark.parametrize(
        "options", [{"num_shared_experts": 1}, {"gated": True, "activation": "silu"}], ids=str
    )
    def test_gradients_are_the_same(self, options):
        layer = small_layer(**options)
        twin = copy.deepcopy(layer)
        batches = [torch.randn(12, 8, device=DEVICE) for _ in range(2)]
        expected = train(twin, batches)
        with cast_ahead(layer, HALF):
            found = train(layer, batches)
            casts = layer.experts._casts
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        num_products = 3 if layer.config.gated else 2
        assert [cast.dtype for cast in casts.tensors()] == [HALF] * num_products

    def test_weights_are_cast_once_and_until_the_context_ends(self):
        layer, x = small_layer(), torch.randn(12, 8, device=DEVICE)
        in_fp32, _ = layer(x)
        with cast_ahead(layer, HALF):
            assert torch.equal(layer(x)[0], in_fp32)  # another dtype is cast in the pass
            with torch.no_grad():
                layer.experts.w1.zero_()  # not seen: the context promises that this does not happen
                layer.experts.b1.zero_()
            earlier = in_halves(layer, x)
        assert not torch.equal(earlier, in_halves(layer, x))
        with pytest.raises(RuntimeError, match="stop"), cast_ahead(layer, HALF):
            raise RuntimeError("stop")
        assert [m._casts for m in layer.modules() if isinstance(m, Experts)] == [None]

    def test_compiled(self):
        layer, x = small_layer(), torch.randn(12, 8, device=DEVICE)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            expected = in_halves(layer, x)
            with cast_ahead(layer, HALF):
                assert torch.equal(in_halves(compiled, x), expected)
            with torch.no_grad():
                layer.experts.w1.mul_(2)


def test_torch_forms_cast_nothing_ahead():
    layer = MoELayer(MoEConfig(8, 16, num_experts=4, kernels="torch"))
    with cast_ahead(layer, torch.bfloat16):
        assert layer.experts._casts is None


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(1260)  # on a busy machine
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__)


@pytest.mark.skipif(INTERPRETED, reason="compiles, which the interpreter does not")
@pytest.mark.parametrize("top_k", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("architecture", "shared_memory", "dtype"),
    [
        (90, 232448, torch.bfloat16),
        pytest.param(90, 0, torch.float32, marks=pytest.mark.slow),
        pytest.param(80, 166912, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(89, 101376, torch.float16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_compile_without_a_gpu(
    gated, architecture, shared_memory, dtype, top_k, monkeypatch
):
    """For an H100, an A100 and an RTX 4090, within the shared memory of a program there."""
    pytest.importorskip("triton")
    from moe_core.ops.ffn import triton as triton_ffn

    compiled, tiles = compile_launches(monkeypatch, architecture), triton_ffn.tiles
    monkeypatch.setattr(
        triton_ffn, "tiles", lambda rows, width, _: tiles(rows, width, shared_memory)
    )
    monkeypatch.setattr(triton_ffn, "sum_rows", lambda rows, slots, *others: rows[slots].sum(1))
    plan = make_plan(torch.arange(2048 * top_k).view(2048, top_k) % 4, 4, 500)
    tokens, gates = torch.zeros(2048, 384, dtype=dtype), torch.zeros(2048, top_k)
    w = torch.zeros(4, 2048, 384, dtype=dtype)  # 384: one tile and half of one
    b = torch.zeros(4, 2048)
    weights = ExpertWeights(w, b, w, torch.zeros(4, 384), *((w, b) if gated else (None, None)))
    casts = (None, None, None)
    settings = ("silu", 0.0, True, "triton", "ffn.triton")
    inputs = MoEFFNInputs(tokens, gates, *weights, *casts, *plan[:4], None, *settings)
    y, hidden = triton_ffn.forward(inputs)
    triton_ffn.backward(inputs, y, hidden, [True] * 6 + [gated] * 2)
    assert len(compiled) == 8
    for name, kernel in compiled.items():
        assert kernel.metadata.shared <= (shared_memory or 101376), name
        assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"]), name
        assert "ld.global.b16" not in kernel.asm["ptx"], name  # halves, one by one
        on_tensor_cores = re.search(r"wgmma\.mma_async|mma\.sync", kernel.asm["ptx"]) is not None
        assert on_tensor_cores == (name in PRODUCTS), name
