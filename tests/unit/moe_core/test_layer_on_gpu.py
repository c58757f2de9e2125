"""The layer on a CUDA device: `pytest -m gpu`. Skipped, with this reason, where there is none."""

# T tokens, E experts, K top-k, N rows, M model dim

import logging

import pytest
import torch
from moe_cases import make_layer, plain_forward, route_by_torch, route_by_triton
from triton_cases import captured, no_reads_from_the_device

from moe_core import MoELayer
from moe_core.ops import DispatchPlan, backend, combine, dispatch, make_plan
from moe_core.ops.ffn.grouped import CAPABILITIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KERNELS = ["triton", "torch"]
SHAPES = [
    {"model_dim": 64, "hidden_dim": 128, "num_experts": 8},
    # strides that are no multiple of 16 bytes
    {"model_dim": 6, "hidden_dim": 10, "num_experts": 4},
]
ROUTINGS = [
    {"capacity_factor": 0.0},
    {
        "capacity_factor": 1.0, "top_k": 2, "batch_prioritized": True,
        "aux_loss": "load_importance", "gate_noise": 1.0,
    },
]  # fmt: skip


def layer_of(routing: dict, kernels: str, shape: dict = SHAPES[0]) -> MoELayer:
    return make_layer(dtype=torch.float32, kernels=kernels, **routing, **shape).cuda()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("top_k", "capacity_factor"), [(1, 0.0), (2, 0.5)])
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_equals_plain_torch(shape, top_k, capacity_factor, kernels):
    layer = layer_of({"top_k": top_k, "capacity_factor": capacity_factor}, kernels, shape)
    x = torch.randn(200, shape["model_dim"], device="cuda").requires_grad_()
    expected, _ = plain_forward(layer, x)
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    with torch.autocast("cuda", torch.bfloat16):
        y, _ = layer(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)  # bf16: 8 bits of mantissa
    torch.testing.assert_close(grad, expected_grad, rtol=3e-2, atol=6e-2)


def test_auto_takes_triton_and_says_so(caplog):
    backend.language.cache_clear()
    backend._log_once.cache_clear()
    caplog.set_level(logging.INFO, "moe_core")
    make_layer(dtype=torch.float32).cuda()(torch.randn(20, 6, device="cuda"))
    (line,) = caplog.messages
    assert line.startswith("moe_core kernels: triton ")
    assert line.endswith(" on cuda")


def skip_if_torch_reads_back(kernels: str) -> None:
    if kernels == "torch" and torch.cuda.get_device_capability() not in CAPABILITIES:
        pytest.skip("F.grouped_mm is a loop here, which reads the offsets back to the host")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_a_step_reads_nothing_back(routing, kernels):
    skip_if_torch_reads_back(kernels)
    layer = layer_of(routing, kernels)
    x = torch.randn(200, 64, device="cuda").requires_grad_()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y, aux_loss = layer(x)
        (y.sum() + aux_loss).backward()

    step()  # what is compiled on first use is compiled now
    with no_reads_from_the_device():
        step()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_a_step_replays_from_a_cuda_graph(routing, kernels):
    skip_if_torch_reads_back(kernels)
    layer = layer_of(routing | {"gate_noise": 0.0}, kernels)
    x = torch.randn(200, 64, device="cuda")

    def step() -> torch.Tensor:
        layer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16):
            y, aux_loss = layer(x)
        (y.sum() + aux_loss).backward()
        return y

    graph, y = captured(step)
    x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [y.clone(), *(p.grad.clone() for p in layer.parameters())]
    expected = [step(), *(p.grad for p in layer.parameters())]
    torch.testing.assert_close(replayed, expected)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])  # the latter with CUDA graphs
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_compiled_with_triton_equals_eager(routing, mode):
    torch.compiler.reset()
    layer = layer_of(routing | {"gate_noise": 0.0}, "triton")
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    x = torch.randn(200, 64, device="cuda").requires_grad_()
    outcomes = []
    for function in (compiled, compiled, compiled, layer):  # warms up, records, replays
        with torch.autocast("cuda", torch.bfloat16):
            y, aux_loss = function(x)
        gradients = torch.autograd.grad(y.square().sum() + aux_loss, [x, *layer.parameters()])
        outcomes.append([t.clone() for t in (y, aux_loss, *gradients)])
    torch.testing.assert_close(outcomes[2], outcomes[3], rtol=3e-2, atol=6e-2)


@pytest.mark.parametrize("sizes", [(20_000, 8, 1), (20_000, 64, 2), (3_000, 1000, 8)], ids=str)
def test_routing_and_plan_at_size_equal_torch(sizes):
    num_tokens, num_experts, top_k = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    # fp64: no two of these logits round to one probability
    like = {"device": "cuda", "dtype": torch.float64, "generator": generator}
    logits = torch.randn(num_tokens, num_experts, **like)
    for loss in ("gshard", "load_importance"):
        got, expected = (
            function(logits, logits, top_k, top_k > 1, loss, 0.1)
            for function in (route_by_triton, route_by_torch)
        )
        torch.testing.assert_close(got, expected)
    ids, priority = expected[1], expected[2].amax(1)
    share = top_k * num_tokens // num_experts
    for capacity in (None, 2 * share, share // 2):
        plans = [make_plan(ids, num_experts, capacity, priority, kernels) for kernels in KERNELS]
        pairs = zip(*plans, strict=True)
        assert all(torch.equal(*pair) for pair in pairs if pair[1] is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [384, 1000, 7])
def test_rows_at_size_equal_torch(width, dtype):
    num_tokens, top_k = 5_000, 2
    ids = torch.rand(num_tokens, 16, device="cuda").topk(top_k).indices
    plan = make_plan(ids, 16, 500)
    tokens = torch.randn(num_tokens, width, device="cuda").to(dtype).requires_grad_()
    gates = torch.rand(num_tokens, top_k, device="cuda").requires_grad_()
    weight = torch.randn(num_tokens, width, device="cuda")
    outcomes = []
    for kernels in KERNELS:
        y = combine(dispatch(tokens, plan, kernels), gates, plan, kernels)
        outcomes.append([y, *torch.autograd.grad((y * weight).sum(), [tokens, gates])])
    (y, *grads), (expected, *expected_grads) = outcomes
    torch.testing.assert_close(y, expected)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(grads, expected_grads, rtol=tolerance, atol=tolerance * width**0.5)


def test_more_elements_than_32_bits_count():
    num_tokens, width = 2**20 + 8, 2**11
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    tokens = torch.zeros(num_tokens, width, device="cuda", dtype=torch.bfloat16)
    tokens[:, -1] = torch.arange(num_tokens, device="cuda") % 128  # bf16 counts to 256
    tokens.requires_grad_()
    choices = torch.arange(num_tokens, device="cuda").flip(0)
    slots = choices.unsqueeze(1)
    gates = torch.full((num_tokens, 1), 2.0, device="cuda", dtype=torch.bfloat16)
    none = choices.new_empty(0)
    plan = DispatchPlan(choices, none, slots, None, none)
    rows = dispatch(tokens, plan, "triton")
    assert torch.equal(rows[:, -1], tokens[:, -1].flip(0))
    y = combine(rows, gates.requires_grad_(), plan, "triton")
    assert torch.equal(y[:, -1], 2 * tokens[:, -1])
    grad_tokens, grad_gates = torch.autograd.grad(y, (tokens, gates), tokens.detach())
    assert torch.equal(grad_tokens[:, -1], 2 * tokens[:, -1])
    assert torch.equal(grad_gates[:, 0], tokens[:, -1].square())
