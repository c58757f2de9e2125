"""Image files that nobody has checked: their formats, their sizes, what is decoded and what is
not."""

import errno
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageFile, PngImagePlugin

from swinv2_moe.data.build import build_data
from swinv2_moe.data.datasets import ImageDataset, UnreadableImages, read_image
from swinv2_moe.data.images import (
    FORMATS,
    MAX_FILE_BYTES,
    MAX_PIXELS,
    decode,
    read_header,
    to_mode,
)
from swinv2_moe.data.prepare.make_shards import ShardOptions, make_shards
from swinv2_moe.data.shards import load_shards
from swinv2_moe.data.sources import ImageFiles, Sources
from swinv2_moe.data.transforms import bounded, build_transform
from swinv2_moe.errors import UserError
from swinv2_moe.predict.predictor import Predictor

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(secret) run\n%%EOF\n"


def saved(kind: str, size: tuple[int, int] = (6, 6), **keys) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, 100).save(file, kind, **keys)
    return file.getvalue()


def announcing(width: int, height: int) -> bytes:
    """A PNG whose header announces more pixels than it holds."""
    content = saved("PNG")
    header = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


def tiled_tiff(side: int) -> bytes:
    """A TIFF of 16 x 16 pixels in one tile of side x side, compressed."""
    tile = zlib.compress(bytes(side * side))
    values = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side}
    values |= {324: 8 + 2 + 10 * 12 + 4, 325: len(tile)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    return b"II*\0" + struct.pack("<IH", 8, len(values)) + entries + bytes(4) + tile


@pytest.fixture
def no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test where pixels are decoded, or another program is started."""

    def fail(*args, **keys) -> None:
        pytest.fail("decoded")  # which no `except Exception` takes for a broken image

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", fail)


def test_every_format_is_read_whatever_the_name(tmp_path: Path) -> None:
    source = ImageFiles(str(tmp_path), np.array([b"a.jpg"]), np.zeros(1, np.int64))
    for kind in FORMATS:
        (tmp_path / "a.jpg").write_bytes(saved(kind))
        assert abs(read_image(source, 0, "L").getpixel((3, 3)) - 100) < 5, kind


def test_no_other_format_is_opened(no_decoder: None) -> None:
    others = [saved("ICO"), saved("PCX"), saved("PDF")]
    for content in (EPS, *others, b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(99), b"", b"<svg/>"):
        with pytest.raises(ValueError, match=f"^none of the formats {' '.join(FORMATS)}$"):
            decode(content)


def test_a_picture_of_more_pixels_than_allowed_is_refused_by_its_header(no_decoder: None) -> None:
    tiff = saved("TIFF", (300, 100), compression="tiff_deflate")
    for content in (tiff, *(saved(kind, (300, 100)) for kind in ("PNG", "BMP", "GIF"))):
        with pytest.raises(ValueError, match=r"^300 x 100 pixels, the limit is 29,999$"):
            decode(content, max_pixels=29_999)


# pytest undoes what the package ignores
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_default_limit_refuses_what_takes_a_gigabyte(no_decoder: None) -> None:
    with pytest.raises(ValueError, match=f"13,000 x 13,000 pixels, the limit is {MAX_PIXELS:,}"):
        decode(announcing(13_000, 13_000))
    with pytest.raises(ValueError, match="exceeds limit"):  # Pillow's own
        decode(announcing(20_000, 10_000))


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


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.EMFILE, "too many"), OSError(errno.ENOMEM, "no memory")]
)
@pytest.mark.parametrize("place", ["open", "load"])
def test_a_lack_of_memory_or_descriptors_is_no_bad_image(tmp_path, monkeypatch, error, place):
    (tmp_path / "a.png").write_bytes(saved("PNG"))
    source = ImageFiles(str(tmp_path), np.array([b"a.png"]), np.zeros(1, np.int64))
    readers = [lambda: decode(saved("PNG")), lambda: read_image(source, 0, "RGB")]
    predictor = object.__new__(Predictor)
    readers.append(lambda: predictor._read(tmp_path / "a.png"))
    if place == "open":
        readers.append(lambda: read_header(tmp_path / "a.png"))

    def fail(*args, **keys) -> None:
        raise error

    module = Image if place == "open" else ImageFile.ImageFile
    monkeypatch.setattr(module, place, fail)
    for read in readers:
        with pytest.raises(type(error)) as raised:
            read()
        assert raised.value is error


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A picture of 40 x 30 pixels and five of 20 x 20, in a folder, in lists and in shards."""
    names = ["large.png", *(f"{number}.png" for number in range(5))]
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for name in names:
            size = (40, 30) if name == "large.png" else (20, 20)
            (tmp_path / split / "a" / name).write_bytes(saved("PNG", size))
        lines = [f"{split}/a/{name} 0\n" for name in names]
        (tmp_path / f"{split}.txt").write_text("".join(lines))
    encoded = np.array([name.encode() for name in names])
    source = ImageFiles(str(tmp_path / "train/a"), encoded, np.zeros(6))
    make_shards(Sources(source, source, ["a"]), str(tmp_path / "shards"), ShardOptions(), 1)
    return tmp_path


@pytest.mark.parametrize("dataset", ["folder", "list", "shards"])
def test_more_pixels_than_allowed_are_a_bad_image(root, make_data, dataset, monkeypatch):
    """In training and validation: they do not end the run."""
    keys = {"DATA.DATASET": dataset, "DATA.MAX_BAD_SHARE": 0.5, "DATA.NUM_WORKERS": 0}
    keys |= {"DATA.TRAIN_LIST": "train.txt", "DATA.VAL_LIST": "val.txt"}
    keys["DATA.PATH"] = str(root / "shards" if dataset == "shards" else root)
    for limit, count in ((1199, 1), (1200, 0)):
        monkeypatch.setattr(decode, "__defaults__", (limit,))
        data = build_data(make_data(keys))
        for loader in (data.train_loader, data.val_loader):
            named = {name for batch in loader for name in batch.unreadable}
            assert len(named) <= count
            assert all("large" in name for name in named)
        assert sum(len(batch.unreadable) for batch in data.val_loader) == count


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.touch()],
    ids=["pipe", "directory", "device", "large"],
)
def test_what_is_no_ordinary_file_is_a_bad_image(tmp_path: Path, make_data, make) -> None:
    path = tmp_path / "a.png"
    make(path)
    if path.is_file():
        os.truncate(path, MAX_FILE_BYTES + 1)
    source = ImageFiles(str(tmp_path), np.array([b"a.png"]), np.zeros(1, np.int64))
    sample = ImageDataset(source, make_data(), is_train=False)[0]
    assert sample.unreadable == [str(path)]


def test_shards_leave_out_what_is_too_large_where_they_decode_it(root: Path) -> None:
    names = np.array([b"train/a/large.png"] + [b"train/a/0.png"] * 199)
    source = ImageFiles(str(root), names, np.zeros(200))
    sources, output = Sources(source, source, ["a"]), str(root / "out")
    index = make_shards(sources, output, ShardOptions(check=True, max_pixels=1199), 1)
    assert [shard["left_out"] for shard in index["train"]["shards"]] == [1]
    assert len(load_shards(output).train) == 199
    with pytest.raises(UserError, match="was begun with max_pixels 1199, not 1200"):
        make_shards(sources, output, ShardOptions(check=True, max_pixels=1200), 1)


# values of more than 8 bits


def tiff(pixels: bytes, bits: int, sample_format: int, *tags: tuple, photometric=1, samples=1):
    """A TIFF of one row. `tags`: (number, type, value)."""
    width = len(pixels) * 8 // (bits * samples)
    size = [(256, 4, width), (257, 4, 1), (258, 3, bits), (259, 3, 1), (262, 3, photometric)]
    place = [(273, 4, 0), (277, 3, samples), (278, 4, 1), (279, 4, len(pixels))]
    entries = sorted([*size, *place, (339, 3, sample_format), *tags])
    head = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
    end = len(head) + 12 * len(entries) + 4
    for number, kind, value in entries:
        code = {3: "Hxx", 4: "I", 8: "hxx", 9: "i", 11: "f"}[kind]
        head += struct.pack("<HHI" + code, number, kind, 1, end if number == 273 else value)
    return head + bytes(4) + pixels


def row(kind: type, *values: float) -> bytes:
    return np.array(values, kind).tobytes()


TWELVE = row("<u2", 0, 1024, 2048, 4095)
PACKED = bytes([0x00, 0x04, 0x00, 0x80, 0x0F, 0xFF])  # the same in 12 bits each
SMALLEST, LARGEST = -(2**31), 2**31 - 1
SIGNED_RANGE = [(340, 9, SMALLEST), (341, 9, LARGEST)]
UNIT_RANGE = [(340, 11, -1.0), (341, 11, 1.0)]
# content and grey levels; or why it is not read
VALUES = {
    "16 bits": (tiff(row("<u2", 0, 256, 32768, 65535), 16, 1), [0, 1, 128, 255]),
    "white is zero": (tiff(row("<u2", 0, 32768, 65535), 16, 1, photometric=0), [255, 127, 0]),
    "12 bits": (tiff(PACKED, 12, 1), [0, 64, 128, 255]),
    "12 of 16 bits": (tiff(TWELVE, 16, 1, (281, 3, 4095)), [0, 64, 128, 255]),
    "ten levels of 16 bits": (tiff(row("<u2", 0, 5, 9), 16, 1, (281, 3, 9)), [0, 128, 230]),
    "12 bits, PGM": (b"P5 4 1 4095\n" + row(">u2", 0, 1024, 2048, 4095), [0, 64, 128, 255]),
    "signed 16 bits": (tiff(row("<i2", 0, 9), 16, 2), "16-bit integers without the values of"),
    "signed 16 bits with a range": (
        tiff(row("<i2", -128, 0, 127), 16, 2, (340, 8, -128), (341, 8, 127)),
        [0, 128, 255],
    ),
    "32 bits": (tiff(row("<u4", 0, 9), 32, 1), "32-bit integers without the values of black"),
    "32 bits with a range": (
        tiff(row("<u4", 0, 2**31, 2**32 - 1), 32, 1, (280, 4, 0), (281, 4, 2**32 - 1)),
        [0, 128, 255],
    ),
    "signed 32 bits with a range": (
        tiff(row("<i4", SMALLEST, 0, LARGEST), 32, 2, *SIGNED_RANGE),
        [0, 128, 255],
    ),
    "floats": (tiff(row("<f4", 0, 1), 32, 3), "32-bit floating point without the values of"),
    "floats with a range": (tiff(row("<f4", -1, 0, 1), 32, 3, *UNIT_RANGE), [0, 128, 255]),
    "not a number": (
        tiff(row("<f4", 0, np.nan), 32, 3, *UNIT_RANGE),
        "values that are NaN or infinite",
    ),
    "an empty range": (
        tiff(row("<f4", 0, 1), 32, 3, (340, 11, 1.0), (341, 11, 1.0)),
        "values range from 1 to 1",
    ),
    "floats, PFM": (b"Pf 2 1 -1.0\n" + row("<f4", 0, 1), "32-bit floating point without"),
    "16 bits of 12 in colour": (
        tiff(row("<u2", 9, 9, 9), 16, 1, (281, 3, 4095), photometric=2, samples=3),
        "values only up to 4095",
    ),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_are_scaled_from_the_range_that_the_file_gives(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the example that runs without this package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    from classify import read

    content, wanted = VALUES[case]
    (tmp_path / "a.tif").write_bytes(content)
    if isinstance(wanted, list):
        for image in (decode(content), read(tmp_path / "a.tif")):
            assert np.asarray(to_mode(image, "RGB"))[0].tolist() == [[grey] * 3 for grey in wanted]
        return
    with pytest.raises(ValueError, match=wanted):
        decode(content)
    with pytest.raises(ValueError, match=r"values"):
        read(tmp_path / "a.tif")


def test_transparent_palettes_keep_their_colours() -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    for kind, transparency in (("PNG", bytes([0, 128, 255])), ("GIF", 1)):
        file = io.BytesIO()
        image.save(file, kind, transparency=transparency)
        pixels = np.asarray(to_mode(decode(file.getvalue()), "RGB"))
        assert pixels.tolist() == [[[255, 0, 0], [0, 255, 0], [0, 0, 255]]]


def test_the_reason_is_named_where_no_image_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(VALUES["floats"][0])
    with pytest.raises(UserError, match=r"the first: .*a\.tif \(32-bit floating point without"):
        UnreadableImages(2, 0.1).add([str(tmp_path / "a.tif")])


# extreme shapes


@pytest.mark.parametrize("crop", [True, False])
def test_a_thin_image_stays_small_in_every_transform(
    make_data, crop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized = []
    resize = Image.Image.resize

    def recorded(image, size, *args, **keys):
        resized.append(size[0] * size[1])
        return resize(image, size, *args, **keys)

    monkeypatch.setattr(Image.Image, "resize", recorded)
    section = make_data({"TEST.CROP_RATIO": 0.875 * crop, "DATA.IMG_SIZE": 224})
    for size in ((1, 5000), (65_000, 1), (2, 1_000_000)):
        for is_train in (True, False):
            found = build_transform(section, is_train)(Image.new("RGB", size, (255, 0, 0)))
            assert found.shape == (3, 224, 224)
    assert max(resized) <= 32 * 256**2


def test_an_image_that_is_not_thin_is_unchanged() -> None:
    image = Image.new("L", (32, 1))
    for crop in (True, False):
        assert bounded(image, 224, crop) is image
        assert max(bounded(Image.new("L", (1, 300)), 224, crop).size) <= 300


def test_the_middle_and_the_mean_of_a_thin_image() -> None:
    image = Image.new("L", (1, 900))
    image.putdata([0] * 400 + [200] * 100 + [0] * 400)
    assert np.asarray(bounded(image, 16, crop=True)).ravel().tolist() == [200] * 32
    assert abs(np.asarray(bounded(image, 16, crop=False), float).mean() - 200 / 9) < 3
