"""Copies of pictures with the predicted classes below."""

import numpy as np
import pytest
from PIL import Image

from swinv2_moe.errors import UserError
from swinv2_moe.predict.annotate import annotate, copy_name, save_annotated
from swinv2_moe.predict.prediction import ClassProbability, Prediction

TOP = (ClassProbability("cat", 0, 0.75), ClassProbability("dog", 1, 0.25))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((64, 48), (256, 192)),
        ((400, 300), (400, 300)),
        ((4000, 3000), (1024, 768)),
        ((3, 3000), (256, 1024)),  # its width is that of the text
        ((1, 1), (256, 256)),
    ],
)
def test_size_of_the_copy(size, expected):
    copy = annotate(Image.new("RGB", size, (200, 0, 0)), TOP)
    assert copy.width == expected[0]
    rows = copy.height - expected[1]
    assert 2 * 18 <= rows <= 2 * 64
    assert copy.mode == "RGB"


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "I;16"])
def test_every_mode(mode):
    assert annotate(Image.new(mode, (300, 200)), TOP).getpixel((0, 0)) in {(0,) * 3, (255,) * 3}


def test_the_picture_itself_is_not_changed():
    image = Image.new("RGB", (300, 200), (200, 0, 0))
    copy = annotate(image, TOP)
    assert image.size == (300, 200)
    assert copy.crop((0, 0, 300, 200)).tobytes() == image.tobytes()


def test_bars_are_as_long_as_the_probability():
    copy = np.asarray(annotate(Image.new("RGB", (400, 100)), TOP), int)
    rows = copy[100:]
    is_bar = (rows == (68, 119, 170)).all(2)
    first, second = np.split(is_bar, 2)
    assert abs(np.flatnonzero(first.any(0)).max() - 300) <= 1
    assert abs(np.flatnonzero(second.any(0)).max() - 100) <= 1


def test_a_name_that_does_not_fit_is_shortened():
    name = "a class with a very long name" * 9
    copy = annotate(Image.new("RGB", (300, 200)), (ClassProbability(name, 0, 0.0),))
    text = np.asarray(copy, int)[200:].max(2) > 100
    assert text[:, :150].any()
    assert not text[:, -3:].any()


def test_the_copy_is_a_jpeg_under_the_pictures_name(tmp_path):
    Image.new("L", (300, 200)).save(tmp_path / "a.png")
    prediction = Prediction(str(tmp_path / "a.png"), TOP)
    save_annotated(prediction, tmp_path / "new" / "deeper" / copy_name("a.png"))
    with Image.open(tmp_path / "new/deeper/a.png.jpg") as copy:
        assert copy.format == "JPEG"
    assert copy_name("b/photo.JPEG") == "b/photo.JPEG"


def test_a_picture_that_is_gone_and_a_target_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"--pictures .*b\.jpg: cannot be written"):
        save_annotated(Prediction(str(tmp_path / "a.png"), TOP), tmp_path / "b.jpg")
    Image.new("L", (30, 20)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"--pictures .*a\.png/b\.jpg: cannot be written"):
        save_annotated(Prediction(str(tmp_path / "a.png"), TOP), tmp_path / "a.png" / "b.jpg")
