"""swinv2_moe.detection.show: boxes, masks and experts are drawn where they are; no image is
overwritten by another."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmdet")

from mmengine.structures import InstanceData

from swinv2_moe.data.images import image_paths
from swinv2_moe.detection.show import _names, _read, draw, draw_objects
from swinv2_moe.errors import UserError
from swinv2_moe.routing_pictures import paint

META = {"classes": ("cat", "dog"), "palette": [(255, 0, 0), (0, 0, 255)]}
NOTHING = InstanceData(
    bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long), scores=torch.zeros(0)
)


def one_dog() -> InstanceData:
    mask = torch.zeros(1, 60, 80, dtype=torch.bool)
    mask[0, 20:40, 30:60] = True
    return InstanceData(
        bboxes=torch.tensor([[28.0, 18, 62, 42]]),
        masks=mask,
        labels=torch.tensor([1]),
        scores=torch.tensor([0.87]),
    )


def panels(figure) -> list:
    return [axes for axes in figure.axes if axes.images]


def test_draws_the_object_where_it_is() -> None:
    photo = np.full((60, 80, 3), 100, np.uint8)
    (axes,) = panels(draw(photo, one_dog(), {}, META))
    assert axes.get_title() == "1 objects"
    pixels = np.asarray(axes.images[0].get_array()).astype(int)
    assert pixels.shape == (8 * 60, 8 * 80, 3)
    red, _, blue = pixels[8 * 30, 8 * 62]  # on the box
    assert blue > 180 > 60 > red
    pixels = pixels[4::8, 4::8]
    mask = pixels[25:38, 32:58]  # below the text; mmdetection varies the colours of masks
    assert (mask != 100).any(2).all()
    assert (pixels[48:] == 100).all()
    assert (pixels[:, 72:] == 100).all()
    assert (photo == 100).all()


def test_any_name_of_a_class_is_text() -> None:
    photo = np.full((60, 80, 3), 100, np.uint8)
    for name in ("$", "$a$", "$^$", "a\x1b[2J\nb"):
        picture = draw_objects(photo, one_dog(), META | {"classes": ("cat", name)})
        assert picture.shape == (8 * 60, 8 * 80, 3)


def dog_without_mask() -> InstanceData:
    """mmdetection draws a mask's colour by chance."""
    detections = one_dog()
    del detections.masks
    return detections


@pytest.mark.parametrize(
    "palette", [None, [(255, 0, 0)], "red", [(1, 2), (3, 4)], [("a",) * 3] * 2]
)
def test_without_a_colour_for_each_class_mmdetection_chooses(palette) -> None:
    photo = np.full((60, 80, 3), 100, np.uint8)
    pictures = [
        draw_objects(photo, dog_without_mask(), META | {"palette": choice})
        for choice in (palette, None)
    ]
    assert (pictures[0] == pictures[1]).all()
    assert (pictures[0] != 100).any()


def test_classes_without_names_are_numbers() -> None:
    photo = np.full((60, 80, 3), 100, np.uint8)
    pictures = [
        draw_objects(photo, dog_without_mask(), {"classes": names})
        for names in ((), ("cat",), ("cat", "class 1"))
    ]
    assert all((picture == pictures[0]).all() for picture in pictures)


def test_draws_experts_in_their_colours_over_the_whole_image() -> None:
    photo = np.zeros((60, 80, 3), np.uint8)
    ids = {"backbone.trunk.layers.2.blocks.1.mlp.moe": np.array([[0, 2], [1, 2]])}
    figure = draw(photo, NOTHING, ids | {"b": np.array([[3]])}, META)
    titles = [axes.get_title() for axes in panels(figure)]
    assert titles == ["0 objects", "layers.2.blocks.1", "b"]
    painted = panels(figure)[1].images[0].get_array()
    assert painted.shape == photo.shape
    assert (painted == paint(photo[None], np.array([[[0, 2], [1, 2]]]))[0]).all()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["0", "1", "2", "3"]


def test_any_number_of_layers_fits() -> None:
    for layers in (0, 1, 2, 3, 10):
        experts = {f"{i}": np.zeros((3, 4), int) for i in range(layers)}
        figure = draw(np.zeros((60, 80, 3), np.uint8), NOTHING, experts, META)
        assert len(panels(figure)) == 1 + layers


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("b.jpg", "a.PNG", "notes.txt"):
        (tmp_path / "in" / name).write_bytes(b"")
    (tmp_path / "b.png").write_bytes(b"")
    files = image_paths([str(tmp_path / "b.png"), str(tmp_path / "in")])
    assert [file.name for file in files] == ["b.png", "a.PNG", "b.jpg"]
    assert list(_names([*files, Path("b_2.gif")])) == ["b.png", "a.png", "b_2.png", "b_2_2.png"]


def test_grey_and_broken_images(tmp_path: Path) -> None:
    Image.new("L", (5, 4), 7).save(tmp_path / "grey.png")
    assert _read(tmp_path / "grey.png").tolist() == [[[7, 7, 7]] * 5] * 4
    (tmp_path / "broken.png").write_bytes((tmp_path / "grey.png").read_bytes()[:30])
    with pytest.raises(UserError, match=r"broken\.png: not an image that can be read"):
        _read(tmp_path / "broken.png")
