"""Triton's kernels for the experts between tokens and tokens, against plain torch: values,
gradients, what they keep.

They run on a GPU, and under the interpreter in a process that `test_under_the_interpreter` starts.
"""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import make_layer, moe_ffn
from torch.utils.flop_counter import FlopCounterMode
from triton_cases import INTERPRETED, compile_launches, run_interpreted

from moe_core.ops import ExpertWeights, expert_ffn, make_plan
from moe_core.ops.backend import Request, select
from moe_core.ops.ffn import reference
from moe_core.ops.ffn.dropout import seeded_noise
from moe_core.ops.moe_ffn.inputs import MoEFFNInputs

DEVICE = "cpu" if INTERPRETED else "cuda"
OPS = torch.ops.moe_core
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
# T, E, K, capacity, M, H: one block; several, and odd widths; most dropped; all dropped; one
# expert; no token
SIZES = [
    (7, 4, 1, None, 24, 40), (150, 3, 1, 40, 70, 130), (40, 6, 2, 3, 24, 40), (9, 4, 2, 0, 6, 10),
    (70, 1, 1, None, 16, 16), (0, 4, 2, None, 8, 8), (20, 8, 8, None, 24, 40),
]  # fmt: skip
PRODUCTS = ("hidden_kernel", "model_kernel", "hidden_grad_kernel", "weight_grad_kernel")
TOLERANCES = {
    torch.float32: 3e-6,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}  # of the largest value
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # numpy has no bf16


def random(*shape: int, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(DEVICE, dtype)


def by_triton(tokens, gates, w1, b1, w2, b2, plan, activation="gelu", dropout=0.0) -> torch.Tensor:
    return moe_ffn(tokens, gates, w1, b1, w2, b2, plan, activation, dropout, "triton")


class Case:
    """Inputs of one call: a plan of T tokens over E experts, and what it is differentiated in."""

    def __init__(
        self,
        num_tokens,
        num_experts,
        top_k,
        capacity=None,
        model_dim=24,
        hidden_dim=40,
        bias=True,
        dtype=torch.float32,
    ) -> None:
        scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(5)).to(
            DEVICE
        )
        self.ids = scores.topk(top_k).indices
        plan = make_plan(self.ids, num_experts, capacity)
        self.plan, self.capacity = plan, capacity
        matrix = (num_experts, hidden_dim, model_dim)
        tokens = random(num_tokens, model_dim, dtype=dtype)
        gates = random(num_tokens, top_k, dtype=torch.float32, seed=1).sigmoid()
        weights = [
            random(*shape, dtype=torch.float32, seed=2 + i)
            for i, shape in enumerate((matrix, matrix))
        ]
        biases = [
            random(num_experts, n, dtype=torch.float32, seed=4 + n) if bias else None
            for n in matrix[1:]
        ]
        self.inputs = [
            tokens,
            gates,
            weights[0] / model_dim**0.5,
            biases[0],
            weights[1] / hidden_dim**0.5,
            biases[1],
        ]
        self.grad = random(num_tokens, model_dim, dtype=torch.float32, seed=9)

    def outcome(self, function, inputs) -> list[torch.Tensor]:
        """The output, and the gradients of all inputs that are there."""
        inputs = [None if t is None else t.detach().requires_grad_() for t in inputs]
        y = function(*inputs)
        there = [t for t in inputs if t is not None]
        return [y, *torch.autograd.grad(y, there, self.grad.to(y.dtype), materialize_grads=True)]

    def reference(self, activation="gelu", kept=None) -> list[torch.Tensor]:
        """In fp64, expert by expert; `kept` [N, H]: dropout's factors."""

        def forward(tokens, gates, w1, b1, w2, b2):
            choices, offsets, slots, used, _ = self.plan
            rows = reference.expert_ffn(
                tokens[choices // slots.shape[1]],
                w1,
                b1,
                w2,
                b2,
                offsets,
                ACTIVATIONS[activation],
                kept,
            )
            gates = gates if used is None else gates * used
            return (
                (rows[slots] * gates.unsqueeze(2)).sum(1)
                if len(rows)
                else tokens * 0 + gates.sum() * 0
            )

        return self.outcome(forward, [None if t is None else t.double() for t in self.inputs])


def assert_close(found, expected, dtype) -> None:
    for a, b in zip(found, expected, strict=True):
        largest = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(
            a.double(), b.double(), rtol=0, atol=TOLERANCES[dtype] * max(largest, 1e-30)
        )


class TestKernels:
    __test__ = INTERPRETED or torch.cuda.is_available()

    @pytest.mark.parametrize(
        ("dtype", "sizes"),
        [*((torch.float32, s) for s in SIZES), *((HALF, s) for s in SIZES[:3])],
        ids=str,
    )
    def test_values_and_gradients_equal_the_reference(self, dtype, sizes):
        case = Case(*sizes, dtype=dtype)
        found = case.outcome(lambda *inputs: by_triton(*inputs, case.plan), case.inputs)
        assert [t.dtype for t in found] == [torch.float32, dtype, *5 * [torch.float32]]
        assert_close(found, case.reference(), dtype)

    @pytest.mark.parametrize("activation", ["relu", "silu"])
    def test_other_activations_without_bias(self, activation):
        case = Case(33, 4, 2, 10, bias=False)
        found = case.outcome(lambda *inputs: by_triton(*inputs, case.plan, activation), case.inputs)
        assert_close(found, case.reference(activation), torch.float32)

    @pytest.mark.slow
    @given(st.data())
    @settings(deadline=None, max_examples=20)
    def test_any_sizes(self, data):
        num_experts, num_tokens = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 140))
        top_k, capacity = (
            data.draw(st.integers(1, num_experts)),
            data.draw(st.none() | st.integers(0, 80)),
        )
        widths = [data.draw(st.integers(1, 140)) for _ in range(2)]
        case = Case(
            num_tokens, num_experts, top_k, capacity, *widths, bias=data.draw(st.booleans())
        )
        found = case.outcome(lambda *inputs: by_triton(*inputs, case.plan), case.inputs)
        assert_close(found, case.reference(), torch.float32)

    def test_dropout_is_the_same_in_both_directions(self):
        case, share = Case(33, 4, 2), 0.25
        seed = OPS.dropout_seed(case.inputs[0])
        kept = (seeded_noise(seed, 66, 40) >= -16384) / 0.75

        def forward(*inputs):
            plan = case.plan[:4]
            rest = (*[None] * 5, *plan, seed, "gelu", share, True)
            return OPS.moe_ffn(*inputs, *rest)[0]

        assert_close(
            case.outcome(forward, case.inputs), case.reference(kept=kept.double()), torch.float32
        )

    def test_dropout_follows_the_seed(self):
        case, outcomes = Case(33, 4, 2), []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outcomes.append(by_triton(*case.inputs, case.plan, "gelu", 0.5))
        assert torch.equal(outcomes[0], outcomes[1])
        assert not torch.equal(outcomes[0], outcomes[2])

    def test_rows_without_gates_come_back_in_their_order(self):
        """As they come from other ranks: the plan only reorders."""
        case = Case(70, 3, 1)
        case.inputs[1] = None
        found = case.outcome(lambda *inputs: by_triton(*inputs, case.plan), case.inputs)
        with_ones = Case(70, 3, 1)
        with_ones.inputs[1] = torch.ones(70, 1, device=DEVICE)
        expected = with_ones.reference()
        del expected[2]  # of the gates
        assert_close(found, expected, torch.float32)

    @pytest.mark.parametrize("dropout", [0.0, 0.25])
    @pytest.mark.parametrize("dtype", [torch.float32, HALF])
    def test_sorted_rows(self, dtype, dropout):
        """expert_ffn: the rows past the last expert's have no meaning and no gradient."""
        case = Case(90, 4, 1, 20, dtype=dtype)
        used = int(case.plan.offsets[-1])
        rows = case.inputs[0][case.plan.choices]
        form = select("ffn", Request("triton", DEVICE, dtype, torch.float32, activation="gelu"))
        assert form == "ffn.triton"
        torch.manual_seed(3)
        seed = OPS.dropout_noise(rows, case.inputs[2], "gelu", "triton")
        kept = None
        if dropout:
            kept = ((seeded_noise(seed, len(rows), 40) >= -16384) / 0.75).double()
        inputs = [t.detach().requires_grad_() for t in (rows, *case.inputs[2:])]
        torch.manual_seed(3)
        weights = ExpertWeights(*inputs[1:])
        out = expert_ffn(inputs[0], weights, case.plan.offsets, "gelu", dropout, "triton")[:used]
        found = [out, *torch.autograd.grad(out, inputs, case.grad[:used].to(dtype))]
        doubles = [t.detach().double().requires_grad_() for t in inputs]
        out = reference.expert_ffn(*doubles, case.plan.offsets, F.gelu, kept)[:used]
        expected = [out, *torch.autograd.grad(out, doubles, case.grad[:used].double())]
        found[1], expected[1] = found[1][:used], expected[1][:used]
        assert_close(found, expected, dtype)

    def test_gradients_only_where_they_are_wanted(self):
        case = Case(40, 4, 2, 9)
        expected = case.outcome(lambda *inputs: by_triton(*inputs, case.plan), case.inputs)
        for wanted in range(6):
            inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(case.inputs)]
            by_triton(*inputs, case.plan).backward(case.grad)
            torch.testing.assert_close(inputs[wanted].grad, expected[1 + wanted])
            assert all(t.grad is None for i, t in enumerate(inputs) if i != wanted)

    def test_any_strides(self):
        case = Case(40, 4, 2, 9)
        case.grad = torch.ones(1, 1, device=DEVICE).expand_as(case.grad)
        turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in case.inputs]
        assert_close(
            case.outcome(lambda *inputs: by_triton(*inputs, case.plan), turned),
            case.reference(),
            torch.float32,
        )

    def test_tokens_of_dropped_choices_may_hold_anything(self):
        case = Case(40, 4, 1, 5)
        dropped = ~case.plan.kept[:, 0]
        assert dropped.any()
        expected = case.reference()
        case.inputs[0][dropped], case.grad[dropped] = float("nan"), float("nan")
        found = case.outcome(lambda *inputs: by_triton(*inputs, case.plan), case.inputs)
        assert found[0][dropped].eq(0).all()
        for i in (0, 1, 2):  # of each token
            found[i], expected[i] = found[i][~dropped], expected[i][~dropped]
        assert_close(found, expected, torch.float32)

    def test_runs_repeat_bit_by_bit(self):
        case = Case(150, 3, 2, 90)
        runs = [
            case.outcome(lambda *inputs: by_triton(*inputs, case.plan), case.inputs)
            for _ in range(2)
        ]
        assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))

    def test_opcheck(self):
        case = Case(7, 4, 2, 2)
        seed = OPS.dropout_seed(case.inputs[0])
        inputs = [t.requires_grad_() for t in case.inputs]
        rest = (*[None] * 5, *case.plan[:4], seed, "gelu", 0.5)
        torch.library.opcheck(OPS.moe_ffn.default, (*inputs, *rest, True))
        hidden = OPS.moe_ffn(*inputs, *rest, True)[1]
        inputs = [t.detach() for t in inputs]
        needs = [True, False, True, True, False, True, False, False]
        torch.library.opcheck(
            OPS.moe_ffn_backward.default, (case.grad, hidden, needs, *inputs, *rest)
        )

    def test_the_backward_pass_keeps_tokens_and_one_hidden_layer(self):
        layer = make_layer(dtype=torch.float32, top_k=2, capacity_factor=0.0, kernels="triton").to(
            DEVICE
        )
        x, saved = torch.randn(50, 6, device=DEVICE).requires_grad_(), {}

        def pack(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        of_rows = [t.shape for t in saved.values() if t.is_floating_point() and t.shape[0] == 100]
        assert of_rows == [(100, 10)]

    def test_flops_are_counted(self):
        layer = make_layer(top_k=2, capacity_factor=0.0, dtype=torch.float32, kernels="triton").to(
            DEVICE
        )
        x = random(13, 6, dtype=torch.float32).requires_grad_()
        with FlopCounterMode(display=False) as counter:
            layer(x)[0].sum().backward()
        router, experts = 2 * 13 * 6 * 4, 2 * 2 * 13 * 2 * 6 * 10
        assert counter.get_total_flops() == 3 * (router + experts)

    @pytest.mark.slow  # TRITON_INTERPRET=1 pytest -m slow <this file>
    def test_the_benchmark_of_tiles_runs(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
        import tiles

        monkeypatch.setattr(tiles, "SMALL", tiles.SMALL[:1])
        monkeypatch.setattr(tiles, "LARGE", tiles.LARGE[:1])
        output = tmp_path / "found.json"
        where = ["--device", DEVICE, "--dtype", str(HALF).removeprefix("torch.")]
        tiles.main([*where, "--shapes", "70x16x4x2", "--rounds", "1", "--output", str(output)])
        (table,) = json.loads(output.read_text())["tables"].values()
        names = [row[1].split()[0] for row in table["rows"]]
        assert names == ["in", "64", "128", "small", "large", "F.grouped_mm"]

    def test_layer_takes_them_for_the_dtypes_they_are_for(self):
        for kernels, dtype, taken in (
            ("triton", torch.float32, True),
            ("triton", HALF, True),
            ("triton", torch.float64, False),
            ("torch", HALF, False),
            ("auto", torch.float32, not INTERPRETED),
            ("auto", HALF, not INTERPRETED),
        ):
            form = select("moe_ffn", Request(kernels, DEVICE, dtype, activation="gelu"))
            assert (form == "moe_ffn.triton") == taken


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(280)
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
    from moe_core.ops.moe_ffn import triton as triton_ffn

    compiled, tiles = compile_launches(monkeypatch, architecture), triton_ffn.tiles
    monkeypatch.setattr(
        triton_ffn, "tiles", lambda rows, width, _: tiles(rows, width, shared_memory)
    )
    monkeypatch.setattr(triton_ffn, "sum_rows", lambda rows, slots, *others: rows[slots].sum(1))
    plan = make_plan(torch.arange(2048 * top_k).view(2048, top_k) % 4, 4, 500)
    tokens, gates, w = (
        torch.zeros(2048, 384, dtype=dtype),
        torch.zeros(2048, top_k),
        torch.zeros(4, 2048, 384),
    )
    weights = (
        w.to(dtype),
        torch.zeros(4, 2048),
        w.to(dtype),
        torch.zeros(4, 384),
    )  # 384: one tile and half of one
    if gated:
        weights += (w.to(dtype), torch.zeros(4, 2048))
    else:
        weights += (None, None)
    casts = (None, None, None)
    inputs = MoEFFNInputs(tokens, gates, *weights, *casts, *plan[:4], None, "silu", 0.0)
    y, hidden = triton_ffn.forward(inputs, True)
    triton_ffn.backward(inputs, y, hidden, [True] * (8 if gated else 6) + [False] * (2 - 2 * gated))
    assert len(compiled) == 7
    for name, kernel in compiled.items():
        assert kernel.metadata.shared <= (shared_memory or 101376), name
        assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"]), name
        assert "ld.global.b16" not in kernel.asm["ptx"], name  # halves, one by one
        on_tensor_cores = re.search(r"wgmma\.mma_async|mma\.sync", kernel.asm["ptx"]) is not None
        assert on_tensor_cores == (name in PRODUCTS), name
