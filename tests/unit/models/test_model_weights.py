"""Weights into models: all or nothing, upcycling, and files that are not what they seem."""

import os
import pickle
import re
import zipfile

import pytest
import torch
from moe_cases import assert_experts_are_the_dense_ffns
from safetensors.torch import save_file
from timm.models.swin_transformer_v2 import SwinTransformerV2

from moe_core import moe_layers
from swinv2_moe.errors import UserError
from swinv2_moe.models import load_dense, load_strict, weight_files
from swinv2_moe.models.weight_files import unwrapped, without_prefixes
from swinv2_moe.models.weights import read_weights


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model, before):
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("experts", [0, 4])
def test_strict_loading_is_all_or_nothing(experts, make_model):
    model, state = make_model(experts), values(make_model(experts, seed=1))
    missing, extra = ["norm.bias", "head.fc.weight"], ["extra.one", "extra.two"]
    reshaped = ["patch_embed.proj.weight", "layers.1.blocks.1.norm1.weight"]
    for key in missing:
        state.pop(key)
    state |= {key: torch.zeros(1) for key in extra} | {key: torch.zeros(2, 2) for key in reshaped}
    before = values(model)
    with pytest.raises(UserError) as caught:
        load_strict(model, state, "weights w")
    message = str(caught.value)
    assert message.startswith("weights w does not fit")
    assert [key for key in [*missing, *reshaped, *extra] if key not in message] == []
    assert "[2, 2] there, [32] in the model" in message
    assert "\n" not in message
    assert_unchanged(model, before)
    state = values(make_model(experts, seed=1))
    load_strict(model, state, "w")
    assert_unchanged(model, state)


def test_upcycling_needs_dense_weights(make_model):
    with pytest.raises(UserError, match=r"has experts; MODEL\.UPCYCLE makes experts of dense"):
        load_dense(make_model(4), values(make_model(4)), upcycle=True)


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
        assert torch.equal(
            layer.experts.w1[1], dense.get_submodule(name.removesuffix(".moe")).fc1.weight
        )
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
    reshaped = [
        key for key in wide if ".mlp.fc" not in key and wide[key].shape != before[key].shape
    ]
    assert 3 <= sum(key in message for key in reshaped) < len(reshaped)
    assert f"{78 if upcycle else 70} of another shape" in message
    short = make_model().state_dict()
    del short["layers.1.blocks.1.mlp.fc1.bias"]
    if upcycle:  # half an FFN is not to be mixed with the experts' own other half
        with pytest.raises(UserError, match="b1"):
            load_dense(model, short, upcycle)
        assert_unchanged(model, before)


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "model.pt", "state_dict.bin"])
def test_files_of_timm_weights(name, nano, make_model, randomize, tmp_path):
    """All weights of a file, also those that it keeps under a name."""
    state, file = randomize(SwinTransformerV2(**nano), seed=5).state_dict(), tmp_path / name
    if name == "w.safetensors":
        save_file(state, file)
    else:
        torch.save(state if name == "w.pth" else {file.stem: state, "epoch": 3}, file)
    model = make_model()
    assert load_dense(model, file) == []
    assert_unchanged(model, state)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "saver", [torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))]
)
def test_a_malicious_pickle_runs_nothing(saver, make_model, tmp_path):
    file = tmp_path / "evil.pth"
    saver({"model": {"norm.weight": Malicious(tmp_path / "pwned")}}, file)
    model = make_model()
    before = values(model)
    with pytest.raises(UserError, match=r"evil\.pth: cannot be read as weights") as caught:
        load_dense(model, file)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()
    assert "weights_only" not in str(caught.value)  # torch's advice to run it
    assert_unchanged(model, before)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_files_that_hold_no_weights(suffix, make_model, tmp_path):
    model, file = make_model(), tmp_path / f"w{suffix}"
    for content in (b"", b"no weights at all", b"\x00" * 100):
        file.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read as weights") as caught:
            load_dense(model, file)
        assert "\n" not in str(caught.value)


def test_missing_and_wrong_content(make_model, tmp_path):
    with pytest.raises(UserError, match=r"gone\.pth: no such file"):
        load_dense(make_model(), tmp_path / "gone.pth")
    for content in ([1, 2], {"model": {"a": 1}}, {"epoch": 3}):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(UserError, match="holds no state dict of tensors"):
            load_dense(make_model(), tmp_path / "w.pth")


def rewrite(file, change, compression=zipfile.ZIP_STORED):
    """Each record of a torch file's zip changed, with the checksum of what it then holds."""
    with zipfile.ZipFile(file) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(file, "w", compression) as target:
        for name, content in records.items():
            target.writestr(name, change(content) if "/data/" in name else content)


def assert_refused(make_model, file, reason):
    """Loading names the file and the reason in one line, and changes nothing."""
    model = make_model(4)
    before = values(model)
    with pytest.raises(UserError, match=reason) as caught:
        load_dense(model, file, upcycle=True)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_unchanged(model, before)


@pytest.fixture
def dense_file(make_model, tmp_path):
    file = tmp_path / "dense.pth"
    torch.save(make_model().state_dict(), file)
    return file


def test_compressed_records_are_refused_before_they_are_unpacked(dense_file, make_model):
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA):
        rewrite(dense_file, lambda content: content, compression)
        assert_refused(make_model, dense_file, "data.pkl' is compressed")
    rewrite(dense_file, lambda content: bytes(1 << 20), zipfile.ZIP_DEFLATED)
    assert_refused(make_model, dense_file, "is compressed")


KEPT = {"half": lambda n: n // 2, "nothing": lambda n: 0, "all but a byte": lambda n: n - 1}


@pytest.mark.parametrize("kept", KEPT)
def test_records_shorter_than_their_tensors(kept, dense_file, make_model):
    rewrite(dense_file, lambda content: content[: KEPT[kept](len(content))])
    words = "no record has that size|is damaged|larger than its data"
    assert_refused(make_model, dense_file, words)


@pytest.mark.parametrize("record", ["data/5", "data.pkl"])
def test_a_flipped_bit(record, dense_file, make_model):
    """The zip knows a checksum of every record, also of what says which tensor lies where."""
    with zipfile.ZipFile(dense_file) as archive:
        info = archive.getinfo(f"dense/{record}")
        wanted = archive.read(info)
    content = bytearray(dense_file.read_bytes())
    start = content.index(wanted)
    content[start + len(wanted) // 2] ^= 4
    dense_file.write_bytes(content)
    assert_refused(make_model, dense_file, "is damaged|Bad CRC-32")


def test_a_file_without_checksums(make_model, tmp_path):
    """torch.serialization.set_crc32_options(False) leaves them at 0."""
    state = make_model().state_dict()
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "w.pth")
    finally:
        torch.serialization.set_crc32_options(computes)
    found = read_weights(tmp_path / "w.pth")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("is_zip", [True, False])
def test_before_and_after_torch_1_6(is_zip, make_model, tmp_path):
    state = make_model().state_dict()
    torch.save(state, tmp_path / "w.pth", _use_new_zipfile_serialization=is_zip)
    found = read_weights(tmp_path / "w.pth")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_tensors_that_share_their_data(tmp_path):
    both = torch.arange(6.0).view(2, 3)
    torch.save({"all": both, "row": both[1], "columns": both.t()}, tmp_path / "w.pth")
    found = read_weights(tmp_path / "w.pth")
    assert torch.equal(found["row"], both[1])
    assert torch.equal(found["columns"], both.t())


EXPANDED = "takes 8,589,934,592 bytes, its data has 4"
NOT_DENSE = {  # what takes the place of a weight: what the line says of it
    "expanded": (lambda weight: torch.zeros(1).expand(1 << 31), EXPANDED),
    "sparse": (lambda weight: weight.to_sparse(), "is no dense tensor"),
    "without data": (lambda weight: torch.empty(weight.shape, device="meta"), "has no data"),
    "quantized": (
        lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        "is quantized",
    ),
}


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("what", NOT_DENSE)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense(what, is_zip, make_model, tmp_path):
    """None of them takes the memory that its shape promises."""
    change, reason = NOT_DENSE[what]
    state, file = make_model().state_dict(), tmp_path / "w.pth"
    state["norm.weight"] = change(state["norm.weight"])
    torch.save(state, file, _use_new_zipfile_serialization=is_zip)
    assert_refused(make_model, file, rf"'norm\.weight' .*{re.escape(reason)}")


def test_one_large_tensor_under_many_names(tmp_path):
    whole = torch.zeros(1 << 16)
    torch.save({f"weight{i}": whole for i in range(100)}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"its tensors take 26,214,400 bytes, the file has"):
        read_weights(tmp_path / "w.pth")


# Of the trunk, of an FFN that experts start from, and one that is also read for its shape
KEYS = ["norm.weight", "layers.1.blocks.1.mlp.fc1.weight", "patch_embed.proj.weight"]


@pytest.mark.parametrize("key", KEYS)
def test_numbers_that_are_not_floating_point(key, make_model, tmp_path):
    for kind, suffix in (
        (torch.int32, ".pth"),
        (torch.complex64, ".pth"),
        (torch.bool, ".safetensors"),
    ):
        state, file = make_model().state_dict(), tmp_path / f"w{suffix}"
        state[key] = state[key].to(kind)
        save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
        assert_refused(make_model, file, rf"{re.escape(key)} is of {kind}, not of floating point")


@pytest.mark.parametrize("key", KEYS[:2])
def test_values_that_are_not_finite(key, make_model, tmp_path):
    for value in (float("nan"), float("inf"), -float("inf")):
        state, file = values(make_model()), tmp_path / "w.pth"
        state[key].view(-1)[3] = value
        torch.save(state, file)
        words = rf"{re.escape(key)} holds values that are NaN or infinite"
        assert_refused(make_model, file, words)


def test_what_would_be_infinite_in_single_precision(make_model):
    state = {name: tensor.double() for name, tensor in make_model().state_dict().items()}
    model = make_model()
    load_strict(model, state, "w")
    state["norm.weight"][0] = 1e300
    with pytest.raises(UserError, match=r"norm\.weight holds values"):
        load_strict(model, state, "w")


@pytest.mark.parametrize(
    "table", [torch.zeros(3), torch.full((1, 7, 7, 2), float("nan")), torch.zeros(1, 7, 7, 1)]
)
def test_coordinates_that_tell_no_window(table, make_model):
    state = values(make_model())
    tables = {f"layers.{i}.blocks.0.attn.relative_coords_table": table for i in range(3)}
    model = make_model()
    load_dense(model, state | tables)
    assert_unchanged(model, state)


def test_a_patch_embedding_of_another_form(make_model):
    state = make_model().state_dict() | {"patch_embed.proj.weight": torch.zeros(3)}
    with pytest.raises(UserError, match=r"patch_embed\.proj\.weight has shape \[3\]"):
        load_dense(make_model(), state)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_what_is_not_a_regular_file(suffix, make_model, tmp_path):
    file = tmp_path / f"w{suffix}"
    os.mkfifo(file)
    assert_refused(make_model, file, "not a regular file")
    file.unlink()
    file.symlink_to("/dev/zero")
    assert_refused(make_model, file, "not a regular file")
    file.unlink()
    file.mkdir()
    assert_refused(make_model, file, "is a directory")


@pytest.mark.parametrize("read", ["read_weights", "read_headers", "read_metadata"])
def test_a_file_larger_than_memory_can_map(read, monkeypatch, tmp_path):
    """As 1 TB of holes in a process with a limit of its memory."""

    def refuse(*_, **__):
        raise MemoryError("Cannot allocate memory (os error 12)")

    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors")
    for name in ("safe_open", "load_file"):
        monkeypatch.setattr(weight_files, name, refuse)
    with pytest.raises(UserError, match=r"w\.safetensors: cannot be read as weights \(Cannot"):
        getattr(weight_files, read)(tmp_path / "w.safetensors")


def test_names_that_are_no_text(make_model, tmp_path):
    torch.save({0: torch.zeros(1)}, tmp_path / "w.pth")
    assert_refused(make_model, tmp_path / "w.pth", "0 has a name that is no text")
    torch.save(make_model().state_dict() | {"a\nb\0": torch.zeros(1)}, tmp_path / "w.pth")
    assert_refused(make_model, tmp_path / "w.pth", r"unexpected: 'a\\nb\\x00'")


def test_names_and_containers_of_other_programs():
    own = {"patch_embed.proj.weight": torch.ones(1), "head.fc.bias": torch.zeros(1)}
    for prefix in ("module.", "module._orig_mod.", "model.backbone.", "student.", "encoder_q."):
        named = {prefix + name: tensor for name, tensor in own.items()}
        assert without_prefixes(named, "weights") == own
    mixed = {"model.backbone.patch_embed.proj.weight": 1, "model.head.fc.bias": 2, "n_averaged": 3}
    assert list(without_prefixes(mixed, "weights")) == list(own)
    assert without_prefixes(own, "weights") is own
    other = {"backbone.trunk.patch_embed.proj.weight": 1}  # of a detector of this project
    assert without_prefixes(other, "weights") is other
    with pytest.raises(UserError, match=r"two tensors are 'head\.fc\.bias'"):
        without_prefixes(mixed | {"head.fc.bias": 4}, "weights")
    with pytest.raises(UserError, match=r"two models: model\.patch"):
        without_prefixes(mixed | {"model.patch_embed.proj.weight": 1}, "weights")
    for content in ({"model": {"state_dict": own}}, {"teacher": own, "epoch": 1}, {"ema": own}):
        assert unwrapped(content) == own
    endless: dict = {}
    endless["model"] = endless
    assert unwrapped(endless) is endless
