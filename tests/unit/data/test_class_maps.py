"""Class maps by name, and the command that writes them."""

import json

import pytest
from tool_cases import command

from swinv2_moe.commands.predict import table_row
from swinv2_moe.data.classes import (
    class_names,
    english_name,
    imagenet_names,
    map_classes,
    match_all,
)
from swinv2_moe.errors import UserError
from swinv2_moe.predict.prediction import ClassProbability, Prediction

# The first lines of the map that Swin-Transformer publishes (data/map22kto1k.txt).
PUBLISHED = [359, 368, 460, 475, 486, 492, 496, 514, 516, 525]


def test_imagenet_22k_to_1k():
    numbers = map_classes(class_names("imagenet-22k"), class_names("imagenet-1k"))
    assert numbers[:10] == PUBLISHED
    assert map_classes(["01", "9" * 5000], ["1", "9" * 5000, "9" * 18]) == [0, 1, -1]
    missing = [i for i, number in enumerate(numbers) if number == -1]
    assert missing == [850]  # the teddy bear is not in the fall 2011 set
    names = class_names("imagenet-22k")
    found = [names[number] for number in numbers if number != -1]
    assert found == [name for name in class_names("imagenet-1k") if name != "n04399382"]


def test_every_kind_of_source(tmp_path):
    names = ["ant", "bee", "cat"]
    (tmp_path / "names.txt").write_text("ant\n\nbee \ncat\n")
    for directory, file in (("run", "meta.json"), ("shards", "index.json")):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / file).write_text(json.dumps({"class_names": names}))
    for name in reversed(names):
        (tmp_path / "train" / name).mkdir(parents=True)
    for source in ("names.txt", "run", "shards", "train"):
        assert class_names(str(tmp_path / source)) == names
    for name in ("1", "2", "010"):
        (tmp_path / "numbers" / name).mkdir(parents=True)
    assert class_names(str(tmp_path / "numbers")) == ["1", "2", "010"]
    (tmp_path / "twice.txt").write_text("ant\nbee\nant\n")
    (tmp_path / "empty.txt").write_text("\n")
    for source, says in (
        ("twice.txt", "'ant' comes twice"),
        ("empty.txt", "no class names"),
        ("gone", "No such file"),
    ):
        with pytest.raises(UserError, match=says):
            class_names(str(tmp_path / source))


def test_the_command(tmp_path, monkeypatch, capsys):
    make_class_map = command("make_class_map", monkeypatch, capsys, "data")
    old, new, output = (tmp_path / name for name in ("old.txt", "new.txt", "map.txt"))
    old.write_text("ant\nbee\ncat\n")
    new.write_text("cat\ndog\n")
    done = make_class_map(old, new, "--output", output)
    assert (done.status, output.read_text()) == (0, "2\n-1\n")
    assert "1 of 2 classes" in done.out
    old.write_text("0\n1\n2\n")
    new.write_text("02\n00\n")
    done = make_class_map(old, new, "--output", output)
    assert (done.status, output.read_text()) == (0, "2\n0\n")
    new.write_text("1\n2\n3\n")
    done = make_class_map(old, new, "--output", output)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "its classes are 0 to 2, those of the data 1 to 3" in done.err
    new.write_text("dog\n")
    done = make_class_map(old, new, "--output", output)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "none of its 1 classes (dog" in done.err


def test_all_classes_are_matched_by_id_or_english_name():
    imagenet = imagenet_names(1000)
    assert imagenet == class_names("imagenet-1k")
    names = ["n01443537", "Tinca_tinca", "great white shark", "GOLDEN-RETRIEVER"]
    assert match_all(imagenet, names, "t") == [1, 0, 2, 207]
    assert match_all(["b", "a"], ["a"], "t") == [1]
    assert imagenet_names(3) == ["0", "1", "2"]
    with pytest.raises(UserError, match=r"does not know 1 of the 2 .*: crane"):
        match_all(["crane", "owl", "crane"], ["crane", "owl"], "t")
    assert match_all(["crane", "owl", "crane"], ["owl"], "t") == [1]
    assert match_all(imagenet_names(3), ["cat", "dog", "owl"], "t") == [0, 1, 2]
    assert match_all(["cat", "dog", "owl"], ["1", "3", "2"], "t") == [0, 2, 1]
    assert match_all(imagenet_names(3), ["02", "00", "01"], "t") == [2, 0, 1]
    assert match_all(imagenet_names(3), ["1", "2", "3"], "t") == [0, 1, 2]  # without names


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["goldfish", "my cat"], "t: does not know 1 of the 2 classes of the data: my cat; its"),
        (["crane"], "does not know"),  # a bird and a machine
        (
            ["goldfish", "n01443537"],
            "'goldfish' and 'n01443537' of the data are both .*'n01443537'",
        ),
    ],
)
def test_classes_that_a_teacher_cannot_have(names, says):
    with pytest.raises(UserError, match=says):
        match_all(imagenet_names(1000), names, "t")


def test_people_read_english_names():
    assert english_name("n02979186") == "cassette player"
    assert english_name("n04399382") == "teddy"  # of ImageNet-1K alone
    for name in ("n00000000", "n2979186", "n029791860", "dog, cat"):
        assert english_name(name) == name
    guess = ClassProbability("n02979186", 482, 0.5)
    assert (guess.class_name, guess.label) == ("n02979186", "cassette player")
    assert table_row("a.jpg", Prediction("a.jpg", (guess, guess))) == [
        *("a.jpg", "cassette player", "50.0%", "cassette player 50.0%")
    ]
