"""tools/predict.py and swinv2_moe.load on a small run: pictures, folders, files of results, and
pictures that cannot be read."""

import csv
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from tool_cases import assert_one_line, command

import swinv2_moe
from swinv2_moe.checkpoints.deployed import open_deployed
from swinv2_moe.config import load_config
from swinv2_moe.data import ImageFiles
from swinv2_moe.data.build import evaluation_loader
from swinv2_moe.data.images import FORMATS
from swinv2_moe.errors import UserError
from swinv2_moe.train.run import train


@pytest.fixture
def predict(monkeypatch, capsys):
    """`predict(*arguments)`: tools/predict.py in this process."""
    return command("predict", monkeypatch, capsys)


@pytest.fixture(scope="module")
def run(runs):
    return runs / "experts"


@pytest.fixture(scope="module")
def model(run):
    return swinv2_moe.load(str(run), device="cpu")


@pytest.fixture
def pictures(photographs, tmp_path):
    """A folder of three photographs, one of them deeper, and one file that is none."""
    folder = tmp_path / "holiday"
    (folder / "deeper").mkdir(parents=True)
    shutil.copy(photographs / "val/red/03.jpg", folder / "one.jpg")
    shutil.copy(photographs / "val/blue/00.jpg", folder / "two.jpg")
    shutil.copy(photographs / "val/blue/01.jpg", folder / "deeper/three.jpg")
    (folder / "broken.jpg").write_bytes(b"not a picture")
    (folder / "notes.txt").write_text("holiday")
    return folder


# swinv2_moe.load


def test_the_package_imports_no_torch():
    code = "import sys, swinv2_moe; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_predictions_are_those_of_validation(model, run, photographs):
    """The same probabilities as the dropless model on the batches of the evaluation loader."""
    predictions = model.predict(photographs / "val", top_k=2, batch_size=5)
    with open_deployed(
        str(run / "checkpoints" / "best"), opts=["MODEL.MOE.EVAL_CAPACITY_FACTOR", "0"]
    ) as deployed:
        paths = np.array([prediction.file.encode() for prediction in predictions])
        source = ImageFiles("", paths, np.zeros(len(paths), np.int64))
        network = deployed.model(2)
        with torch.inference_mode():
            logits = [network(batch.images) for batch in evaluation_loader(deployed.data, source)]
    expected = torch.cat(logits).softmax(1)
    assert len(predictions) == len(expected) == 13
    for prediction, row in zip(predictions, expected, strict=True):
        assert prediction.probability == pytest.approx(row.max().item(), abs=1e-5)
        assert sum(guess.probability for guess in prediction.top) == pytest.approx(1, abs=1e-5)
        for guess in prediction.top:
            assert guess.class_name == model.class_names[guess.index]
            assert guess.probability == pytest.approx(row[guess.index].item(), abs=1e-5)


def test_a_prediction_does_not_depend_on_the_batch(model, pictures):
    together = model.predict([pictures / "one.jpg", pictures / "two.jpg"])
    alone = model.predict(pictures / "one.jpg")[0]
    assert alone.index == together[0].index
    assert alone.probability == pytest.approx(together[0].probability, abs=1e-5)


def test_where_experts_choose_each_picture_is_a_batch(small, photographs, tmp_path):
    keys = ["TRAIN.MAX_STEPS", "1", "DATA.DATASET", "folder", "MODEL.MOE.ROUTER", "expert_choice"]
    train(load_config(None, [*small, *keys], data=str(photographs), output=str(tmp_path / "run")))
    model = swinv2_moe.load(str(tmp_path / "run"))
    sizes = []
    model.module.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    assert len(model.predict(photographs / "val")) == 13
    assert sizes == [1] * 13


def test_files_folders_and_images_in_memory(model, pictures):
    image = Image.open(pictures / "two.jpg")
    mixed = model.predict([str(pictures / "one.jpg"), image, pictures / "deeper"], top_k=1)
    files = [str(pictures / "one.jpg"), "", str(pictures / "deeper/three.jpg")]
    assert [prediction.file for prediction in mixed] == files
    assert [len(prediction.top) for prediction in mixed] == [1, 1, 1]
    (alone,) = model.predict(pictures / "two.jpg", top_k=1)[0].top
    (among_others,) = mixed[1].top  # in a batch of three, which may be rounded otherwise
    assert among_others.class_name == alone.class_name
    assert among_others.probability == pytest.approx(alone.probability, abs=1e-5)
    assert model.predict(image)[0].top == model.predict([pictures / "two.jpg"])[0].top
    assert model.predict([]) == []


def test_arrays_and_bytes(model, pictures):
    image = Image.open(pictures / "one.jpg").convert("RGB")
    expected = model.predict([image, image.convert("L")])
    pixels = np.asarray(image)
    assert model.predict([pixels, np.asarray(image.convert("L"))]) == expected
    assert model.predict(np.stack([pixels, pixels])) == model.predict([image, image])
    assert model.predict(pixels[::2, ::-1])[0].error is None
    content = (pictures / "one.jpg").read_bytes()
    (found,) = model.predict(content)
    (of_file,) = model.predict(pictures / "one.jpg")
    assert (found.file, found.top) == ("", of_file.top)
    assert model.predict([content, b"text"])[1].error.startswith("none of the formats JPEG")


@pytest.mark.parametrize(
    ("picture", "says"),
    [
        (np.zeros((8, 8, 3)), r"picture 0 is an array of float64 \[8, 8, 3\]: .* \(255 \* x\)"),
        (np.zeros((3, 8, 8), np.uint8), r"array of uint8 \[3, 8, 8\]: .* x.transpose\(1, 2, 0\)"),
        (np.zeros((0, 8), np.uint8), r"array of uint8 \[0, 8\]: "),
        ([b"", torch.zeros(3, 8, 8)], "picture 1 is Tensor: predict takes a path"),
        ([None], "picture 0 is NoneType"),
        (3, "picture 0 is int"),
        ("", "picture 0 is '', it must name a file or folder"),
    ],
)
def test_what_is_no_picture_is_refused_with_the_way_out(picture, says, model):
    with pytest.raises(UserError, match=says):
        model.predict(picture)


def test_links_to_folders_are_followed_once(model, pictures, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "holiday").symlink_to(pictures)
    (pictures / "circle").symlink_to(tmp_path / "links")
    names = [prediction.file for prediction in model.predict(tmp_path / "links")]
    names = sorted(name.rpartition("/")[2] for name in names)
    assert names == ["broken.jpg", "one.jpg", "three.jpg", "two.jpg"]


def test_an_image_in_memory_is_turned_upright(model, pictures):
    image = Image.open(pictures / "one.jpg")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(pictures / "turned.png", exif=exif)
    for turned in (pictures / "turned.png", Image.open(pictures / "turned.png")):
        assert model.predict(turned)[0].top == model.predict(image)[0].top


def test_a_picture_that_cannot_be_read_is_named(model, pictures):
    predictions = model.predict(pictures)
    assert len(predictions) == 4
    broken = next(p for p in predictions if p.file.endswith("broken.jpg"))
    assert broken.error.startswith("none of the formats JPEG")
    with pytest.raises(ValueError, match=r"broken\.jpg: cannot be read \(none of the formats"):
        broken.class_name  # noqa: B018


def test_bad_arguments(model, pictures, tmp_path):
    with pytest.raises(UserError, match="top_k is 0, it must be at least 1"):
        model.predict(pictures, top_k=0)
    with pytest.raises(UserError, match="batch_size is -1"):
        model.predict(pictures, batch_size=-1)
    with pytest.raises(UserError, match=r"gone\.jpg: no such file"):
        model.predict(tmp_path / "gone.jpg")
    with pytest.raises(UserError, match=r"run .*gone"):
        swinv2_moe.load(str(tmp_path / "gone"))


def test_outputs_that_are_not_finite(run, pictures):
    model = swinv2_moe.load(str(run), device="cpu")
    with torch.no_grad():
        model.module.head.fc.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="its outputs are not finite"):
        model.predict(pictures / "one.jpg")


# tools/predict.py


def test_table_names_and_status(predict, run, best_step, pictures, model):
    finished = predict(run, pictures, "--top-k", "2")
    assert finished.status == 1
    says = f"{pictures}/broken.jpg: cannot be read (none of the formats {' '.join(FORMATS)})\n"
    assert finished.err == says
    rows = {line.split()[0]: line.split() for line in finished.out.splitlines() if line.strip()}
    for name in ("one.jpg", "two.jpg", "deeper/three.jpg"):
        words = []
        for guess in model.predict(pictures / name, top_k=2)[0].top:
            words += [guess.class_name, f"{guess.probability:.1%}"]
        assert rows[name][1:] == words
    assert f"step {best_step}, 2 classes, 16 px" in finished.out
    (pictures / "broken.jpg").unlink()
    finished = predict(run, pictures)
    assert (finished.status, finished.err) == (0, "")


def test_what_is_not_used_of_a_picture_is_said(predict, run, pictures, model):
    (pictures / "broken.jpg").unlink()
    pages = [Image.new("RGB", (16, 12), (40 * i, 0, 0)) for i in range(2)]
    pages[0].save(pictures / "pages.tif", save_all=True, append_images=pages[1:])
    part = "pages or frames beyond the first"
    found = model.predict([pictures / "pages.tif", (pictures / "pages.tif").read_bytes(), pages[0]])
    assert [prediction.unused for prediction in found] == [part, part, ""]
    finished = predict(run, pictures, "--output", pictures / "out.json")
    says = f"1 of 4 pictures have {part}, which are not used; the first: {pictures}/pages.tif"
    assert (finished.status, finished.err) == (0, f"warning: {says}\n")
    assert f'"unused": "{part}"' in (pictures / "out.json").read_text()


def test_nothing_can_be_read(predict, run, pictures):
    finished = predict(run, pictures / "broken.jpg", "--output", pictures / "out.csv")
    assert finished.status == 1
    assert "probability" not in finished.out
    assert "broken.jpg: cannot be read" in finished.err
    assert (pictures / "out.csv").read_text().startswith("file,error\n")


def test_csv(predict, run, pictures, model):
    predict(run, pictures, "--top-k", "2", "--output", pictures / "out.csv")
    with (pictures / "out.csv").open(newline="") as file:
        rows = {row["file"]: row for row in csv.DictReader(file)}
    assert len(rows) == 4
    best, second = model.predict(pictures / "one.jpg", top_k=2)[0].top
    row = rows[str(pictures / "one.jpg")]
    assert (row["class"], row["index"]) == (best.class_name, str(best.index))
    assert float(row["probability"]) == pytest.approx(best.probability, abs=1e-5)
    assert (row["class_2"], row["error"]) == (second.class_name, "")
    broken = rows[str(pictures / "broken.jpg")]
    assert broken["class"] == ""
    assert broken["error"].startswith("none of the formats")


def test_json(predict, run, best_step, pictures):
    predict(run, pictures, "--output", pictures / "out.json")
    content = json.loads((pictures / "out.json").read_text())
    assert (content["step"], content["image_size"]) == (best_step, 16)
    assert len(content["predictions"]) == 4
    by_file = {record["file"]: record for record in content["predictions"]}
    assert by_file[str(pictures / "one.jpg")]["error"] is None
    for guess in by_file[str(pictures / "one.jpg")]["top"]:
        assert set(guess) == {"class_name", "index", "probability"}
    assert by_file[str(pictures / "broken.jpg")]["top"] == []


def test_annotated_copies(predict, run, pictures, tmp_path):
    before = (pictures / "one.jpg").read_bytes()
    Image.open(pictures / "one.jpg").save(pictures / "one.png")
    predict(run, pictures, "--pictures", tmp_path / "annotated")
    copies = [p for p in (tmp_path / "annotated").rglob("*") if p.is_file()]
    names = sorted(str(p.relative_to(tmp_path / "annotated")) for p in copies)
    assert names == ["deeper/three.jpg", "one.jpg", "one.png.jpg", "two.jpg"]
    with Image.open(tmp_path / "annotated/one.jpg") as copy:
        assert copy.width == 256
        assert copy.height > 256 * 40 / 50
    assert (pictures / "one.jpg").read_bytes() == before


def test_two_copies_of_one_name(predict, run, pictures, tmp_path):
    Image.open(pictures / "one.jpg").save(pictures / "one.png")
    (pictures / "one.png.jpg").write_bytes((pictures / "one.jpg").read_bytes())
    finished = predict(run, pictures, "--pictures", tmp_path / "annotated")
    assert_one_line(finished, "the copies of one.png and one.png.jpg would both be one.png.jpg")
    assert not (tmp_path / "annotated").exists()


def test_many_pictures_are_counted_by_class(predict, run, photographs, model):
    finished = predict(run, photographs / "train", photographs / "val")
    assert finished.status == 0
    assert "... 21 more" in finished.out
    counts = {"red": 0, "blue": 0}
    for prediction in model.predict([photographs / "train", photographs / "val"]):
        counts[prediction.class_name] += 1
    rows = [line.split() for line in finished.out.splitlines()]
    assert all([name, str(count)] in rows for name, count in counts.items() if count)


# arguments after the run and the folder ({folder}), and what the one line must name
BAD_INPUT = {
    "{folder}/gone.jpg": "gone.jpg: no such file or directory",
    "{folder}/empty": "empty: holds no images (.jpg",
    "--top-k 0": "--top-k is 0, it must be at least 1",
    "--output out.txt": "--output out.txt: must end in .csv or .json",
    "--pictures {folder}": "--pictures {folder}: it holds ... one of the pictures; name another",
    "--pictures {folder}/notes.txt": "--pictures {folder}/notes.txt: cannot be made a directory",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_one_line(words, predict, run, pictures):
    (pictures / "empty").mkdir()
    finished = predict(run, pictures, words, folder=pictures)
    assert_one_line(finished, BAD_INPUT[words].format(folder=pictures))


@pytest.mark.parametrize("name", ["gone", "auto"])
def test_what_is_no_run_is_one_line(predict, pictures, name):
    assert_one_line(predict(name, pictures), f"error: RUN {name}: ")


def test_under_torchrun(predict, run, pictures, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    says = "error: WORLD_SIZE is 2: this is for one process, without torchrun"
    assert_one_line(predict(run, pictures), says)
