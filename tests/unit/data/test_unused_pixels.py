"""Pixels that are not used are counted in a message: bands beyond RGB, pages beyond the first, the
ends of wide images."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from swinv2_moe.data.images import decode, read_header
from swinv2_moe.data.sources import load_sources

BANDS, PAGES = "bands beyond grey or RGB", "pages or frames beyond the first"


def tiff(bands: int, photometric: int, extra: list[int], planar: int = 1) -> bytes:
    """A TIFF of 16 x 12 pixels with 8-bit bands of the values 200, 180, ..."""
    width, height = 16, 12
    data = np.empty((height, width, bands), np.uint8)
    data[:] = np.arange(200, 200 - 20 * bands, -20)
    num_strips = 1
    if planar == 2:
        data, num_strips = data.transpose(2, 0, 1), bands
    size = data.size // num_strips
    tags = {256: [width], 257: [height], 258: [8] * bands, 259: [1], 262: [photometric]}
    tags |= {273: [0] * num_strips, 277: [bands], 278: [height], 279: [size] * num_strips}
    tags |= {284: [planar]} | ({338: extra} if extra else {})
    start = 8 + 2 + 12 * len(tags) + 4  # of values of more than 4 bytes
    long = sum(4 * len(values) for values in tags.values() if len(values) > 1)
    tags[273] = [start + long + size * i for i in range(num_strips)]
    entries = more = b""
    for tag, values in tags.items():
        raw = struct.pack(f"<{len(values)}I", *values)
        if len(raw) > 4:
            raw, more = struct.pack("<I", start + len(more)), more + raw
        entries += struct.pack("<HHI", tag, 4, len(values)) + raw
    header = b"II*\0" + struct.pack("<IH", 8, len(tags))
    return header + entries + bytes(4) + more + data.tobytes()


def saved(kind: str, num_pages: int, **keys) -> bytes:
    pages = [Image.new("RGB", (16, 12), (40 * i, 0, 0)) for i in range(num_pages)]
    file = io.BytesIO()
    pages[0].save(file, kind, save_all=True, append_images=pages[1:], **keys)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "unused"),
    [
        (tiff(3, 2, []), ""),
        (tiff(4, 2, [2]), ""),  # RGB and opacity
        (tiff(4, 5, []), ""),  # CMYK
        (tiff(1, 1, []), ""),
        (tiff(4, 2, [0]), BANDS),
        (tiff(6, 2, [0, 0, 0]), BANDS),
        (tiff(2, 1, [0]), BANDS),
        (saved("TIFF", 1), ""),
        (saved("TIFF", 3), PAGES),
        (saved("GIF", 2), PAGES),
        (saved("WEBP", 2), PAGES),
        (saved("PNG", 2), PAGES),
        (saved("GIF", 1), ""),
    ],
)
def test_what_is_left_out_of_an_image(content, unused):
    assert read_header(io.BytesIO(content)) == (16, 12, unused)
    decode(content)


def test_smaller_copies_of_a_page_are_no_pages():
    content = saved("TIFF", 1)
    image = Image.open(io.BytesIO(content))
    file = io.BytesIO()
    preview = Image.new("RGB", (8, 6))
    preview.encoderinfo = {"tiffinfo": {254: 1}}
    image.save(file, "TIFF", save_all=True, append_images=[preview])
    assert read_header(io.BytesIO(file.getvalue())).unused == ""


@pytest.mark.parametrize("content", [tiff(4, 2, [0], planar=2), tiff(4, 1, [0, 0, 0])])
def test_an_arrangement_that_is_not_read_names_the_bands(content):
    says = r"^a TIFF of 4 bands with 8 bits each, .* convert it to 1 or 3 bands of 8 bits$"
    for read in (decode, lambda content: read_header(io.BytesIO(content))):
        with pytest.raises(ValueError, match=says):
            read(content)
        with pytest.raises(ValueError, match=r"^no"):
            read(b"II*\0" + bytes(20))


@pytest.fixture
def load(make_folder, make_data):
    """`load(contents, ...)`: the notes of a folder whose first training images have these
    contents."""
    root = make_folder()

    def load(contents, *keys, validation_only=False) -> list[str]:
        for number, content in enumerate(contents):
            (root / "train/cat" / f"{number}.png").write_bytes(content)
        section = make_data({"DATA.DATASET": "folder", "DATA.PATH": str(root)}, *keys)
        notes = load_sources(section, validation_only).notes
        return [note.replace(str(root), "ROOT") for note in notes]

    return load


def test_a_run_says_it_once(load):
    contents = [tiff(4, 2, [0]), saved("TIFF", 3), tiff(6, 2, [0] * 3), b"broken"]
    looked = "of 7 images that were looked at have"
    assert load(contents) == [
        f"warning: 2 {looked} {BANDS}, which are not used; the first: ROOT/train/cat/0.png",
        f"warning: 1 {looked} {PAGES}, which are not used; the first: ROOT/train/cat/1.png",
    ]
    assert load(contents, validation_only=True) == []


def test_wide_images_are_cropped_in_evaluation(load):
    file = io.BytesIO()
    Image.new("RGB", (90, 30)).save(file, "PNG")
    contents = [file.getvalue() + bytes([number]) for number in range(4)]
    assert load(contents) == []  # half of them
    file = io.BytesIO()
    Image.new("RGB", (30, 120)).save(file, "PNG")
    assert load([*contents, file.getvalue()]) == [
        "most images are wide or tall (3.0 : 1): evaluation sees the middle, about 26% of such an"
        " image; TEST.CROP_RATIO 0 uses all of it"
    ]
    assert load([], {"TEST.CROP_RATIO": 0.0}) == []
