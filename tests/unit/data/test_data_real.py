"""Real photographs: a small ImageNet subset in a tar, where the machine has it."""

import os
import tarfile
from pathlib import Path

import pytest
import torch
from torchvision.datasets import ImageFolder

from swinv2_moe.data.build import build_data
from swinv2_moe.data.datasets import UnreadableImages

DATA = Path(os.environ.get("SWINV2_MOE_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))
TAR = DATA / "imagenette224_small" / "imagenette224_small.tar"

pytestmark = pytest.mark.skipif(
    not TAR.is_file(),
    reason="imagenette224_small.tar is neither in SWINV2_MOE_TEST_DATA nor in ../shared/data",
)


@pytest.fixture(scope="module")
def imagenette(tmp_path_factory):
    root = tmp_path_factory.mktemp("imagenette")
    with tarfile.open(TAR) as tar:
        tar.extractall(root, filter="data")
    return root


def test_photographs_load_with_the_default_recipe(imagenette, make_data):
    keys = {"DATA.DATASET": "folder", "DATA.PATH": str(imagenette), "DATA.NUM_WORKERS": 2}
    section = make_data(keys, {"DATA.IMG_SIZE": 64, "DATA.BATCH_SIZE": 50})
    data = build_data(section)
    assert (data.train_size, data.val_size, data.num_classes) == (1000, 1000, 10)
    unreadable = UnreadableImages(data.train_size + data.val_size, section.max_bad_share)
    for loader in (data.train_loader, data.val_loader):
        targets = []
        for batch in loader:
            unreadable.add(batch.unreadable)
            targets.append(batch.targets)
            assert batch.images.shape == (50, 3, 64, 64)
            # Photographs under ImageNet's mean and standard deviation: near 0 and 1.
            assert abs(batch.images.mean()) < 0.7
            assert 0.5 < batch.images.std() < 1.6
        assert torch.bincount(torch.cat(targets)).tolist() == [100] * 10
    assert unreadable.summary() is None


def test_a_list_of_the_photographs_equals_the_folder(imagenette, make_data, tmp_path):
    keys = {"DATA.PATH": str(imagenette), "DATA.IMG_SIZE": 32, "DATA.BATCH_SIZE": 100}
    lists = {}
    for split in ("train", "val"):
        samples = ImageFolder(imagenette / split).samples
        lines = [f"{os.path.relpath(path, imagenette)} {label}\n" for path, label in samples]
        (tmp_path / f"{split}.txt").write_text("".join(lines))
        lists[f"DATA.{split.upper()}_LIST"] = str(tmp_path / f"{split}.txt")
    folder, listed = {"DATA.DATASET": "folder"}, {"DATA.DATASET": "list"}
    by_folder = build_data(make_data(keys, folder), rank=3, world_size=5)
    by_list = build_data(make_data(keys, lists, listed), rank=3, world_size=5)
    for loader in ("train_loader", "val_loader"):
        a, b = (next(iter(getattr(data, loader))) for data in (by_folder, by_list))
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.targets, b.targets)
