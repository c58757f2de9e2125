"""Weights into models: all or nothing, upcycling, and files that are not what they seem."""

import os
import pickle

import pytest
import torch
from moe_cases import assert_experts_are_the_dense_ffns
from safetensors.torch import save_file
from timm.models.swin_transformer_v2 import SwinTransformerV2

from moe_core import moe_layers
from swinv2_moe.errors import UserError
from swinv2_moe.models import load_dense, load_strict


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model, before):
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("experts", [0, 4])
def test_strict_loading_is_all_or_nothing(experts, make_model):
    model, state = make_model(experts), values(make_model(experts, seed=1))
    missing = ["norm.bias", "head.fc.weight"]
    for key in missing:
        state.pop(key)
    state |= {"extra.one": torch.zeros(1), "extra.two": torch.zeros(1)}
    reshaped = ["patch_embed.proj.weight", "layers.1.blocks.1.norm1.weight"]
    state |= {key: torch.zeros(2, 2) for key in reshaped}
    before = values(model)
    with pytest.raises(UserError) as caught:
        load_strict(model, state, "weights w")
    message = str(caught.value)
    assert message.startswith("weights w does not fit")
    assert [key for key in [*missing, *reshaped, "extra.one", "extra.two"] if key not in message] == []
    assert "[2, 2] there, [32] in the model" in message
    assert "\n" not in message
    assert_unchanged(model, before)


def test_strict_loading_loads(make_model):
    model, state = make_model(4), values(make_model(4, seed=1))
    load_strict(model, state, "w")
    assert_unchanged(model, state)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_upcycling_puts_the_dense_ffn_into_every_expert(pre_norm, make_model):
    dense, model = make_model(pre_norm=pre_norm), make_model(4, pre_norm=pre_norm, seed=1)
    before = values(model)
    kept = load_dense(model, values(dense), upcycle=True)
    assert kept == [f"{layer}.router.weight" for layer in moe_layers(model)]
    assert_experts_are_the_dense_ffns(model, dense)
    for name, layer in moe_layers(model).items():
        assert (layer.experts.b2 is None) == pre_norm
        assert torch.equal(layer.router.weight, before[f"{name}.router.weight"])
        assert layer.experts.w1.is_contiguous()
        with torch.no_grad():
            layer.experts.w1[0] += 1  # experts share no memory
        assert torch.equal(layer.experts.w1[1], dense.get_submodule(name.removesuffix(".moe")).fc1.weight)
    trunk = [key for key in dense.state_dict() if ".mlp." not in key]
    assert all(torch.equal(model.state_dict()[key], dense.state_dict()[key]) for key in trunk)


def test_without_upcycling_the_experts_keep_their_values(make_model):
    dense, model = make_model(), make_model(4, seed=1)
    before = values(model)
    kept = load_dense(model, values(dense))
    assert kept == [key for key in before if ".mlp.moe." in key]
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key] if ".mlp.moe." in key else dense.state_dict()[key])


@pytest.mark.parametrize("upcycle", [False, True])
def test_dense_weights_that_do_not_fit_change_nothing(upcycle, make_model, tmp_path):
    model = make_model(4)
    before = values(model)
    wide = make_model(embed_dim=32).state_dict()
    file = tmp_path / "wide.safetensors"
    save_file(wide, file)
    with pytest.raises(UserError) as caught:
        load_dense(model, file, upcycle)
    message = str(caught.value)
    assert str(file) in message
    assert_unchanged(model, before)
    lost = [key for key in wide if ".mlp.fc" not in key and key not in message and wide[key].shape != before[key].shape]
    assert lost == []
    if upcycle:
        assert "layers.1.blocks.1.mlp.moe.experts.w1" in message
    short = make_model().state_dict()
    del short["layers.1.blocks.1.mlp.fc1.bias"]
    if upcycle:  # half an FFN is not to be mixed with the experts' own other half
        with pytest.raises(UserError, match="b1"):
            load_dense(model, short, upcycle)
        assert_unchanged(model, before)


def test_another_head_is_named(make_model):
    model = make_model(4)
    with pytest.raises(UserError, match=r"head\.fc\.weight \(\[7, 64\] there, \[5, 64\] in the model\)"):
        load_dense(model, make_model(num_classes=7).state_dict())


@pytest.mark.parametrize("wrap", [None, "model", "state_dict"])
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".safetensors"])
def test_files_of_timm_weights(wrap, suffix, nano, make_model, randomize, tmp_path):
    state = randomize(SwinTransformerV2(**nano), seed=5).state_dict()
    file = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        if wrap:
            pytest.skip("safetensors files are flat")
        save_file(state, file)
    else:
        torch.save({wrap: state, "epoch": 3} if wrap else state, file)
    model = make_model()
    assert load_dense(model, file) == []
    assert_unchanged(model, state)


def test_microsofts_naming(make_model):
    """Downsampling at the end of a stage, the head without `.fc`, buffers in the file."""
    state = make_model(seed=3).state_dict()
    theirs = {}
    for key, tensor in state.items():
        if "downsample" in key:
            stage = int(key.split(".")[1])
            key = key.replace(f"layers.{stage}.", f"layers.{stage - 1}.")
        theirs[key.replace("head.fc.", "head.")] = tensor
    theirs["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    theirs["layers.0.blocks.0.attn.relative_coords_table"] = torch.zeros(1, 7, 7, 2)
    model = make_model()
    assert load_dense(model, {"model": theirs}) == []
    assert_unchanged(model, state)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("saver", [torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))])
def test_a_malicious_pickle_runs_nothing(saver, make_model, tmp_path):
    file = tmp_path / "evil.pth"
    saver({"model": {"norm.weight": Malicious(tmp_path / "pwned")}}, file)
    model = make_model()
    before = values(model)
    with pytest.raises(UserError, match=r"evil\.pth: cannot be read as weights") as caught:
        load_dense(model, file)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()
    assert_unchanged(model, before)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"\x00" * 100])
def test_files_that_hold_no_weights(suffix, content, make_model, tmp_path):
    file = tmp_path / f"w{suffix}"
    file.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as weights") as caught:
        load_dense(make_model(), file)
    assert "\n" not in str(caught.value)


def test_missing_and_wrong_content(make_model, tmp_path):
    with pytest.raises(UserError, match=r"gone\.pth: no such file"):
        load_dense(make_model(), tmp_path / "gone.pth")
    for content in ([1, 2], {"model": {"a": 1}}, {"epoch": 3}):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(UserError, match="holds no state dict of tensors"):
            load_dense(make_model(), tmp_path / "w.pth")
