"""The two models: equal to timm's where they must be, their experts, auxiliary loss, checkpointing
and compilation."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import SwinTransformerV2, window_partition, window_reverse
from timm.optim import param_groups_layer_decay
from torch.func import functional_call, grad, jvp, vmap

from moe_core import moe_layers
from swinv2_moe.models import (
    MoEMlp,
    SwinTransformerMoE,
    SwinTransformerV2MoE,
    WithAuxLoss,
    load_dense,
    separate_aux_loss,
    take_aux_loss,
)


@pytest.fixture
def images():
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_dense_model_equals_timm(mode, nano, images, randomize):
    timm_model = randomize(SwinTransformerV2(**nano)).double()
    model, images = SwinTransformerV2MoE(**nano).double(), images.double()
    assert load_dense(model, timm_model.state_dict()) == []
    results = []
    for m in (timm_model, model):
        getattr(m, mode)()
        loss = F.cross_entropy(m(images), torch.arange(4))
        loss.backward()
        results.append([m(images), *(p.grad for p in m.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert [n for n, _ in timm_model.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_the_dense_model_starts_like_timm(nano):
    states = []
    for cls in (SwinTransformerV2, SwinTransformerV2MoE):
        torch.manual_seed(0)
        states.append({name: (p.mean(), p.std()) for name, p in cls(**nano).named_parameters()})
    theirs, ours = states
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0.5, atol=0.01, equal_nan=True)
    assert all(std == 0 for name, (_, std) in ours.items() if "blocks" in name and ".norm" in name)
    released = SwinTransformerMoE(**nano).named_parameters()
    norms = [p for name, p in released if name.endswith(("norm1.weight", "norm.weight"))]
    assert norms
    assert all(p.eq(1).all() for p in norms)


def test_parameter_names_of_the_released_form(make_model):
    """Those that the public checkpoints hold (but for timm's places of head and downsample)."""
    model = make_model(4, pre_norm=True, moe={"router": "cosine"})

    def names(part):
        return {name for name, _ in model.get_submodule(part).named_parameters()}

    dense_block = {f"norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    dense_block |= {f"attn.{n}.{kind}" for n in ("qkv", "proj") for kind in ("weight", "bias")}
    dense_block |= {f"attn.cpb_mlp.{n}" for n in ("0.weight", "0.bias", "2.weight")}
    dense_block |= {"mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight"}
    assert names("layers.0.blocks.1") == dense_block
    router = ("temperature", "sim_matrix", "projector.weight", "projector.bias")
    experts = {"experts.w1", "experts.b1", "experts.w2"}
    assert names("layers.1.blocks.1.mlp.moe") == experts | {f"router.{name}" for name in router}
    assert names("layers.1.blocks.1.mlp") == {
        f"moe.{n}" for n in names("layers.1.blocks.1.mlp.moe")
    }
    assert names("layers.1.downsample") == {"norm.weight", "norm.bias", "reduction.weight"}
    model = make_model(pre_norm=True)
    assert model.layers[1].downsample.norm.weight.shape == (64,)
    assert not any("logit_scale" in n or n.endswith("fc2.bias") for n in names(""))


def layer_norm(x, norm):
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)


def plain_block(block, x, shift):
    """x + attn(norm1(x)), x + fc2(gelu(fc1(norm2(x)))), windows cut out and put back by slicing."""
    y = torch.roll(layer_norm(x, block.norm1), (-shift, -shift), (1, 2))
    windows = window_partition(y, (4, 4)).flatten(1, 2)
    windows = block.attn(windows, block.attn_mask).unflatten(1, (4, 4))
    y = window_reverse(windows, (4, 4), x.shape[1:3])
    x = x + torch.roll(y, (shift, shift), (1, 2))
    fc1, fc2 = block.mlp.fc1, block.mlp.fc2
    y = F.gelu(F.linear(layer_norm(x, block.norm2), fc1.weight, fc1.bias))
    return x + F.linear(y, fc2.weight)


def test_released_blocks_and_patch_merging_by_hand(make_model):
    model = make_model(pre_norm=True).double()
    x = torch.randn(2, 8, 8, 16, dtype=torch.float64)
    for block, shift in zip(model.layers[0].blocks, (0, 2), strict=True):
        assert (block.attn_mask is not None) == bool(shift)
        torch.testing.assert_close(block(x), plain_block(block, x, shift))
    merging = model.layers[1].downsample
    parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]  # V1's order
    merged = layer_norm(torch.cat(parts, -1), merging.norm)
    torch.testing.assert_close(merging(x), F.linear(merged, merging.reduction.weight))


@pytest.mark.parametrize("pre_norm", [False, True])
def test_one_expert_is_the_dense_model(pre_norm, make_model, images):
    """With E = K = 1 the gate is 1: the same logits, and gradients, as the dense FFN in its
    place."""
    dense, sparse = make_model(pre_norm=pre_norm), make_model(1, pre_norm=pre_norm, seed=1)
    load_dense(sparse, dense.state_dict(), upcycle=True)
    for model in (dense.double(), sparse.double()):
        model(images.double()).square().sum().backward()
    torch.testing.assert_close(sparse(images.double()), dense(images.double()))
    expected = dense.layers[1].blocks[1].mlp.fc2.weight.grad.T
    torch.testing.assert_close(sparse.layers[1].blocks[1].mlp.moe.experts.w2.grad[0], expected)


@pytest.mark.parametrize("top_k", [1, 2])
def test_upcycled_experts_give_the_dense_models_logits(top_k, make_model, images):
    """Whatever the routers say: the norm behind them takes the gate's value out, up to its
    epsilon."""
    dense, sparse = make_model(), make_model(4, seed=1, moe={"top_k": top_k})
    load_dense(sparse, dense.state_dict(), upcycle=True)
    dense, sparse, images = dense.double(), sparse.double(), images.double()
    torch.testing.assert_close(sparse(images), dense(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_stays_one(dtype, make_model, images):
    model = make_model(4).eval().to(dtype)
    seen = []
    for stage in model.layers:
        stage.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    assert model(images.to(dtype)).dtype == dtype
    model = make_model(4).train()
    with torch.autocast("cpu", dtype):
        model(images)
    assert set(seen) == {dtype}


def test_experts_are_where_moe_blocks_says(make_model, nano):
    model = make_model(4)
    assert list(moe_layers(model)) == ["layers.1.blocks.1.mlp.moe", "layers.2.blocks.0.mlp.moe"]
    assert [layer.config.hidden_dim for layer in moe_layers(model).values()] == [128, 256]
    wrong = {"names no block": (), "block 2 of stage 1": ((), (2,)), "4 stages": ((), (), (), (0,))}
    for text, blocks in wrong.items():
        with pytest.raises(ValueError, match=text):
            SwinTransformerV2MoE(num_experts=2, moe_blocks=blocks, **nano)
    with pytest.raises(ValueError, match="top_k"):
        make_model(2, moe={"top_k": 0})


def test_take_aux_loss_sums_the_layers_and_clears(make_model, images):
    model = make_model(4, moe={"gate_noise": 1.0, "aux_loss": "gshard"})
    with separate_aux_loss(model):
        logits = model(images)
    waiting = [m.aux_loss for m in model.modules() if isinstance(m, MoEMlp)]
    assert len(waiting) == 2
    aux_loss = take_aux_loss(model)
    torch.testing.assert_close(aux_loss, waiting[0] + waiting[1])
    assert aux_loss.requires_grad
    assert take_aux_loss(model) == 0
    assert not any(m.aux_loss is not None for m in model.modules() if isinstance(m, MoEMlp))
    assert logits.shape == (4, 5)
    dense_logits, zero = make_model().forward_with_aux(images)
    assert zero == 0
    assert dense_logits.shape == (4, 5)


def test_a_model_can_be_copied_and_pickled_after_a_forward(make_model, images):
    model = make_model(4)
    model(images)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in copies:
        assert take_aux_loss(twin) == 0
        torch.testing.assert_close(twin(images), model(images))
    assert take_aux_loss(model) != 0


# Each block's code is compiled: few blocks
SHALLOW = {"depths": (1, 1), "num_heads": (2, 2), "moe_blocks": ((0,), (0,))}
SHALLOW |= {"pretrained_window_sizes": (0, 0)}


@pytest.mark.parametrize("form", ["eager", "checkpoint", "reentrant", "compiled"])
def test_a_loss_of_the_logits_alone_balances(form, make_model, images, monkeypatch):
    """Once: a loss that is attached adds no gradient where it is also added."""
    model = make_model(4, moe={"aux_loss": "gshard"}, aux_loss_weight=0.7, **SHALLOW).double()
    images, targets = images.double(), torch.arange(4)

    def gradients(loss):
        model.zero_grad(set_to_none=True)
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    logits, aux_loss = model.forward_with_aux(images)
    task = F.cross_entropy(logits, targets)
    unbalanced = gradients(task + 0 * aux_loss)
    logits, aux_loss = model.forward_with_aux(images)
    expected = gradients(F.cross_entropy(logits, targets) + 0.7 * aux_loss)

    run = model
    if form == "compiled":
        torch.compiler.reset()
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr("timm.layers.config._USE_REENTRANT_CKPT", form == "reentrant")
    model.set_grad_checkpointing(form in ("checkpoint", "reentrant"))
    found = gradients(F.cross_entropy(run(images), targets) + 5 * take_aux_loss(model))
    logits, aux_loss = model.forward_with_aux(images)
    explicit = gradients(F.cross_entropy(logits, targets) + 0.7 * aux_loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
        torch.testing.assert_close(explicit[name], gradient)
    router = "layers.1.blocks.0.mlp.moe.router.weight"
    assert (expected[router] - unbalanced[router]).abs().max() > 1e-3


def test_transforms_of_a_model(make_model, images):
    """Gradients of every sample by vmap, with attached losses, and a forward derivative."""
    model = make_model(4, moe={"aux_loss": "gshard", "top_k": 2}, aux_loss_weight=0.7).double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    images = images[:2].double()

    def loss(parameters, image):
        return functional_call(model, parameters, (image.unsqueeze(0),)).sin().sum()

    per_sample = vmap(grad(loss), (None, 0))(parameters, images)
    for i, image in enumerate(images):
        model.zero_grad()
        loss({}, image).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(per_sample[name][i], parameter.grad)
    model.eval()
    image, direction = images.unbind()
    gradient = grad(lambda image: loss({}, image))(image)
    slope = jvp(lambda image: loss({}, image), (image,), (direction,))[1]
    torch.testing.assert_close(slope, (gradient * direction).sum())


def test_the_weight_of_the_attached_loss(make_model, images):
    """A number or a tensor, changed between steps; no gradient in evaluation and of frozen
    layers."""

    def gradient(model):
        model.zero_grad()
        (0 * model(images).sum()).backward()
        return model.layers[1].blocks[1].mlp.moe.router.weight.grad

    model = make_model(4, moe={"aux_loss": "gshard"})
    default = gradient(model)
    assert default.any()
    for weight in (0.02, torch.tensor(0.02)):
        model.set_aux_loss_weight(weight)
        torch.testing.assert_close(gradient(copy.deepcopy(model)), 2 * default)
    assert not gradient(model.eval()).any()
    assert gradient(make_model(4, freeze_moe=True)) is None
    with pytest.raises(ValueError, match=r"aux_loss_weight \(-1\) must be finite"):
        make_model(4, aux_loss_weight=-1)


def loss_and_gradients(model, images):
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    logits, aux_loss = WithAuxLoss(model)(images)
    loss = logits.square().mean() + 0.5 * aux_loss
    loss.backward()
    return [loss.detach(), aux_loss.detach(), *(p.grad for p in model.parameters())]


NOISY = {"gate_noise": 1.0, "aux_loss": "load_importance"}
NOISY |= {"hidden_dropout": 0.1, "capacity_factor": 0.75}


@pytest.mark.parametrize("pre_norm", [False, True])
def test_activation_checkpointing_changes_nothing(pre_norm, make_model, images):
    model = make_model(4, pre_norm=pre_norm, moe=NOISY, drop_path_rate=0.3)
    expected = loss_and_gradients(model, images)
    model.set_grad_checkpointing(True)
    for expected_value, found in zip(expected, loss_and_gradients(model, images), strict=True):
        torch.testing.assert_close(found, expected_value)
    router = model.layers[1].blocks[1].mlp.moe.router.weight.grad
    assert router.abs().max() > 0
    # The recomputation in the backward pass runs the layers again: nothing of it may count in the
    # next step.
    for expected_value, found in zip(expected, loss_and_gradients(model, images), strict=True):
        torch.testing.assert_close(found, expected_value)


def test_compiled_without_a_graph_break(make_model, images):
    """The released form; the other one is compiled above."""
    moe = {"aux_loss": "load_importance", "capacity_factor": 0.75}
    model, images = make_model(4, pre_norm=True, moe=moe, **SHALLOW).double(), images.double()
    eager = loss_and_gradients(model, images)
    torch.compiler.reset()
    compiled = torch.compile(WithAuxLoss(model), backend="aot_eager", fullgraph=True)
    model.zero_grad(set_to_none=True)
    logits, aux_loss = compiled(images)
    (logits.square().mean() + 0.5 * aux_loss).backward()
    assert aux_loss > 0
    torch.testing.assert_close([aux_loss, *(p.grad for p in model.parameters())], eager[1:])
    torch.compiler.reset()


def test_evaluation_uses_its_own_capacity(make_model, images):
    model = make_model(4, moe={"capacity_factor": 0.5})
    layers = moe_layers(model).values()
    model(images)
    assert all(layer.last_routing.dropped_share > 0 for layer in layers)
    model.eval()
    model(images)
    assert all(layer.last_routing.dropped_share == 0 for layer in layers)
    model.train()
    model(images)
    assert all(layer.last_routing.dropped_share > 0 for layer in layers)
    model = make_model(4, eval_capacity_factor=0.5).eval()
    model(images)
    assert all(layer.last_routing.dropped_share > 0 for layer in moe_layers(model).values())


@pytest.mark.parametrize(("pre_norm", "router"), [(False, "cosine"), (True, "linear")])
def test_no_weight_decay(pre_norm, router, make_model):
    """None on 1-D parameters, biases, cpb_mlp, logit_scale and the cosine gate's (the published
    recipe)."""
    exempt = ("bias", "norm", "cpb_mlp", "logit_scale", "experts.b")
    exempt += ("temperature", "sim_matrix", "projector")
    moe = {"router": router} | ({"output_bias": True} if pre_norm else {})
    model = make_model(4, pre_norm=pre_norm, moe=moe)
    groups = param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=1.0)
    decayed = {id(p) for group in groups for p in group["params"] if group["weight_decay"]}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) != any(part in name for part in exempt), name


def test_layer_decay_by_depth(make_model):
    model = make_model(4)
    groups = param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scale = {name: scale[id(p)] for name, p in model.named_parameters()}
    places = ("0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1", "2.blocks.0")
    blocks = [scale[f"layers.{place}.norm1.weight"] for place in places]
    assert blocks == sorted(blocks)
    assert len(set(blocks)) == 5
    assert scale["patch_embed.proj.weight"] < blocks[0]
    assert scale["head.fc.weight"] == 1.0
    moe = "layers.2.blocks.0.mlp.moe"
    assert scale[f"{moe}.experts.w1"] == scale[f"{moe}.router.weight"] == blocks[4]
