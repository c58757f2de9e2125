"""Tutel's files of whole models and of ranks, the single file, and dense weights grown into
experts."""

import json
from pathlib import Path

import pytest
import torch
from moe_cases import assert_experts_are_the_dense_ffns
from released_files import make_released, write_released
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_core import moe_layers
from moe_core.parallel import ExpertGroup
from swinv2_moe.checkpoints.checkpoint import open_checkpoint, open_file, write_meta, write_weights
from swinv2_moe.checkpoints.deployed import open_deployed
from swinv2_moe.config import as_opts, config_from_text, flatten, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model, load_dense, weight_files
from swinv2_moe.start.initial import settings_of_weights, take_over


def weights_of(directory):
    return {
        file.relative_to(directory): {
            name: tensor.tolist() for name, tensor in load_file(file).items()
        }
        for file in sorted(directory.rglob("*.safetensors"))
    }


TYPES = (["MODEL.TYPE", "swin_moe"], ["MODEL.TYPE", "swinv2_moe", "MODEL.MOE.OUTPUT_BIAS", "true"])


@pytest.mark.parametrize(
    ("opts", "output", "ranks"),
    [
        (TYPES[0], "t.pt", []),
        (TYPES[1], "t.pt", []),
        (TYPES[0], "t.safetensors", []),
        (TYPES[1], "t.pth", ["--ranks", 2]),
        (TYPES[0], "{rank}-of-8.ckpt", ["--ranks", 8]),
        (TYPES[1], "t-{rank}.safetensors", ["--ranks", 4]),
    ],
)
def test_tutel_there_and_back(opts, output, ranks, imported, exported, make_checkpoint, tmp_path):
    ours, model = make_checkpoint(*opts)
    file = exported("tutel", ours, tmp_path / output, *ranks)
    assert weights_of(ours) == weights_of(imported("tutel", file, *opts))
    if output == "t.pt":
        theirs = torch.load(file, weights_only=True)
        for name, layer in moe_layers(model).items():
            assert torch.equal(theirs[f"{name}.experts.batched_fc1_w"], layer.experts.w1)
            assert torch.equal(theirs[f"{name}.gates.0.wg.weight"], layer.router.weight)
            assert theirs[f"{name}._num_global_experts"] == 4
        assert torch.equal(theirs["head.fc.weight"], model.head.fc.weight)


def test_half_precision_becomes_the_models(
    imported, exported, make_checkpoint, load, make_config, tmp_path
):
    ours, model = make_checkpoint()
    half = load_file(exported("tutel", ours, tmp_path / "t.safetensors"))
    for name, value in half.items():
        if value.is_floating_point():
            half[name] = value.bfloat16()
    torch.save(half, tmp_path / "half.pt")
    state = load(imported("tutel", tmp_path / "half.pt"), make_config()).state_dict()
    for name, value in model.state_dict().items():
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], value.bfloat16().float())


@pytest.mark.parametrize("opts", TYPES, ids=["released form", "V2"])
def test_a_single_file_holds_all_that_a_checkpoint_needs(
    opts, convert, exported, make_checkpoint, tmp_path
):
    ours, model = make_checkpoint(*opts)
    file = exported("single", ours, tmp_path / "one.safetensors")
    tensors, state = load_file(file), model.state_dict()
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name]) for name in state)
    with safe_open(file, "pt") as content:
        metadata = content.metadata()
    assert json.loads(metadata["class_names"]) == ["a", "b", "c", "d", "e"]
    assert metadata["step"] == "7"
    assert convert("import", "single", file, "--output", tmp_path / "new")[::2] == (0, "")
    assert weights_of(ours) == weights_of(tmp_path / "new")
    before, after = (open_checkpoint(directory).meta for directory in (ours, tmp_path / "new"))
    for key in ("config", "step", "class_names", "windows"):
        assert before[key] == after[key]


@pytest.mark.parametrize("form", ["checkpoint", "single", "earlier single"])
def test_other_windows_are_refused_in_each_form(
    form, convert, cfg, exported, make_checkpoint, make_config, tmp_path
):
    source, _ = make_checkpoint(*TYPES[1])
    if form != "checkpoint":
        source = exported("single", source, tmp_path / "one.safetensors")
    if form == "earlier single":
        with safe_open(source, "pt") as content:
            metadata = content.metadata()
        del metadata["windows"]
        save_file(load_file(source), source, metadata)
    larger = ["DATA.IMG_SIZE", "32", "MODEL.SWINV2.WINDOW_SIZE", "8"]
    says = r"biases are for windows of \[4, 4, 2\], the model would use them for \[8, 8, 4\]"
    with (
        open_deployed(str(source), opts=larger) as deployed,
        pytest.raises(UserError, match=says),
    ):
        deployed.model(5)
    config = make_config(*TYPES[1], *larger)
    trained = settings_of_weights(str(source), 3)
    changed, notes = take_over(config, trained, "it")
    assert changed.MODEL.SWINV2.PRETRAINED_WINDOW_SIZES == [4, 4, 2]
    assert any("PRETRAINED_WINDOW_SIZES [4, 4, 2]" in line for line in notes)
    given = make_config(*TYPES[1], *larger, "MODEL.SWINV2.PRETRAINED_WINDOW_SIZES", "[8,8,4]")
    with pytest.raises(UserError, match=says):
        take_over(given, trained, "it")
    if form != "checkpoint":
        arguments = [*cfg(*TYPES[1], *larger), "--output", tmp_path / "new"]
        finished = convert("import", "single", source, *arguments)
        assert "biases are for windows of [4, 4, 2]" in finished.err


def test_a_single_file_names_no_paths_of_the_machine(exported, make_checkpoint, tmp_path):
    values = {
        "OUTPUT": ("/home/me@work/out/", "out"),
        "DATA.PATH": ("/home/me/photos", "photos"),
        "MODEL.PRETRAINED": ("hf-hub:owner/name@v1/a", "hf-hub:owner/name@v1/a"),
        "TRAIN.DISTILL.TEACHER": ("timm:resnet18@/home/me/w.pth", "timm:resnet18@w.pth"),
        "TRAIN.DISTILL.CACHE": ("", ""),
    }
    given, expected = ({key: pair[i] for key, pair in values.items()} for i in range(2))
    ours, _ = make_checkpoint(*as_opts(given | {"AUG.MIXUP": 0.0, "AUG.CUTMIX": 0.0}))
    exported("single", ours, tmp_path / "one.safetensors")
    meta = open_file(tmp_path / "one.safetensors").meta
    config = flatten(config_from_text(meta["config"], "the file"))
    assert {key: config[key] for key in values} == expected


def test_a_single_file_in_fewer_bytes(
    exported, imported, load, make_checkpoint, make_config, tmp_path, monkeypatch
):
    ours, model = make_checkpoint()
    monkeypatch.setattr(weight_files, "_LEAST_INT8", 64)
    file = exported("single", ours, tmp_path / "int8.safetensors", "--dtype", "int8")
    stored = load_file(file)
    packed = [name for name, tensor in stored.items() if tensor.dtype == torch.int8]
    assert any(".experts.w1" in name for name in packed)
    assert all(stored[name].dtype == torch.bfloat16 for name in stored if name not in packed)
    state = load(imported("single", file), make_config()).state_dict()
    for name, value in model.state_dict().items():
        if name in packed:
            limit = value.abs().amax(-1, keepdim=True) / 250
            assert (state[name] - value).abs().le(limit).all(), name
        else:
            assert torch.equal(state[name], value.to(torch.bfloat16).to(value)), name


def test_int8_rows_of_zeros_and_of_other_shapes():
    rows = torch.zeros(2, 3, 8192)
    rows[1, 2, 5] = -3.0
    packed = weight_files.as_int8({"w": rows, "b": rows[0, 0], "n": torch.tensor(3)})
    assert packed["w"].dtype == torch.int8
    assert packed["w.scale"].shape == (2, 3)
    assert packed["n"].dtype == torch.int64
    restored = weight_files._without_scales(packed)
    assert restored.keys() == {"w", "b", "n"}
    assert restored["w"][1, 2, 5].item() == pytest.approx(-3.0, rel=0.01)
    restored["w"][1, 2, 5] = 0
    assert not restored["w"].any()
    packed["w.scale"] = packed["w.scale"][0]
    with pytest.raises(ValueError, match="does not scale the rows"):
        weight_files._without_scales(packed)


def test_a_single_file_with_another_configuration(
    convert, cfg, exported, make_checkpoint, tmp_path
):
    names = tmp_path / "names.txt"
    names.write_text("v\nw\nx\ny\nz\n")
    file = exported("single", make_checkpoint()[0], tmp_path / "one.safetensors")
    arguments = [*cfg("MODEL.MOE.TOP_K", 2), "--class-names", names, "--output", tmp_path / "new"]
    assert convert("import", "single", file, *arguments)[::2] == (0, "")
    meta = open_checkpoint(tmp_path / "new").meta
    assert "TOP_K: 2" in meta["config"]
    assert meta["class_names"] == list("vwxyz")


def test_averaged_weights_are_those_exported(exported, make_checkpoint, make_config, tmp_path):
    """What a run with TRAIN.EMA_DECAY leaves: the averages below ema/ are the ones to deploy."""
    ours, model = make_checkpoint()
    averaged = {name: value + 1 for name, value in model.state_dict().items()}
    write_weights(tmp_path / "other", model, averaged, make_config().dump(), [])
    (tmp_path / "other").rename(ours / "ema")
    inner = json.loads((ours / "ema" / "meta.json").read_text())
    meta = json.loads((ours / "meta.json").read_text())
    meta["files"] |= {f"ema/{name}": record for name, record in inner["files"].items()}
    del meta["checksum"]
    write_meta(ours, meta)
    found = load_file(exported("single", ours, tmp_path / "one.safetensors"))
    assert all(torch.equal(found[name], averaged[name]) for name in averaged)


def dense_file(make_config, tmp_path, opts, suffix=".pth"):
    torch.manual_seed(2)
    dense = build_model(model_config(make_config(*opts, "MODEL.MOE.NUM_EXPERTS", 0)), 5)
    file = tmp_path / f"dense{suffix}"
    if suffix == ".safetensors":
        save_file(dense.state_dict(), file)
    else:
        torch.save({"model": dense.state_dict()}, file)
    return file, dense


def test_the_preprocessing_of_dense_weights_is_recorded(convert, cfg, make_config, tmp_path):
    file, _ = dense_file(make_config, tmp_path, [])
    described = {"mean": [0.5, 0.4, 0.3], "crop_pct": 0.9, "label_names": list("edcba")}
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": described}))
    arguments = [*cfg("TEST.CROP_RATIO", 0.8), "--output", tmp_path / "new"]
    status, said, _ = convert("import", "dense", file, *arguments)
    said = " ".join(said.split())
    assert status == 0
    assert f"settings of the weights {file}: DATA.MEAN [0.5, 0.4," in said
    assert "TEST.CROP_RATIO is 0.8, its weights were trained with 0.9" in said
    meta = open_checkpoint(tmp_path / "new").meta
    assert "MEAN:\n  - 0.5" in meta["config"]
    assert meta["class_names"] == list("edcba")


@pytest.mark.parametrize(
    ("opts", "suffix"), zip(TYPES, [".pth", ".safetensors"], strict=True), ids=["released", "V2"]
)
def test_every_upcycled_expert_is_the_dense_ffn(
    opts, suffix, imported, make_config, load, tmp_path
):
    file, dense = dense_file(make_config, tmp_path, opts, suffix)
    model = load(imported("dense", file, *opts), make_config(*opts))
    assert len(moe_layers(model)) == 3
    assert_experts_are_the_dense_ffns(model, dense)
    state = model.state_dict()
    trunk = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    assert all(torch.equal(state[name], value) for name, value in trunk.items())


class Group(ExpertGroup):
    """A rank's view of a group that is not there: enough to build its part of a model."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size, self.for_torch_tools = rank, size, False


@pytest.mark.parametrize(("ranks", "opts"), zip([8, 2], TYPES, strict=True), ids=["released", "V2"])
def test_ranks_upcycle_their_own_part_of_the_same_experts(ranks, opts, make_config, tmp_path):
    file, _ = dense_file(make_config, tmp_path, opts)
    whole = build_model(model_config(make_config(*opts)), 5)
    load_dense(whole, file, upcycle=True)
    for rank in range(ranks):
        part = build_model(model_config(make_config(*opts)), 5, Group(rank, ranks))
        load_dense(part, file, upcycle=True)
        for name, layer in moe_layers(part).items():
            shard, experts = layer.shard, whole.get_submodule(name).experts
            for key, own in layer.experts.named_parameters():
                last = shard.first_expert + shard.num_experts
                expected = experts.get_parameter(key)[shard.first_expert : last]
                assert torch.equal(own, expected.chunk(shard.num_parts, dim=1)[shard.part]), key


def test_microsofts_names_of_dense_weights(convert, cfg, make_config, load, tmp_path):
    """The released dense Swin: its own naming, with buffers, and the experts of a swin_moe
    model."""
    dense = make_config("MODEL.MOE.NUM_EXPERTS", 0, "MODEL.MOE.BLOCKS", "[[],[],[]]")
    stem = write_released(make_released(dense, 1, 5), tmp_path / "x.pth")
    source = f"{stem}.master"
    assert convert("import", "dense", source, *cfg(), "--output", tmp_path / "new")[::2] == (0, "")
    arguments = [*cfg("MODEL.MOE.NUM_EXPERTS", 0), "--output", tmp_path / "dense"]
    Path(source).rename(tmp_path / "y.pth.global")
    assert convert("import", "swin-moe", tmp_path / "y.pth", *arguments)[::2] == (0, "")
    model, plain = load(tmp_path / "new", make_config()), load(tmp_path / "dense", dense)
    assert torch.equal(
        model.layers[1].blocks[1].mlp.moe.experts.w1[3], plain.layers[1].blocks[1].mlp.fc1.weight
    )
    assert torch.equal(model.head.fc.weight, plain.head.fc.weight)
