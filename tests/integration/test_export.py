"""tools/export.py: programs that equal the model, on their own and in the example; and every input
that cannot work."""

import csv
import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import fake_graph
import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from sklearn.datasets import load_sample_images
from tool_cases import ROOT, Finished, assert_one_line, command, words

from swinv2_moe.checkpoints.checkpoint import write_weights
from swinv2_moe.checkpoints.deployed import open_deployed
from swinv2_moe.config import data_config, load_config, model_config
from swinv2_moe.data.transforms import build_transform
from swinv2_moe.export.export import preprocessing
from swinv2_moe.models import build_model

onnx = pytest.importorskip("onnx", reason="needs the export extra")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the export extra")

# torch's, of what torch.export.load reads
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")
CLASSES = [f"digit {number}" for number in range(10)]
# One block without experts, one with.
TINY = (
    "MODEL.SWINV2.DEPTHS [1,1] MODEL.SWINV2.NUM_HEADS [2,2] MODEL.MOE.BLOCKS [[],[0]]"
    " MODEL.SWINV2.PRETRAINED_WINDOW_SIZES [0,0]"
)
MODELS = {
    "experts": "MODEL.MOE.TOP_K 2 MODEL.MOE.NORMALIZE_GATES true MODEL.MOE.ROUTER cosine"
    " MODEL.MOE.EVAL_CAPACITY_FACTOR 0.75",
    "released": "MODEL.TYPE swin_moe MODEL.MOE.OUTPUT_BIAS false MODEL.MOE.NUM_EXPERTS 2"
    " MODEL.MOE.EVAL_CAPACITY_FACTOR 0",
    "dense": "MODEL.MOE.NUM_EXPERTS 0 DATA.CHANNELS 1 DATA.MEAN [0.5] DATA.STD [0.5]"
    " TEST.CROP_RATIO 0 DATA.DATASET folder DATA.PATH gone",
}


@pytest.fixture
def export(monkeypatch, capsys, checkpoints, tmp_path):
    """`export(name, *arguments)`: tools/export.py in this process, of a checkpoint to exported/."""
    run = command("export", monkeypatch, capsys)
    output = tmp_path / "exported"

    def of(name: str, *arguments: object, **places: Path) -> Finished:
        good = ["--resume", checkpoints / name, "--output", output]
        return run(*good, *arguments, **places)

    return of


@pytest.fixture
def classify(monkeypatch, capsys):
    """`classify(*arguments)`: examples/classify.py in this process."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import classify

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["classify.py", *map(str, arguments)])
        status, message = 0, ""
        try:
            classify.main()
        except SystemExit as stop:
            status = stop.code
            if isinstance(status, str):  # which Python prints
                status, message = 1, f"{status}\n"
        out, err = capsys.readouterr()
        return Finished(status, out, err + message)

    return run


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, small):
    """A checkpoint of each of MODELS; no weight is zero, where SwinV2's norms start and hide what
    comes before."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, keys in MODELS.items():
        config = load_config(None, [*small, *f"{TINY} {keys}".split()])
        model = build_model(model_config(config), len(CLASSES))
        generator = torch.Generator().manual_seed(0)
        tensors = {
            key: torch.randn(t.shape, generator=generator) * 0.2
            for key, t in model.state_dict().items()
        }
        write_weights(root / name, model, tensors, config.dump(), CLASSES, step=7)
    return root


@pytest.fixture(scope="module")
def exported(tmp_path_factory, checkpoints, start_ranks):
    """The model with experts in both formats, in batches of 3, the last with 2 images; what the
    command has printed."""
    output = tmp_path_factory.mktemp("exported") / "experts"
    arguments = ["--resume", checkpoints / "experts", "--output", output, "--format onnx torch"]
    more = "--batch-size 3 --images 29 --opts DEVICE cpu"
    (done,) = start_ranks(1, "tools/export.py", *arguments, more)
    assert (done.status, done.err) == (0, "")
    return output, done.out


def run_alone(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, *words(*arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)


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
    names = ["model.json", "model.onnx", "model.pt2"]
    assert sorted(path.name for path in directory.iterdir()) == names
    spec = json.loads((directory / "model.json").read_text())
    assert "/" not in spec["data"]
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
    for program in spec["programs"].values():
        assert program["images"] == 29
        assert program["max_abs_difference"] < 1e-4 * program["max_abs_logit"]
        one = 100 / 29 + 1e-6  # a tie within the difference above may go either way
        assert program["same_top1"] >= 100 - one
        assert program["program_top1"] == pytest.approx(program["model_top1"], abs=one)
        assert [len(program["milliseconds"][name]) for name in ("program", "model")] == [20, 20]
        size = (directory / program["file"]).stat().st_size
        assert program["files"][program["file"]]["bytes"] == size
    differences = [spec["programs"][kind]["max_abs_difference"] for kind in ("onnx", "torch")]
    row = ["largest", "difference", *(f"{difference:.2g}" for difference in differences)]
    assert row in [line.split() for line in printed.splitlines()]
    assert "experts, step 7, 4 experts, capacity factor 0.75; float32" in printed


def test_programs_run_without_this_project(exported, tmp_path):
    """A process that cannot import it: neither operations nor classes of ours are in the files."""
    code = """
import sys
sys.modules.update(dict.fromkeys(("moe_core", "swinv2_moe", "timm")))
import torch
logits = torch.export.load(sys.argv[1]).module()(torch.zeros(3, 3, 16, 16))
assert logits.shape == (3, 10)
"""
    (tmp_path / "alone.py").write_text(code)
    done = run_alone("-W ignore", tmp_path / "alone.py", exported[0] / "model.pt2", cwd=tmp_path)
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
    options = "--batch-size 0 --format torch onnx --images 16 --opts DEVICE cpu"
    finished = export("released", options)
    assert (finished.status, finished.err) == (0, "")
    exported = tmp_path / "exported"
    spec = json.loads((exported / "model.json").read_text())
    assert spec["input"]["shape"] == [None, 3, 16, 16]
    model = model_of(checkpoints / "released")
    program = torch.export.load(exported / "model.pt2").module()
    for count in (1, 5, 32):
        images = torch.randn(count, 3, 16, 16)
        wanted = model(images)
        torch.testing.assert_close(onnx_logits(exported, images), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(program(images), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("bfloat16", onnx.TensorProto.BFLOAT16), ("int8", onnx.TensorProto.INT8)]
)
def test_smaller_weights(export, tmp_path, dtype, kind):
    finished = export("experts", "--dtype", dtype, "--batch-size 3 --opts DEVICE cpu")
    assert (finished.status, finished.err) == (0, "")
    weights = onnx.load(tmp_path / "exported" / "model.onnx").graph.initializer
    small = [weight for weight in weights if weight.data_type == kind and len(weight.dims) > 1]
    # the products of two blocks' attention (2 each), a dense FFN, four experts, a merging, the head
    assert len(small) == 2 * 2 + 2 + 4 * 2 + 1 + 1
    (router,) = (weight for weight in weights if weight.name.endswith(".router.projector.weight"))
    assert router.data_type == onnx.TensorProto.FLOAT
    program = json.loads((tmp_path / "exported" / "model.json").read_text())["programs"]["onnx"]
    assert program["same_top1"] >= 90


def test_bfloat16_for_torch_and_a_dense_model_of_grey_images_without_data(export, tmp_path):
    options = "--dtype bfloat16 --format torch --batch-size 0 --images 13 --opts DEVICE cpu"
    finished = export("dense", options)
    assert (finished.status, finished.err) == (0, "")
    assert ", dense; bfloat16\n" in finished.out
    says = "compared on random images: DATA.PATH is 'gone': no such directory\n"
    assert finished.out.startswith(says)
    assert "\n13 random images, timed in batches of 8: " in finished.out
    exported = tmp_path / "exported"
    (tmp_path / "ordinary").mkdir()
    assert exported.stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    tensors = torch.export.load(exported / "model.pt2").state_dict.values()
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    assert dtypes == {torch.bfloat16}


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
@pytest.mark.parametrize("file", ["model.onnx", "model.pt2"])
def test_the_example_says_what_the_model_says(file, exported, checkpoints, photographs, tmp_path):
    for name in (file, "model.json"):
        shutil.copy(exported[0] / name, tmp_path)
    with open_deployed(str(checkpoints / "experts"), opts=["DEVICE", "cpu"]) as deployed:
        model = deployed.model(len(CLASSES))
        transform = build_transform(deployed.data, is_train=False)
    done = run_alone("examples/classify.py", tmp_path, photographs[0])
    assert (done.returncode, done.stderr) == (0, "")
    images = transform(Image.open(photographs[0]).convert("RGB")).expand(3, -1, -1, -1)
    odds, best = model(images)[0].softmax(0).topk(5)
    shares, names = zip(*(line.split("%  ") for line in done.stdout.splitlines()), strict=True)
    assert list(names) == [CLASSES[n] for n in best]
    # to the digit that is printed, and what the programs may differ by
    assert list(map(float, shares)) == pytest.approx((100 * odds).tolist(), abs=0.05 + 0.01)


@pytest.mark.parametrize("size", [(300, 200), (401, 533), (64, 640), (192, 192), (9, 7), (3, 9000)])
@pytest.mark.parametrize(
    "keys", ["", "DATA.INTERPOLATION bilinear TEST.CROP_RATIO 0.9", "TEST.CROP_RATIO 0"]
)
def test_the_example_prepares_pictures_as_the_evaluation_does(size, keys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from classify import prepare

    config = load_config(None, keys.split())
    pixels = np.random.default_rng(0).integers(0, 256, (*reversed(size), 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    how = preprocessing(data_config(config))
    found = prepare(picture, {"preprocessing": how, "input": {"shape": [1, 3, 192, 192]}})
    wanted = build_transform(data_config(config), is_train=False)(picture)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_example_reads_pictures_alone_and_none_that_is_too_large(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from classify import read

    Image.new("L", (30, 20), 7).save(tmp_path / "good.png")
    assert read(str(tmp_path / "good.png")).getpixel((0, 0)) == 7
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    (tmp_path / "eps.png").write_bytes(postscript)
    Image.new("1", (13_000, 13_000)).save(tmp_path / "large.png", compress_level=1)
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:30])
    for name, says in (
        ("eps", "cannot identify image file"),
        ("large", "13000 x 13000 pixels, the limit is"),
        ("cut", "cannot identify image file"),
        ("gone", "No such file"),
    ):
        with pytest.raises(Exception, match=says):
            read(tmp_path / f"{name}.png")


def test_the_example_says_what_it_needs(classify, tmp_path):
    done = classify()
    assert (done.status, done.out) == (2, "")
    assert "EXPORTED_DIR PICTURE_OR_FOLDER" in done.err
    done = classify(tmp_path, "picture.png")
    says = f"{tmp_path}: no model.onnx and no model.pt2, which `swinv2-moe export` writes\n"
    assert done == (1, "", says)


def test_the_example_classifies_folders(classify, exported, photographs, tmp_path):
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
    done = classify(exported[0], folder, "--top-k", 2, "--csv", tmp_path / "out.csv")
    assert done.status == 1
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith(f"{folder}/broken.jpg: not a picture that can be read (")
    assert len(done.out.splitlines()) == 3 * 5
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = {Path(row["file"]).name: row for row in csv.DictReader(file)}
    assert list(rows) == ["0.PNG", "1.PNG", "2.PNG", "turned.png", "upright.png"]
    assert set(rows["0.PNG"]) == {"file", "class", "probability", "class_2", "probability_2"}
    assert rows["0.PNG"]["class"] in CLASSES
    same = ("class", "class_2")
    assert [rows["turned.png"][key] for key in same] == [rows["upright.png"][key] for key in same]


# what is wrong with the exported directory, and what the one line says
DAMAGE = {
    "no model.json": ("model.json", None, "model.json: cannot be used (FileNotFoundError"),
    "not JSON": ("model.json", "{", "model.json: cannot be used (JSONDecodeError"),
    "no entries": ("model.json", "{}", "model.json: cannot be used (KeyError: 'class_names')"),
    "a list": ("model.json", "[]", "model.json: cannot be used (TypeError"),
    "not ONNX": ("model.onnx", "no", "model.onnx: cannot be loaded ("),
    "not torch's": ("model.pt2", "no", "model.pt2: cannot be loaded ("),
}


@pytest.mark.parametrize("reads", [False, True])
def test_the_example_replays_a_program_of_fixed_shapes(classify, monkeypatch, capsys, reads):
    """On a GPU, by a fake of its graphs. A program that reads on the host runs as usual, with a
    line."""
    import classify as example

    class Graph(fake_graph.FakeGraph):
        def __init__(self):
            super().__init__()
            self._is_first = False  # it is captured with zeros

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    for name in ("stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runs = []

    def program(images):
        runs.append(len(images))
        if reads:
            images.sum().item()
        return 2 * images.flatten(1) + 1

    replayed = example.as_graph(program, torch.zeros(2, 3))
    for number in range(1, 4):
        with torch.inference_mode():
            images = torch.full((2, 3), float(number))
            assert torch.equal(replayed(images), 2 * images + 1)
    assert len(runs) == (3 + 1 + 3 if reads else 3 + 1)
    assert ("not replayed as a CUDA graph (RuntimeError" in capsys.readouterr().err) == reads


@pytest.mark.parametrize("case", DAMAGE)
def test_the_example_names_what_is_damaged(case, classify, exported, photographs, tmp_path):
    name, content, says = DAMAGE[case]
    shutil.copytree(exported[0], tmp_path / "model")
    (tmp_path / "model" / name).unlink()
    if name == "model.pt2":  # of both, the other is run
        (tmp_path / "model" / "model.onnx").unlink()
    if content is not None:
        (tmp_path / "model" / name).write_text(content)
    done = classify(tmp_path / "model", photographs[0])
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith(f"{tmp_path}/model/{says}"), done.err
    assert len(done.err.splitlines()) == 1


def test_the_example_refuses_what_is_no_input(classify, exported, photographs, tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, status, says in (
        ([tmp_path / "empty"], 1, f"{tmp_path}/empty: holds no pictures (.jpg"),
        ([tmp_path / "gone.jpg"], 1, f"{tmp_path}/gone.jpg: not a picture that can be read ("),
        ([photographs[0], "--csv", tmp_path / "none/a.csv"], 1, f"--csv {tmp_path}/none/a.csv: "),
        ([photographs[0], "--top-k", "0"], 2, "--top-k is 0, it must be at least 1"),
    ):
        done = classify(exported[0], *arguments)
        assert done.status == status
        assert says in done.err


# Bad input

# arguments after the good ones ({root}: checkpoints, {tmp}: an empty directory), and what the one
# line must name
BAD_INPUT = {
    "--format tflite": "--format is 'tflite', allowed: onnx, torch",
    "--dtype float16": "--dtype is 'float16' ... onnx takes float32, bfloat16, int8",
    "--format torch --dtype int8": "'int8' ... torch takes float32, bfloat16",
    "--batch-size -1": "--batch-size is -1, it must be at least 0",
    "--capacity-factor nan": "MODEL.MOE.EVAL_CAPACITY_FACTOR ... nan",
    "--batch-size 0": "--batch-size 0 (any) needs --capacity-factor 0 (dropless) ... at 0.75",
    "--batch-size 0 --opts MODEL.MOE.ROUTER expert_choice": (
        "--batch-size 0 (any) ... MODEL.MOE.ROUTER 'expert_choice' ... the number of images"
    ),
    "--capacity-factor 0 --opts MODEL.MOE.ROUTER expert_choice": (
        "--capacity-factor 0: with MODEL.MOE.ROUTER 'expert_choice' ... must not be 0"
    ),
    "--resume {root}/dense --capacity-factor 2": "--capacity-factor 2 ... no experts",
    "--resume {root}/experts/model.safetensors": "its format is None, not",
    "--data {data}": "the data have other classes ... 10 in all ... blue, red",
    "--opts DATA.DATASET folder DATA.PATH {tmp}/none": "DATA.PATH ... none",
    "--output {root}": "--output ... already exists",
    "--output {root}/experts/meta.json/exported": "--output ... cannot be written",
}


@pytest.mark.parametrize("options", BAD_INPUT)
def test_bad_input_is_one_line(
    options, export, checkpoints, tmp_path, monkeypatch, make_photographs
):
    """Before a program is written."""
    monkeypatch.setattr("swinv2_moe.export.programs.write_program", None)
    places = {"root": checkpoints, "tmp": tmp_path}
    if "{data}" in options:
        places["data"] = make_photographs()
    assert_one_line(export("experts", options, **places), BAD_INPUT[options])
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_differs_is_not_kept(export, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules["swinv2_moe.export.export"].TOLERANCES, "float32", 1e-12)
    (tmp_path / ".exported.tmp").mkdir()  # somebody's
    says = "the torch program's logits differ from the model's by ... nothing is written"
    assert_one_line(export("dense", "--format torch"), says)
    assert [path.name for path in tmp_path.iterdir()] == [".exported.tmp"]


def test_only_what_cannot_be_written_is_laid_to_the_output(export, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    def broken(*args):
        raise OSError("a picture is gone")

    monkeypatch.setattr("swinv2_moe.export.programs.write_program", full)
    says = "--output ... exported: cannot be written ([Errno 28] No space left"
    assert_one_line(export("dense", "--format torch"), says)
    monkeypatch.setattr("swinv2_moe.export.programs.write_program", lambda *args: None)
    monkeypatch.setattr("swinv2_moe.export.programs.load_program", lambda *args: None)
    monkeypatch.setattr(sys.modules["swinv2_moe.export.export"], "compare", broken)
    with pytest.raises(OSError, match=r"^a picture is gone$"):
        export("dense", "--format torch")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(export, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    says = "needs the export extra ... pip install -e '.[export]' ... onnxscript"
    assert_one_line(export("dense", "--format onnx"), says)
    assert_one_line(export("dense", "--dtype int8"), says)


@torch.no_grad()
def test_the_default_is_a_program_of_torch_without_the_packages_of_onnx(
    export, classify, monkeypatch, photographs, tmp_path
):
    """For any number of images, and the example runs it: `make train` installs no more, and
    suggests the command without options."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    done = export("dense", "--images 4")
    assert (done.status, done.err) == (0, "")
    says = "--format torch: the packages of ONNX, the default, are not installed (pip install"
    assert done.out.startswith(says)
    exported = tmp_path / "exported"
    assert sorted(path.name for path in exported.iterdir()) == ["model.json", "model.pt2"]
    program = torch.export.load(exported / "model.pt2").module()
    for count in (1, 3):
        assert program(torch.randn(count, 1, 16, 16)).shape == (count, 10)
    done = classify(exported, *photographs)
    assert (done.status, done.err, len(done.out.splitlines())) == (0, "", 2 * 6)


def test_the_default_batch_is_one_image_where_shapes_follow_from_it(export, tmp_path):
    done = export("experts", "--format torch --images 4 --opts DEVICE cpu")
    assert (done.status, done.err) == (0, "")
    spec = json.loads((tmp_path / "exported" / "model.json").read_text())
    assert spec["input"]["shape"] == [1, 3, 16, 16]


def test_under_torchrun(export, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    says = "error: WORLD_SIZE is 2: this is for one process, without torchrun"
    assert_one_line(export("experts"), says)
    assert list(tmp_path.iterdir()) == []
