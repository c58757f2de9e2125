"""A layer's state under casts, copies, construction on meta and recomputation; its random draws."""

import copy
import pickle

import pytest
import torch
from timm.optim import param_groups_weight_decay
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from moe_core import (
    MoEConfig,
    MoELayer,
    finish_gradients,
    ignore_experts,
    update_balance,
)

M, H, E = 16, 8, 4
BIAS = MoEConfig(M, H, E, balance="bias", balance_rate=1e-3, num_shared_experts=1)


def uninitialized(config=BIAS):
    """A layer after `to_empty`, whose memory is filled with NaN and large numbers."""
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory
    try:
        return MoELayer(config, device="meta").to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_bias_stays_in_fp32(dtype):
    layer = MoELayer(BIAS)
    layer.balance.bias.fill_(0.5)
    layer(torch.randn(90, M))
    counts = layer.last_routing.counts
    layer.to(dtype)
    update_balance(layer)  # bf16 would round the step away
    expected = 0.5 + 1e-3 * torch.sign(counts.float().mean() - counts)
    torch.testing.assert_close(layer.balance.bias, expected)

    low = {name: tensor.to(dtype) for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(low, assign=True)
    assert layer.router.weight.dtype == dtype
    assert layer.balance.bias.dtype == torch.float32
    assert layer.type(dtype).balance.load.dtype == torch.int64


def test_the_bias_under_a_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = MoELayer(BIAS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (layer.router.weight.dtype, layer.balance.bias.dtype) == (torch.bfloat16, torch.float32)


def test_the_load_belongs_to_this_process():
    """DistributedDataParallel broadcasts buffers, and checkpoints contain persistent ones."""
    layer = MoELayer(BIAS)
    assert [name for name, _ in layer.named_buffers()] == ["balance.bias"]
    layer(torch.randn(40, M))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin.balance.load, layer.balance.load)
        twin.balance.load.zero_()
    assert layer.balance.load.sum() == 40


def test_marks_for_distributed_data_parallel_hide_nothing_from_torch():
    layer = MoELayer(BIAS)
    model = ignore_experts(layer)
    assert model is layer
    assert set(model.state_dict()) >= {name for name, _ in layer.named_parameters()}
    assert "experts.w1" in model.state_dict()
    # the experts of one process are copies that DistributedDataParallel averages
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")


@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_made_on_meta_loads_its_state(assign):
    saved = MoELayer(BIAS)
    saved.balance.bias.copy_(torch.tensor([0.1, 0.2, -0.1, 0.0]))
    layer = uninitialized()
    if assign:
        layer = MoELayer(BIAS, device="meta")
    layer.load_state_dict(copy.deepcopy(saved.state_dict()), assign=assign)
    x = torch.randn(40, M)
    for one in (saved, layer):
        one(x)
        assert one.balance.load.sum() == 40
        update_balance(one)
    assert torch.equal(layer.balance.bias, saved.balance.bias)
    assert torch.equal(layer(x)[0], saved(x)[0])


@pytest.mark.parametrize("router", ["linear", "cosine", "soft", "expert_choice"])
def test_reset_parameters_after_to_empty(router):
    """Of the layer, or of each module that has the method."""
    config = MoEConfig(M, H, E, router=router, slots_per_expert=2, num_shared_experts=1)
    torch.manual_seed(0)
    expected = MoELayer(config)
    layer = uninitialized(config)
    torch.manual_seed(0)
    layer.reset_parameters()
    if router != "cosine":  # its projector is drawn twice when it is made
        for name, parameter in expected.named_parameters():
            assert torch.equal(layer.get_parameter(name), parameter), name
    each = uninitialized(config)
    for module in each.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in each.parameters())
    assert each(torch.randn(2, 6, M))[0].isfinite().all()


def test_reset_parameters_of_a_sharded_layer(tmp_path):
    torch.manual_seed(0)
    expected = MoELayer(MoEConfig(M, H, E, init_std=0.02))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        layer = MoELayer(MoEConfig(M, H, E, init_std=0.02), device="meta")
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        layer.to_empty(device="cpu")
        torch.manual_seed(0)
        layer.reset_parameters()
        assert isinstance(layer.experts.w1, DTensor)
        for name, parameter in expected.experts.named_parameters():
            found = layer.experts.get_parameter(name).full_tensor()
            assert torch.equal(found, parameter), name
    finally:
        torch.distributed.destroy_process_group()


def test_routers_of_ones_own_are_reset():
    layer = MoELayer(BIAS, router=[torch.nn.Sequential(torch.nn.Linear(M, E)) for _ in range(2)])
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    layer.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_counts_once(use_reentrant):
    layer = MoELayer(BIAS)
    x = torch.randn(40, M, requires_grad=True)
    y, _ = checkpoint(layer, x, use_reentrant=use_reentrant)
    last = layer(x[:8])
    counted = layer.balance.load.clone()
    y.sum().backward()
    assert torch.equal(layer.balance.load, counted)
    assert counted.sum() == 48
    assert layer.last_routing.counts.sum() == len(last[0])  # of the latest pass


# Random draws

DRAWS = {
    "noise": {"gate_noise": 4.0},
    "dropout": {"hidden_dropout": 0.5},
    "dropout in torch": {"hidden_dropout": 0.5, "kernels": "torch"},
    "noise where experts choose": {"gate_noise": 4.0, "router": "expert_choice"},
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draws_do_not_depend_on_the_dtype(name, dtype):
    """With weights and tokens that bf16 has, too. Other draws would choose other experts."""
    if dtype == torch.float64 and name == "dropout":
        pytest.skip("fp64 has no C++ kernel: the masks lie in another order")
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(M, H, E, activation="relu", **DRAWS[name])).bfloat16().float()
    x = torch.randn(40, M).bfloat16().float()
    torch.manual_seed(1)
    expected, _ = layer(x)
    expected_counts = layer.last_routing.counts
    layer.to(dtype)
    torch.manual_seed(1)
    found, _ = layer(x.to(dtype))
    assert torch.equal(layer.last_routing.counts, expected_counts)
    # eight products with bf16's rounding of 2**-8, or fp32's; other draws differ by the values
    rounding = 0.1 if dtype == torch.bfloat16 else 1e-5
    difference = (found.double() - expected.double()).abs().max()
    assert difference < rounding * expected.abs().max()


@pytest.mark.parametrize("router", ["linear", "cosine", "soft"])
def test_initial_values_do_not_depend_on_the_default_dtype(router):
    config = MoEConfig(M, H, E, router=router, slots_per_expert=2)
    layers = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            layers.append(MoELayer(config))
        finally:
            torch.set_default_dtype(torch.float32)
    for name, parameter in layers[0].named_parameters():
        if name != "router.temperature":
            assert torch.equal(layers[1].get_parameter(name), parameter.bfloat16()), name


KINDS = {
    "linear": {"top_k": 2, "capacity_factor": 1.25, "gate_noise": 1.0, "balance": "bias"},
    "cosine": {"router": "cosine", "gated": True, "num_shared_experts": 1, "kernels": "torch"},
    "expert choice": {"router": "expert_choice"},
    "soft": {"router": "soft", "slots_per_expert": 2, "bias": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tools_that_build_a_layer_without_data(kind):
    """As estimators of memory do: torch's fake tensors have shapes, and no values."""

    def train(layer: MoELayer) -> None:
        optimizer = torch.optim.AdamW(layer.parameters())
        y, loss = layer(torch.randn(10, M, requires_grad=True))
        assert y.shape == (10, M)
        (y.sum() + loss).backward()
        finish_gradients(layer, max_norm=1.0)
        optimizer.step()

    config = MoEConfig(M, H, E, **KINDS[kind])
    with FakeTensorMode():
        layer = MoELayer(config)
        train(layer)
        layer.reset_parameters()
        assert layer.eval()(torch.randn(3, M))[0].shape == (3, M)
    tracker, flops = MemTracker(), FlopCounterMode(display=False)
    with FakeTensorMode(), tracker, flops:
        train(MoELayer(config))
    parameters = sum(parameter.nbytes for parameter in layer.parameters())
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    assert peak["Total"] > 3 * parameters  # with gradients and two moments
    assert flops.get_total_flops() > 0
    train(MoELayer(config))  # fake tensors leave nothing behind


class OwnRouter(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(M, E)

    def no_weight_decay(self) -> set[str]:
        return {"weight"}


def test_a_loop_of_ones_own_decays_no_biases():
    """The convention of timm's models: the names of a layer's parameters without weight decay."""
    gated = MoEConfig(M, H, E, gated=True, num_shared_experts=1)
    biases = {f"{part}.{name}" for part in ("experts", "shared") for name in ("b1", "b2", "b3")}
    assert MoELayer(gated).no_weight_decay() == biases
    assert MoELayer(MoEConfig(M, H, E, bias=False)).no_weight_decay() == set()
    cosine = MoELayer(MoEConfig(M, H, E, router="cosine", output_bias=False))
    router = ("temperature", "sim_matrix", "projector.weight", "projector.bias")
    assert cosine.no_weight_decay() == {"experts.b1", *(f"router.{name}" for name in router)}
    own = MoELayer(MoEConfig(M, H, E), router=OwnRouter())
    assert own.no_weight_decay() == {"router.weight", "experts.b1", "experts.b2"}
    groups = param_groups_weight_decay(own, 0.1, no_weight_decay_list=own.no_weight_decay())
    decayed = {id(p) for group in groups for p in group["params"] if group["weight_decay"]}
    assert decayed == {id(own.experts.w1), id(own.experts.w2)}
