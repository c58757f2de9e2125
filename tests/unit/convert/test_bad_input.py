"""Whatever is wrong with what the user gives: one line that names it, exit status 2, nothing
written."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from released_files import make_released, write_released
from safetensors.torch import load_file, save_file

from moe_core.files import fsync_and_hash
from swinv2_moe.checkpoints.checkpoint import read_meta, write_meta


def assert_refused(finished, *fragments: str) -> None:
    assert finished.status == 2
    assert finished.err.count("\n") == 1
    assert finished.err.startswith("error: ")
    assert finished.out == ""
    assert [fragment for fragment in fragments if fragment not in finished.err] == []


@pytest.fixture
def files(make_config, tmp_path) -> Path:
    """x.pth.{rank0..7,master}: 4 experts, each on two ranks."""
    return write_released(make_released(make_config(), 8, 5), tmp_path / "x.pth")


def change(file: Path, key: str, value: object) -> None:
    """Set a key of a file's state dict; remove it if the value is None."""
    content = torch.load(file, weights_only=True)
    if value is None:
        del content["model"][key]
    else:
        content["model"][key] = value
    torch.save(content, file)


LAYER = "layers.1.blocks.1.mlp._moe_layer"
SOURCES = {  # what happens to the files: what the line then says
    "a rank is missing": (lambda x: os.remove(f"{x}.rank3"), ["missing x.pth.rank3"]),
    "the last ranks are missing": (
        lambda x: [os.remove(f"{x}.rank{r}") for r in (4, 5, 6, 7)],
        [
            "those of 8 ranks, there are files of 4",
            "missing x.pth.rank4, x.pth.rank5, x.pth.rank6, x.pth.rank7",
        ],
    ),
    "one too many": (
        lambda x: shutil.copy(f"{x}.rank0", f"{x}.rank8"),
        ["those of 8 ranks, there are files of 9"],
    ),
    "no master": (
        lambda x: os.remove(f"{x}.master"),
        ["x.pth.rank0: holds experts alone", "x.pth.master is missing"],
    ),
    "both forms": (
        lambda x: shutil.copy(f"{x}.master", f"{x}.global"),
        ["x.pth.global and x.pth.rank0"],
    ),
    "a directory": (lambda x: os.mkdir(x), ["x.pth: is a directory"]),
    "a bias that is not zero": (
        lambda x: change(f"{x}.master", f"{LAYER}.experts.batched_fc2_bias", torch.ones(1, 1, 8)),
        ["batched_fc2_bias", "layers.1.blocks.1.mlp.moe", "is not zero"],
    ),
    "another count": (
        lambda x: change(f"{x}.master", f"{LAYER}._num_global_experts", torch.tensor(5)),
        [
            "layers.1.blocks.1.mlp.moe: how many experts",
            "gates.0.wg.weight: 4, _num_global_experts: 5",
        ],
    ),
    "a key less": (lambda x: change(f"{x}.master", "norm.bias", None), ["1 missing: norm.bias"]),
    "a key more": (
        lambda x: change(f"{x}.master", "extra", torch.ones(1)),
        ["1 unexpected: extra"],
    ),
    "a key less on a rank": (
        lambda x: change(f"{x}.rank2", f"{LAYER}.experts.batched_fc1_w", None),
        ["x.pth.rank2", f"{LAYER}.experts.batched_fc1_w"],
    ),
    "another shape": (
        lambda x: change(f"{x}.master", "norm.bias", torch.ones(3)),
        ["norm.bias ([3] there, [32] in the model)"],
    ),
    "another shape on a rank": (
        lambda x: change(f"{x}.rank2", f"{LAYER}.experts.batched_fc2_w", torch.ones(1, 31, 16)),
        ["batched_fc2_w has shape [1, 31, 16] on rank 2, [1, 32, 16] on rank 0"],
    ),
    "integers": (
        lambda x: change(f"{x}.master", "norm.bias", torch.ones(32, dtype=torch.int64)),
        ["1 not of floating point: norm.bias"],
    ),
    "NaN": (
        lambda x: change(f"{x}.master", "norm.bias", torch.full((32,), torch.nan)),
        ["norm.bias holds values that are NaN or infinite"],
    ),
    "no tensors": (
        lambda x: torch.save([1], f"{x}.rank0"),
        ["x.pth.rank0: holds no state dict of tensors"],
    ),
    "cut off": (
        lambda x: os.truncate(f"{x}.rank5", 3000),
        ["x.pth.rank5: cannot be read as weights"],
    ),
    "nothing": (
        lambda x: [path.unlink() for path in x.parent.iterdir()],
        ["x.pth: no such file, and no x.pth.rank0"],
    ),
}


@pytest.fixture
def refused(convert, tmp_path):
    """`refused(arguments, fragment, ...)`: a command with `--output new` is refused with these
    words, and writes nothing."""

    def run(arguments: list, *fragments: str) -> None:
        assert_refused(convert(*arguments, "--output", tmp_path / "new"), *fragments)
        assert not [path for path in tmp_path.iterdir() if "new" in path.name]

    return run


@pytest.mark.parametrize("what", SOURCES)
def test_released_files_with_a_fault(what, files, refused, cfg):
    damage, fragments = SOURCES[what]
    damage(files)
    refused(["import", "swin-moe", files, *cfg()], *fragments)


OTHER_MODELS = [
    ("MODEL.MOE.NUM_EXPERTS", 8, "has 4 experts, MODEL.MOE.NUM_EXPERTS is 8"),
    ("MODEL.MOE.NUM_EXPERTS", 0, "unexpected: layers.1.blocks.1.mlp.moe"),
    ("MODEL.MOE.BLOCKS", "[[],[],[0,1]]", "unexpected: layers.1.blocks.1.mlp.moe"),
    ("MODEL.MOE.ROUTER", "cosine", "missing: layers.1.blocks.1.mlp.moe.router.temperature"),
    ("MODEL.SWINV2.EMBED_DIM", 16, "proj.weight ([8, 3, 2, 2] there, [16, 3, 2, 2] in the model)"),
    ("MODEL.SWINV2.DEPTHS", "[1,2,3]", "missing: layers.2.blocks.2"),
    ("MODEL.NUM_CLASSES", 1000, "has 5 classes, MODEL.NUM_CLASSES is 1000"),
    ("MODEL.TYPE", "swinv2_moe", "MODEL.TYPE 'swin_moe', this model is 'swinv2_moe'"),
]


def test_a_configuration_of_another_model(files, refused, cfg):
    for key, value, fragment in OTHER_MODELS:
        refused(["import", "swin-moe", files, *cfg(key, value)], fragment)


def test_the_number_of_classes_may_be_left_to_the_files(files, imported, exported, tmp_path):
    new = imported("swin-moe", files, "MODEL.NUM_CLASSES", 0)
    exported("single", new, tmp_path / "one.safetensors")


def test_class_names(files, refused, cfg, tmp_path):
    names = tmp_path / "names.txt"
    command = ["import", "swin-moe", files, *cfg(), "--class-names", names]
    refused(command, f"--class-names {names}: cannot be read")
    os.mkfifo(names)
    refused(command, f"--class-names {names}: cannot be read")
    names.unlink()
    names.write_text("a\nb\n")
    refused(command, "has 5 classes, there are 2 class names")
    for text, message in (
        ("", "is empty"),
        ("a\n \nc\nd\ne\n", "line 2 is ' ', a blank name"),
        ("a\nb\nc\nd\n\n", "line 5 is '', a blank name"),
        ("a\nb\nc\nb\ne\n", "line 4 repeats 'b' of line 2"),
    ):
        names.write_text(text)
        refused(command, f"--class-names {names}: {message}")


def test_arguments(files, convert, refused, cfg, make_checkpoint, tmp_path):
    ours = make_checkpoint()[0]
    released = ["import", "swin-moe", files]
    refused(released, "import swin-moe: needs --cfg")
    refused([*released, "--opts", "SEED", "1"], "--opts: needs --cfg")
    refused(["import", "dense", files, *cfg(), "--noise", 0.1], "--noise has left: experts with")
    for kind in ("tutel", "single", "hub"):
        refused(["export", kind, ours, "--newer"], f"--newer: is for swin-moe, not for {kind}")
    refused(["export", "tutel", ours, "--dtype", "int8"], "--dtype int8: is for single, not for")
    for kind in ("swin-moe", "tutel"):
        for ranks, fragment in (
            (3, "do not divide over 3 ranks"),
            (0, "--ranks is 0"),
            (1024, "by the 256 ranks"),
        ):
            refused(["export", kind, ours, "--ranks", ranks], "--ranks", fragment)
    single = tmp_path / "new.safetensors"
    for kind, options, output, fragment in (
        ("single", ["--ranks", 2], single, "without --ranks"),
        ("single", [], tmp_path / "new.pth", "one .safetensors file"),
        ("tutel", ["--ranks", 2], single, "needs {rank} in it"),
    ):
        finished = convert("export", kind, ours, *options, "--output", output)
        assert_refused(finished, fragment)
    assert not list(tmp_path.glob("*new*"))


def test_a_dense_model_has_no_ranks_and_v2_no_released_form(convert, make_checkpoint, tmp_path):
    ours, _ = make_checkpoint("MODEL.MOE.NUM_EXPERTS", 0)
    arguments = [ours, "--ranks", 2, "--output", tmp_path / "y.pth"]
    assert_refused(
        convert("export", "swin-moe", *arguments), "--ranks 2: the model has no experts to divide"
    )
    shutil.rmtree(ours)
    make_checkpoint("MODEL.TYPE", "swinv2_moe")
    assert_refused(convert("export", "swin-moe", *arguments), "this model is 'swinv2_moe'")


def test_an_output_that_exists(files, convert, cfg, make_checkpoint, tmp_path):
    ours, taken = make_checkpoint()[0], tmp_path / "taken"
    taken.mkdir()
    finished = convert("import", "swin-moe", files, *cfg(), "--output", taken)
    assert_refused(finished, f"--output {taken}: already exists")
    finished = convert("export", "swin-moe", ours, "--ranks", 8, "--output", tmp_path / "x.pth")
    assert_refused(finished, f"--output {files}.rank0: already exists")
    finished = convert("export", "tutel", ours, "--output", tmp_path / "x.pth.rank0" / "new")
    assert_refused(finished, "x.pth.rank0 is not a directory")
    assert list(taken.iterdir()) == []


@pytest.mark.parametrize("source", ["gone", "directory", "file", "checkpoint with a damaged file"])
def test_what_is_no_checkpoint(source, convert, make_checkpoint, tmp_path):
    path, fragment = tmp_path / "c", f"CHECKPOINT {tmp_path}/c: no such file or directory"
    if source == "directory":
        path.mkdir()
        fragment = "holds no checkpoint"
    elif source == "file":
        path.write_text("")
        fragment = f"{path}"
    elif source.startswith("checkpoint"):
        path, fragment = make_checkpoint()[0], "experts/layers.1.blocks.1.mlp.moe/0002.safetensors"
        os.truncate(path / fragment, 100)
    assert_refused(convert("export", "tutel", path, "--output", tmp_path / "y.pt"), fragment)
    assert not list(tmp_path.glob("*y.pt*"))


def test_a_directory_named_auto_is_no_run_to_go_on_with(convert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("auto").mkdir()
    for kind in ("tutel", "hub"):
        finished = convert("export", kind, "auto", "--output", "y.pt")
        assert_refused(finished, "checkpoint auto: holds no checkpoint")


def test_a_full_disk_leaves_nothing(convert, make_checkpoint, monkeypatch, tmp_path):
    ours, saved, real = make_checkpoint()[0], [], torch.save

    def save(content, file):
        real(content, file)
        saved.append(file)
        if len(saved) == 3:
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    monkeypatch.setattr(torch, "save", save)
    arguments = [ours, "--ranks", 4, "--output", tmp_path / "sub" / "y.pth"]
    finished = convert("export", "swin-moe", *arguments)
    assert_refused(finished, "y.pth.rank2: cannot be written", "file write failed")
    assert list((tmp_path / "sub").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(files, convert, cfg, tmp_path):
    os.chmod(f"{files}.rank1", 0)
    arguments = [files, *cfg(), "--output", tmp_path / "new"]
    assert_refused(convert("import", "swin-moe", *arguments), "x.pth.rank1: permission denied")
    os.chmod(tmp_path, 0o500)
    try:
        assert_refused(convert("import", "swin-moe", *arguments), "no permission to write into")
    finally:
        os.chmod(tmp_path, 0o700)


SINGLE = {"format": "swinv2-moe single file 1", "step": "1", "class_names": "[]", "config": "{}"}
METADATA = [  # of a single file, what the line says
    (None, "its format is None"),
    ({"format": SINGLE["format"]}, "its metadata cannot be used ('class_names')"),
    (SINGLE | {"config": "MODEL: {NOPE: 1}"}, "its configuration cannot be used"),
    (SINGLE | {"class_names": "[" * 100_000}, "nested too deeply"),
    (SINGLE | {"class_names": '"ab"'}, "class_names is 'ab', it must be a list"),
    (SINGLE | {"step": "1.5"}, "step is 1.5"),
    (SINGLE | {"step": "9" * 30}, "step is 999"),
]


def test_a_single_file_of_another_kind(refused, tmp_path):
    weights = {"norm.weight": torch.ones(1)}
    save_file(weights, tmp_path / "one.pth")
    refused(["import", "single", tmp_path / "one.pth"], "one.pth", "is a .safetensors file")
    file = tmp_path / "one.safetensors"
    for metadata, reason in METADATA:
        save_file(weights, file, metadata)
        refused(["import", "single", file], str(file), reason)


def test_a_named_pipe_in_the_place_of_weights(refused, cfg, tmp_path):
    file = tmp_path / "pipe.pth"
    os.mkfifo(file)
    for kind in ("swin-moe", "dense"):
        refused(["import", kind, file, *cfg()], f"{file}: not a regular file")


def test_a_checkpoint_without_a_classifier_is_not_exported(convert, make_checkpoint, tmp_path):
    ours, _ = make_checkpoint()
    file = ours / "model.safetensors"
    trunk = {key: value for key, value in load_file(file).items() if not key.startswith("head.")}
    save_file(trunk, file)
    meta = read_meta(ours)
    write_meta(ours, meta | {"files": meta["files"] | {file.name: fsync_and_hash(file)}})
    finished = convert("export", "single", ours, "--output", tmp_path / "y.safetensors")
    assert_refused(finished, "has no classifier")


class RunsCommand:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


class RunsCode:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({str(self.marker)!r}, 'w')",)


PLANTED = [  # kind, file with the pickle, source
    ("swin-moe", "x.pth.rank0", "x.pth"),
    ("swin-moe", "x.pth.master", "x.pth"),
    ("swin-moe", "y.pth.global", "y.pth"),
    ("dense", "dense.pth", "dense.pth"),
    ("tutel", "tutel.pt", "tutel.pt"),
    ("tutel", "tutel-1.ckpt", "tutel-{rank}.ckpt"),
    ("single", "single.safetensors", "single.safetensors"),
]


@pytest.mark.parametrize(("kind", "name", "source"), PLANTED)
def test_a_planted_pickle_runs_nothing(kind, name, source, files, refused, cfg, tmp_path):
    marker, file = tmp_path / "executed", tmp_path / name
    torch.save({"model": {"norm.weight": torch.ones(1)}}, tmp_path / "tutel-0.ckpt")
    for evil in (RunsCommand, RunsCode):
        content = {"model": {"norm.weight": evil(marker)}}
        for save in (torch.save, lambda content, file: file.write_bytes(pickle.dumps(content))):
            save(content, file)
            command = ["import", kind, tmp_path / source, *cfg()]
            refused(command, f"{file}: cannot be read as weights")
            assert not marker.exists()
        pickle.loads(pickle.dumps(content))  # it would have
        assert marker.exists()
        marker.unlink()
