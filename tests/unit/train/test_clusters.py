"""MODEL.UPCYCLE clusters: routers and hidden units that start at clusters of a dense model's
tokens."""

import pytest
import torch
from run_cases import ALONE
from timm.layers import Mlp

from moe_core import MoEConfig, MoELayer, moe_layers
from swinv2_moe.config import load_config
from swinv2_moe.errors import UserError
from swinv2_moe.train.clusters import IMAGES, find_starts, sample_images, set_routers, start_of
from swinv2_moe.train.initial import load_pretrained
from swinv2_moe.train.run import train

DIM, HIDDEN, GROUPS = 16, 24, 4
QUIET = {"MODEL.DROP_PATH_RATE": 0.0, "MODEL.MOE.GATE_NOISE": 0.0, "MODEL.MOE.CAPACITY_FACTOR": 0.0}


def groups_of_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens around four directions, of any length, and the number of their direction."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.eye(DIM)[:GROUPS]
    numbers = torch.arange(400) % GROUPS
    tokens = directions[numbers] + 0.05 * torch.randn(400, DIM, generator=generator)
    return tokens * torch.rand(400, 1, generator=generator).add(0.2) * 5, numbers


@pytest.mark.parametrize("router", ["linear", "cosine"])
def test_each_expert_begins_with_the_tokens_of_a_cluster(router):
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(DIM, HIDDEN, GROUPS, router=router)).eval()
    tokens, numbers = groups_of_tokens()
    start = start_of(layer, Mlp(DIM, HIDDEN), tokens, seed=0)
    assert start.units is None
    set_routers(layer, {"": start})
    with torch.no_grad():
        logits = layer.router(tokens)
    expert_of_group = logits.argmax(1)[:GROUPS]
    assert len(set(expert_of_group.tolist())) == GROUPS
    assert torch.equal(logits.argmax(1), expert_of_group[numbers])
    if router == "linear":
        # fp32, eps 6e-8: products of 16 terms, and a mean of 400 values
        assert float(logits.std(1).mean()) == pytest.approx(1, rel=400 * 6e-8)
    again = start_of(layer, Mlp(DIM, HIDDEN), tokens, seed=0)
    assert torch.equal(again.router, start.router)


def test_a_small_expert_gets_the_units_that_its_tokens_use():
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(DIM, HIDDEN // GROUPS, GROUPS)).eval()
    tokens, _ = groups_of_tokens()
    ffn = Mlp(DIM, HIDDEN)
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter.zero_()
        ffn.fc2.weight.fill_(1.0)
        for unit in range(HIDDEN):
            ffn.fc1.weight[unit, unit % GROUPS] = 2.0
    start = start_of(layer, ffn, tokens, seed=0)
    set_routers(layer, {"": start})
    with torch.no_grad():
        expert_of_group = layer.router(tokens).argmax(1)[:GROUPS]
    for group, expert in enumerate(expert_of_group.tolist()):
        assert start.units[expert].tolist() == list(range(group, HIDDEN, GROUPS))


@pytest.fixture
def dense(make_trainer, save, tmp_path):
    """A dense model with random weights, and its checkpoint."""
    trainer = make_trainer({"MODEL.MOE.NUM_EXPERTS": 0})
    with torch.no_grad():
        for parameter in trainer.step.model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return trainer.step.model.eval(), save(trainer, tmp_path / "dense")


@pytest.fixture
def load(dense, make_trainer):
    """`load({"KEY": value})`: a model with experts that starts from the dense one."""

    def run(keys: dict):
        start = {"MODEL.PRETRAINED": str(dense[1]), "MODEL.UPCYCLE": "clusters"}
        trainer = make_trainer(QUIET | start | keys)
        model, data, config = trainer.step.model, trainer.data, trainer.config
        state = torch.get_rng_state()
        images = sample_images(config.data, data)
        load_pretrained(config.model, model, ALONE, 0, data.class_names, images)
        assert torch.equal(torch.get_rng_state(), state), "the ranks would draw different numbers"
        return model.eval(), next(iter(data.val_loader)).images

    return run


@torch.no_grad()
def test_the_function_is_kept_and_the_tokens_are_spread(dense, load):
    model, images = load({})
    expected = dense[0](images)
    # the norm behind an expert takes the gate's value out, up to its epsilon
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-3 * float(expected.std()))
    for layer in moe_layers(model).values():
        assert float(layer.last_routing.counts.max()) < 0.7 * float(layer.last_routing.counts.sum())


@torch.no_grad()
def test_small_experts_keep_a_part_of_the_function(dense, load):
    fine = {"MODEL.MOE.NUM_EXPERTS": 8, "MODEL.MOE.TOP_K": 4, "MODEL.MOE.HIDDEN_RATIO": 0.25}
    model, images = load(fine)
    for name, layer in moe_layers(model).items():
        ffn = dense[0].get_submodule(name.removesuffix(".moe"))
        rows = {tuple(row.tolist()) for row in ffn.fc1.weight}
        for expert in layer.experts.w1:
            assert {tuple(row.tolist()) for row in expert} <= rows
        assert len({tuple(expert.flatten().tolist()) for expert in layer.experts.w1}) > 1
    expected = dense[0](images)
    correlation = torch.corrcoef(torch.stack([model(images).flatten(), expected.flatten()]))[0, 1]
    assert float(correlation) > 0.5


def test_a_layer_needs_a_token_for_each_expert(dense, make_trainer):
    trainer = make_trainer({"MODEL.MOE.NUM_EXPERTS": 300})
    per_image = 8192 // IMAGES
    images = torch.zeros(4, 3, 16, 16)
    assert 4 * per_image < 300
    with pytest.raises(UserError, match=r"has 300 experts and only \d+ tokens"):
        find_starts(dense[0], trainer.step.model, [images], 0)


def test_a_router_without_directions_is_refused():
    keys = ["MODEL.PRETRAINED", "weights.pth", "MODEL.UPCYCLE", "clusters"]
    with pytest.raises(UserError, match="ROUTER is 'soft', clusters start linear"):
        load_config("quickstart_digits", [*keys, "MODEL.MOE.ROUTER", "soft"])


def test_a_run_begins_with_clusters(dense, make_config, tmp_path):
    keys = {"MODEL.PRETRAINED": str(dense[1]), "MODEL.UPCYCLE": "clusters", "TRAIN.MAX_STEPS": 2}
    assert train(make_config(tmp_path / "run", keys))["steps"] == 2
