"""tools/detect.py on generated shapes: train, test and predict; what it learns; mmdetection's own
test script agrees."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image
from tool_cases import command

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from detection_cases import ROOT
from mmengine.runner import save_checkpoint
from shapes_cases import Options, make_shapes

from swinv2_moe.detection.run import build_detector, load_config

CONFIGS = ROOT / "configs/detection/shapes"
SMALL = ["train_dataloader.dataset.times=1", "train_cfg.max_epochs=1", "train_cfg.val_interval=1"]


@pytest.fixture
def detect(monkeypatch, capsys, tmp_path: Path):
    """tools/detect.py in this process and an empty directory with a few small images in
    data/shapes."""
    make_shapes(tmp_path / "data/shapes", Options(train=4, val=2, min_size=64, max_size=96))
    monkeypatch.chdir(tmp_path)
    return command("detect", monkeypatch, capsys)


def test_train_test_and_predict(detect, tmp_path: Path) -> None:
    config = CONFIGS / "mask_rcnn.py"
    trained = detect("train", config, "--output", "run", "--opts", *SMALL)
    assert trained.status == 0, trained.err
    assert "instances_train.json: 4 images (0 without objects)" in trained.out
    assert (tmp_path / "run/checkpoints/latest/model.safetensors").is_file()

    tested = detect("test", config, "run", "--output", "ap.json")
    assert tested.status == 0, tested.err
    metrics = json.loads((tmp_path / "ap.json").read_text())
    assert {"coco/bbox_mAP", "coco/bbox_mAP_50", "coco/segm_mAP"} <= set(metrics)
    assert table(tested.out) == table(trained.out)  # the checkpoint is what was validated

    assert "the best in validation" in tested.out or "has no best one" in tested.out
    assert "index created" not in trained.out + tested.out
    wrong = detect("test", config, "run", "--checkpoint", "99")
    assert wrong.status == 2
    assert "--checkpoint 99: run has checkpoints of the steps" in wrong.err

    on_train = detect("test", config, "run", "--split", "train")
    assert "instances_train.json" in on_train.out

    words = "run data/shapes/val --pictures drawn --output found.json --threshold 0"
    shown = detect("predict --config", config, words)
    assert shown.status == 0, shown.err
    pictures = sorted((tmp_path / "drawn").iterdir())
    assert [picture.name for picture in pictures] == ["000000.png.jpg", "000001.png.jpg"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["file_name"] for row in found} == {"000000.png", "000001.png"}
    assert {row["category_name"] for row in found} <= {"circle", "square", "triangle"}
    for row in found:
        size = Image.open(tmp_path / "data/shapes/val" / row["file_name"]).size
        assert row["segmentation"]["size"] == list(size[::-1])


@pytest.mark.parametrize("classes", ["", "'person','dog'"])
def test_predicts_with_a_configuration_of_coco(detect, tmp_path: Path, classes: str) -> None:
    """Its data set has the names and colours, or names alone; with names of the user, it has those
    of COCO's colours."""
    config = "detection/coco_open/mask_rcnn"
    options = ["model.test_cfg.rcnn.max_per_img=2"]
    if classes:
        options += [f"test_dataloader.dataset.metainfo.classes=({classes})"]
        heads = ("bbox_head", "mask_head")
        options += [f"model.roi_head.{head}.num_classes=2" for head in heads]
    model = build_detector(load_config(config, options))
    save_checkpoint({"state_dict": model.state_dict(), "meta": {}}, str(tmp_path / "model.pth"))
    words = "model.pth data/shapes/val --pictures drawn --output found.csv --threshold 0 --opts"
    shown = detect("predict --config", config, words, *options)
    assert shown.status == 0, shown.err
    assert len(list((tmp_path / "drawn").iterdir())) == 2
    rows = (tmp_path / "found.csv").read_text().splitlines()[1:]
    assert len(rows) == 4
    names = {row.split(",")[1] for row in rows}
    assert not any(name.startswith("class ") for name in names)
    if classes:
        assert names <= {"person", "dog"}


def table(out: str) -> list[str]:
    rows = [line.split() for line in out.splitlines()]
    return [row for row in rows if row and row[0] in ("boxes", "masks")]


def damage_box(tmp_path: Path) -> None:
    file = tmp_path / "data/shapes/annotations/instances_train.json"
    content = json.loads(file.read_text())
    content["annotations"][1]["bbox"][0] = 500
    file.write_text(json.dumps(content))


BOX = "instances_train.json ... annotation 2 (image 1) ... [500, ... outside its image"


@pytest.mark.parametrize(
    ("damage", "words", "says"),
    [
        (damage_box, "", BOX),
        (None, "--resume nowhere", "nowhere"),
        (None, "--opts model.backbone.num_heads=7", "num_heads"),
    ],
)
def test_what_cannot_be_used_is_one_line_before_the_first_step(
    detect, tmp_path, damage, words, says
) -> None:
    if damage:
        damage(tmp_path)
    done = detect("train", CONFIGS / "mask_rcnn.py", "--work-dir run", words)
    assert done.status == 2
    line = done.err.splitlines()[-1]
    assert line.startswith("error: ")
    assert [part for part in says.split(" ... ") if part not in line] == []
    assert "Epoch(train)" not in done.out + done.err


def test_no_such_config_checkpoint_or_image(detect, tmp_path: Path) -> None:
    for words, says in (
        ("train none.py", "none.py"),
        ("test {config} nowhere", "nowhere"),
        ("test {config} nowhere --output no/ap.json", "no/ap.json"),
        ("predict --config {config} nowhere {data}/val", "nowhere"),
        ("predict --config {config} {data} none.png", "none.png"),
        ("predict --config {config} {data} {data}/annotations", "holds no images"),
    ):
        done = detect(words, config=CONFIGS / "mask_rcnn.py", data=tmp_path / "data/shapes")
        assert done.status == 2
        assert says in done.err.splitlines()[-1]


def run(directory: Path, *words: object) -> str:
    """A command in a process of its own; its output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, *map(str, words)]
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    """A directory with the data set of the configurations, 40 and 10 images, in data/shapes."""
    directory = tmp_path_factory.mktemp("shapes")
    run(ROOT, "data/make_shapes.py", directory / "data/shapes")
    return directory


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["mask_rcnn", "cascade_mask_rcnn", "htc"])
def test_learns_shapes_in_five_epochs(shapes: Path, name: str) -> None:
    """And mmdetection's own test script, on the same checkpoint, prints the same AP."""
    config, work = CONFIGS / f"{name}.py", shapes / name
    run(shapes, ROOT / "tools/detect.py", "train", config, "--output", work)
    run(shapes, ROOT / "tools/detect.py", "test", config, work, "--output", work / "ap.json")
    metrics = json.loads((work / "ap.json").read_text())
    assert metrics["coco/bbox_mAP"] >= 0.8
    packaged = Path(find_spec("mmdet").origin).parent / ".mim/tools/test.py"
    run(shapes, packaged, config, work / "checkpoints/best", "--work-dir", work / "theirs")
    (theirs,) = (work / "theirs").glob("*/*.json")
    found = json.loads(theirs.read_text())
    assert {key: found[key] for key in metrics} == metrics


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes(shapes: Path) -> None:
    """torchrun with gloo: trains, and tests to the AP that one process finds."""
    config, work = CONFIGS / "mask_rcnn.py", shapes / "two"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    torchrun += [ROOT / "tools/detect.py"]
    run(shapes, *torchrun, "train", config, "--output", work, "--opts", *SMALL)
    run(shapes, *torchrun, "test", config, work, "--output", work / "two.json")
    run(shapes, ROOT / "tools/detect.py", "test", config, work, "--output", work / "one.json")
    one, two = (json.loads((work / f"{name}.json").read_text()) for name in ("one", "two"))
    assert one == two
