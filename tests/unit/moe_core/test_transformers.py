"""Models of Hugging Face transformers with this engine's experts equal those with their own, in
outputs and all gradients."""

import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.24")

from moe_core.compat import transformers as compat  # noqa: E402
from moe_core.registry import ACTIVATIONS, GATED_ACTIVATIONS  # noqa: E402

_SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "num_experts_per_tok": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "mixtral": ("MixtralConfig", {"intermediate_size": 48, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 48, "intermediate_size": 48, "num_experts": 4},
    ),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 48, "num_experts": 4}),
    "gpt_oss": ("GptOssConfig", {"intermediate_size": 48, "num_local_experts": 4}),
}
# of the largest value
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}
MODELS = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(autouse=True, scope="module")
def registered():
    compat.register()
    compat.register()  # once more changes nothing


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch):
    for registry in (ACTIVATIONS, GATED_ACTIVATIONS):
        monkeypatch.setattr(registry, "_values", dict(registry))


def model_of(name: str, implementation: str = "eager", **changes) -> nn.Module:
    """A tiny model with random weights, in evaluation mode."""
    class_name, sizes = CONFIGS[name]
    config = getattr(transformers, class_name)(**{**_SMALL, **sizes, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # some start at zero
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values / max(parameter.shape[-1], 1) ** 0.5)
    return model.eval()


def experts_of(model: nn.Module) -> nn.Module:
    """Those of the first layer."""
    modules = model.modules()
    return next(module for module in modules if type(module).__name__.endswith("Experts"))


def assert_close(found, expected, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        limit = tolerance * max(value.abs().max().item(), 1e-30)
        torch.testing.assert_close(
            found[name].double(), value.double(), rtol=0, atol=limit, msg=name
        )


def experts_outcome(experts: nn.Module, implementation: str, x, ids, gates, grad) -> dict:
    """The output of an experts module and all gradients."""
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    x, gates = x.detach().requires_grad_(), gates.detach().requires_grad_()
    y = experts(x, ids, gates)
    y.backward(grad)
    found = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "gates": gates.grad, **found}


@MODELS
def test_logits_and_all_gradients(name):
    model = model_of(name).double()
    tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(2))
    outcomes = []
    for implementation in ("eager", "moe_core"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        logits = model(tokens).logits
        logits.square().mean().backward()
        gradients = {key: p.grad for key, p in model.named_parameters()}
        outcomes.append({"logits": logits.detach(), **gradients})
    assert_close(outcomes[1], outcomes[0], 1e-10)


@MODELS
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_experts_alone(name, dtype):
    """Of 23 tokens, none of which chooses expert 1, and of one token."""
    for num_tokens in (23, 1):
        check_experts_alone(name, dtype, num_tokens)


def check_experts_alone(name, dtype, num_tokens):
    experts = experts_of(model_of(name)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(num_tokens, 4, generator=generator)
    scores[:, 1] = 0
    gates, ids = scores.topk(2)
    x, grad = (torch.randn(num_tokens, 32, generator=generator).to(dtype) for _ in range(2))
    inputs = (x, ids, gates.to(dtype), grad)
    expected = experts_outcome(experts, "eager", *inputs)
    found = experts_outcome(experts, "moe_core", *inputs)
    assert_close(found, expected, TOLERANCES[dtype])
    with torch.no_grad():
        assert_close({"y": experts(x, ids, inputs[2])}, {"y": found["y"]}, TOLERANCES[dtype])


def test_the_engine_computes(monkeypatch):
    model = model_of("mixtral", "moe_core")
    calls = []
    original = compat.moe_ffn
    monkeypatch.setattr(
        compat, "moe_ffn", lambda *arguments: calls.append(1) or original(*arguments)
    )
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]]))
    assert len(calls) == 2  # layers


def test_training_steps_are_equal():
    losses = []
    for implementation in ("eager", "moe_core"):
        model = model_of("olmoe", implementation).double().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(2))
        losses.append([])
        for _ in range(3):
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-8, atol=0)


def assert_same_experts(experts: nn.Module, other: str = "eager") -> None:
    """In fp64, the outcome with random choices by the engine and by another implementation."""
    experts.double()
    x, grad = torch.randn(2, 9, 32, dtype=torch.float64).unbind()
    gates, ids = torch.rand(9, 4, dtype=torch.float64).topk(2)
    expected = experts_outcome(experts, other, x, ids, gates, grad)
    assert_close(experts_outcome(experts, "moe_core", x, ids, gates, grad), expected, 1e-10)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "leaky_relu"])
def test_other_activations(activation):
    assert_same_experts(experts_of(model_of("mixtral", hidden_act=activation)))


def test_other_limits_of_gpt_oss():
    assert_same_experts(experts_of(model_of("gpt_oss", swiglu_limit=0.5, swiglu_alpha=1.5)))


class Scaled(nn.Module):
    """One class name and no plain attribute for functions, buffers and parameters of many."""

    def __init__(self, function=torch.tanh, scale: float = 1.0) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.weight * self.scale * self.function(x)


OWN = {
    "relu": Scaled(torch.relu),
    "function": F.silu,
    "lambda": lambda x: x.square(),
    "prelu": nn.PReLU(dtype=torch.float64),
    "limit of 1": transformers.activations.ClippedGELUActivation(-1, 1),
}


@pytest.mark.parametrize("name", OWN)
def test_activations_of_the_module(name):
    """Whatever it is, the module's own is called. Nothing of it stays behind."""
    experts = experts_of(model_of("mixtral"))
    del experts.act_fn  # a module may not become a function otherwise
    experts.act_fn = OWN[name]
    before = len(ACTIVATIONS)
    assert_same_experts(experts)
    assert len(ACTIVATIONS) == before


def test_gates_and_norms_of_the_module(monkeypatch):
    experts = experts_of(model_of("mixtral")).double()
    for change in ("class", "instance", "norm"):
        if change == "class":
            monkeypatch.setattr(type(experts), "_apply_gate", lambda self, x: x[:, ::2].sin())
        elif change == "instance":
            experts._apply_gate = lambda x: x[:, 1::2].cos()
        else:
            experts.has_post_expert_norm, experts.post_expert_norm = True, nn.RMSNorm(32).double()
        assert_same_experts(experts, "batched_mm")


def test_hooks_of_an_activation_run():
    experts = experts_of(model_of("mixtral", "moe_core"))
    experts.act_fn.register_forward_hook(lambda module, inputs, output: output * 0)
    assert experts(torch.randn(9, 32), torch.zeros(9, 1).long(), torch.ones(9, 1)).eq(0).all()


def test_autocast():
    """bf16 over fp32 weights, in sizes that are no multiples of 16 bytes."""
    experts = experts_of(model_of("mixtral", "moe_core", intermediate_size=47, hidden_size=44))
    x, ids, gates = torch.randn(9, 44), torch.randint(4, (9, 1)), torch.ones(9, 1)
    expected = experts(x, ids, gates)
    with torch.autocast("cpu", torch.bfloat16):
        found = experts(x, ids, gates)
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.04 * expected.abs().max().item())


class TestBadInput:
    def test_expert_parallelism_of_transformers(self):
        experts = experts_of(model_of("mixtral", "moe_core"))
        experts._is_expert_parallel = True
        with pytest.raises(ValueError, match="expert parallelism"):
            experts(torch.zeros(1, 32), torch.zeros(1, 1).long(), torch.ones(1, 1))

    def test_an_old_version(self):
        with pytest.raises(ImportError, match=r"transformers 4\.57\.6 is too old.* 5\.24"):
            compat.check_version("4.57.6")

    def test_without_transformers(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        monkeypatch.delitem(sys.modules, compat.__name__)
        with pytest.raises(ImportError, match=r"needs transformers 5.24 or newer"):
            importlib.import_module(compat.__name__)
