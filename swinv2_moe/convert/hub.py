"""Export a checkpoint in timm's hub form: config.json, model.safetensors and a model card.

`timm.create_model("local-dir:DIR", pretrained=True)` loads the directory, or `hf-hub:OWNER/NAME`
after an upload, once the module of the model's class is imported.
"""

from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf
from torch import nn

from moe_core.files import fsync, publish_directory
from swinv2_moe.config import as_opts, config_from_text, data_config, model_config
from swinv2_moe.convert.files import check_new
from swinv2_moe.convert.model_card import model_card
from swinv2_moe.data.section import DataConfig
from swinv2_moe.errors import UserError
from swinv2_moe.files import new_directory, writing
from swinv2_moe.models import load_strict, measure_model, model_arguments
from swinv2_moe.train.checkpoint import (
    check_network,
    count_classes,
    open_newest,
    read_weights_of,
)

# Keys about the machine of the training, with the values that are exported instead.
_NOT_THE_MODELS = {"MODEL.MOE.KERNELS": "auto"}


def export_hub(checkpoint: Path, output: Path) -> None:
    """Write the new directory `output` from a checkpoint or run.

    Averaged weights are used if there are any. The files are loaded back and compared with the
    checkpoint before the directory appears.

    Raises:
        UserError: no complete checkpoint, a model type without a timm name, an `output` that exists
            or cannot be written; nothing is written.
    """
    check_new(output)
    source = open_newest(checkpoint)
    name = f"checkpoint {source.directory}"
    config = config_from_text(source.meta["config"], name, as_opts(_NOT_THE_MODELS))
    section = model_config(config)
    registered = "timm_moe" if section.type == "timm" else section.type
    if not timm.is_model(registered):
        raise UserError(
            f"MODEL.TYPE is {section.type!r}: timm has no model of that name; register one"
            " (timm.models.register_model) in the file of the class"
        )
    num_classes = count_classes(source, section)
    check_network(source, section, num_classes)
    arguments = model_arguments(section, num_classes)
    model: Any = timm.create_model(registered, **arguments).eval()
    load_strict(model, read_weights_of(source, model), name)
    labels = {"label_names": source.meta["class_names"]}
    data = data_config(config)
    card = model_card(source, config, num_classes, measure_model(section, num_classes))
    with new_directory(output) as directory, writing(output):
        save_for_hf(
            model,
            str(directory),
            model_config=labels,
            model_args=arguments,
            safe_serialization=True,
            data_config=timm_preprocessing(data),
        )
        (directory / "README.md").write_text(card)
        _check_weights(model, directory)
        for file in directory.iterdir():
            fsync(file)
        publish_directory(directory, output)


def timm_preprocessing(config: DataConfig) -> dict[str, object]:
    """The preprocessing of evaluation, under the names of timm's data configuration."""
    interpolation = config.interpolation
    if interpolation == "random":
        interpolation = "bilinear"
    preprocessing = {
        "input_size": (config.channels, config.img_size, config.img_size),
        "interpolation": interpolation,
        "mean": config.mean,
        "std": config.std,
        "crop_pct": config.test.crop_ratio,
        "crop_mode": "center",
    }
    if not config.test.crop_ratio:  # without a crop, the image is stretched to the square
        preprocessing |= {"crop_pct": 1.0, "crop_mode": "squash"}
    return preprocessing


def _check_weights(model: nn.Module, directory: Path) -> None:
    """Check that timm reads the weights of `model` from `directory`."""
    state = timm.create_model(f"local-dir:{directory}", pretrained=True).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), f"{name} differs in {directory}"
