"""What the experts compute with: never weights of before, and kept copies only within `prepared`;
and their memory."""

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from ffn_cases import assert_close
from torch.nn.utils import prune

from moe_core import MoEConfig, MoELayer, prepared
from moe_core.experts import Experts
from moe_core.ops import buffers
from moe_core.ops.ffn import cpp as ffn_cpp
from moe_core.ops.native import library

OFFSETS = torch.tensor([5, 9], dtype=torch.int32)
ROWS = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))


def make_experts(seed: int = 0, kernels: str = "auto") -> Experts:
    torch.manual_seed(seed)
    return Experts(MoEConfig(8, 16, 2, kernels=kernels)).eval()


def evaluated(experts: Experts) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return experts(ROWS, OFFSETS)


def expected(experts: Experts, context) -> torch.Tensor:
    """By experts that were never others, in the same form: prepared weights may have a kernel of
    their own."""
    fresh = make_experts()
    with torch.no_grad():
        for own, other in zip(fresh.parameters(), experts.parameters(), strict=True):
            own.copy_(other)
    with context(fresh):
        return evaluated(fresh)


def step(experts: Experts, **options) -> None:
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1, **options)
    experts(ROWS, OFFSETS).square().sum().backward()
    optimizer.step()


def step_without_a_pass(experts: Experts) -> None:
    """Its gradients are of an earlier pass: no pass with gradients comes between two
    evaluations."""
    for parameter in experts.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(experts.parameters(), lr=0.1, fused=True).step()


def load(experts: Experts, **options) -> None:
    experts.load_state_dict(make_experts(1).state_dict(), **options)


def write_in_place(experts: Experts) -> None:
    with torch.no_grad():
        experts.w2[1].mul_(2)


def write_state(experts: Experts) -> None:
    experts.state_dict()["b1"].lerp_(torch.ones(()), 0.5)  # as timm's averaged weights do


def replace_data(experts: Experts) -> None:
    experts.w1.data = torch.randn(experts.w1.shape)


def write_data(experts: Experts) -> None:
    experts.w1.data.mul_(2)  # leaves no trace, neither in versions nor in addresses


CHANGES = {
    "step": step,
    "fused step": partial(step, fused=True),
    "step without a pass": step_without_a_pass,
    "load": load,
    "assign": partial(load, assign=True),
    "write in place": write_in_place,
    "write state": write_state,
    "replace data": replace_data,
    "write data": write_data,
}


@pytest.mark.parametrize("context", [nullcontext, prepared])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_evaluation_follows_every_change_of_the_parameters(change, context):
    """Also one between two prepared contexts."""
    experts = make_experts()
    with context(experts):
        before = evaluated(experts)
    change(experts)
    with context(experts):
        after = evaluated(experts)
    assert not torch.equal(after, before)
    assert torch.equal(after, expected(experts, context))


def test_evaluation_follows_parameters_that_lie_where_others_lay():
    """As functional_call's do, which are gone after the call; here by one buffer for all."""
    experts = make_experts()
    buffers_of = {name: bytearray(p.nbytes) for name, p in experts.named_parameters()}
    results = []
    for seed in range(2):
        wanted, parameters = make_experts(seed), {}
        for name, parameter in wanted.named_parameters():
            place = torch.frombuffer(buffers_of[name], dtype=torch.float32)
            parameters[name] = place.view_as(parameter).copy_(parameter.detach())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            results.append(torch.func.functional_call(experts, parameters, (ROWS, OFFSETS)))
        # the buffers are not aligned as a tensor is, so torch may take another kernel
        assert_close(results[-1:], [evaluated(wanted)], torch.bfloat16)
    assert not torch.equal(*results)


def test_copies_last_within_the_context_and_not_beyond():
    experts = make_experts(kernels="torch")  # which casts weights on every CPU
    with torch.no_grad():
        assert experts.weights(torch.bfloat16).w1 is experts.w1  # cast by the kernel
        with prepared(experts):
            copy_ = experts.weights(torch.bfloat16).w1
            assert copy_ is not experts.w1
            assert experts.weights(torch.bfloat16).w1 is copy_
            with prepared(experts):
                assert experts.weights(torch.bfloat16).w1 is copy_
            assert experts.weights(torch.bfloat16).w1 is copy_
        assert experts.weights(torch.bfloat16).w1 is experts.w1
        with pytest.raises(RuntimeError, match="mine"), prepared(experts):
            raise RuntimeError("mine")
        assert experts.weights(torch.bfloat16).w1 is experts.w1
        reference = weakref.ref(copy_)
        del copy_
        gc.collect()
        assert reference() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepared_experts_compute_the_same(dtype):
    torch.manual_seed(0)
    experts = Experts(MoEConfig(64, 96, 2)).eval()
    rows = torch.randn(9, 64, dtype=dtype)
    with torch.no_grad():
        plain = experts(rows, OFFSETS)
        with prepared(experts):
            assert_close([experts(rows, OFFSETS)], [plain], dtype)


def test_a_pass_that_learns_takes_the_parameters():
    experts = make_experts()
    with prepared(experts):
        assert experts.weights(torch.bfloat16).w1 is experts.w1  # gradients are on
        experts(ROWS, OFFSETS).sum().backward()
    assert all(parameter.grad is not None for parameter in experts.parameters())


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_frozen_experts_compute_with_copies_also_where_the_rows_learn(kernels):
    """Not with copies in the layout of a pass without gradients."""
    torch.manual_seed(0)
    experts = Experts(MoEConfig(64, 96, 2, kernels=kernels)).requires_grad_(False)
    rows = torch.randn(9, 64, requires_grad=True)

    def gradient() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(experts(rows, OFFSETS).sum(), rows)[0]

    expected = gradient()
    with prepared(experts):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            experts(rows, OFFSETS)
        found = gradient()
        if kernels == "torch":
            assert experts.weights(torch.bfloat16).w1.dtype == torch.bfloat16
    # bf16 rounds by 4e-3: the weights, the hidden layer and its gradient, the result
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 * expected.abs().max().item())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda experts: pickle.loads(pickle.dumps(experts))]
)
def test_copies_are_not_copied(duplicate):
    experts = make_experts()
    with prepared(experts):
        before = evaluated(experts)
        other = duplicate(experts)
        with torch.no_grad():
            assert other.weights(torch.bfloat16).w1 is other.w1
    assert_close([evaluated(other)], [before], torch.bfloat16)  # without its prepared weights


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning"
)
@pytest.mark.parametrize("warm", [False, True])
def test_a_traced_layer_computes_with_its_weights(warm):
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(64, 96, 2)).eval()
    x = torch.randn(9, 64)
    with torch.no_grad(), prepared(layer):
        if warm:
            layer(x)
        traced = torch.jit.trace(layer, x, check_trace=False)
        with prepared(MoELayer(MoEConfig(64, 96, 2))):  # nothing of it may be another's
            expected_y = layer(x)[0]
        torch.testing.assert_close(traced(x)[0], expected_y)
        layer.experts.w1.zero_()
    # the trace reads the parameters themselves
    torch.testing.assert_close(traced(x)[0], layer(x)[0])


def losses(layer: MoELayer) -> list[float]:
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(3):
        loss = layer(x)[0].square().mean()
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


def test_hooks_of_the_experts_and_of_the_cosine_router_run_before_weights_are_read():
    """Pruning nothing changes nothing. It computes `w1` from `w1_orig` in a forward pre-hook."""
    config = MoEConfig(8, 16, 2, router="cosine", capacity_factor=0.0)
    plain, pruned = MoELayer(config), MoELayer(config)
    pruned.load_state_dict(plain.state_dict())
    prune.identity(pruned.experts, "w1")
    prune.identity(pruned.experts, "b2")
    prune.identity(pruned.router.projector, "weight")
    assert losses(pruned) == losses(plain)


def test_memory_of_large_results_serves_the_next_ones():
    shape, device = (1024, 1024), torch.device("cpu")
    first = buffers.empty(shape, torch.float32, device)
    place, part = first.data_ptr(), first[3:]
    del first
    second = buffers.empty(shape, torch.float32, device)
    assert second.data_ptr() != place  # a view still holds it
    del part
    gc.collect()
    if buffers._AVAILABLE:
        assert buffers.empty(shape, torch.bfloat16, device).data_ptr() != place  # half the size
        assert buffers.empty(shape, torch.float32, device).data_ptr() == place
    buffers.release_buffers()
    assert not buffers._free


def test_a_thread_may_take_the_memory_that_another_drops(monkeypatch):
    class TakenMeanwhile(list):
        def __bool__(self) -> bool:
            return True  # there was one a moment ago

    monkeypatch.setitem(buffers._free, 1, TakenMeanwhile())
    buffers._drop(1)


@pytest.mark.skipif(library.chosen() is None, reason="C++ does not compile here")
def test_weight_gradients_are_the_op_s_own_memory(monkeypatch):
    """A copy of them would cost as much as they do: autograd takes them over."""
    experts = make_experts().train()
    places = []

    def spy(*arguments, **options):
        tensor = buffers_empty(*arguments, **options)
        places.append(tensor.data_ptr())
        return tensor

    buffers_empty = buffers.empty
    monkeypatch.setattr(ffn_cpp, "empty", spy)
    experts(ROWS, OFFSETS).sum().backward()
    assert all(parameter.grad.data_ptr() in places for parameter in experts.parameters())
