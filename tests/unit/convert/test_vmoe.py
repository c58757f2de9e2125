"""V-MoE's checkpoints: the logits of the original program in JAX (vmoe/original.py), the shapes of
the published models, and files that are damaged or lie."""

import json
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_bad_input import assert_refused

from moe_core import moe_layers
from swinv2_moe.checkpoints.checkpoint import load_weights, open_checkpoint
from swinv2_moe.config import config_from_text, load_config, model_config
from swinv2_moe.convert.vmoe import from_vmoe, vmoe_config
from swinv2_moe.convert.vmoe_files import Extension, _unpack, read_vmoe
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model
from swinv2_moe.ranks.world import World
from swinv2_moe.start.initial import load_pretrained

FILES = Path(__file__).parent / "vmoe"
SMALL = FILES / "small"
SHARD = "small.data-00001-of-00003"


def model_of(opts: tuple[str, ...] = ()) -> torch.nn.Module:
    tensors = read_vmoe(SMALL)
    model = build_model(model_config(vmoe_config(tensors, SMALL, opts)), 5)
    model.load_state_dict(from_vmoe(tensors, SMALL))
    return model.double().eval()


def recorded(name: str) -> torch.Tensor:
    with np.load(FILES / "small.npz") as arrays:
        found = torch.from_numpy(arrays[name]).double()
    return found.permute(0, 3, 1, 2) if name == "images" else found


# factor 1.2: 12 tokens an expert, by both programs' rounding; first choices go before second ones
@pytest.mark.parametrize(("name", "factor"), [("logits", "0.0"), ("limited", "1.2")])
@torch.no_grad()
def test_logits_are_those_of_the_original_program(name: str, factor: str) -> None:
    model = model_of(("MODEL.MOE.EVAL_CAPACITY_FACTOR", factor))
    torch.testing.assert_close(model(recorded("images")), recorded(name), rtol=0, atol=1e-5)


def test_the_limit_of_the_recorded_logits_matters() -> None:
    assert (recorded("logits") - recorded("limited")).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("S/32 224", 56_999_400),
        ("S/32 384", 56_785_384),
        ("B/16 224", 300_974_931),
        ("B/16 384", 285_238_504),
    ],
)
def test_published_models_have_the_parameters_of_the_original_program(
    name: str, count: int
) -> None:
    shapes = json.loads((FILES / "published.json").read_text())[name]
    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    config = vmoe_config(tensors, Path(name))
    state = from_vmoe(tensors, Path(name))
    with torch.device("meta"):
        model = build_model(model_config(config), len(state["head.weight"]))
    assert {key: value.shape for key, value in state.items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert f"{config.DATA.IMG_SIZE}" == name.split()[1]
    blocks = {"S": [[5, 7]], "B": [[1, 3, 5, 7, 9, 11]]}[name[0]]
    assert blocks == config.MODEL.MOE.BLOCKS


def test_a_checkpoint_is_written_that_has_the_logits_and_the_routing(convert, tmp_path) -> None:
    finished = convert("import", "vmoe", SMALL, "--output", tmp_path / "new")
    assert (finished.status, finished.err) == (0, "")
    opened = open_checkpoint(tmp_path / "new")
    config = config_from_text(opened.meta["config"], "test")
    model = build_model(model_config(config), 5)
    load_weights(opened, model)
    model.double().eval()
    with torch.no_grad():
        logits = model(recorded("images"))
    torch.testing.assert_close(logits, recorded("logits"), rtol=0, atol=1e-5)
    assert opened.meta["class_names"] == list("01234")
    for layer in moe_layers(model).values():
        routing = layer.config
        assert (routing.top_k, routing.normalize_gates, routing.gate_noise) == (2, False, 1.0)
        assert (routing.aux_loss, routing.activation) == ("load_importance", "gelu_tanh")


def test_keys_and_class_names_can_be_given(convert, tmp_path) -> None:
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\ne\n")
    options = ["--opts", "MODEL.MOE.TOP_K", "1", "--class-names", tmp_path / "names.txt"]
    finished = convert("import", "vmoe", f"{SMALL}.index", *options, "--output", tmp_path / "new")
    assert (finished.status, finished.err) == (0, "")
    meta = open_checkpoint(tmp_path / "new").meta
    assert config_from_text(meta["config"], "test").MODEL.MOE.TOP_K == 1
    assert meta["class_names"] == list("abcde")


def test_a_run_begins_from_it_at_another_size(convert, tmp_path) -> None:
    """Position embeddings are resized, a classifier of other classes begins anew, and the rest,
    experts and the layer before the classifier included, is that of the checkpoint."""
    convert("import", "vmoe", SMALL, "--output", tmp_path / "new")
    config = config_from_text(open_checkpoint(tmp_path / "new").meta["config"], "test")
    opts = [*("MODEL.PRETRAINED", str(tmp_path / "new")), *("DATA.IMG_SIZE", "12")]
    for key in ("TYPE", "NAME", "ARGS"):
        opts += [f"MODEL.{key}", config.MODEL[key]]
    opts += ["MODEL.MOE.NUM_EXPERTS", "4", "MODEL.MOE.BLOCKS", "[[1,3]]"]
    section = model_config(load_config(None, [*opts, "MODEL.CLASS_MAP", "new"]))
    model = build_model(section, 3)
    load_pretrained(section, model, World(0, 1, torch.device("cpu")), ["x", "y", "z"])
    source, state = model_of().float().state_dict(), model.state_dict()
    same = {key for key in state if state[key].shape == source[key].shape}
    assert state.keys() - same == {"pos_embed", "head.weight", "head.bias"}
    assert all(torch.equal(state[key], source[key]) for key in same)
    assert model(torch.zeros(2, 3, 12, 12)).shape == (2, 3)


# What is wrong with files, as their MessagePack values


def packed(value: Any) -> bytes:
    if isinstance(value, Extension):
        data = bytes(value.data)
        return b"\xc9" + struct.pack(">Ib", len(data), value.code) + data
    if isinstance(value, (bytes, memoryview)):
        return b"\xc6" + struct.pack(">I", len(value)) + bytes(value)
    if isinstance(value, str):
        return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
    if isinstance(value, dict):
        parts = [packed(part) for pair in value.items() for part in pair]
        return b"\xdf" + struct.pack(">I", len(value)) + b"".join(parts)
    if isinstance(value, (list, tuple)):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed, value))
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    return b"\xd3" + struct.pack(">q", value)


def info(shape: Any, dtype: str = "float32", place: Any = None, shard: int = 0) -> Extension:
    """An array of the index with one piece."""
    place = [(0, size) for size in shape] if place is None else place
    slices = packed([packed([start, stop, None]) for start, stop in place])
    described = packed([shape, dtype, False, {}])
    return Extension(8, memoryview(packed([described, [slices], [shard]])))


def in_index(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Change the index of a copied checkpoint."""

    def run(folder: Path) -> None:
        file = folder / "small.index"
        content = _unpack(file.read_bytes())
        change(content)
        file.write_bytes(packed(content))

    return run


def in_shard(change: Callable[[list], object]) -> Callable[[Path], object]:
    """Change the first piece of a shard: [[array, ...], place]."""

    def run(folder: Path) -> None:
        content = _unpack((folder / SHARD).read_bytes())
        change(next(value for value in content.values() if isinstance(value, list))[0])
        (folder / SHARD).write_bytes(packed(content))

    return run


def array(values: np.ndarray, dtype: str = "float32") -> Extension:
    return Extension(1, memoryview(packed([list(values.shape), dtype, values.tobytes()])))


def values_of(piece: list) -> np.ndarray:
    return np.frombuffer(_unpack(piece[0][0].data)[2], "<f4").copy()


def put(name: str, value: object) -> Callable[[Path], object]:
    """Replace or add an entry of the index's parameters."""
    *groups, last = name.split("/")

    def change(content: dict) -> None:
        node = content["index"]["params"]
        for group in groups:
            node = node[group]
        node[last] = value

    return in_index(change)


def renamed(old: str, new: str) -> Callable[[Path], object]:
    """Another name for a part of the parameters, in the same place of the order."""
    return in_index(lambda c: c["index"]["params"].update({new: c["index"]["params"].pop(old)}))


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda folder: (folder / "small.index").unlink(), "small.index: no such file"),
    "no shard": (lambda folder: (folder / SHARD).unlink(), f"no shard {SHARD} beside"),
    "an empty index": (cut("small.index", 0), "small.index: cannot be read"),
    "a cut index": (cut("small.index", 1000), "it ends too early"),
    "a cut shard": (cut(SHARD, 9000), "its arrays have"),
    "a pickle": (
        lambda folder: (folder / "small.index").write_bytes(b"\x80\x04cos\nsystem\n."),
        "small.index: damaged, or no checkpoint of V-MoE",
    ),
    "a pipe": (
        lambda folder: ((folder / SHARD).unlink(), (folder / SHARD).mkdir()),
        f"no shard {SHARD}",
    ),
    "another version": (in_index(lambda c: c.update(version="20990101")), "'20990101'"),
    "no shards": (in_index(lambda c: c.update(shard_count=0)), "it has 0 shards"),
    "a million shards": (in_index(lambda c: c.update(shard_count=10**6)), "1000000 shards"),
    "shards in words": (in_index(lambda c: c.update(shard_count="3")), "it has '3' shards"),
    "a state without a version": (
        in_index(lambda c: (c.pop("version"), c["index"].update(step=info([])))),
        "a training state without a version",
    ),
    "nothing in it": (in_index(lambda c: c.update(index={})), "it has no arrays"),
    "a number in the tree": (in_index(lambda c: c["index"]["params"].update(a=7)), "is no array"),
    "more than the shards hold": (put("head/kernel", info([1 << 20, 1 << 20])), "its arrays have"),
    "a negative shape": (put("head/bias", info([-5], place=[(0, 5)])), "has the shape [-5]"),
    "many dims": (put("head/bias", info([1] * 9)), "has the shape"),
    "integers": (put("head/bias", info([5], "int32")), "is of 'int32', not of floating point"),
    "a piece outside": (put("head/bias", info([5], place=[(2, 7)])), "'head/bias'"),
    "a gap": (put("head/bias", info([5], place=[(0, 4)])), "do not make up its shape [5]"),
    "a shard that is none": (put("head/bias", info([5], shard=3)), "'head/bias'"),
    "another place than in the index": (
        in_shard(lambda piece: piece.__setitem__(1, Extension(6, memoryview(packed([]))))),
        "which the index does not have",
    ),
    "too few values": (
        in_shard(lambda piece: piece.__setitem__(0, [array(values_of(piece)[:-1])])),
        "values, its place",
    ),
    "another dtype": (
        in_shard(lambda piece: piece.__setitem__(0, [array(values_of(piece), "float16")])),
        "is of 'float16', not float32",
    ),
    "NaN": (
        in_shard(lambda piece: piece.__setitem__(0, [array(values_of(piece) * np.nan)])),
        "NaN or infinite",
    ),
    "deep nesting": (
        lambda folder: (folder / "small.index").write_bytes(b"\x91" * 100_000),
        "32 levels",
    ),
    "four billion values": (
        lambda folder: (folder / "small.index").write_bytes(b"\xdd\xff\xff\xff\xff" + b"\x01" * 99),
        "it ends too early",
    ),
    "two million values": (
        lambda folder: (folder / SHARD).write_bytes(
            b"\xdd" + struct.pack(">I", 1 << 21) + b"\x01" * (1 << 21)
        ),
        "more than 1,048,576 values",
    ),
    "a key twice": (
        lambda folder: (folder / "small.index").write_bytes(b"\x82\xa1a\x01\xa1a\x02"),
        "a key of another form, or twice",
    ),
    "a name that is a path": (renamed("pre_logits", "z/../../x"), "unexpected: z/../../x/bias"),
    "no class token": (renamed("cls", "clt"), "has no cls"),
}


@pytest.fixture
def copied(tmp_path) -> Path:
    folder = tmp_path / "copied"
    folder.mkdir()
    for file in FILES.glob("small.*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_line_for_what_is_wrong(damage: str, copied, convert, tmp_path) -> None:
    change, fragment = DAMAGES[damage]
    change(copied)
    finished = convert("import", "vmoe", copied / "small", "--output", tmp_path / "new")
    assert_refused(finished, fragment)
    assert not (tmp_path / "new").exists()


def test_each_byte_of_an_index_may_be_wrong(copied) -> None:
    """Whatever the byte becomes, the files are read or refused."""
    file = copied / "small.index"
    content = bytearray(file.read_bytes())
    numbers = np.random.default_rng(3)
    for position in numbers.choice(len(content), 200, replace=False):
        changed = bytearray(content)
        changed[position] = int(numbers.integers(256))
        file.write_bytes(changed)
        with suppress(UserError):
            assert len(read_vmoe(copied / "small")) > 10


def test_a_training_state_is_read_without_its_optimiser(copied) -> None:
    """Its arrays are numbered over all of the state."""
    content = _unpack((copied / "small.index").read_bytes())
    content["index"]["aaa"] = {"momentum": info([1 << 30, 1 << 30])}
    (copied / "small.index").write_bytes(packed(content))
    for file in copied.glob("*.data-*"):
        pieces = _unpack(file.read_bytes())
        shifted = {
            key if value is True else str(int(key) + 1): value for key, value in pieces.items()
        }
        file.write_bytes(packed(shifted))
    expected = read_vmoe(SMALL)
    found = read_vmoe(copied / "small")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_models_that_are_no_v_moe_are_named() -> None:
    tensors = read_vmoe(SMALL)
    block = "Encoder/encoderblock_1"
    for name, shape, fragment in (
        (f"{block}/Moe/Router/dense/kernel", (2, 16, 2), "an ensemble of experts (E3)"),
        ("Encoder/posembed_input/pos_embedding", (1, 4, 16), "its 3 patches are no square"),
        ("embedding/kernel", (4, 2, 3, 16), "patches are of 4 x 2 pixels"),
        ("cls", (1,), "cls has 1 dimensions"),
        ("Encoder/encoderblock_7/x", (1,), "has no block 4 of 8"),
    ):
        with pytest.raises(UserError, match=re.escape(fragment)):
            vmoe_config(tensors | {name: torch.zeros(shape)}, SMALL)
    part = f"{block}/SelfAttention/key/bias"
    with pytest.raises(UserError, match="does not fit a V-MoE"):
        from_vmoe({name: tensors[name] for name in tensors if name != part}, SMALL)


def test_options_of_other_kinds_are_refused(convert, tmp_path) -> None:
    finished = convert("import", "vmoe", SMALL, "--cfg", "x.yaml", "--output", tmp_path / "new")
    assert_refused(finished, "--cfg x.yaml", "--opts")
    tensors = read_vmoe(SMALL)
    for name, args, fragment in (
        ("vit_base_patch16_224", "embed_dim=24 representation_size=16", "must be the width"),
        ("resnet18", "representation_size=16", "resnet18 is no ViT"),
    ):
        config = vmoe_config(tensors, SMALL, ["MODEL.NAME", name, "MODEL.ARGS", args])
        with pytest.raises(UserError, match=f"representation_size=16: .*{fragment}"):
            build_model(model_config(config), 5)
