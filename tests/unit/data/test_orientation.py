"""Photographs are turned as their EXIF orientation says, wherever they are read."""

import io
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, features

from swinv2_moe.config import data_config
from swinv2_moe.data.datasets import ImageDataset
from swinv2_moe.data.images import decode, upright
from swinv2_moe.data.prepare.make_shards import ShardOptions, make_shards
from swinv2_moe.data.shards import load_shards
from swinv2_moe.data.sources import ImageFiles, Sources

# What was done to the upright image before it was stored, by the orientation that undoes it.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def photograph(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def stored(orientation: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """The photograph as a camera held in another way stores it."""
    image = photograph(mode)
    if STORED[orientation] is not None:
        image = image.transpose(STORED[orientation])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif, quality=100, lossless=True)
    return file.getvalue()


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    """The photograph in each orientation."""
    names = []
    for orientation in STORED:
        name = f"{orientation}.png"
        (tmp_path / name).write_bytes(stored(orientation))
        names.append(name.encode())
    return ImageFiles(str(tmp_path), np.array(names), np.zeros(len(names), np.int64))


@pytest.mark.parametrize("orientation", STORED)
def test_every_orientation_gives_the_same_pixels(orientation: int) -> None:
    for kind in ("PNG", "TIFF", "WEBP"):
        assert np.array_equal(decode(stored(orientation, kind)), photograph()), kind
    jpeg = decode(stored(orientation, "JPEG", "L"))
    difference = np.abs(np.asarray(jpeg, int) - np.asarray(photograph("L"), int))
    assert difference.mean() < 5


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_an_avif_is_upright() -> None:
    assert decode(stored(6, "AVIF")).size == (40, 30)


@pytest.mark.parametrize("is_train", [True, False])
def test_tensors_of_every_orientation_are_equal(
    files: ImageFiles, make_config, full_augmentation, is_train: bool
) -> None:
    """The augmentation depends on the index, so each file is a source of its own."""
    config = data_config(make_config(full_augmentation))
    images = []
    for path in files.paths:
        source = ImageFiles(files.root, np.array([path]), np.zeros(1, np.int64))
        images.append(ImageDataset(source, config, is_train)[0].image)
    assert all(torch.equal(image, images[0]) for image in images[1:])


def test_shards_are_decoded_upright(files: ImageFiles, tmp_path: Path) -> None:
    pytest.importorskip("webdataset", reason="needs the data extra")
    sources = Sources(files, files, ["a"])
    make_shards(sources, str(tmp_path / "whole"), ShardOptions(), 1)
    made = load_shards(str(tmp_path / "whole")).train
    # as the files are
    assert {made.read(i) for i in range(8)} == {stored(orientation) for orientation in STORED}
    assert all(np.array_equal(made.open(i), photograph()) for i in range(8))
    make_shards(sources, str(tmp_path / "smaller"), ShardOptions(short_side=15), 1)
    made = load_shards(str(tmp_path / "smaller")).train
    assert {made.open(i).size for i in range(8)} == {(20, 15)}
    assert len({made.read(i) for i in range(8)}) == 1


def with_exif(exif: Image.Exif | bytes) -> bytes:
    file = io.BytesIO()
    photograph().save(file, "PNG", exif=exif)
    return file.getvalue()


# pytest undoes what the package ignores
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_metadata_that_is_broken_or_says_nothing_is_ignored() -> None:
    unknown = Image.Exif()
    unknown[ExifTags.Base.Orientation] = 99
    for exif in (b"Exif\0\0MM\0*\0\0\0\x08\xff\xff broken", b"no EXIF at all", unknown):
        assert np.array_equal(decode(with_exif(exif)), photograph())


def test_an_upright_image_is_returned_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    once = upright(Image.open(io.BytesIO(stored(6))))
    assert upright(once) is once
    image = photograph()
    without_metadata = Mock(side_effect=AssertionError("looked for EXIF data"))
    monkeypatch.setattr(Image.Image, "getexif", without_metadata)
    assert upright(image) is image
