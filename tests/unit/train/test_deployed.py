"""A checkpoint after its training: which data it is used with, and whether that has its classes."""

import pytest

from swinv2_moe.config import all_sections, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model
from swinv2_moe.train.checkpoint import Checkpoint, write_weights
from swinv2_moe.train.deployed import Deployed, open_deployed


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


def test_class_names(tmp_path, make_config):
    def compare(known, found):
        source = Checkpoint(tmp_path / "run", {"class_names": known})
        return Deployed(None, source, config).compare_classes(found)

    config = all_sections(make_config(tmp_path))
    assert compare(["a", "b", "c"], ["a", "b", "c"]) is None
    assert compare([], ["a"] * 1000) is None
    line = compare(["a", "b", "c"], ["a", "c", "b"])
    assert (
        line == "2 of 3 classes have other names: class 1 is 'b' in the checkpoint, 'c' in the data"
    )
    with pytest.raises(UserError, match=r"run has 3 classes, the data \(digits\) has 1,000$"):
        compare(["a", "b", "c"], ["a"] * 1000)
