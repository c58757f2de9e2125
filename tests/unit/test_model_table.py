"""docs/reference/models.md has a row for each configuration, with its size and accuracy."""

import re
from pathlib import Path

import pytest

from swinv2_moe.config import load_config, model_config
from swinv2_moe.config.load import config_names
from swinv2_moe.models import measure_model

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
# Numbers of classes of configurations in which the data determine them.
CLASSES = {"tiny_imagenet": 200, "tiny_imagenet/finetune_96": 10, ".": 10}
NAMES = {
    name: path
    for name, path in config_names().items()
    if path.suffix == ".yaml" and not name.startswith("ablations/") and path.stem != "recipe"
}
QUICK = [
    "quickstart_digits",
    "vit_moe_digits",
    "tiny_imagenet/32expert_fine",
    "tiny_imagenet/finetune_96",
    "in22k/swin_moe_small_window12_192_8expert",
    "upcycle/swinv2_moe_tiny_window8_256_8expert",
]


def row_of(name: str) -> str:
    """Its row; the model is built on the meta device."""
    head = [line[2:] for line in NAMES[name].read_text().splitlines() if line.startswith("# ")]
    pretrained = ["MODEL.PRETRAINED", "any weights"]
    is_start = not name.startswith("upcycle/") and "finetune" not in name
    model = model_config(load_config(name, [] if is_start else pretrained, data="anywhere"))
    default = CLASSES.get(str(Path(name).parent), 0)
    size = measure_model(model, model.num_classes or CLASSES.get(name, default))
    experts = "dense"
    if model.experts.layer is not None:
        experts = f"{model.experts.num_experts} in {sum(map(len, model.experts.blocks))} layers"
    said = [line[8:].lstrip(",: ").rstrip(".") for line in head if line.startswith("Accuracy")]
    nothing = ("measured: none", "published: none")
    accuracy = "; ".join(line for line in said if not line.startswith(nothing))
    accuracy = re.sub(r" \(measured; docs/[^)]*\)", "", accuracy)
    for written, short in (
        (r"; [\d.]+M parameters$", ""),
        (r"published \(arXiv 2206.03382\): (?:top-1 )?", "published: "),
        (r" on ImageNet-22K, (\S+) fine-tuned on ImageNet-1K,", r"; ImageNet-1K \1,"),
        (r", (\S+) 5-shot", r", 5-shot \1"),
        (r"^(published: [\d.]+) on ImageNet-1K$", r"\1"),
    ):
        accuracy = re.sub(written, short, accuracy)
    sizes = f"{size.parameters / 1e6:,.1f}M | {size.macs / 1e6:,.0f}M"
    return f"| `{name}` | {model.img_size} | {experts} | {sizes} | {accuracy} |"


@pytest.mark.parametrize("name", QUICK)
def test_a_row(name):
    assert row_of(name) in PAGE.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES.keys() - set(QUICK)))
def test_other_rows(name):
    assert row_of(name) in PAGE.read_text().splitlines()


def test_every_configuration_has_a_row():
    text = PAGE.read_text()
    names = set(re.findall(r"^\| `([^`]*)` \| \d", text, re.MULTILINE))
    for folder, files in re.findall(r"^\| `(detection/.*?)` \| (.*) \|$", text, re.MULTILINE):
        names |= {folder + name for name in re.findall("`(.*?)`", files)}
    detectors = {name for name in config_names() if name.startswith("detection/")}
    assert names == NAMES.keys() | {name for name in detectors if "/_base_/" not in name}
