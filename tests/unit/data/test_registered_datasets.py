"""A dataset is one file: registered inside of the package or by `--import FILE` from outside."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from swinv2_moe import imports
from swinv2_moe.commands.options import CommandParser
from swinv2_moe.config import config_from_text, data_config, load_config
from swinv2_moe.data import ImageArrays, Sources
from swinv2_moe.data.build import build_data
from swinv2_moe.data.section import DATASETS, register_dataset
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.imports import import_file

ROOT = Path(__file__).parents[3]
BUILT_IN = ["cifar10", "cifar100", "digits", "folder", "imagenet", "list", "shards"]
# The class is the file's own: a spawned worker must import the file before it receives the source.
NPZ = """
import os
from dataclasses import dataclass

import numpy as np

from swinv2_moe.data import ImageArrays, Sources, register_dataset
from swinv2_moe.errors import UserError


@dataclass(frozen=True)
class Npz(ImageArrays):
    def open(self, index):
        return super().open(index).rotate(90)


def read(root, split):
    file = os.path.join(root, split + ".npz")
    try:
        content = np.load(file)
        return Npz(file, content["images"], content["targets"])
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from error


@register_dataset("npz")
def npz(config):
    return Sources(read(config.path, "train"), read(config.path, "val"), ["even", "odd"])
"""


@pytest.fixture(autouse=True)
def registrations_end_with_the_test(monkeypatch):
    before = dict(DATASETS)
    monkeypatch.setattr(imports, "_imported", [])
    yield
    DATASETS.clear()
    DATASETS.update(before)
    sys.modules.pop("imported_npz", None)


@pytest.fixture
def outside(tmp_path):
    file = tmp_path / "npz.py"
    file.write_text(NPZ)
    return file


@pytest.fixture
def arrays(tmp_path):
    """A directory with train.npz and val.npz: 12 and 5 images of 2 classes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        images = rng.integers(0, 256, (count, 20, 24, 3), np.uint8)
        np.savez(tmp_path / f"{split}.npz", images=images, targets=np.arange(count) % 2)
    return tmp_path


OPTS = ["DATA.DATASET", "npz", "DATA.BATCH_SIZE", "4", "DATA.IMG_SIZE", "16"]
OPTS += ["MODEL.SWINV2.WINDOW_SIZE", "4", "MODEL.SWINV2.DEPTHS", "[1]"]
OPTS += ["MODEL.SWINV2.NUM_HEADS", "[2]", "MODEL.SWINV2.PRETRAINED_WINDOW_SIZES", "[0]"]
OPTS += ["MODEL.MOE.BLOCKS", "[[]]"]


def npz_data(data: Path, *opts: object):
    return data_config(load_config(None, [*OPTS, *map(str, opts)], data=str(data)))


def load_mine(**how):
    """The sources of the dataset that a test has registered as "mine"."""
    return load_sources(data_config(load_config(None, ["DATA.DATASET", "mine"], **how)))


def test_an_outside_file_is_a_dataset(outside, arrays):
    with pytest.raises(UserError, match=r"DATA\.DATASET is .npz., allowed: cifar10, "):
        npz_data(arrays)
    import_file(str(outside))
    data = build_data(npz_data(arrays, "DATA.NUM_WORKERS", 0))
    assert (data.train_size, data.val_size, data.class_names) == (12, 5, ["even", "odd"])
    assert [len(batch.images) for batch in data.train_loader] == [4, 4, 4]
    (arrays / "val.npz").unlink()
    with pytest.raises(UserError, match=r"val\.npz: cannot be read"):
        build_data(npz_data(arrays))


def test_workers_read_an_outside_source(outside, arrays):
    """A worker that is not forked imports the file again."""
    import_file(str(outside))
    data = build_data(npz_data(arrays, "DATA.NUM_WORKERS", 1))
    whole = npz_data(arrays, "DATA.NUM_WORKERS", 0, "DATA.BATCH_SIZE", 12)
    (in_process,) = build_data(whole).val_loader
    data.val_loader.multiprocessing_context = "spawn"
    images = [image for batch in data.val_loader for image in batch.images]
    assert len(images) == 5
    for image, expected in zip(images, in_process.images, strict=True):
        assert image.equal(expected)


def test_a_registered_name_is_in_the_help_and_the_list_of_keys(outside, capsys):
    with pytest.raises(SystemExit):
        CommandParser().parse_args(["--import", str(outside), "--help"])
    assert f"DATA.DATASET: {', '.join(BUILT_IN)}, npz\n" in capsys.readouterr().out
    command = [sys.executable, "-m", "swinv2_moe.config", "--import", outside]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert f"DATA.DATASET: 'digits'  # {', '.join(BUILT_IN)}, npz\n" in done.stdout


def test_the_configuration_of_a_run_names_an_outside_dataset(outside):
    text = "DATA: {DATASET: npz, PATH: somewhere}"
    with pytest.raises(UserError, match=r"run: its configuration .*DATA\.DATASET is 'npz'"):
        config_from_text(text, "run")
    import_file(str(outside))
    assert config_from_text(text, "run").DATA.DATASET == "npz"


def test_an_unknown_name_lists_the_nearest(outside):
    import_file(str(outside))
    with pytest.raises(UserError, match=r"'npzz', allowed: .*, npz; did you mean npz\?"):
        load_config(None, ["DATA.DATASET", "npzz"])
    with pytest.raises(UserError, match=r"'fold', allowed: .*; did you mean folder\?"):
        load_config(None, ["DATA.DATASET", "fold"], data="somewhere")


def test_a_name_is_registered_once(outside, tmp_path):
    import_file(str(outside))
    with pytest.raises(ValueError, match=r"DATA.DATASET 'npz' is registered already: .*npz"):
        register_dataset("npz")
    with pytest.raises(ValueError, match="registered as ''"):
        register_dataset("")
    second = tmp_path / "second.py"
    second.write_text(NPZ.replace('"npz"', '"folder"'))
    with pytest.raises(UserError, match=r"line \d+, ValueError: DATA.DATASET 'folder' is reg"):
        import_file(str(second))


def test_what_a_dataset_needs_is_checked():
    lists = r"DATA\.TRAIN_LIST and DATA\.VAL_LIST must name its two list files"
    for name, options, needs in (
        ("path", {}, r"DATA\.PATH \(or --data\) must name its directory"),
        ("lists", {"needs_path": False, "needs_lists": True}, lists),
    ):
        register_dataset(name, **options)(lambda config: None)
        with pytest.raises(UserError, match=f"DATA.DATASET is '{name}': {needs}"):
            load_config(None, ["DATA.DATASET", name])
    register_dataset("nothing", needs_path=False)(lambda config: None)
    assert load_config(None, ["DATA.DATASET", "nothing"]).DATA.PATH == ""


def test_data_replaces_a_dataset_of_a_file_that_reads_no_files(tmp_path):
    for name, needs_path in (("generated", False), ("stored", True)):
        register_dataset(name, needs_path=needs_path)(lambda config: None)
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"DATA: {{DATASET: {name}}}")
    load = lambda name: load_config(tmp_path / f"{name}.yaml", data="somewhere")  # noqa: E731
    assert load("generated").DATA.DATASET == "folder"
    assert load("stored").DATA.DATASET == "stored"


def test_the_function_receives_an_expanded_path_that_exists(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = []

    @register_dataset("mine")
    def mine(config):
        paths.append(config.path)
        return load_sources(data_config(load_config()))

    load_mine(data="~")
    assert paths == [str(tmp_path)]
    with pytest.raises(UserError, match=r"DATA\.PATH is .*gone': no such directory"):
        load_mine(data="~/gone")


class Three(ImageArrays):
    def __len__(self):
        return 3


def three(*targets: int) -> Sources:
    source = Three("mine", np.zeros((3, 4, 4), np.uint8), np.array(targets))
    return Sources(source, source, ["a", "b"])


def noise(num_train: int, num_val: int, names: list) -> Sources:
    parts = [ImageArrays("", np.zeros((n, 4, 4)), np.zeros(n, int)) for n in (num_train, num_val)]
    return Sources(*parts, names)


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        (None, "its function returned NoneType, not swinv2_moe.data.Sources"),
        (three(0, 1), "its train source has 3 images and 2 targets"),
        (three(0, 1, 2), "its train source has label 2, with 2 classes"),
        (three(0, -1, 1), "its train source has label -1, with 2 classes"),
        (noise(2, 0, ["a"]), "its val source has no images$"),
        (noise(2, 2, [0]), "its class name 0 is int, not text$"),
    ],
)
def test_sources_that_cannot_be_used(sources, says):
    register_dataset("mine", needs_path=False)(lambda config: sources)
    with pytest.raises(UserError, match=f"^DATA.DATASET is 'mine': {says}"):
        load_mine()
