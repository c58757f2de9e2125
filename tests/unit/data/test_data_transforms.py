"""timm's transforms under our keys, against the recipes written out with Pillow."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import posterize
from torchvision.transforms import InterpolationMode

from swinv2_moe.data.transforms import _augment_ops, build_transform
from swinv2_moe.errors import UserError

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def picture(width=300, height=200, mode="RGB"):
    rng = np.random.default_rng(width + height)
    small = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def normalised(image):
    pixels = np.asarray(image, np.float32) / 255
    return torch.from_numpy((pixels - np.float32(MEAN)) / np.float32(STD)).permute(2, 0, 1)


@pytest.fixture
def make_transform(make_data):
    """`make_transform(is_train, {"AUG.HFLIP": 1.0}, ...)`."""
    return lambda is_train, *keys: build_transform(make_data(*keys), is_train)


def test_eval_crop_is_swinv2s_recipe(make_transform):
    """At 192 px: short side to 219, the middle 192 x 192."""
    image = picture(300, 200)
    got = make_transform(False, {"DATA.IMG_SIZE": 192})(image)
    resized = image.resize((int(219 * 300 / 200), 219), Image.Resampling.BICUBIC)
    left, top = round((resized.width - 192) / 2), round((219 - 192) / 2)
    assert math.floor(192 / 0.875) == 219
    torch.testing.assert_close(got, normalised(resized.crop((left, top, left + 192, top + 192))))


def test_eval_without_crop_resizes_both_sides(make_transform):
    keys = {"DATA.IMG_SIZE": 64, "TEST.CROP_RATIO": 0.0, "DATA.INTERPOLATION": "bilinear"}
    image = picture(300, 200)
    want = normalised(image.resize((64, 64), Image.Resampling.BILINEAR))
    torch.testing.assert_close(make_transform(False, keys)(image), want)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "random"])
def test_train_with_everything_off_is_eval_without_crop(
    make_transform, no_augmentation, interpolation
):
    keys = {"TEST.CROP_RATIO": 0.0, "DATA.INTERPOLATION": interpolation}
    for size in ((300, 200), (64, 640), (8, 8)):
        image = picture(*size)
        train = make_transform(True, no_augmentation, keys)(image)
        val = make_transform(False, no_augmentation, keys)(image)
        assert torch.equal(train, val), size


def test_flip_alone_is_a_mirror_and_nothing_is_turned_upside_down(make_transform, no_augmentation):
    image = picture()
    flipped = make_transform(True, no_augmentation, {"AUG.HFLIP": 1.0})(image)
    want = make_transform(False, no_augmentation, {"TEST.CROP_RATIO": 0.0})(image).flip(-1)
    # mirrored before the 8-bit rounding or after
    torch.testing.assert_close(flipped, want, atol=0.05, rtol=0)


def test_each_key_changes_pictures(make_transform, no_augmentation):
    image = picture()
    for keys in (
        {"AUG.SCALE": [0.2, 0.5]},
        {"AUG.HFLIP": 0.5},
        {"AUG.COLOR_JITTER": 0.4},
        {"AUG.AUTO_AUGMENT": "rand-m9-mstd0.5-inc1"},
        {"AUG.REPROB": 1.0},
    ):
        transform = make_transform(True, no_augmentation, keys)
        assert len({transform(image).numpy().tobytes() for _ in range(10)}) > 1, keys


def test_the_crop_and_the_erasing_follow_their_keys(make_transform, full_augmentation):
    keys = {"AUG.SCALE": [0.3, 0.4], "AUG.REPROB": 0.1, "DATA.INTERPOLATION": "nearest"}
    crop, *_, erase = make_transform(True, full_augmentation, keys).transforms
    assert (crop.size, tuple(crop.scale), tuple(crop.ratio)) == (
        (16, 16),
        (0.3, 0.4),
        (3 / 4, 4 / 3),
    )
    assert crop.interpolation == InterpolationMode.NEAREST
    assert (erase.probability, erase.mode, erase.max_count) == (0.1, "pixel", 1)


@pytest.mark.parametrize("size", [8, 96])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("policy", ["", "none", "rand-m9-mstd0.5-inc1", "original", "augmix-m3-w3"])
def test_shape_and_type_at_every_policy(make_transform, full_augmentation, size, mode, policy):
    channels = len(mode)  # 3 or 1
    keys = {"DATA.IMG_SIZE": size, "AUG.AUTO_AUGMENT": policy}
    keys |= {"DATA.MEAN": MEAN[:channels], "DATA.STD": STD[:channels]}
    for is_train in (True, False):
        transform = make_transform(is_train, full_augmentation, keys)
        for image in (picture(mode=mode), picture(8, 8, mode), picture(1, 1, mode)):
            for _ in range(3 if is_train else 1):
                out = transform(image)
                assert (out.shape, out.dtype) == ((channels, size, size), torch.float32)
                assert out.isfinite().all()


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "original", "originalr", "augmix-m10"])
def test_no_posterise_goes_below_one_bit(make_transform, policy):
    """Pillow 13 raises a ValueError for the 0 bits that timm's strongest level asks for."""
    transform = make_transform(True, {"AUG.AUTO_AUGMENT": policy})
    ops = [op for op in _augment_ops(transform) if op.name.startswith("Posterize")]
    assert ops
    for op in ops:
        got = op.aug_fn(picture(), 0)
        assert got.tobytes() == posterize(picture(), 1).tobytes()


@pytest.mark.parametrize(("size", "scale"), [((1, 1), 0.08), ((3, 1), 0.08), ((24, 20), 0.005)])
def test_a_random_crop_has_at_least_one_pixel(make_transform, no_augmentation, size, scale):
    """timm's crop of 0 pixels would be a black image."""
    white = Image.new("RGB", size, "white")
    keys = {"AUG.SCALE": [scale, scale]}
    transform = make_transform(True, no_augmentation, keys)
    wanted = make_transform(False, no_augmentation)(white)
    for _ in range(30):
        torch.testing.assert_close(transform(white), wanted)


def test_an_unknown_policy_is_the_users_mistake(make_transform):
    for policy in ("rnad-m9", "rand-x9"):
        with pytest.raises(UserError, match=rf"AUG\.AUTO_AUGMENT is '{policy}'"):
            make_transform(True, {"AUG.AUTO_AUGMENT": policy})
