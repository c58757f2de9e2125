"""The experts' copies in evaluation's dtype, which must never be older than the parameters, and their memory."""

import copy
import gc
import pickle

import pytest
import torch

from moe_core import Derived, MoEConfig
from moe_core.experts import Experts
from moe_core.kernels import buffers, ffn_loop, ffn_x86

OFFSETS = torch.tensor([5, 9], dtype=torch.int32)
ROWS = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))


def make_experts(seed: int = 0) -> Experts:
    torch.manual_seed(seed)
    return Experts(MoEConfig(8, 16, 2)).eval()


def evaluated(experts: Experts) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return experts(ROWS, OFFSETS)


def expected(experts: Experts) -> torch.Tensor:
    fresh = make_experts()
    with torch.no_grad():
        for own, other in zip(fresh.parameters(), experts.parameters(), strict=True):
            own.copy_(other)
    return evaluated(fresh)


def step(experts: Experts, fused: bool = False) -> None:
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1, fused=fused)
    experts(ROWS, OFFSETS).square().sum().backward()
    optimizer.step()


def fused_step(experts: Experts) -> None:
    step(experts, fused=True)


def load(experts: Experts) -> None:
    experts.load_state_dict(make_experts(1).state_dict())


def assign(experts: Experts) -> None:
    experts.load_state_dict(make_experts(1).state_dict(), assign=True)


def write_in_place(experts: Experts) -> None:
    with torch.no_grad():
        experts.w2[1].mul_(2)


def write_state(experts: Experts) -> None:
    experts.state_dict()["b1"].lerp_(torch.ones(()), 0.5)  # as timm's averaged weights do


def replace_data(experts: Experts) -> None:
    experts.w1.data = torch.randn(experts.w1.shape)


def write_data(experts: Experts) -> None:
    experts.w1.data.mul_(2)  # no trace of it; a change of mode drops the copies
    experts.train().eval()


CHANGES = [step, fused_step, load, assign, write_in_place, write_state, replace_data, write_data]


@pytest.mark.parametrize("change", CHANGES)
def test_evaluation_follows_every_change_of_the_parameters(change):
    experts = make_experts()
    before = evaluated(experts)
    change(experts)
    after = evaluated(experts)
    assert not torch.equal(after, before)
    assert torch.equal(after, expected(experts))


def test_evaluation_follows_parameters_that_lie_where_others_lay():
    """As functional_call's do, which are gone after the call; here by one buffer for all."""
    experts = make_experts()
    buffers_of = {name: bytearray(p.nbytes) for name, p in experts.named_parameters()}
    results = []
    for seed in range(2):
        wanted = make_experts(seed)
        parameters = {n: torch.frombuffer(b, dtype=torch.float32) for n, b in buffers_of.items()}
        parameters = {n: parameters[n].view_as(p).copy_(p.detach()) for n, p in wanted.named_parameters()}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            results.append(torch.func.functional_call(experts, parameters, (ROWS, OFFSETS)))
        assert torch.equal(results[-1], evaluated(wanted))
    assert not torch.equal(*results)


def test_copies_last_while_nothing_changes():
    experts = make_experts()
    with torch.no_grad():
        assert experts.weights(torch.bfloat16).w1 is experts.weights(torch.bfloat16).w1
        assert experts.weights(torch.float32).w1 is experts.w1


def test_another_thread_s_dtype_is_not_taken_for_one_s_own():
    derived, module = Derived(), torch.nn.Linear(1, 1).eval().requires_grad_(False)

    class Interrupted(str):
        """While this key is compared, another thread computes with its own."""

        def __eq__(self, other: object) -> bool:
            if not isinstance(other, Interrupted):
                return False
            assert derived.get(module, module.parameters(), "bf16", lambda: "copies in bf16") == "copies in bf16"
            return True

        __hash__ = str.__hash__

    for _ in range(2):
        key = Interrupted("fp32")
        assert derived.get(module, module.parameters(), key, lambda: "copies in fp32") == "copies in fp32"


def test_a_pass_that_learns_takes_the_parameters():
    experts = make_experts()
    assert experts.weights(torch.bfloat16).w1 is experts.w1  # gradients are on
    with torch.no_grad():
        assert experts.train().weights(torch.bfloat16).w1 is experts.w1


def test_frozen_experts_compute_with_copies_also_where_the_rows_learn():
    experts = make_experts().requires_grad_(False)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        experts(ROWS, OFFSETS)
    rows = ROWS.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        experts(rows, OFFSETS).sum().backward()
    assert experts.weights(torch.bfloat16).w1.dtype == torch.bfloat16
    assert rows.grad.isfinite().all()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda experts: pickle.loads(pickle.dumps(experts))])
def test_copies_are_not_copied(duplicate):
    experts = make_experts()
    before = evaluated(experts)
    other = duplicate(experts)
    assert other._copies is not experts._copies
    assert other._copies._kept is None
    assert torch.equal(evaluated(other), before)


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


def test_weight_gradients_are_the_op_s_own_memory(monkeypatch):
    """A copy of them would cost as much as they do: autograd takes them over."""
    experts = make_experts().train()
    places = []

    def spy(*arguments, **options):
        tensor = buffers_empty(*arguments, **options)
        places.append(tensor.data_ptr())
        return tensor

    buffers_empty = buffers.empty
    monkeypatch.setattr(ffn_loop, "empty", spy)
    monkeypatch.setattr(ffn_x86, "empty", spy)
    experts(ROWS, OFFSETS).sum().backward()
    assert all(parameter.grad.data_ptr() in places for parameter in experts.parameters())
