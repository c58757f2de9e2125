"""Unusual and broken images, in files and in shards alike: read right, or named."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from swinv2_moe.data.datasets import ImageDataset, read_image
from swinv2_moe.data.prepare.make_shards import ShardOptions, make_shards
from swinv2_moe.data.shards import load_shards
from swinv2_moe.data.sources import ImageFiles, Sources

# swinv2_moe.data.datasets ignores it, pytest does not
pytestmark = pytest.mark.filterwarnings("ignore:Palette images")

RED, GREEN = (250, 0, 0), (0, 250, 0)


def png(width, height, bit_depth, color_type, rows: bytes) -> bytes:
    """A PNG of the given header and uncompressed rows, which Pillow itself cannot write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, bit_depth, color_type, 0, 0, 0)
    image = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + image


def saved(kind: str, image: Image.Image, **keys) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **keys)
    return file.getvalue()


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (6, 6), color) for color in (RED, GREEN)]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    return saved(kind, frames[0], save_all=True, append_images=frames[1:], **lossless)


NOISE = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
WHOLE = saved("JPEG", Image.fromarray(NOISE))
GREY_16 = Image.fromarray(np.full((6, 6), 200 * 256, np.uint16))
RGB_16 = b"\0" + struct.pack(">6H", *[250 << 8, 0, 0] * 2)
PALETTE = Image.new("RGB", (6, 6), RED).quantize(4)
CMYK = Image.new("CMYK", (6, 6), (0, 255, 255, 0))
READABLE = {
    "one pixel.png": (saved("PNG", Image.new("RGB", (1, 1), RED)), (1, 1), RED),
    "long.png": (saved("PNG", Image.new("RGB", (20_000, 20), RED)), (20_000, 20), RED),
    "cmyk.jpg": (saved("JPEG", CMYK), (6, 6), (255, 0, 0)),
    "grey 16.png": (saved("PNG", GREY_16), (6, 6), (200,) * 3),
    "rgb 16.png": (png(2, 1, 16, 2, RGB_16), (2, 1), RED),
    "palette.png": (saved("PNG", PALETTE, transparency=bytes([255, 0, 7, 9])), (6, 6), RED),
}
for kind in ("GIF", "WEBP", "PNG", "TIFF"):
    READABLE[f"animated.{kind.lower()}"] = (animated(kind), (6, 6), RED)
BROKEN = {
    "cut.jpg": WHOLE[: len(WHOLE) // 2],
    "huge.png": png(20_000, 20_000, 8, 2, b"\0" * 1000),  # 1.2 GB of pixels in a file of 100 bytes
    "text.jpg": b"<html>404</html>",
    "header.png": saved("PNG", Image.new("RGB", (6, 6)))[:30],
}


@pytest.fixture
def sources(tmp_path):
    """The images above, in files and in shards; in shards row i of the files is where the key
    begins with i."""
    contents = {name: image[0] for name, image in READABLE.items()} | BROKEN
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    classes = list(contents)
    encoded = np.array([name.encode() for name in classes])
    in_files = ImageFiles(str(tmp_path), encoded, np.arange(len(classes)))
    make_shards(Sources(in_files, in_files, classes), str(tmp_path / "shards"), ShardOptions(), 1)
    return in_files, load_shards(str(tmp_path / "shards")).train, classes


@pytest.mark.parametrize("kind", ["files", "shards"])
def test_unusual_images_are_read_and_broken_ones_are_not(sources, kind):
    source, names = sources[kind == "shards"], sources[2]
    for index in range(len(source)):
        name = names[source.targets[index]]
        image = read_image(source, index, "RGB")
        if name in BROKEN:
            assert image is None, name
        else:
            _, size, color = READABLE[name]
            assert image.size == size, name
            assert np.abs(np.subtract(image.getpixel((0, 0)), color)).max() <= 5, name


@pytest.mark.parametrize("kind", ["files", "shards"])
def test_every_broken_image_is_named_and_the_others_become_samples(sources, kind, make_data):
    source, names = sources[kind == "shards"], sources[2]
    broken = [i for i in range(len(source)) if names[source.targets[i]] in BROKEN]
    for is_train in (True, False):
        dataset = ImageDataset(source, make_data(), is_train, max_tries=len(source))
        named = set()
        for sample in dataset.__getitems__(list(range(len(source)))):
            assert sample.image.shape == (3, 16, 16)
            named.update(sample.unreadable)
        assert named == {source.name(i) for i in broken}
        assert all(".tar: 0000" in name or "files" in kind for name in named)
