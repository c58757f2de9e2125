"""moe_core.compat.tutel in one process: which form computes, names, errors, state dicts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tutel_cases import HIDDEN, MODEL_DIM, make_layer

from moe_core import MoEConfig, MoELayer
from moe_core.compat.tutel import layer as layer_module
from moe_core.compat.tutel import moe, net, system
from moe_core.compat.tutel.activations import KnownActivation, recognise
from moe_core.compat.tutel.dispatch import gshard_loss, load_importance_loss
from moe_core.tutel import from_tutel, to_tutel


def tokens(*shape: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(*shape, MODEL_DIM)


# Activations


def dropout_of_gelu(p: float) -> tuple[nn.Dropout, object]:
    dropout = nn.Dropout(p)
    return dropout, lambda x: dropout(F.gelu(x))


KNOWN = [
    (F.relu, "relu"),
    (torch.relu, "relu"),
    (nn.ReLU(inplace=True), "relu"),
    (lambda x: x.relu(), "relu"),
    (nn.GELU(), "gelu"),
    (lambda x: F.silu(x), "silu"),
    (nn.SiLU(), "silu"),
]
UNKNOWN = [
    torch.tanh,
    lambda x: F.relu(x) * 2,
    lambda x: F.relu(F.gelu(x)),
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: F.gelu(F.dropout(x, 0.5)),
    lambda x: (F.relu(x), x)[1],
    lambda x: F.relu(x) if x.shape[0] > 3 else x,
    lambda x: F.dropout(F.relu(x), 1.0),
    lambda x: missing(F.relu(x)),  # noqa: F821 - made later
]


def test_known_activations_are_recognised_and_no_others():
    for function, name in KNOWN:
        assert recognise(function) == KnownActivation(name, 0.0), name
    assert [recognise(function) for function in UNKNOWN] == [None] * len(UNKNOWN)


def test_dropout_is_read_in_every_call():
    dropout, function = dropout_of_gelu(0.25)
    state = torch.get_rng_state()
    assert recognise(function) == KnownActivation("gelu", 0.25)
    dropout.p = 0.5
    assert recognise(function) == KnownActivation("gelu", 0.5)
    dropout.eval()
    assert recognise(function) == KnownActivation("gelu", 0.0)
    assert torch.equal(state, torch.get_rng_state())


def test_the_engine_drops_hidden_units():
    """Dropout after the activation, in the engine: the mean over many tokens is unchanged."""
    dropout, function = dropout_of_gelu(0.5)
    layer = make_layer({"experts": {"activation_fn": function}, "gate": {"k": 1}}, moe)
    layer.experts.dropout = dropout
    x = tokens(1).repeat(4000, 1)
    dropped = layer(x, capacity_factor=0)
    assert dropped.std(0).max() > 0.01
    layer.eval()
    assert torch.allclose(dropped.mean(0), layer(x[:1], capacity_factor=0)[0], atol=0.02)


BY_THE_ENGINE = [
    {},
    {"experts": {"activation_fn": None}},
    {"experts": {"activation_fn": dropout_of_gelu(0.1)[1]}},
    {"experts": {"has_fc2_bias": False}},
    {"gate": {"type": "cosine_top"}},
]
PADDED = [
    {"experts": {"activation_fn": torch.tanh}},
    {"experts": {"output_dim": 8}},
    {"layer": {"is_postscore": False}},
    {"experts": {"type": "llama_ffn"}},
]


def test_which_form_computes(monkeypatch):
    calls = []
    usual = layer_module.padded_forward
    monkeypatch.setattr(
        layer_module, "padded_forward", lambda *args: calls.append(1) or usual(*args)
    )
    for cases, expected in ((BY_THE_ENGINE, 0), (PADDED, 1)):
        for case in cases:
            calls.clear()
            make_layer(case, moe)(tokens(2, 5))
            assert len(calls) == expected, case


def test_both_forms_agree():
    """A wrapped ReLU is unknown, so the padded form computes what the engine does."""
    known = make_layer({"gate": {"capacity_factor": 0.5}}, moe)
    other = {"activation_fn": lambda x: F.relu(x) * 1.0}
    unknown = make_layer({"gate": {"capacity_factor": 0.5}, "experts": other}, moe)
    x = tokens(3, 7)
    results = []
    for layer in (known, unknown):
        y = layer(x)
        (y.square().sum() + y.l_aux).backward()
        results.append([y, y.l_aux, *(p.grad for p in layer.parameters())])
    for found, expected in zip(*results, strict=True):
        # fp32 (eps 6e-8): sums of at most 24 terms, then of 21 tokens' terms, which may cancel
        limit = 2e-5 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found, expected, rtol=0, atol=limit)
    assert torch.equal(known.dispatch_count, unknown.dispatch_count)


# Arguments


@pytest.mark.parametrize("activation", [F.relu, torch.tanh], ids=["engine", "padded"])
@pytest.mark.parametrize(("num_tokens", "capacity_factor"), [(0, 1.0), (0, 0.0), (7, 0.1)])
def test_experts_without_a_place(activation, num_tokens, capacity_factor):
    gate = {"capacity_factor": capacity_factor}
    layer = make_layer({"experts": {"activation_fn": activation}, "gate": gate}, moe)
    x = torch.randn(num_tokens, MODEL_DIM, requires_grad=True)
    y = layer(x)
    (y.sum() + y.l_aux).backward()
    assert y.shape == x.shape
    assert not y.any()


def test_attributes_that_programs_read():
    seen = []
    layer = moe.moe_layer(
        {"type": "top", "k": 2, "gate_noise": 0.5},
        MODEL_DIM,
        {"type": "ffn", "count_per_node": 3, "hidden_size_per_expert": HIDDEN},
        scan_expert_func=lambda name, parameter: seen.append(name),
        result_func=lambda y: (y, y.l_aux),
    )
    y, l_aux = layer(tokens(2, 5))
    assert y.shape == (2, 5, MODEL_DIM)
    assert l_aux is layer.l_aux
    names = ["batched_fc1_w", "batched_fc2_w", "batched_fc1_bias", "batched_fc2_bias"]
    assert seen == names
    assert [name for name, _ in layer.get_parameter_iterator("local_experts")] == names
    assert [name for name, _ in layer.get_parameter_iterator("gate")] == ["0.wg.weight"]
    assert all(p._tutel_expert for p in layer.experts.parameters())
    assert (layer.num_global_experts, layer.num_local_experts, layer.sharded_count) == (3, 3, 1)
    assert layer.valid_rs == [0, 1]
    assert "Top-K(s) = ['k=2, noise=0.5'], Total-Experts = 3 [managed by 1 device(s)]" in str(layer)
    assert int(layer.dispatch_count.sum()) == 20


def test_experts_and_gates_described_in_older_ways():
    layer = moe.moe_layer(
        {"type": "top"},
        MODEL_DIM,
        {
            "type": "ffn",
            "hidden_size_per_expert": HIDDEN,
            "activation_fn_with_self": lambda x, experts: F.relu(x) + experts.hidden_size * 0,
        },
    )
    assert layer(tokens(4)).shape == (4, MODEL_DIM)
    experts = {"type": "ffn", "hidden_size_per_expert": HIDDEN, "num_experts_per_device": 3}
    gate, before = {"type": "top", "k": 1}, dict(experts)
    moe.moe_layer(gate, MODEL_DIM, experts)
    assert (gate, experts) == ({"type": "top", "k": 1}, before)  # descriptions are not changed
    with pytest.warns(FutureWarning, match="gate_type: use"):
        layer = moe.moe_layer("Top2Gate", MODEL_DIM, experts)
    assert layer.gates[0].top_k == 2
    with pytest.warns(FutureWarning, match="pad_samples has no effect"):
        moe.moe_layer({"type": "top"}, MODEL_DIM, experts, pad_samples=False)


def test_each_gate_has_its_own_options():
    gates = [
        {"type": "top", "k": 1, "capacity_factor": 0.5},
        {"type": "cosine_top", "k": 2, "capacity_factor": 0, "proj_dim": 8, "init_t": 1.0},
    ]
    experts = {"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": HIDDEN}
    layer = moe.moe_layer(gates, MODEL_DIM, experts, seeds=(1, 1, 1))
    layer(tokens(9), gate_index=1)
    assert int(layer.dispatch_count.sum()) == 18
    y = layer(tokens(9), gate_index=0)
    assert int(layer.dispatch_count.sum()) == 9
    assert (y.abs().sum(1) == 0).any()  # dropped
    layer.gates[0].capacity_factor = 0
    assert not (layer(tokens(9)).abs().sum(1) == 0).any()
    assert layer.gates[1].sim_matrix.shape == (8, 4)
    assert layer.gates[1].temperature.item() == 0.0


def test_gate_noise_may_change():
    layer = make_layer({"gate": {"k": 1}}, moe)
    x = tokens(50)
    layer.gates[0].gate_noise = 100.0
    ids = []
    for _ in range(2):
        layer(x)
        ids.append(layer.dispatch_count.tolist())
    assert ids[0] != ids[1]
    layer.eval()
    assert torch.equal(layer(x), layer(x))


class Tripled(nn.Module):
    """An experts module as Tutel's users write it."""

    def __init__(self, model_dim, num_experts_per_device, sharded_count, shape=None):
        super().__init__()
        assert sharded_count == 1
        self.shape = shape
        self.scale = nn.Parameter(3 * torch.ones(num_experts_per_device, 1, 1))

    def forward(self, x, layer):
        if self.shape:
            assert x.shape[2:] == self.shape
            return x * self.scale.unsqueeze(3)
        return x * self.scale


class FirstExperts(nn.Module):
    """A gate that always prefers the experts in order."""

    def __init__(self, model_dim, num_global_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.register_buffer("logits", -torch.arange(num_global_experts).float())

    def forward(self, x):
        return self.logits.expand(len(x), -1)


def test_modules_of_the_user():
    gate = {"type": "custom", "module": FirstExperts, "top_k": 2}
    experts = {"type": "custom", "module": Tripled, "num_experts_per_device": 4}
    layer = moe.moe_layer(gate, MODEL_DIM, experts)
    x = tokens(2, 5)
    assert torch.allclose(layer(x, capacity_factor=0), 3 * x, atol=1e-5)
    assert layer.dispatch_count.tolist() == [10, 10, 0, 0]
    experts["shape"] = (4, 4)
    layer = moe.moe_layer(gate, MODEL_DIM, experts)
    x = tokens(2, 5).unflatten(2, (4, 4))
    y = layer(x, capacity_factor=0, reserve_dims=2)
    assert torch.allclose(y, 3 * x, atol=1e-5)


def test_a_gate_of_the_user_with_the_engine():
    layer = moe.moe_layer(
        {"type": "custom", "module": FirstExperts, "top_k": 1},
        MODEL_DIM,
        {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": HIDDEN},
    )
    y = layer(tokens(6))  # 3 places
    assert (y.abs().sum(1) > 0).tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": {"type": "median"}}, r"gate type \('median'\) must be one of top, cosine_top"),
        ({"gate": {"temperature": 2}}, r"temperature \(2\) is not an option of gate type 'top'"),
        ({"experts": {"type": "conv"}}, r"experts type \('conv'\) must be one of ffn, llama_ffn"),
        ({"experts": {"dropout": 0.1}}, "experts of type 'ffn': .*'dropout'"),
        ({"experts": {"implicit_dropout_p": 0.1}}, r"implicit_dropout_p \(0.1\): use dropout in"),
        ({"experts": {"num_experts_per_device": 0}}, r"num_experts_per_device \(0\) must not"),
        ({"experts": {"activation_fn_with_self": F.relu}}, "are both given"),
        ({"layer": {"parallel_type": "tensor"}}, r"\('tensor'\) must be 'adaptive:R'"),
        ({"layer": {"is_gshard_loss": False}}, r"\(False\) needs gate_noise \(0.0\)"),
        ({"layer": {"a2a_type": "x"}}, r"a2a_type \('x'\) is not an argument of moe_layer"),
        ({"call": {"adaptive_r": 3}}, r"adaptive_r \(3\) must be one of 0, 1"),
        ({"call": {"a2a_ffn_overlap_degree": 0}}, r"overlap_degree \(0\) must be at least 1"),
    ],
)
def test_bad_options_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        make_layer(change, moe)(tokens(4), **change.get("call", {}))


def test_other_errors():
    layer = make_layer({}, moe)
    with pytest.raises(ValueError, match=r"input has shape \[16\], it must have 2 dims"):
        layer(torch.zeros(16))
    with pytest.raises(ValueError, match=r"param_type \('shared'\) must be"):
        layer.get_parameter_iterator("shared")
    with pytest.raises(ValueError, match=r"gate_type \('Best2'\) must be a dictionary"):
        moe.moe_layer("Best2", 8, {"type": "ffn", "hidden_size_per_expert": 8})
    with pytest.raises(ValueError, match=r"gate_noise \(0\) must be above 0"):
        load_importance_loss(torch.ones(2, 2), torch.ones(2, 1), 2, 0)
    with pytest.raises(ValueError, match=r"backend \('mpi'\) must be one of nccl, gloo"):
        system.init_data_model_parallel(backend="mpi")
    with pytest.raises(NotImplementedError, match="from_url has no counterpart"):
        system.from_url("https://example.com")


def test_variables_of_the_environment(monkeypatch):
    monkeypatch.setenv("CAP_FACTOR", "0.5")
    monkeypatch.setenv("BATCH_PRIO", "1")
    experts = {"type": "ffn", "hidden_size_per_expert": 8}
    layer = moe.moe_layer({"type": "top"}, 8, experts)
    assert layer.gates[0].capacity_factor == 0.5
    assert layer.batch_prioritized_routing
    monkeypatch.setenv("SKIP_MOE", "1")
    x = torch.ones(2, 8)
    y = moe.moe_layer({"type": "top"}, 8, experts)(x)
    assert torch.equal(y, x)
    assert y.l_aux is None
    monkeypatch.setenv("SKIP_A2A", "1")
    with pytest.raises(NotImplementedError, match="SKIP_A2A=1 has no counterpart"):
        moe.moe_layer({"type": "top"}, 8, experts)


# Dtypes and copies


@pytest.mark.parametrize("activation", [F.relu, torch.tanh], ids=["engine", "padded"])
def test_dtypes(activation):
    layer = make_layer({"experts": {"activation_fn": activation}}, moe)
    x = tokens(3, 5)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.float32
    assert torch.allclose(y, expected, atol=3e-2)  # of values near 1, in bf16
    for dtype in (torch.bfloat16, torch.float64):
        layer = layer.to(dtype)
        y = layer(x.to(dtype))
        assert y.dtype == dtype
        assert torch.allclose(y.float(), expected, atol=3e-2)
        assert layer.gates[0].wg.weight.dtype == torch.float32  # fp32_gate
        y = layer(x)  # of another dtype than the experts
        assert y.dtype == torch.float32
        layer.zero_grad()
        y.sum().backward()
        assert layer.experts.batched_fc1_w.grad.dtype == dtype


def test_copies_are_independent():
    layer = make_layer({}, moe)
    x = tokens(4)
    expected = layer(x)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert torch.equal(layer(x), torch.zeros(4, MODEL_DIM))
    assert torch.equal(other(x), expected)


# State dicts


def test_names_and_legacy_state_dicts(caplog):
    layer = make_layer({}, moe)
    with torch.no_grad():
        for bias in (layer.experts.batched_fc1_bias, layer.experts.batched_fc2_bias):
            bias.uniform_()
    state = layer.state_dict()
    assert {name: list(value.shape) for name, value in state.items()} == {
        "_num_global_experts": [],
        "experts.batched_fc1_w": [2, HIDDEN, MODEL_DIM],
        "experts.batched_fc2_w": [2, HIDDEN, MODEL_DIM],
        "experts.batched_fc1_bias": [2, HIDDEN],
        "experts.batched_fc2_bias": [2, MODEL_DIM],
        "gates.0.wg.weight": [2, MODEL_DIM],
    }
    legacy = {name: value.clone() for name, value in state.items()}
    del legacy["_num_global_experts"]
    for name in ("experts.batched_fc1_bias", "experts.batched_fc2_bias"):
        legacy[name] = legacy[name].unsqueeze(1)
    other = make_layer({"layer": {}}, moe, rank=1)
    other.load_state_dict(legacy)
    assert "_num_global_experts is missing" in caplog.text
    assert torch.equal(other(tokens(4)), layer(tokens(4)))
    del legacy["experts.batched_fc2_bias"]
    other.load_state_dict(legacy)
    assert "experts.batched_fc2_bias is missing and becomes 0" in caplog.text
    assert not other.experts.batched_fc2_bias.any()
    larger = make_layer({"experts": {"num_experts_per_device": 4}}, moe)
    with pytest.raises(ValueError, match="_num_global_experts is 2, the layer has 4 experts"):
        larger.load_state_dict(state)


@pytest.mark.parametrize("gate", ["top", "cosine_top"])
def test_state_dicts_through_the_converter(gate):
    """Tutel's layer -> MoELayer gives the same output, and back the same tensors."""
    layer = make_layer({"gate": {"type": gate}}, moe)
    router = {"top": "linear", "cosine_top": "cosine"}[gate]
    config = MoEConfig(
        MODEL_DIM, HIDDEN, 2, top_k=2, capacity_factor=1.0, router=router, activation="relu"
    )
    engine = MoELayer(config)
    engine.load_state_dict(from_tutel([layer.state_dict()]))
    x = tokens(3, 5)
    y, aux_loss = engine(x)
    theirs = layer(x)
    # fp32 (eps 6e-8): sums of at most 24 terms near 1, in two products
    assert torch.allclose(theirs, y, atol=1e-5)
    assert torch.allclose(theirs.l_aux, aux_loss, atol=1e-5)
    (again,) = to_tutel(engine.state_dict())
    assert again.keys() == layer.state_dict().keys()
    for name, value in layer.state_dict().items():
        assert torch.equal(again[name], value), name


# Functions of which one builds a layer


def test_routing_of_three_tokens():
    """Two experts, worked out by hand."""
    scores = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]])
    critical, loss = moe.top_k_routing(scores, top_k=1, capacity_factor=1.0)
    assert critical.capacity == 2
    assert critical.locations[0].tolist() == [0, 1, 2]
    assert loss.item() == pytest.approx(2 * 2.2 / 3 * 1.0)
    ids, counts = moe.get_topk_selection(critical)
    assert (ids.tolist(), counts.tolist()) == ([[0], [0], [0]], [3, 0])
    assert moe.get_reversed_sample_ids(critical).tolist() == [[0, 1], [-1, -1]]
    x = torch.tensor([[1.0], [2.0], [3.0]])
    rows = moe.fast_encode(x, critical)
    assert rows.tolist() == [[[1.0], [2.0]], [[0.0], [0.0]]]
    y = moe.fast_decode(rows, critical)
    assert torch.allclose(y, torch.tensor([[0.9], [1.2], [0.0]]))
    dispatcher = moe.fast_dispatcher(2, 0, 1, torch.float32)
    dispatcher.update(critical.indices, critical.locations, critical.gates, capacity=2)
    assert torch.equal(dispatcher.encode(x), rows.flatten(0, 1))
    assert torch.equal(dispatcher.decode(rows.flatten(0, 1)), y)
    critical, _ = moe.top_k_routing(scores, 1, batch_prioritized_routing=True)
    assert critical.locations[0].tolist() == [0, 2, 1]  # 0.9, 0.7, 0.6


def test_second_choices_come_after_first_ones():
    scores = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    critical, _ = moe.extract_critical(scores, 2, capacity_factor=0, loss_fn=None)
    assert [places.tolist() for places in critical.locations] == [[0, 0], [1, 1]]
    assert (critical.capacity, critical.counts.tolist()) == (2, [2, 2])
    assert moe.get_reversed_sample_ids(critical).tolist() == [[0, 1], [1, 0]]
    assert moe.get_reversed_sample_ids(critical, "top_id").tolist() == [[0, 1], [0, 1]]
    for factor, capacity in ((-0.4, 0), (-9.0, 2), (3.0, 6)):
        assert moe.extract_critical(scores, 2, capacity_factor=factor)[0].capacity == capacity
    assert moe.extract_critical(scores, 2, capacity_factor=1.0, alignment=3)[0].capacity == 3
    with pytest.raises(ValueError, match="return_id_type"):
        moe.get_reversed_sample_ids(critical, "token")


def test_gradients_of_encode_and_decode():
    torch.manual_seed(0)
    logits = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    for is_postscore in (True, False):

        def through(logits, x, is_postscore=is_postscore):
            critical, _ = moe.extract_critical(logits.softmax(1), 2)
            rows = moe.fast_encode(x, critical, is_postscore)
            return moe.fast_decode(rows.square(), critical, is_postscore)

        assert torch.autograd.gradcheck(through, (logits, x))


def test_losses_of_balanced_and_collapsed_routing():
    balanced = torch.eye(4)
    assert gshard_loss(balanced, balanced.argmax(1, keepdim=True)).item() == pytest.approx(1)
    collapsed = torch.tensor([[1.0, 0, 0, 0]]).repeat(4, 1)
    assert gshard_loss(collapsed, collapsed.argmax(1, keepdim=True)).item() == pytest.approx(4)


# net and system in one process


def test_collectives_of_one_process():
    x = torch.ones(2, 3)
    for function in (
        net.simple_all_reduce,
        net.simple_all_gather,
        net.simple_all_to_all,
        net.simple_split,
        net.simple_reduce_scatter,
        net.simple_broadcast,
        net.zero_gather,
        net.all_to_all_single,
    ):
        assert torch.equal(function(x), x)
    assert net.all_to_all(x, 1, 0, background=True)() is x
    assert (net.get_world_size(), net.get_world_rank()) == (1, 0)
    with pytest.raises(NotImplementedError, match=r"tutel.net.spatial_split has no counterpart"):
        net.spatial_split(x, 0)
    assert net.batch_all_gather_v([x])[1].tolist() == [6]
    net.barrier()
    assert moe.moe_layer.global_expert_count(3) == 3


def test_a_session_of_one_process(capsys, monkeypatch):
    monkeypatch.setattr(system, "_sessions", [])
    with pytest.raises(RuntimeError, match="init_data_model_parallel"):
        system.record_time()
    monkeypatch.delenv("RANK", raising=False)
    env = system.init_data_model_parallel(backend="gloo")
    assert (env.global_size, env.global_rank, env.is_distributed) == (1, 0, False)
    assert (env.local_device, env.is_cuda, env.model_group) == (torch.device("cpu"), False, None)
    assert system.get_local_session() is env
    assert system.record_time() <= system.record_time()
    env.dist_print("printed", 1)
    assert capsys.readouterr().out == "printed 1\n"
    with pytest.raises(ValueError, match=r"backend \('nccl'\) is not the one in use \('gloo'\)"):
        net.create_groups_from_world(1, include_init="nccl")


def test_small_helpers_of_system(tmp_path):
    pattern = str(tmp_path / "new" / "{rank}-of-{size}.ckpt")
    name = system.apply_rank_size_from_pattern(pattern, rank=1, size=4)
    assert name.endswith("new/1-of-4.ckpt")
    assert (tmp_path / "new").is_dir()
