"""Image files that nobody has checked: their formats, their sizes, what is decoded and what is
not."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageFile, PngImagePlugin
from yacs.config import CfgNode

from swinv2_moe.config import data_config
from swinv2_moe.data import build_data
from swinv2_moe.data.datasets import ImageDataset, read_image
from swinv2_moe.data.images import FORMATS, MAX_FILE_BYTES, MAX_PIXELS, decode
from swinv2_moe.data.prepare import transfer_bar
from swinv2_moe.data.prepare.make_shards import Options, make_shards
from swinv2_moe.data.shards import load_shards
from swinv2_moe.data.sources import ImageFiles, Sources
from swinv2_moe.errors import UserError

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(secret) run\n%%EOF\n"


def saved(kind: str, size: tuple[int, int] = (6, 6), **keys) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, 100).save(file, kind, **keys)
    return file.getvalue()


def tiled_tiff(side: int) -> bytes:
    """A TIFF of 16 x 16 pixels in one tile of side x side, compressed."""
    tile = zlib.compress(bytes(side * side))
    values = {
        256: 16,
        257: 16,
        258: 8,
        259: 8,
        262: 1,
        277: 1,
        322: side,
        323: side,
        324: 8 + 2 + 10 * 12 + 4,
    }
    values[325] = len(tile)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    return b"II*\0" + struct.pack("<IH", 8, len(values)) + entries + bytes(4) + tile


@pytest.fixture
def no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test where pixels are decoded, or another program is started."""

    def fail(*args, **keys) -> None:
        pytest.fail("decoded")  # which no `except Exception` takes for a broken image

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", fail)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read_whatever_the_name(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(saved(kind))
    source = ImageFiles(str(tmp_path), np.array([b"a.jpg"]), np.zeros(1, np.int64))
    assert abs(read_image(source, 0, "L").getpixel((3, 3)) - 100) < 5


@pytest.mark.parametrize(
    "content",
    [
        EPS,
        saved("ICO"),
        saved("PCX"),
        b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(99),
        saved("PDF"),
        b"",
        b"<svg/>",
    ],
)
def test_no_other_format_is_opened(content: bytes, no_decoder: None) -> None:
    with pytest.raises(ValueError, match=f"^none of the formats {' '.join(FORMATS)}$"):
        decode(content)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "GIF"])
def test_a_picture_of_more_pixels_than_allowed_is_refused_by_its_header(
    kind: str, no_decoder: None
) -> None:
    keys = {"compression": "tiff_deflate"} if kind == "TIFF" else {}
    with pytest.raises(ValueError, match=r"^300 x 100 pixels, the limit is 29,999$"):
        decode(saved(kind, (300, 100), **keys), max_pixels=29_999)


# pytest undoes what the package ignores
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_default_limit_refuses_what_takes_a_gigabyte(no_decoder: None) -> None:
    content = saved("PNG", (13_000, 13_000))
    assert len(content) < 200_000
    with pytest.raises(ValueError, match=f"13,000 x 13,000 pixels, the limit is {MAX_PIXELS:,}"):
        decode(content)
    with pytest.raises(ValueError, match="exceeds limit"):  # Pillow's own
        decode(saved("PNG", (20_000, 10_000)))


def test_a_tile_of_a_tiff_counts_where_it_is_larger_than_the_image(no_decoder: None) -> None:
    with pytest.raises(ValueError, match=r"^12,000 x 12,000 pixels"):
        decode(tiled_tiff(12_000))


def test_a_tiled_tiff_is_read() -> None:
    assert decode(tiled_tiff(64)).getpixel((15, 15)) == 0


def test_a_text_that_unpacks_to_gigabytes_is_an_error_of_its_file() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * (PngImagePlugin.MAX_TEXT_CHUNK + 1), zip=True)
    with pytest.raises(ValueError, match="too large"):
        decode(saved("PNG", pnginfo=info))


@pytest.fixture
def make_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pictures of 40 x 30 and 20 x 20 pixels, as a folder or in shards, under a configuration with
    DATA.MAX_PIXELS."""
    monkeypatch.setattr(transfer_bar.TransferBar, "start", lambda self: None)

    def make(config: CfgNode, dataset: str) -> CfgNode:
        for split in ("train", "val"):
            (tmp_path / "images" / split / "a").mkdir(parents=True)
            (tmp_path / "images" / split / "a" / "large.png").write_bytes(saved("PNG", (40, 30)))
            for number in range(5):
                (tmp_path / "images" / split / "a" / f"{number}.png").write_bytes(
                    saved("PNG", (20, 20))
                )
        config.DATA.DATASET, config.DATA.PATH = "folder", str(tmp_path / "images")
        if dataset == "list":
            for split in ("train", "val"):
                names = sorted(os.listdir(tmp_path / "images" / split / "a"))
                lines = "".join(f"{split}/a/{name} 0\n" for name in names)
                (tmp_path / "images" / f"{split}.txt").write_text(lines)
            config.DATA.TRAIN_LIST, config.DATA.VAL_LIST = "train.txt", "val.txt"
        if dataset == "shards":
            source = ImageFiles(
                str(tmp_path / "images/train/a"),
                np.array([b"large.png", *(b"%d.png" % i for i in range(5))]),
                np.zeros(6),
            )
            make_shards(Sources(source, source, ["a"]), str(tmp_path / "shards"), Options(), 1)
            config.DATA.PATH = str(tmp_path / "shards")
        config.DATA.DATASET = dataset
        return config

    return make


@pytest.mark.parametrize("dataset", ["folder", "list", "shards"])
@pytest.mark.parametrize(("limit", "count"), [(1199, 1), (1200, 0)])
def test_the_limit_is_configured_and_what_exceeds_it_is_a_bad_image(
    make_source, make_config, dataset: str, limit: int, count: int
) -> None:
    config = make_source(
        make_config({"DATA.MAX_PIXELS": limit, "DATA.MAX_BAD_SHARE": 0.5}), dataset
    )
    data = build_data(data_config(config))
    for loader in (data.train_loader, data.val_loader):
        named = {name for batch in loader for name in batch.unreadable}
        assert len(named) <= count
        assert all("large" in name for name in named)
    assert sum(len(batch.unreadable) for batch in data.val_loader) == count


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "large"])
def test_what_is_no_ordinary_file_is_a_bad_image(tmp_path: Path, make_config, kind: str) -> None:
    path = tmp_path / "a.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, MAX_FILE_BYTES + 1)
    source = ImageFiles(str(tmp_path), np.array([b"a.png"]), np.zeros(1, np.int64))
    sample = ImageDataset(source, data_config(make_config()), is_train=False)[0]
    assert sample.unreadable == [str(path)]


def test_shards_leave_out_what_is_too_large_where_they_decode_it(
    make_source, make_config, tmp_path: Path
) -> None:
    config = make_source(make_config(), "folder")
    source = ImageFiles(
        config.DATA.PATH, np.array([b"train/a/large.png"] + [b"train/a/0.png"] * 199), np.zeros(200)
    )
    sources = Sources(source, source, ["a"])
    index = make_shards(sources, str(tmp_path / "out"), Options(check=True, max_pixels=1199), 1)
    assert [shard["left_out"] for shard in index["train"]["shards"]] == [1]
    assert len(load_shards(str(tmp_path / "out")).train) == 199
    with pytest.raises(UserError, match="was begun with max_pixels 1199, not 1200"):
        make_shards(sources, str(tmp_path / "out"), Options(check=True, max_pixels=1200), 1)
