"""--check-files and DATA.VAL_SPLIT: unreadable images and copies are listed before the first step,
and images are held out for validation, in a run and in its evaluation."""

import shutil

import pytest
from PIL import Image
from tool_cases import assert_one_line, command


@pytest.fixture
def arguments(make_photographs, small, tmp_path):
    """Of a run of one step on photographs of which three are broken."""
    data = make_photographs(broken=3)
    keys = [*small, "DATA.DATASET", "folder", "TRAIN.MAX_STEPS", "1"]
    words = ["--cfg", "configs/quickstart_digits.yaml", "--data", data]
    words += ["--output", tmp_path / "run", "--check-files"]
    return data, [*words, "--opts", *keys]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def test_unreadable_images_are_listed_before_the_first_step(train_command, arguments):
    data, words = arguments
    finished = train_command(*words, "DATA.MAX_BAD_SHARE", "0.2")
    assert (finished.status, finished.err) == (0, "")
    lines = finished.out.splitlines()
    first = lines.index("warning: 3 of 64 images cannot be read:")
    listed = [f"  {data}/train/red/{number:02d}.jpg" for number in range(3)]
    assert lines[first + 1 : first + 4] == listed
    assert not any(line.startswith("epoch") for line in lines[:first])


def test_too_many_stop_the_run_and_are_all_listed(train_command, arguments, tmp_path):
    data, words = arguments
    finished = train_command(*words, "DATA.MAX_BAD_SHARE", "0.02")
    assert finished.status == 2
    assert "3 of 64 images could not be read, DATA.MAX_BAD_SHARE allows" in finished.err
    assert all(f"  {data}/train/red/{number:02d}.jpg" in finished.out for number in range(3))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_nothing_is_said_where_all_can_be_read(train_command, make_photographs, small, tmp_path):
    words = ["--cfg", "configs/quickstart_digits.yaml", "--data", make_photographs()]
    words += ["--output", tmp_path / "run", "--check-files"]
    keys = [*small, "DATA.DATASET", "folder", "TRAIN.MAX_STEPS", "1"]
    finished = train_command(*words, "--opts", *keys)
    assert (finished.status, finished.err) == (0, "")
    assert "cannot be read" not in finished.out
    assert "copies" not in finished.out


def test_ranks_share_the_check(start_ranks, arguments):
    data, words = arguments
    shutil.copy(data / "train/blue/03.jpg", data / "val/blue/07.jpg")
    shutil.copy(data / "train/blue/04.jpg", data / "train/red/23.jpg")
    frames = [Image.new("RGB", (40, 50), colour) for colour in ("red", "green")]
    frames[0].save(data / "val/red/many.gif", save_all=True, append_images=frames[1:])
    outcomes = start_ranks(2, "tools/train.py", *words, "DATA.MAX_BAD_SHARE", "0.2")
    assert [outcome.status for outcome in outcomes] == [0, 0]
    assert "warning: 3 of 65 images cannot be read:" in outcomes[0].out
    line = "1 images have pages or frames beyond the first, not used; the first:"
    assert f"{line} {data}/val/red/many.gif" in outcomes[0].out
    copies = [
        "2 copies (equal bytes) in both splits, or with another label:",
        f"  {data}/train/red/23.jpg = {data}/train/blue/04.jpg",
        f"  {data}/val/blue/07.jpg = {data}/train/blue/03.jpg",
    ]
    assert "\n".join(copies) in outcomes[0].out
    assert "cannot be read:" not in outcomes[1].out
    assert "copies" not in outcomes[1].out


@pytest.fixture
def evaluate(monkeypatch, capsys):
    """`evaluate(*arguments)`: tools/evaluate.py in this process."""
    return command("evaluate", monkeypatch, capsys)


def test_a_run_that_holds_out_images(train_command, evaluate, make_photographs, small, tmp_path):
    """Its evaluation uses the same images; other data is evaluated as it is."""
    data = make_photographs()
    others = make_photographs()
    shutil.rmtree(data / "val")
    words = ["--cfg", "configs/quickstart_digits.yaml", "--data", data]
    words += ["--output", tmp_path / "run"]
    keys = [*small, "DATA.DATASET", "folder", "DATA.VAL_SPLIT", "0.25", "TRAIN.MAX_STEPS", "1"]
    finished = train_command(*words, "--opts", *keys)
    assert (finished.status, finished.err) == (0, "")
    line = f"DATA.VAL_SPLIT 0.25: 12 of the 48 images of {data}/train are held out for validation"
    assert line in finished.out.splitlines()
    assert "36 + 12 images" in finished.out
    finished = evaluate("--resume", tmp_path / "run")
    assert finished.status == 0
    assert line in finished.out.splitlines()
    finished = evaluate("--resume", tmp_path / "run", "--data", others)
    assert finished.status == 0
    assert "DATA.VAL_SPLIT" not in finished.out
    finished = evaluate("--resume", tmp_path / "run", "--data", f"{data}/../{data.name}")
    assert finished.status == 0
    assert "12 of the 48 images" in finished.out
    classes = sorted((data / "train").iterdir())
    picture = next(classes[0].iterdir())
    for i in range(6):
        shutil.copy(picture, classes[0] / f"new{i}{picture.suffix}")
    finished = evaluate("--resume", tmp_path / "run")
    warning = (
        "warning: the folder has 40 + 14 images, 36 + 12 when it was trained on: the share that is"
        " held out was chosen anew, so some of its images may have been trained on"
    )
    assert warning in finished.out.splitlines()
    more = ["--resume", "auto", "--opts", *keys, "TRAIN.MAX_STEPS", "2"]
    assert warning in train_command(*words, *more).out.splitlines()
    moved = data.rename(tmp_path / "moved")
    finished = evaluate("--resume", tmp_path / "run", "--data", moved)
    assert_one_line(finished, "it has no val/ folder; found: train; DATA.VAL_SPLIT 0.1 would")
