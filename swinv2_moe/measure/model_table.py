"""Table of the configurations of this project: computed sizes, and the accuracy that the files
state."""

from pathlib import Path
from typing import NamedTuple

from swinv2_moe.config import load_config, model_config
from swinv2_moe.config.load import comment, config_names
from swinv2_moe.models import measure_model
from swinv2_moe.models.section import count_moe_layers

# Numbers of classes of configurations in which the data determine them.
_CLASSES = {
    "imagenette_96": 10,
    "quickstart_digits": 10,
    "vit_moe_digits": 10,
    "tiny_imagenet/finetune_96": 10,
}
_TINY_IMAGENET = 200
_HEAD = """\
# Models

Every configuration for classification. Parameters are those of all experts, over all ranks; MACs
those of one image. Accuracy is top-1 in percent, as the head of the file says; "measured" is ours.
`swinv2-moe configs NAME` prints the head, with the hardware and the duration. Made by
`swinv2-moe configs --markdown`.

| configuration | pixels | experts | parameters | MACs | accuracy |
| --- | ---: | --- | ---: | ---: | --- |
"""


class Row(NamedTuple):
    """A configuration. `accuracy`: the lines of its comment about accuracy."""

    name: str
    image_size: int
    experts: str
    parameters: int
    macs: int
    accuracy: list[str]


def rows() -> list[Row]:
    """Every configuration that `swinv2-moe train` accepts. Each model is built on the meta
    device."""
    model_rows = []
    for name, path in config_names().items():
        is_part = name.startswith("ablations/") or name.endswith("recipe")
        if path.suffix == ".yaml" and not is_part:
            model_rows.append(row_of(name, path))
    return model_rows


def row_of(name: str, path: Path) -> Row:
    """The row of the configuration `name` in the file `path`."""
    opts = []
    if name.startswith("upcycle/") or "finetune" in name:
        opts = ["MODEL.PRETRAINED", "any weights"]
    config = load_config(path, opts, data="anywhere")
    model = model_config(config)
    default = _TINY_IMAGENET if name.startswith("tiny_imagenet/") else 0
    num_classes = model.num_classes or _CLASSES.get(name, default)
    size = measure_model(model, num_classes)
    experts = "dense"
    if model.experts.layer is not None:
        layers = count_moe_layers(model.experts.blocks)
        experts = f"{model.experts.num_experts} in {layers} layers"
    accuracy = [
        line.removeprefix("Accuracy").lstrip(",: ").rstrip(".")
        for line in comment(path)
        if line.startswith("Accuracy")
    ]
    return Row(name, model.img_size, experts, size.parameters, size.macs, accuracy)


def markdown(table: list[Row]) -> str:
    """The page docs/reference/models.md."""
    lines = []
    for row in table:
        accuracy = [line for line in row.accuracy if not line.startswith("measured: none")]
        cells = [
            f"`{row.name}`",
            str(row.image_size),
            row.experts,
            f"{row.parameters / 1e6:,.1f}M",
            f"{row.macs / 1e6:,.0f}M",
            "; ".join(accuracy),
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(lines)
