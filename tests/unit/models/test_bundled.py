"""The file of the package's model: its size, its card, its configuration, and its use by timm."""

import re

import pytest
import timm
import torch

import swinv2_moe
from moe_core.files import sha256
from swinv2_moe.config import config_from_text
from swinv2_moe.models.bundled import DIRECTORY, NAMES, bundled_file
from swinv2_moe.models.weight_files import read_metadata

MOST_BYTES = 16_000_000
# What a card has to say, in its own words.
TOLD = ("non-commercial", "Apache-2.0", "Tiny-ImageNet", "Imagenette", "cannot")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_and_its_card(name):
    file = bundled_file(name)
    assert file.stat().st_size <= MOST_BYTES
    card = (DIRECTORY / f"{name}.md").read_text()
    assert sha256([file.read_bytes()]) in card
    for words in TOLD:
        assert words in card, words


@pytest.mark.parametrize("name", NAMES)
def test_a_file_names_no_path_of_the_machine_that_made_it(name):
    metadata = read_metadata(bundled_file(name))
    config = config_from_text(metadata["config"], name)
    assert (config.OUTPUT, config.TRAIN.DISTILL.CACHE) == ("", "")
    assert not re.search(r"/(home|root|tmp|work)\b", " ".join(metadata.values()))


def test_load_and_timm_give_the_same_model():
    model = swinv2_moe.load("tiny", "cpu")
    of_timm = timm.create_model("swinv2_moe_bundled_tiny", pretrained=True).eval()
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(of_timm(images), model.module(images))
    assert len(model.class_names) == of_timm.num_classes == 1000
