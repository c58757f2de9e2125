"""tools/export.py: programs that equal the model, on their own and in the example; and every input
that cannot work."""

import builtins
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from sklearn.datasets import load_sample_images
from tool_cases import ROOT, command

from swinv2_moe.config import data_config, load_config, model_config
from swinv2_moe.data import build_transform
from swinv2_moe.models import build_model
from swinv2_moe.train.checkpoint import write_weights
from swinv2_moe.train.deployed import open_deployed

onnx = pytest.importorskip("onnx", reason="needs the export extra")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the export extra")

# torch's, of what torch.export.load reads
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")
CLASSES = [f"digit {number}" for number in range(10)]
MODELS = {
    "experts": "MODEL.MOE.TOP_K 2 MODEL.MOE.NORMALIZE_GATES true MODEL.MOE.ROUTER cosine"
    " MODEL.MOE.EVAL_CAPACITY_FACTOR 0.75",
    "released": "MODEL.TYPE swin_moe MODEL.MOE.OUTPUT_BIAS false MODEL.MOE.NUM_EXPERTS 2"
    " MODEL.MOE.EVAL_CAPACITY_FACTOR 0",
    "dense": "MODEL.MOE.NUM_EXPERTS 0 MODEL.SWINV2.IN_CHANS 1 DATA.MEAN [0.5] DATA.STD [0.5]"
    " TEST.CROP false DATA.DATASET folder DATA.PATH gone",
}


@pytest.fixture
def export(monkeypatch, capsys):
    """`export(*arguments)`: tools/export.py in this process."""
    return command("export", monkeypatch, capsys)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, small):
    """A checkpoint of each of MODELS; no weight is zero, where SwinV2's norms start and hide what
    comes before."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, keys in MODELS.items():
        config = load_config(None, [*small, *keys.split()])
        model, generator = (
            build_model(model_config(config), len(CLASSES)),
            torch.Generator().manual_seed(0),
        )
        tensors = {
            key: torch.randn(t.shape, generator=generator) * 0.2
            for key, t in model.state_dict().items()
        }
        write_weights(root / name, model, tensors, config.dump(), CLASSES, step=7)
    return root


@pytest.fixture(scope="module")
def exported(tmp_path_factory, checkpoints):
    """The model with experts in both formats, in batches of 3, the last with 2 images; what the
    command has printed."""
    output = tmp_path_factory.mktemp("exported") / "experts"
    arguments = [
        "--resume",
        checkpoints / "experts",
        "--output",
        output,
        "--format",
        "onnx",
        "torch",
    ]
    done = run_alone(
        "tools/export.py",
        *arguments,
        "--batch-size",
        "3",
        "--images",
        "29",
        "--opts",
        "DEVICE",
        "cpu",
    )
    assert (done.returncode, done.stderr) == (0, "")
    return output, done.stdout


def run_alone(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def model_of(checkpoint: Path) -> torch.nn.Module:
    with open_deployed(str(checkpoint), opts=["DEVICE", "cpu"]) as deployed:
        return deployed.model(len(CLASSES))


def onnx_logits(directory: Path, images: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(directory / "model.onnx")
    return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


@torch.no_grad()
def test_both_programs_equal_the_model(exported, checkpoints):
    images = torch.randn(3, 3, 16, 16)
    wanted = model_of(checkpoints / "experts")(images)
    torch.testing.assert_close(onnx_logits(exported[0], images), wanted, rtol=1e-4, atol=1e-4)
    program = torch.export.load(exported[0] / "model.pt2").module()
    torch.testing.assert_close(program(images), wanted, rtol=1e-4, atol=1e-4)


def test_what_is_printed_and_written(exported):
    directory, printed = exported
    assert sorted(path.name for path in directory.iterdir()) == [
        "model.json",
        "model.onnx",
        "model.pt2",
    ]
    spec = json.loads((directory / "model.json").read_text())
    assert spec["input"] == {"name": "images", "dtype": "float32", "shape": [3, 3, 16, 16]}
    assert spec["output"] == {"name": "logits", "dtype": "float32", "shape": [3, 10]}
    assert (spec["class_names"], spec["step"], spec["dtype"]) == (CLASSES, 7, "float32")
    assert (spec["num_experts"], spec["capacity_factor"]) == (4, 0.75)
    assert (spec["compared_on"], spec["without_data"]) == ("validation images", None)
    assert spec["other_class_names"] == (
        "the classes are matched by number, since only one side has names: class 0 is 'digit 0' in"
        " the checkpoint, '0' in the data"
    )
    assert spec["other_class_names"] in printed.splitlines()
    rows = [line.split() for line in printed.splitlines()]
    for program in spec["programs"].values():
        assert program["images"] == 29
        assert program["max_abs_difference"] < 1e-4 * program["max_abs_logit"]
        assert program["same_top1"] == 100
        assert program["program_top1"] == program["model_top1"]
        assert [len(program["milliseconds"][name]) for name in ("program", "model")] == [20, 20]
        assert (
            program["files"][program["file"]]["bytes"]
            == (directory / program["file"]).stat().st_size
        )
    onnx_program, torch_program = (spec["programs"][kind] for kind in ("onnx", "torch"))
    differences = [
        f"{program['max_abs_difference']:.2g}" for program in (onnx_program, torch_program)
    ]
    assert ["largest", "difference", *differences] in rows
    assert "experts, step 7, 4 experts, capacity factor 0.75; float32" in printed


def test_programs_run_without_this_project(exported, tmp_path):
    """A process that cannot import it: neither operations nor classes of ours are in the files."""
    code = "import sys; sys.modules.update(dict.fromkeys(('moe_core', 'swinv2_moe', 'timm')));"
    code += (
        "import torch; logits = torch.export.load(sys.argv[1]).module()(torch.zeros(3, 3, 16, 16));"
    )
    code += "assert logits.shape == (3, 10)"
    done = run_alone("-W", "ignore", "-c", code, exported[0] / "model.pt2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    onnx.checker.check_model(exported[0] / "model.onnx")
    assert {node.domain for node in onnx.load(exported[0] / "model.onnx").graph.node} == {""}
    for file in ("model.onnx", "model.pt2"):
        # nor where they were made
        assert str(ROOT).encode() not in (exported[0] / file).read_bytes()


def test_a_capacity_makes_every_shape_fixed(exported):
    model = onnx.shape_inference.infer_shapes(onnx.load(exported[0] / "model.onnx"))
    dims = [dim for value in model.graph.value_info for dim in value.type.tensor_type.shape.dim]
    assert dims
    assert all(dim.HasField("dim_value") for dim in dims)


@torch.no_grad()
def test_dropless_takes_any_number_of_images(export, checkpoints, tmp_path):
    arguments = [
        "--resume",
        checkpoints / "released",
        "--output",
        tmp_path / "any",
        "--batch-size",
        "0",
    ]
    finished = export(
        *arguments, "--format", "torch", "onnx", "--images", "16", "--opts", "DEVICE", "cpu"
    )
    assert (finished.status, finished.err) == (0, "")
    spec = json.loads((tmp_path / "any" / "model.json").read_text())
    assert spec["input"]["shape"] == [None, 3, 16, 16]
    model, program = (
        model_of(checkpoints / "released"),
        torch.export.load(tmp_path / "any" / "model.pt2").module(),
    )
    for count in (1, 5, 32):
        images = torch.randn(count, 3, 16, 16)
        torch.testing.assert_close(
            onnx_logits(tmp_path / "any", images), model(images), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(program(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("bfloat16", onnx.TensorProto.BFLOAT16), ("int8", onnx.TensorProto.INT8)]
)
def test_smaller_weights(export, checkpoints, tmp_path, dtype, kind):
    arguments = [
        "--resume",
        checkpoints / "experts",
        "--output",
        tmp_path / dtype,
        "--dtype",
        dtype,
    ]
    finished = export(*arguments, "--batch-size", "3", "--opts", "DEVICE", "cpu")
    assert (finished.status, finished.err) == (0, "")
    weights = onnx.load(tmp_path / dtype / "model.onnx").graph.initializer
    small = [weight for weight in weights if weight.data_type == kind and len(weight.dims) > 1]
    # the products of three blocks' attention (2 each), a dense FFN, two layers of four experts, two
    # mergings, the head
    assert len(small) == 3 * 2 + 2 + 2 * 4 * 2 + 2 + 1
    routers = [weight for weight in weights if weight.name.endswith(".router.projector.weight")]
    assert [weight.data_type for weight in routers] == [onnx.TensorProto.FLOAT] * 2
    program = json.loads((tmp_path / dtype / "model.json").read_text())["programs"]["onnx"]
    assert program["same_top1"] >= 90


def test_bfloat16_for_torch_and_a_dense_model_of_grey_images_without_data(
    export, checkpoints, tmp_path
):
    arguments = [
        "--resume",
        checkpoints / "dense",
        "--output",
        tmp_path / "half",
        "--dtype",
        "bfloat16",
    ]
    chosen = ["--format", "torch", "--batch-size", "0", "--images", "13", "--opts", "DEVICE", "cpu"]
    finished = export(*arguments, *chosen)
    assert (finished.status, finished.err) == (0, "")
    assert ", dense; bfloat16\n" in finished.out
    assert finished.out.startswith(
        "compared on random images: DATA.PATH is 'gone': no such directory\n"
    )
    assert "\n13 random images, timed in batches of 8: " in finished.out
    (tmp_path / "ordinary").mkdir()
    assert (tmp_path / "half").stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    program = torch.export.load(tmp_path / "half" / "model.pt2")
    assert {
        tensor.dtype for tensor in program.state_dict.values() if tensor.is_floating_point()
    } == {torch.bfloat16}


# The example


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> list[Path]:
    """Those that scikit-learn ships: a temple in China and a flower, 640 x 427."""
    root, files = tmp_path_factory.mktemp("photographs"), []
    for number, pixels in enumerate(load_sample_images().images):
        files.append(root / f"{number}.png")
        Image.fromarray(pixels).save(files[-1])
    return files


@torch.no_grad()
def test_the_example_says_what_the_model_says(exported, checkpoints, photographs):
    with open_deployed(str(checkpoints / "experts"), opts=["DEVICE", "cpu"]) as deployed:
        model, transform = (
            deployed.model(len(CLASSES)),
            build_transform(deployed.data, is_train=False),
        )
    for file in photographs:
        done = run_alone("examples/classify.py", exported[0], file)
        assert (done.returncode, done.stderr) == (0, "")
        images = transform(Image.open(file).convert("RGB")).expand(3, -1, -1, -1)
        odds, best = model(images)[0].softmax(0).topk(5)
        wanted = [
            f"{share:6.1%}  {CLASSES[number]}"
            for share, number in zip(odds.tolist(), best.tolist(), strict=True)
        ]
        assert done.stdout.splitlines() == wanted


@pytest.mark.parametrize("size", [(300, 200), (401, 533), (64, 640), (192, 192), (9, 7), (3, 9000)])
@pytest.mark.parametrize(
    "keys", ["", "DATA.INTERPOLATION bilinear TEST.CROP_RATIO 0.9", "TEST.CROP false"]
)
def test_the_example_prepares_pictures_as_the_evaluation_does(size, keys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from classify import prepare

    from swinv2_moe.export.export import preprocessing

    config = load_config(None, keys.split())
    picture = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (*reversed(size), 3), dtype=np.uint8)
    )
    spec = {
        "preprocessing": preprocessing(data_config(config)),
        "input": {"shape": [1, 3, 192, 192]},
    }
    found, wanted = (
        torch.from_numpy(prepare(picture, spec)),
        build_transform(data_config(config), is_train=False)(picture),
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_example_reads_pictures_alone_and_none_that_is_too_large(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from classify import read

    Image.new("L", (30, 20), 7).save(tmp_path / "good.png")
    assert read(str(tmp_path / "good.png")).getpixel((0, 0)) == 7
    (tmp_path / "eps.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    )
    Image.new("L", (13_000, 13_000)).save(tmp_path / "large.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:30])
    for name, says in (
        ("eps", "cannot identify image file"),
        ("large", "13000 x 13000 pixels, the limit is"),
        ("cut", "cannot identify image file"),
        ("gone", "No such file"),
    ):
        with pytest.raises(Exception, match=says):
            read(tmp_path / f"{name}.png")


def test_the_example_says_what_it_needs(tmp_path):
    done = run_alone("examples/classify.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "EXPORTED_DIR PICTURE_OR_FOLDER" in done.stderr
    done = run_alone("examples/classify.py", tmp_path, "picture.png")
    assert (done.returncode, done.stderr) == (
        1,
        f"{tmp_path}: no model.onnx, which tools/export.py --format onnx writes\n",
    )


def test_the_example_classifies_folders(exported, photographs, tmp_path):
    """More pictures than the batch of 3, upright and turned; a broken one is named."""
    folder = tmp_path / "pictures"
    (folder / "deeper").mkdir(parents=True)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    with Image.open(photographs[0]) as image:
        image.save(folder / "upright.png")
        image.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.png", exif=exif)
    for number in range(3):
        shutil.copy(photographs[1], folder / "deeper" / f"{number}.PNG")
    (folder / "broken.jpg").write_bytes(b"not a picture")
    words = [exported[0], folder, "--top-k", "2", "--csv", tmp_path / "out.csv"]
    done = run_alone("examples/classify.py", *words)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"{folder}/broken.jpg: not a picture that can be read (")
    assert len(done.stdout.splitlines()) == 3 * 5
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = {Path(row["file"]).name: row for row in csv.DictReader(file)}
    assert list(rows) == ["0.PNG", "1.PNG", "2.PNG", "turned.png", "upright.png"]
    assert set(rows["0.PNG"]) == {"file", "class", "probability", "class_2", "probability_2"}
    assert rows["0.PNG"]["class"] in CLASSES


# what is wrong with the exported directory, and what the one line says
DAMAGE = {
    "no model.json": ("model.json", None, "model.json: cannot be used (FileNotFoundError"),
    "not JSON": ("model.json", "{", "model.json: cannot be used (JSONDecodeError"),
    "no entries": ("model.json", "{}", "model.json: cannot be used (KeyError: 'class_names')"),
    "a list": ("model.json", "[]", "model.json: cannot be used (TypeError"),
    "not ONNX": ("model.onnx", "no", "model.onnx: cannot be loaded ("),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_the_example_names_what_is_damaged(case, exported, photographs, tmp_path):
    name, content, says = DAMAGE[case]
    shutil.copytree(exported[0], tmp_path / "model")
    (tmp_path / "model" / name).unlink()
    if content is not None:
        (tmp_path / "model" / name).write_text(content)
    done = run_alone("examples/classify.py", tmp_path / "model", photographs[0])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{tmp_path}/model/{says}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_example_refuses_what_is_no_input(exported, photographs, tmp_path):
    (tmp_path / "empty").mkdir()
    for words, status, says in (
        ([tmp_path / "empty"], 1, f"{tmp_path}/empty: holds no pictures (.jpg"),
        ([tmp_path / "gone.jpg"], 1, f"{tmp_path}/gone.jpg: not a picture that can be read ("),
        ([photographs[0], "--csv", tmp_path / "none/a.csv"], 1, f"--csv {tmp_path}/none/a.csv: "),
        ([photographs[0], "--top-k", "0"], 2, "--top-k is 0, it must be at least 1"),
    ):
        done = run_alone("examples/classify.py", exported[0], *words)
        assert done.returncode == status
        assert says in done.stderr
        assert "Traceback" not in done.stderr


# Bad input

# arguments after the good ones ({root}: checkpoints, {tmp}: an empty directory), and what the one
# line must name
BAD_INPUT = {
    "format": (["--format", "tflite"], ["--format is 'tflite', allowed: onnx, torch"]),
    "dtype": (
        ["--dtype", "float16"],
        ["--dtype is 'float16'", "onnx takes float32, bfloat16, int8"],
    ),
    "int8 for torch": (
        ["--format", "torch", "--dtype", "int8"],
        ["'int8'", "torch takes float32, bfloat16"],
    ),
    "batch size": (["--batch-size", "-1"], ["--batch-size is -1, it must be at least 0"]),
    "no images": (["--images", "0"], ["--images is 0, it must be at least 1"]),
    "capacity": (["--capacity-factor", "nan"], ["MODEL.MOE.EVAL_CAPACITY_FACTOR", "nan"]),
    "any batch": (
        ["--batch-size", "0"],
        ["--batch-size 0 (any) needs --capacity-factor 0 (dropless)", "at 0.75"],
    ),
    "any batch where experts choose": (
        ["--batch-size", "0", "--opts", "MODEL.MOE.ROUTER", "expert_choice"],
        ["--batch-size 0 (any)", "MODEL.MOE.ROUTER 'expert_choice'", "the number of images"],
    ),
    "any batch of Soft MoE": (
        ["--batch-size", "0", "--opts", "MODEL.MOE.ROUTER", "soft"],
        ["--batch-size 0 (any)", "MODEL.MOE.ROUTER 'soft'", "the number of images"],
    ),
    "dropless where experts choose": (
        ["--capacity-factor", "0", "--opts", "MODEL.MOE.ROUTER", "expert_choice"],
        ["--capacity-factor 0: with MODEL.MOE.ROUTER 'expert_choice'", "must not be 0"],
    ),
    "capacity of Soft MoE": (
        ["--capacity-factor", "1", "--opts", "MODEL.MOE.ROUTER", "soft"],
        ["--capacity-factor 1: MODEL.MOE.ROUTER 'soft' has no capacity factor"],
    ),
    "dense": (
        ["--resume", "{root}/dense", "--capacity-factor", "2"],
        ["--capacity-factor 2", "no experts"],
    ),
    "no checkpoint": (["--resume", "{tmp}"], ["--resume", "holds no checkpoint"]),
    "a file": (
        ["--resume", "{root}/experts/model.safetensors"],
        ["is a file, it must be a run or a checkpoint"],
    ),
    "another model": (
        ["--opts", "MODEL.SWINV2.EMBED_DIM", "32"],
        ["does not fit", "patch_embed.proj.weight"],
    ),
    "other classes": (
        ["--data", "{data}"],
        ["none of the classes of the data", "10 in all", "blue, red"],
    ),
    "no data": (["--data", "{tmp}/none"], ["DATA.PATH", "none"]),
    "no data by opts": (
        ["--opts", "DATA.DATASET", "folder", "DATA.PATH", "{tmp}/none"],
        ["DATA.PATH", "none"],
    ),
    "existing output": (["--output", "{root}"], ["--output", "already exists"]),
    "output in a file": (
        ["--output", "{root}/experts/meta.json/exported"],
        ["--output", "cannot be written"],
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line(case, export, checkpoints, tmp_path, monkeypatch, make_photographs):
    def too_late(*args):
        raise AssertionError("a program was written")

    monkeypatch.setattr("swinv2_moe.export.programs.write_program", too_late)
    arguments, texts = BAD_INPUT[case]
    places = {
        "root": checkpoints,
        "tmp": tmp_path,
        "data": make_photographs() if "{data}" in arguments else "",
    }
    good = ["--resume", checkpoints / "experts", "--output", tmp_path / "exported"]
    assert_one_line(export(*good, *[word.format(**places) for word in arguments]), texts)
    assert list(tmp_path.iterdir()) == []


def assert_one_line(finished, texts: list[str]) -> None:
    assert (finished.status, finished.out) == (2, "")
    lines = finished.err.splitlines()
    assert len(lines) == 1, finished.err
    assert [text for text in texts if text not in lines[0]] == [], lines[0]


def test_a_program_that_differs_is_not_kept(export, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules["swinv2_moe.export.export"].TOLERANCES, "float32", 1e-12)
    (tmp_path / ".exported.tmp").mkdir()  # somebody's
    finished = export(
        "--resume", checkpoints / "dense", "--output", tmp_path / "exported", "--format", "torch"
    )
    assert_one_line(
        finished, ["the torch program's logits differ from the model's by", "nothing is written"]
    )
    assert [path.name for path in tmp_path.iterdir()] == [".exported.tmp"]


def test_only_what_cannot_be_written_is_laid_to_the_output(
    export, checkpoints, tmp_path, monkeypatch
):
    def full(*args):
        raise OSError(28, "No space left on device")

    def broken(*args):
        raise OSError("a picture is gone")

    arguments = [
        "--resume",
        checkpoints / "dense",
        "--output",
        tmp_path / "exported",
        "--format",
        "torch",
    ]
    monkeypatch.setattr("swinv2_moe.export.programs.write_program", full)
    assert_one_line(
        export(*arguments), ["--output", "exported: cannot be written ([Errno 28] No space left"]
    )
    monkeypatch.setattr("swinv2_moe.export.programs.write_program", lambda *args: None)
    monkeypatch.setattr("swinv2_moe.export.programs.load_program", lambda *args: None)
    monkeypatch.setattr(sys.modules["swinv2_moe.export.export"], "compare", broken)
    with pytest.raises(OSError, match=r"^a picture is gone$"):
        export(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(export, checkpoints, tmp_path, monkeypatch):
    def without_onnxscript(name, *args, original=builtins.__import__, **kwargs):
        if name == "onnxscript":
            raise ModuleNotFoundError("No module named 'onnxscript'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_onnxscript)
    finished = export("--resume", checkpoints / "dense", "--output", tmp_path / "exported")
    assert_one_line(
        finished,
        ["needs the export extra", "pip install -e '.[export]'", "No module named 'onnxscript'"],
    )


def test_several_ranks_are_refused(checkpoints, start_ranks, tmp_path):
    arguments = [
        "--resume",
        checkpoints / "experts",
        "--output",
        tmp_path / "exported",
        "--opts",
        "DEVICE",
        "cpu",
    ]
    ended = start_ranks(2, "tools/export.py", *arguments)
    assert [outcome.status for outcome in ended] == [2, 2]
    error = "error: one process exports, here are 2: start it without torchrun"
    assert [outcome.err for outcome in ended] == [f"{error}\n", f"{error} (rank 1)\n"]
    assert list(tmp_path.iterdir()) == []
