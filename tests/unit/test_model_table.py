"""docs/reference/models.md is what `swinv2-moe configs --markdown` prints."""

import re
from pathlib import Path

import pytest

from swinv2_moe.config.load import config_names
from swinv2_moe.measure.model_table import markdown, row_of, rows

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


@pytest.mark.parametrize(
    "name",
    [
        "quickstart_digits",
        "vit_moe_digits",
        "tiny_imagenet/32expert_fine",
        "tiny_imagenet/finetune_96",
        "in22k/swin_moe_small_window12_192_8expert",
        "upcycle/swinv2_moe_tiny_window8_256_8expert",
    ],
)
def test_a_row(name):
    (line,) = markdown([row_of(name, config_names()[name])]).splitlines()[-1:]
    assert line in PAGE.read_text().splitlines()


def test_every_configuration_has_a_row():
    files = config_names().items()
    names = [name for name, path in files if path.suffix == ".yaml"]
    names = [name for name in names if not name.startswith("ablations/")]
    names = [name for name in names if not name.endswith("recipe")]
    assert re.findall(r"^\| `(.*?)`", PAGE.read_text(), re.MULTILINE) == names


@pytest.mark.slow
def test_the_whole_page():
    assert PAGE.read_text() == markdown(rows())
