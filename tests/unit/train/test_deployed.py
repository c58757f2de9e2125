"""A checkpoint after its training: which data it is used with, and whether that has its classes."""

import numpy as np
import pytest

from swinv2_moe.checkpoints.checkpoint import Checkpoint, write_weights
from swinv2_moe.checkpoints.deployed import Deployed, open_deployed
from swinv2_moe.config import all_sections, model_config
from swinv2_moe.data.sources import ImageArrays, Sources
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, make_config):
    """Weights that say they were trained on shards, a list, CIFAR-10 and the digits."""
    root = tmp_path_factory.mktemp("checkpoints")
    config = make_config(root)
    model = build_model(model_config(config), num_classes=10)
    config.defrost()
    for kind in ("shards", "list", "cifar10", "digits"):
        config.DATA.DATASET = kind
        config.DATA.PATH = "" if kind == "digits" else "/somewhere/else"
        config.DATA.TRAIN_LIST = config.DATA.VAL_LIST = "list.txt" if kind == "list" else ""
        write_weights(root / kind, model, model.state_dict(), config.dump(), list("0123456789"))
    return root


@pytest.mark.parametrize(
    ("trained_on", "holds", "expected"),
    [
        ("shards", "index.json", "shards"),  # the training's, moved
        ("list", "images", "list"),
        ("cifar10", "cifar-10-batches-py", "cifar10"),
        ("shards", "train", "folder"),  # other data
        ("cifar10", "train", "folder"),
        ("shards", "test", "folder"),
        ("cifar10", "index.json", "shards"),
        ("digits", "train", "folder"),
        ("digits", "nothing of the kind", "folder"),  # the digits lie in no directory
    ],
)
def test_data_is_what_it_looks_like(checkpoints, trained_on, holds, expected, tmp_path):
    if holds == "index.json":
        (tmp_path / "train").mkdir()
        (tmp_path / holds).touch()
    else:
        (tmp_path / holds).mkdir()
    assert dataset_of(checkpoints / trained_on, tmp_path) == expected
    assert dataset_of(checkpoints / trained_on, tmp_path, "imagenet") == "imagenet"
    assert dataset_of(checkpoints / trained_on) == trained_on


def dataset_of(checkpoint, data=None, dataset=None) -> str:
    with open_deployed(str(checkpoint), data and str(data), dataset) as deployed:
        return deployed.data.dataset


@pytest.fixture
def align(tmp_path, make_config):
    """`align(trained, names)`: the targets of one image of each class of the data, in the
    checkpoint's numbering; and the line about differences."""
    config = all_sections(make_config(tmp_path))

    def align(trained, names):
        source = Checkpoint(tmp_path / "run", {"class_names": trained})
        images = ImageArrays("", np.zeros((len(names), 2, 2), np.uint8), np.arange(len(names)))
        sources = Sources(images, images, names)
        found, note = Deployed(None, source, config).aligned(sources)
        assert found.train.targets.tolist() == found.val.targets.tolist()
        return found.class_names, found.val.targets.tolist(), note

    return align


def test_classes_are_matched_by_name(align):
    abc = ["a", "b", "c"]
    assert align(abc, abc) == (abc, [0, 1, 2], None)
    assert align(abc, ["c", "a", "b"]) == (abc, [2, 0, 1], None)
    missing = "1 of 3 classes of the checkpoint are not in the data: "
    assert align(abc, ["b", "c"]) == (abc, [1, 2], f"{missing}a")
    unknown = "1 of 3 classes of the data are unknown to the checkpoint, their 1 validation images"
    assert align(abc, ["b", "c", "d"]) == (abc, [1, 2], f"{unknown} are left out: d; {missing}a")
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert align([composed, "x"], ["w", decomposed])[1] == [0]
    with pytest.raises(
        UserError, match=r"run: the data have other classes.* checkpoint: a, b, c; .* data: d, e$"
    ):
        align(abc, ["d", "e"])
    with pytest.raises(UserError, match=r"a name comes twice: 'crane'"):
        align(["crane", "crane"], ["crane"])


def test_classes_without_names_are_matched_by_number(align, monkeypatch):
    numbers = ["0", "1", "2"]
    line = "matched by number, since only one side has names: class 0 is"
    names, targets, note = align(["a", "b", "c"], numbers)
    assert (names, targets) == (["a", "b", "c"], [0, 1, 2])
    assert f"{line} 'a' in the checkpoint, '0' in the data" in note
    names, targets, note = align(numbers, ["a", "b", "c"])
    assert (names, targets) == (["a", "b", "c"], [0, 1, 2])
    assert line in note
    assert align(numbers, ["0", "2"])[1] == [0, 2]
    with pytest.raises(UserError, match="the data have other classes"):
        align(numbers, ["a", "b"])
    monkeypatch.setattr("swinv2_moe.checkpoints.checkpoint.count_classes", lambda *args: 3)
    names, targets, note = align([], ["a", "b", "c"])
    assert (names, targets) == (["a", "b", "c"], [0, 1, 2])
    assert note.endswith("its classes are taken to be, in order: a, b, c")
    with pytest.raises(UserError, match=r"has 3 classes without names, the data .* has 2$"):
        align([], ["a", "b"])


NUMBERS = [str(number) for number in range(12)]
FROM_ONE = [str(number) for number in range(1, 13)]
LETTERS = list("abcdefghijkl")


@pytest.mark.parametrize("names", [NUMBERS, FROM_ONE, [f"{i:02}" for i in range(12)]])
def test_classes_with_names_on_one_side_are_matched_by_number(names, align, monkeypatch):
    """In any order: shards of earlier versions have numbered folders in the order of text."""
    monkeypatch.setattr("swinv2_moe.checkpoints.checkpoint.count_classes", lambda *args: 12)
    as_text = sorted(names)
    for data in (names, as_text):
        found, targets, note = align(LETTERS, data)
        assert (found, targets) == (LETTERS, [names.index(name) for name in data])
        assert f"class 0 is 'a' in the checkpoint, '{names[0]}' in the data" in note
        found, targets, note = align([], data)
        assert (found, targets) == (names, [names.index(name) for name in data])
        assert f"in order: {', '.join(names[:3])}, ... (12 in all)" in note
        assert ("differently: class " in note) == (names != as_text)
    found, targets, _ = align(as_text, LETTERS)
    assert targets == [as_text.index(name) for name in names]
    assert [found[target] for target in targets] == LETTERS


@pytest.mark.parametrize("form", ["class_{}", "{}.0", "no. {} of 12"])
def test_names_with_a_number_are_matched_in_its_order(form, align, monkeypatch):
    monkeypatch.setattr("swinv2_moe.checkpoints.checkpoint.count_classes", lambda *args: 12)
    names = [form.format(number) for number in NUMBERS]
    as_text = sorted(names)
    for trained in ([], NUMBERS, sorted(NUMBERS)):
        _, targets, note = align(trained, as_text)
        numbers = list(trained or NUMBERS)
        assert [numbers[target] for target in targets] == [
            NUMBERS[names.index(name)] for name in as_text
        ]
        if form != "{}.0" or not trained:
            assert "differently: class 2 may be" in note


def test_an_order_on_which_programs_differ_is_said(align, monkeypatch):
    monkeypatch.setattr("swinv2_moe.checkpoints.checkpoint.count_classes", lambda *args: 3)
    for names, other in ((["B", "C", "a"], "class 0 may be 'a', not 'B'"), (["a", "b", "c"], "")):
        for trained in ([], ["0", "1", "2"]):
            note = align(trained, names)[2]
            assert other in note
            assert ("differently" in note) == bool(other)


def test_whole_numbers_are_compared_as_numbers(align):
    for form in ("{:02}", "{}.0"):
        names = [form.format(number) for number in range(12)]
        assert align(NUMBERS, names) == (NUMBERS, list(range(12)), None)
    assert align(sorted(NUMBERS), ["003", "11"])[1] == [5, 3]
    with pytest.raises(UserError, match="a name comes twice: '1' and '01'"):
        align(NUMBERS, ["1", "01"])


@pytest.mark.parametrize(
    ("trained", "names", "says"),
    [
        (NUMBERS, FROM_ONE, "classes are 0 to 11, those of the data 1 to 12: .* lower .* out 12$"),
        (FROM_ONE, NUMBERS, "classes are 1 to 12, those of the data 0 to 11: .* raise .* out 0$"),
        (NUMBERS, ["03", "12"], "0 to 11, those of the data 3 to 12"),
        (NUMBERS, [*FROM_ONE, "13"], "0 to 11, those of the data 1 to 13: .* out 12, 13$"),
        (NUMBERS, FROM_ONE[:5] + FROM_ONE[6:], "0 to 11, those of the data 1 to 12"),
        (NUMBERS[:5] + NUMBERS[6:], FROM_ONE, "0 to 11, those of the data 1 to 12"),
        (NUMBERS, ["-1", *FROM_ONE], "0 to 11, those of the data -1 to 12: .* out -1, 12$"),
        (FROM_ONE, NUMBERS[:-1], "1 to 12, those of the data 0 to 10: .* raise .* out 0$"),
    ],
)
def test_numbers_that_count_from_elsewhere_are_refused(trained, names, says, align):
    with pytest.raises(UserError, match=says):
        align(trained, names)
    _, targets, note = align(NUMBERS, FROM_ONE[:-1])
    assert targets == list(range(1, 12))
    assert note.endswith(
        ": 0 (if the data count the same classes from 1, lower their numbers by 1)"
    )
    assert "count the same" not in align(NUMBERS, FROM_ONE[:-2])[2]
    assert align(NUMBERS, [*NUMBERS, "12"])[1] == list(range(12))
