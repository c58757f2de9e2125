"""`add_experts`: which blocks, refusals, and what a training program does with the model."""

import copy
import io
import pickle
import re

import pytest
import timm
import torch
from timm.models import create_feature_extractor
from torch import nn

import swinv2_moe
from moe_core import moe_layers, prepared
from swinv2_moe import add_experts
from swinv2_moe.export.forms import StandardForm
from swinv2_moe.models import MoEModel, take_aux_loss

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 6, "num_heads": 2}
VIT |= {"num_classes": 5}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # fp64: other orders of sums


@pytest.fixture
def dense(randomize):
    """`dense(**arguments)`: a small ViT in fp64."""

    def make(**arguments):
        return randomize(timm.create_model("vit_tiny_patch16_224", **VIT | arguments)).double()

    return make


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64)


def places(model: nn.Module) -> list[str]:
    return [name.removesuffix(".mlp.moe") for name in moe_layers(model)]


@pytest.mark.parametrize(
    ("blocks", "numbers"),
    [
        ("last 1", [5]),
        ("last 6", [0, 1, 2, 3, 4, 5]),
        ("every 2", [1, 3, 5]),
        ("every 4", [3]),
        ("all", [0, 1, 2, 3, 4, 5]),
        ([2, -1], [2, 5]),
        (["blocks.3", 0], [0, 3]),
        ([[1, 4]], [1, 4]),
    ],
)
def test_blocks_by_words_numbers_and_names(blocks, numbers, dense):
    assert places(add_experts(dense(), blocks)) == [f"blocks.{i}" for i in numbers]


def test_blocks_by_stage():
    """MaxViT's blocks have two FFNs each, which count one by one."""
    model = timm.create_model("test_maxvit", device="meta")
    found = places(add_experts(model, [[], [0], [], [-1]]))
    assert found == ["stages.1.blocks.0.attn_block", "stages.3.blocks.0.attn_grid"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": "last two"}, "blocks ('last two') must be 'last N', 'every N', 'all', or a"),
        ({"blocks": "last 7"}, "blocks ('last 7'): the model has 6 blocks with an MLP"),
        ({"blocks": [6]}, "blocks names block 6, the model has 6 blocks with an MLP, numbered"),
        ({"blocks": [[0], [1]]}, "blocks ([[0], [1]]) has 2 stages, the model has 1"),
        ({"blocks": [[6]]}, "blocks names block 6 of stage 0, which has 6 blocks"),
        ({"blocks": ["block.3"]}, "blocks names 'block.3', which is no block with one MLP; did"),
        ({"blocks": [2, -4]}, "blocks ([2, -4]) names blocks.2 twice"),
        ({"blocks": []}, "blocks ([]) names no block"),
        ({"num_experts": 0}, "num_experts (0) must be an integer of at least 1"),
        ({"aux_loss_weight": -1.0}, "aux_loss_weight (-1.0) must be finite and not negative"),
        ({"hidden_ratio": 0.5}, "hidden_ratio (0.5) must be 1 with upcycle=True"),
        ({"activation": "silu"}, "activation ('silu') must be 'gelu', as in blocks.4.mlp, with"),
        ({"gated": True}, "gated (True) must be False, as in blocks.4.mlp, with upcycle=True"),
        ({"top_k": 0}, "top_k (0) must be an integer of at least 1"),
    ],
)
def test_bad_arguments_are_named_in_one_line_and_nothing_changes(arguments, message, dense):
    model = dense()
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        add_experts(model, **arguments)
    assert "\n" not in str(raised.value)
    assert not moe_layers(model)


def test_experts_twice_are_refused(dense):
    model = add_experts(dense(), [5])
    with pytest.raises(ValueError, match=r"blocks\.5\.mlp has experts already"):
        add_experts(model)
    assert places(add_experts(model, [3])) == ["blocks.3", "blocks.5"]


def test_wrapped_models_are_refused(dense):
    wrapped = torch.compile(dense(), backend="eager")
    with pytest.raises(ValueError, match="call add_experts before"):
        add_experts(wrapped)


def test_an_ffn_of_another_kind_is_named(dense):
    model = dense()
    model.blocks[5].mlp.fc1 = nn.utils.parametrizations.weight_norm(model.blocks[5].mlp.fc1)
    with pytest.raises(
        ValueError, match=r"blocks\.5\.mlp is a timm.* with ParametrizedLinear; experts cannot"
    ):
        add_experts(model)


def test_the_model_stays_what_it_is(dense, images):
    """Also found where a newcomer looks, and it is the same object."""
    model = dense()
    kind = type(model)
    changed = swinv2_moe.add_experts(model)
    assert changed is model
    assert isinstance(model, kind)
    assert isinstance(model, MoEModel)
    assert type(model).__name__ == kind.__name__
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins.append(torch.load(file, weights_only=False))
    for twin in twins:
        assert type(twin) is type(model)
        torch.testing.assert_close(twin.eval()(images), model.eval()(images), **CLOSE)
        assert moe_layers(twin)["blocks.5.mlp.moe"] is not moe_layers(model)["blocks.5.mlp.moe"]


def test_new_experts_and_one_expert_per_token(dense, images):
    """With one expert a token's result is multiplied by its gate value: not the dense model's."""
    expected = dense().eval()(images)
    for arguments in ({"upcycle": False}, {"top_k": 1}):
        found = add_experts(dense(), **arguments).eval()(images)
        assert (found - expected).abs().max() > 1e-3
    config = moe_layers(add_experts(dense(), upcycle=False, hidden_ratio=0.5))["blocks.5.mlp.moe"]
    assert config.config.hidden_dim == 32


def test_dropout_of_the_ffn_stays(dense, images):
    """proj_drop is in timm's MLP twice: on its hidden units and on its result."""
    model = add_experts(dense(proj_drop_rate=0.25), [5])
    mlp = model.blocks[5].mlp
    assert (mlp.moe.config.hidden_dropout, mlp.dropout) == (0.25, 0.25)
    x = torch.ones(2, 9, 16, dtype=torch.float64)
    share = (mlp.train()(x) == 0).double().mean()
    assert 0.1 < share < 0.45  # of 288 numbers
    assert (mlp.eval()(x) == 0).sum() == 0


def test_the_balance_loss_is_attached_once(dense, images):
    """As for this project's models: any loss of the output also trains the router, and the value
    can be read. With the loss as a result, nothing is attached."""
    model = add_experts(dense(), [5], aux_loss_weight=0.5).train()
    router = moe_layers(model)["blocks.5.mlp.moe"].router.weight
    model(images).sum().backward()
    attached, router.grad = router.grad, None
    assert take_aux_loss(model) > 0
    logits, aux_loss = model.forward_with_aux(images)
    (logits.sum() + 0.5 * aux_loss).backward()
    torch.testing.assert_close(router.grad, attached, **CLOSE)
    model.zero_grad()
    add_experts(model, [3], freeze=True)
    assert not any(p.requires_grad for p in model.blocks[3].mlp.parameters())


@pytest.mark.parametrize("name", ["test_convnext", "vit_tiny_patch16_224"])
def test_features_only_before_or_after(name, randomize):
    """A model that timm has wrapped for features gets experts, too."""
    arguments = VIT | {"num_classes": 0} if name.startswith("vit") else {}
    size = 32 if name.startswith("vit") else 64
    wrapped = randomize(timm.create_model(name, features_only=True, **arguments)).double().eval()
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    expected = wrapped(images)
    add_experts(wrapped, "last 1", 4)
    assert len(moe_layers(wrapped)) == 1
    torch.testing.assert_close(wrapped(images), expected, **CLOSE)
    wrapped.train()(images)[-1].sum().backward()
    (layer,) = moe_layers(wrapped).values()
    assert layer.router.weight.grad.abs().sum() > 0


def test_intermediate_features_and_graphs(dense, images):
    model = add_experts(dense()).eval()
    _, maps = model.forward_intermediates(images, indices=[5])
    assert maps[0].shape == (4, 16, 4, 4)
    graph = create_feature_extractor(model, ["head"])
    torch.testing.assert_close(graph(images)["head"], model(images), **CLOSE)


def test_recomputed_activations_give_the_same_gradients(dense, images):
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)  # for the routers
        model = add_experts(dense()).train()
        model.set_grad_checkpointing(recompute)
        model(images).square().mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_compiled_training_gives_the_same_gradients(dense, images):
    """The compiler of gradients traces the attached loss; inductor itself is tested elsewhere."""
    model = add_experts(dense(depth=2), [1]).train()
    compiled = torch.compile(model, backend="aot_eager")
    found = []
    for each in (model, compiled):
        model.zero_grad()
        each(images).square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_convnext2"])
def test_an_exported_program_has_the_same_logits(name, randomize):
    """The second has 1x1 convolutions, between which images are [B, M, h, w]."""
    arguments = VIT if name.startswith("vit") else {"num_classes": 5}
    size = 32 if name.startswith("vit") else 64
    model = add_experts(randomize(timm.create_model(name, **arguments)), "last 1", 4).eval()
    images = torch.randn(2, 3, size, size)
    program = torch.export.export(StandardForm(model), (images,)).module()
    with torch.no_grad():
        expected = model(images)
        # fp32: products of experts in another order
        torch.testing.assert_close(program(images), expected, rtol=1e-4, atol=1e-4)


def test_the_state_dict_of_the_rest_is_the_dense_models(dense, images):
    model = dense()
    before = model.state_dict()
    add_experts(model)
    after = model.state_dict()
    common = [name for name in before if ".mlp." not in name or int(name.split(".")[1]) < 4]
    assert all(torch.equal(before[name], after[name]) for name in common)
    new = set(after) - set(before)
    kinds = ("router.weight", "experts.w1", "experts.b1", "experts.w2", "experts.b2")
    assert new == {f"blocks.{i}.mlp.moe.{kind}" for i in (4, 5) for kind in kinds}
    other = add_experts(dense(), upcycle=False)
    other.load_state_dict(after)
    torch.testing.assert_close(other.eval()(images), model.eval()(images), **CLOSE)


def test_soft_experts_know_the_number_of_tokens(dense, images):
    """16 patches and a class token over 4 experts."""
    model = add_experts(dense(), [5], 4, router="soft", upcycle=False)
    assert model.blocks[5].mlp.moe.config.slots_per_expert == 5
    assert model(images).shape == (4, 5)


def test_images_and_experts_on_other_devices_and_dtypes(dense):
    model = add_experts(timm.create_model("vit_tiny_patch16_224", device="meta", **VIT))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model = add_experts(dense().bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with prepared(model), torch.inference_mode():
        assert model.eval()(torch.randn(1, 3, 32, 32).bfloat16()).isfinite().all()
