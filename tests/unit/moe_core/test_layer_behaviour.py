"""What a caller of the layer sees besides its numbers: arguments per call, noise, statistics,
initialisation. `test_bad_modules` has the errors."""

import copy
import math

import pytest
import torch
from moe_cases import assert_equal_to_plain, make_layer
from safetensors.torch import load_file
from torch import nn

from moe_core import MoEConfig, MoELayer, expert_parameters, load_tensors, moe_layers, save_tensors
from moe_core.capacity import expert_capacity
from moe_core.ops.ffn import cpp as ffn_cpp


def tokens(num: int = 13) -> torch.Tensor:
    return torch.randn(num, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_arguments_of_a_call_do_not_stick():
    layer = make_layer(top_k=1, capacity_factor=0.5)
    x = tokens()
    before = layer(x)[0]
    for call in ({"top_k": 2, "capacity_factor": 0.0}, {"capacity_factor": -0.75}, {"top_k": 3}):
        assert_equal_to_plain(layer, x, **call)
        assert not torch.equal(layer(x, **call)[0], before)
        assert torch.equal(layer(x)[0], before)


def test_top_k_above_the_number_of_experts_means_all():
    x = tokens()
    every = make_layer(top_k=4, capacity_factor=0.5)(x)
    of_config = make_layer(top_k=9, capacity_factor=0.5)(x)
    of_call = make_layer(capacity_factor=0.5)(x, top_k=9)
    torch.testing.assert_close(of_config, every, rtol=0, atol=0)
    torch.testing.assert_close(of_call, every, rtol=0, atol=0)


def test_routing_noise_only_in_training():
    layer, x = make_layer(gate_noise=1.0), tokens()
    quiet = make_layer()
    layer.eval()
    assert torch.equal(layer(x)[0], quiet(x)[0])
    layer.train()
    torch.manual_seed(0)
    first, second = layer(x)[1], layer(x)[1]
    assert first != second
    layer.eval()  # and back: nothing lingers
    assert torch.equal(layer(x)[0], quiet(x)[0])
    layer.train()
    torch.manual_seed(0)
    assert layer(x)[1] == first


def test_hidden_dropout_only_in_training():
    layer = make_layer(hidden_dropout=0.5)
    assert not torch.equal(layer(tokens())[0], layer(tokens())[0])
    assert torch.equal(layer.eval()(tokens())[0], make_layer()(tokens())[0])


def test_last_routing_by_hand():
    layer = make_layer(num_experts=2, capacity_factor=1.0)
    assert layer.last_routing is None
    with torch.no_grad():
        layer.router.weight.zero_()[0, 0] = math.log(3)  # probabilities 3/4 and 1/4 where x_0 = 1
    x = torch.zeros(5, 6, dtype=torch.float64, requires_grad=True)
    layer(x.add(torch.eye(6, dtype=torch.float64)[0]))
    routing = layer.last_routing
    assert routing.counts.tolist() == [5, 0]
    assert routing.dropped_share.item() == pytest.approx(2 / 5)  # capacity 1.0 * ceil(5 / 2)
    assert routing.entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert not any(value.requires_grad for value in routing)


def test_expert_capacity():
    for arguments, capacity in (
        ((8, 4, 1, 1.0), 2),
        ((9, 4, 1, 1.0), 3),  # ceil(T / E)
        ((9, 4, 2, 1.25), 6),  # K * floor(f * S), not floor(K * f * S) = 7
        ((9, 4, 1, -1.25), 3),
        ((9, 4, 1, 0.0), None),
        ((9, 4, 1, 0.3), 0),
        ((0, 4, 1, 1.0), 0),
    ):
        assert expert_capacity(*arguments) == capacity, arguments


def test_parameters_have_the_published_names_and_shapes():
    layer = MoELayer(MoEConfig(6, 10, 4))
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "router.weight": (4, 6),
        "experts.w1": (4, 10, 6),
        "experts.b1": (4, 10),
        "experts.w2": (4, 10, 6),
        "experts.b2": (4, 6),
    }
    assert MoELayer(MoEConfig(6, 10, 4, output_bias=False)).experts.b2 is None
    without_bias = MoELayer(MoEConfig(6, 10, 4, bias=False)).experts
    assert [name for name, _ in without_bias.named_parameters()] == ["w1", "w2"]
    model = nn.Sequential(nn.Linear(6, 6), layer)
    assert list(moe_layers(model)) == ["1"]
    names = [f"1.experts.{name}" for name in ("b1", "b2", "w1", "w2")]
    assert sorted(expert_parameters(model)) == names


def test_initialisation_is_per_expert_and_of_the_stated_size():
    torch.manual_seed(0)
    experts = MoELayer(MoEConfig(64, 256, 3)).experts
    assert experts.w1.abs().max() <= 1 / 8
    assert experts.w2.abs().max() <= 1 / 16
    assert experts.w1.std().item() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.02)
    assert not torch.equal(experts.w1[0], experts.w1[1])
    experts = MoELayer(MoEConfig(64, 256, 3, init_std=0.005)).experts
    assert experts.w2.std().item() == pytest.approx(0.005, rel=0.02)
    assert experts.b1.count_nonzero() == experts.b2.count_nonzero() == 0


def test_a_used_layer_can_be_copied_and_a_meta_layer_materialised():
    layer = make_layer()
    layer(tokens())[1].backward()
    assert torch.equal(copy.deepcopy(layer)(tokens())[0], layer(tokens())[0])
    with torch.device("meta"):
        empty = MoELayer(layer.config)
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device="cpu").double().load_state_dict(layer.state_dict())
    assert torch.equal(empty(tokens())[0], layer(tokens())[0])


def test_a_layer_that_is_the_whole_model_is_saved_by_expert(tmp_path):
    layer = make_layer()
    save_tensors(tmp_path, layer, layer.state_dict())
    assert len(list((tmp_path / "experts").rglob("*.safetensors"))) == layer.config.num_experts
    assert list(load_file(tmp_path / "model.safetensors")) == ["router.weight"]
    torch.testing.assert_close(
        load_tensors(tmp_path, layer), dict(layer.state_dict()), rtol=0, atol=0
    )


@pytest.mark.parametrize("watch", ["backward hook", "backward pre-hook", "own forward"])
def test_a_linear_router_is_called_if_something_watches_it(watch):
    layer = MoELayer(MoEConfig(model_dim=4, hidden_dim=8, num_experts=2))
    router, calls = layer.router, []
    if watch == "backward hook":
        router.register_full_backward_hook(lambda *_: calls.append(watch))
    elif watch == "backward pre-hook":
        router.register_full_backward_pre_hook(lambda *_: calls.append(watch))
    else:
        forward = router.forward
        router.forward = lambda tokens: calls.append(watch) or forward(tokens)
    y, aux_loss = layer(torch.randn(3, 4, requires_grad=True))
    (y.sum() + aux_loss).backward()
    assert calls == [watch]


class OutputAlone(nn.Module):
    """A layer without its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_layer(dtype=torch.float32)

    def forward(self, x):
        return self.layer(x)[0]


def test_a_layer_that_was_traced_with_gradients_can_be_saved(tmp_path):
    model, x = OutputAlone(), tokens().float()
    traced = torch.jit.trace(model, x, check_trace=False)
    torch.jit.save(traced, tmp_path / "traced.pt")
    loaded = torch.jit.load(tmp_path / "traced.pt")
    torch.testing.assert_close(loaded(x), model(x))


def test_a_program_exported_in_bf16_runs_on_a_cpu_that_does_not_multiply_it(monkeypatch):
    model, x = OutputAlone().eval(), tokens().float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        program = torch.export.export(model, (x,)).module()
        expected = model(x)
        monkeypatch.setattr(ffn_cpp, "packed_dtype", lambda dtype, kernels: torch.int32)
        found = program(x)
    limit = 0.02 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=limit)


def test_an_exported_layer_takes_any_number_of_tokens():
    """Also where a narrow layer chooses between its parameters and packed weights by it."""
    model, length = OutputAlone().eval(), torch.export.Dim("length", min=2, max=5000)
    with torch.no_grad():
        program = torch.export.export(model, (tokens(6).float(),), dynamic_shapes=({0: length},))
        for num in (2, 3000):
            x = tokens(num).float()
            torch.testing.assert_close(program.module()(x), model(x))
