"""tools/show_routing.py on a small run, with folders of JPEGs: figures, table, and inputs
that cannot work."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from tool_cases import assert_one_line, command

LAYERS = ["layers.1.blocks.0", "layers.2.blocks.0"]


@pytest.fixture
def show_routing(monkeypatch, capsys):
    """`show_routing(*arguments)`: tools/show_routing.py in this process."""
    return command("show_routing", monkeypatch, capsys)


def test_figures_table_and_file(show_routing, runs, best_step, tmp_path):
    finished = show_routing("--resume", runs / "experts", "--output", tmp_path / "new")
    assert (finished.status, finished.err) == (0, "")
    names = ["classes.png", "load.png", "routing.json", "routing.png"]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == names
    assert Image.open(tmp_path / "new" / "routing.png").size[1] > 8 * 128  # eight images
    found = json.loads((tmp_path / "new" / "routing.json").read_text())
    assert (found["step"], found["images"], found["classes"]) == (best_step, 13, 2)
    assert found["class_bits"] == pytest.approx(0.961, abs=1e-3)  # 8 of 13 images are blue
    assert list(found["layers"]) == LAYERS
    rows = [line.split() for line in finished.out.splitlines()]
    for layer, values in found["layers"].items():
        bits = values["bits"]
        assert sum(values["load"]) == pytest.approx(6, abs=1e-3)
        assert bits["colour"] > 0.9 * bits["class"] > 0.1  # red and blue
        assert bits["class"] > 2 * bits["class_by_chance"]
        names = ("class", "class_by_chance", "position", "colour", "contrast")
        numbers = [f"{bits[name]:.3f}" for name in names]
        used, largest = f"{values['experts_used']}/6", f"{max(values['load']):.2f}"
        assert [layer, used, largest, *numbers] in rows
    assert "dropless, 13 validation images at 16 px, 2 classes" in finished.out


def test_images_of_ones_own(show_routing, runs, tmp_path):
    """Folders and files; what else lies in a folder does not matter, the numbers are the validation
    images'."""
    own = tmp_path / "own" / "deeper"
    own.mkdir(parents=True)
    (own / "notes.txt").write_text("holiday")
    for i, mode in enumerate(("L", "RGBA", "P")):
        Image.fromarray(np.full((30, 90), 80 * i, np.uint8)).convert(mode).save(own / f"{i}.PNG")
    arguments = ("--resume", runs / "experts", "--output", tmp_path)
    show_routing(*arguments)
    expected = json.loads((tmp_path / "routing.json").read_text())
    finished = show_routing(*arguments, "--images", tmp_path / "own", own / "0.PNG", "--count", "9")
    assert (finished.status, finished.err) == (0, "")
    assert Image.open(tmp_path / "routing.png").size[1] < 8 * 128  # four images
    assert json.loads((tmp_path / "routing.json").read_text()) == expected


def test_the_packages_model_paints_pictures_alone(show_routing, tmp_path):
    """Its data set is not here, so nothing is measured."""
    Image.fromarray(np.full((70, 90, 3), 80, np.uint8)).save(tmp_path / "one.png")
    output = ("--output", tmp_path / "out")
    finished = show_routing("bundled:tiny", "--images", tmp_path / "one.png", *output)
    assert (finished.status, finished.err) == (0, "")
    assert finished.out.splitlines()[-1].endswith("; --data DIR also measures")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["routing.json", "routing.png"]
    assert_one_line(show_routing("bundled:tiny", *output), "DATA.PATH is 'tiny-imagenet-200'")


def test_a_checkpoint_on_its_own_and_other_data(show_routing, runs, tmp_path):
    shutil.copytree(runs / "experts" / "checkpoints" / "latest", tmp_path / "weights")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "load.png").touch()  # of a run that was shown before
    arguments = ("--dataset digits --limit 40 --count 1 --output", tmp_path / "out")
    finished = show_routing("--resume", tmp_path / "weights", *arguments)
    assert (finished.status, finished.err) == (0, "")
    names = ["classes.png", "routing.json", "routing.png"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    assert "40 validation images" in finished.out
    assert "10 classes" in finished.out
    assert "no load.png: RUN is a checkpoint outside of a run" in finished.out


def test_validation_images_that_cannot_be_read(show_routing, runs, make_photographs, tmp_path):
    """Also where a whole batch cannot be."""
    data = make_photographs()
    for i in range(2):
        (data / "val" / "red" / f"0{i}.jpg").write_bytes(b"not a picture")
    arguments = ("--resume", runs / "experts", "--data", data, "--output", tmp_path / "out")
    finished = show_routing(*arguments, "--opts DATA.MAX_BAD_SHARE 0.2 DATA.BATCH_SIZE 2")
    assert (finished.status, finished.err) == (0, "")
    assert "14 validation images" in finished.out
    assert "2 images could not be read; the first: " in finished.out
    shutil.rmtree(tmp_path / "out")
    finished = show_routing(*arguments, "--opts DATA.MAX_BAD_SHARE 0.1")
    assert "2 of 16 images could not be read" in finished.err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def places(tmp_path_factory, runs):
    root = tmp_path_factory.mktemp("places")
    (root / "empty").mkdir()
    (root / "broken.jpg").write_bytes(b"not a picture")
    for name in ("no_metrics", "half", "cut"):
        shutil.copytree(runs / "experts", root / name, symlinks=True)
        (root / name / "checkpoints" / "best").unlink()
    (root / "no_metrics" / "metrics.jsonl").unlink()
    (root / "half" / "metrics.jsonl").write_text('{"step": 1, "moe_lay')
    for file in (root / "cut" / "checkpoints").glob("step-*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    return root


# arguments after the good ones ({root} is `places`), and what the one line must name
BAD_INPUT = {
    "--resume {root}/no_metrics": "no_metrics: holds no run (no metrics.jsonl)",
    "--resume {root}/half": "half: metrics.jsonl has no logged step (of 1 lines)",
    "--resume {root}/cut": "no checkpoint in ... is whole ... model.safetensors",
    "--resume {runs}/dense": "dense/checkpoints ... a dense model, it has no experts",
    "--images {root}/empty": "--images ... empty: holds no images",
    "--images {root}/nowhere": "--images ... nowhere: no such file",
    "--images {root}/broken.jpg": "--images ... broken.jpg: cannot be read as an image",
    "--count 0": "--count is 0, it must be at least 1",
    "--limit 0": "--limit is 0",
    "--output {root}/none/out": "--output ... none/out",
    "--output {root}/broken.jpg": "--output ... broken.jpg: must be a directory",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_one_line(words, show_routing, runs, places, tmp_path):
    output = ("--output", tmp_path / "out")
    finished = show_routing("--resume", runs / "experts", *output, words, root=places, runs=runs)
    assert_one_line(finished, BAD_INPUT[words])
    assert not (tmp_path / "out").exists()


def test_under_torchrun(show_routing, runs, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    finished = show_routing("--resume", runs / "experts", "--output", tmp_path / "out")
    assert_one_line(finished, "error: WORLD_SIZE is 2: this is for one process, without torchrun")
