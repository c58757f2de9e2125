"""The host's work for a layer: how many ops and kernel launches a pass has, each of which takes the
host 0.02 ms, and that torch's dispatcher is used only where something watches."""

from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from triton_cases import INTERPRETED

from moe_core import MoEConfig, MoELayer
from moe_core.ops.native import library
from moe_core.ops.route import op as routing

needs_cpp = pytest.mark.skipif(library.chosen() is None, reason="no C++ here")
LAUNCHES = {
    "route_kernel": 1,
    "_loss_kernel": 1,
    "_loss_backward_kernel": 1,
    "_count_kernel": 1,
    "_scan_kernel": 1,
    "_plan_kernel": 1,
    "blocks_kernel": 2,
    "hidden_kernel": 1,
    "model_kernel": 2,
    "_dispatch_kernel": 2,
    "hidden_grad_kernel": 1,
    "weight_grad_kernel": 2,
    "gate_grad_kernel": 1,
    "_sum_kernel": 2,
    "sum_blocks_kernel": 2,
    "route_backward_kernel": 1,
}


def small_layer(kernels: str = "auto") -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(MoEConfig(16, 32, 4, top_k=2, capacity_factor=0.0, kernels=kernels))


def train(layer: MoELayer) -> None:
    y, aux_loss = layer(torch.ones(20, 16, requires_grad=True))
    (y.sum() + aux_loss).backward()


@needs_cpp
def test_ops_of_a_pass():
    layer = small_layer()
    train(layer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(layer)
    ops = Counter(event.name for event in profile.events() if event.name.startswith("moe_core::"))
    names = ("route", "make_plan", "moe_ffn", "route_backward", "moe_ffn_backward")
    assert ops == {f"moe_core::{name}": 1 for name in names}


class DispatchedError(Exception):
    pass


@needs_cpp
@pytest.mark.parametrize("op", [routing._route, routing._route_backward])
def test_the_dispatcher_is_used_only_where_something_watches(op, monkeypatch):
    def refuse(*arguments):
        raise DispatchedError

    monkeypatch.setattr(op, "dispatched", refuse)
    layer = small_layer()
    train(layer)
    with pytest.raises(DispatchedError), FlopCounterMode(display=False):
        train(layer)
    with pytest.raises(DispatchedError), torch.profiler.profile():
        train(layer)


class TestKernels:
    @pytest.mark.skipif(not INTERPRETED, reason="in a process that test_verify.py starts")
    def test_launches_of_a_pass(self, monkeypatch):
        from triton.runtime import interpreter

        launches: Counter[str] = Counter()
        launch = interpreter.GridExecutor.__call__

        def counted(self, *arguments, **named):
            launches[self.fn.__name__] += 1
            return launch(self, *arguments, **named)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
        with torch.autocast("cpu", torch.bfloat16):
            train(small_layer("triton"))
        assert launches == LAUNCHES
