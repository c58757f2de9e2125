"""detect train FOLDER, predict, test and report without a configuration, on small shapes."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tool_cases import ROOT, command

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from shapes_cases import Options, make_shapes

import swinv2_moe
from swinv2_moe.checkpoints.checkpoint import write_weights
from swinv2_moe.config import load_config, model_config
from swinv2_moe.convert.convert import export_weights
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model, bundled

QUICK = "--size 64 --epochs 1 --batch 4"
NETWORK = (
    "DATA.IMG_SIZE 64 MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.DEPTHS [1,1,1]"
    " MODEL.SWINV2.NUM_HEADS [1,1,2] MODEL.SWINV2.WINDOW_SIZE 8 MODEL.MOE.NUM_EXPERTS 4"
    " MODEL.SWINV2.PRETRAINED_WINDOW_SIZES [0,0,0] MODEL.MOE.BLOCKS [[],[0],[0]]"
)


@pytest.fixture(scope="module", autouse=True)
def small_network(tmp_path_factory):
    """In place of the package's, whose ONNX program takes half a minute: three blocks with random
    weights."""
    folder, config = tmp_path_factory.mktemp("bundled"), load_config(None, NETWORK.split())
    model = build_model(model_config(config), 2)
    write_weights(folder / "run", model, model.state_dict(), config.dump(), ["a", "b"])
    export_weights("single", folder / "run", folder / "tiny.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundled, "DIRECTORY", folder)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a finished run in output/shapes."""
    root = tmp_path_factory.mktemp("detect")
    make_shapes(root / "shapes", Options(train=8, val=4, min_size=64, max_size=96))
    (root / "shapes.txt").write_text("a file")
    return root


@pytest.fixture
def detect(folder: Path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    return command("detect", monkeypatch, capsys)


@pytest.fixture(scope="module")
def trained(folder: Path) -> str:
    """What training said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # 24 steps at a high rate, after which it finds something everywhere
        detector = swinv2_moe.fit_detector("shapes", size=64, epochs=3, batch=1, lr=3e-3)
    assert sorted(detector.class_names) == ["circle", "square", "triangle"]
    return "output/shapes"


def test_train_says_what_it_chose(detect, folder: Path) -> None:
    done = detect("train", "shapes", "--output said", QUICK)
    assert done.status == 0, done.err
    for part in (
        "shapes: COCO JSON, classes (3): ",
        "pictures: train 8 (",
        "weights: bundled:tiny",
        "size 64 x 64 px: given",
        "batch 4: given",
        "lr 0.00035: AdamW",
        "epochs 1: given",
        "expected duration: ",
        "AP50 ",
        "4 pictures of val",
        "next: swinv2-moe detect report said",
    ):
        assert part in done.out, part
    again = detect("train", "shapes", "--output said", QUICK)
    assert again.status == 2
    assert "already holds a run" in again.err
    continued = detect("train", "said")  # finished: nothing is left to train
    assert continued.status == 0, continued.err
    assert "resuming from" in continued.out + continued.err


def test_detector_in_python(trained: str, folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    detector = swinv2_moe.load(trained)
    files = sorted(Path("shapes/val").iterdir())
    found = detector.detect("shapes/val", threshold=0.0)
    assert [one.file for one in found] == [str(file) for file in files]
    for one, file in zip(found, files, strict=True):
        assert (one.width, one.height) == Image.open(file).size
        assert len(one.boxes) == len(one.scores) == len(one.class_names) > 0
        assert (np.diff(one.scores) <= 0).all()
        assert (one.boxes >= 0).all()
        assert (one.boxes[:, 2] <= one.width).all()
        assert (one.boxes[:, 3] <= one.height).all()
    pixels = np.asarray(Image.open(files[0]).convert("RGB"))
    (same,) = detector.detect(pixels, threshold=0.0)
    # one picture a batch: other sums in other kernels, so in fp32 only nearly equal
    assert np.allclose(same.scores[:5], found[0].scores[:5], atol=1e-4)
    with pytest.raises(UserError, match="batch_size is 0"):
        detector.detect(files, batch_size=0)


def test_predict_writes_each_form(detect, trained: str, folder: Path) -> None:
    (folder / "in").mkdir()
    for number in range(3):
        shutil.copy(folder / f"shapes/val/00000{number}.png", folder / f"in/{number}.png")
    (folder / "in/broken.png").write_bytes(b"nothing")
    words = f"{trained} in --threshold 0 --pictures drawn --output"
    for file in ("found.csv", "found.json"):
        done = detect("predict", words, file)
        assert done.status == 1  # for the broken one
        assert "in/broken.png: cannot be read" in done.err
        assert "objects in 3 pictures of" in done.out
    rows = list(csv.DictReader((folder / "found.csv").open()))
    results = json.loads((folder / "found.json").read_text())
    objects = [row for row in rows if row["class"]]
    assert len(objects) == len(results) > 0
    for row, result in zip(objects, results, strict=True):
        assert row["file"].endswith(result["file_name"])
        assert row["class"] == result["category_name"]
        sides = [float(row[side]) for side in ("left", "top", "width", "height")]
        assert sides == pytest.approx(result["bbox"], abs=0.011)  # both are rounded to hundredths
        # names in order; the broken one is the fourth
        assert result["image_id"] == 1 + ["0.png", "1.png", "2.png"].index(result["file_name"])
    (broken,) = [row for row in rows if row["error"]]
    assert broken["file"].endswith("broken.png")
    drawn = sorted(path.name for path in (folder / "drawn").iterdir())
    assert drawn == ["0.png.jpg", "1.png.jpg", "2.png.jpg"]


def test_test_measures_the_run_s_own_split(detect, trained: str, folder: Path) -> None:
    done = detect("test", trained, "--output", "ap.json")
    assert done.status == 0, done.err
    result = json.loads((folder / "ap.json").read_text())
    assert result["split"] == "val"
    assert result["pictures"] == 4
    assert set(result["by_class"]) == {"circle", "square", "triangle"}
    assert "circle" in done.out
    logged = []
    for file in (folder / trained).glob("*/vis_data/scalars.json"):
        entries = map(json.loads, file.read_text().splitlines())
        logged += [entry["coco/bbox_mAP"] for entry in entries if "coco/bbox_mAP" in entry]
    # mmdetection's own evaluation of the best checkpoint, in thousandths. In batches of another
    # size fp32 sums differ, and boxes of nearly equal scores change places.
    assert result["ap"] / 100 == pytest.approx(max(logged), abs=0.003)
    train = detect("test", trained, "--split train")
    assert "8 pictures of train" in train.out
    none = detect("test", trained, "--split test")
    assert none.status == 2
    assert "no pictures of test" in none.err


def test_report_is_one_file(detect, trained: str, folder: Path) -> None:
    done = detect("report", trained)
    assert done.status == 0, done.err
    page = (folder / trained / "report.html").read_text()
    for part in ("AP50", "By class", "Worst mistakes", "triangle", "<svg", "data:image/jpeg"):
        assert part in page, part
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_onnx_finds_the_same_objects_without_this_project(
    detect, trained: str, folder: Path
) -> None:
    """examples/detect.py, which imports neither torch nor this project."""
    pytest.importorskip("onnxscript")
    done = detect("export", trained, "exported")
    assert done.status == 0, done.err
    assert "exists" in detect("export", trained, "exported").err
    files = sorted(map(str, (folder / "shapes/val").iterdir()))
    ran = subprocess.run(
        [sys.executable, ROOT / "examples/detect.py", "exported", *files, "--threshold", "0"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    rows = list(csv.DictReader(ran.stdout.splitlines()))
    for file, one in zip(files, swinv2_moe.load(trained).detect(files, threshold=0.0), strict=True):
        mine = [row for row in rows if row["file"] == file]
        # The two resize differently (OpenCV, Pillow), so scores differ by hundredths.
        assert float(mine[0]["score"]) == pytest.approx(float(one.scores[0]), abs=0.05)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train nowhere --epochs 1", "nowhere"),
        ("train shapes --epochs x", "--epochs is x, it must be a whole number"),
        ("train shapes --minutes 0", "--minutes is 0, it must be above 0"),
        ("train shapes --size 8", "--size is 8"),
        ("train shapes --weights nowhere --output other", "nowhere"),
        ("train shapes --output shapes/run", "lies in the folder of pictures"),
        ("train shapes --output shapes.txt/run", "shapes.txt"),
        ("train shapes --pretrained x", "--pretrained x: is for a configuration"),
        ("train detection/shapes/mask_rcnn --epochs 2", "takes a folder of pictures"),
        ("train shapes/val", "no labels"),
        ("train", "is required"),
        ("predict shapes shapes/val", "no run of `swinv2-moe detect train FOLDER`"),
        ("predict nowhere shapes/val", "nowhere"),
        ("predict output/shapes nowhere.png", "nowhere.png"),
        ("predict output/shapes shapes/val --output found.txt", "must end in .csv or .json"),
        ("predict output/shapes shapes/val --threshold 2", "--threshold is 2.0"),
        ("predict output/shapes shapes/val --pictures shapes", "it holds shapes/val/000000.png"),
        ("test output/shapes --checkpoint 999", "999"),
        ("report shapes", "no run of"),
        ("export output/shapes", "export takes RUN DIR"),
    ],
)
def test_wrong_input_is_one_line(detect, trained: str, words: str, says: str) -> None:
    done = detect(words)
    assert done.status == 2
    line = done.err.splitlines()[-1]
    assert says in line


def test_a_picture_that_breaks_after_its_header_is_named(detect, folder: Path) -> None:
    make_shapes(folder / "cut", Options(train=8, val=4, min_size=64, max_size=96))
    for split in ("train", "val"):
        file = folder / f"cut/{split}/000001.png"
        file.write_bytes(file.read_bytes()[:200])
    done = detect("train", "cut", QUICK)
    assert "000001.png: cannot be read" in done.out + done.err
    assert (folder / "output/cut/checkpoints/latest/meta.json").is_file()
