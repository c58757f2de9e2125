"""Export a checkpoint in timm's hub form: config.json, model.safetensors and a model card.

`timm.create_model("local-dir:DIR", pretrained=True)` loads the directory, or `hf-hub:OWNER/NAME`
after an upload, once the module of the model's class is imported.
"""

from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import ModelCardData
from timm.models import save_for_hf
from torch import nn

from moe_core.files import fsync, publish_directory
from swinv2_moe import __version__
from swinv2_moe.checkpoints.checkpoint import (
    Checkpoint,
    check_network,
    count_classes,
    open_newest,
    read_weights_of,
)
from swinv2_moe.config import as_opts, config_from_text, data_config, model_config
from swinv2_moe.convert.files import check_new
from swinv2_moe.convert.summary import describe_model
from swinv2_moe.data.section import DataConfig
from swinv2_moe.errors import UserError
from swinv2_moe.files import new_directory, writing
from swinv2_moe.models import load_strict, measure_model, model_arguments
from swinv2_moe.models.section import MODELS, ModelConfig

# Keys about the machine of the training, with the values that are exported instead.
_NOT_THE_MODELS = {"MODEL.MOE.KERNELS": "auto"}
_CARD = """\
---
{front_matter}
# license: name the licence of the weights here, for example apache-2.0
---
# {type}, {classes:,} classes

{model}; {parameters:,.2f}M parameters, {macs:,.1f}M MACs for an image of {size} x {size} pixels.
Data set: {data_set} ({classes:,} classes); name the images here. Accuracy: {accuracy}.
Written by swinv2-moe {version}.

```python
import timm

import {module}  # registers the model with timm

model = timm.create_model("local-dir:DIRECTORY", pretrained=True).eval()
# after `hf upload OWNER/NAME DIRECTORY`: timm.create_model("hf-hub:OWNER/NAME", pretrained=True)
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
class_names = model.pretrained_cfg.get("label_names")
```
"""


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
    card = _card(source, section, data.dataset, num_classes)
    with new_directory(output) as directory, writing(output):
        save_for_hf(
            model,
            str(directory),
            model_config=labels,
            model_args=arguments,
            safe_serialization=True,
            data_config=timm_preprocessing(data),
        )
        (directory / "README.md").write_text(card)  # `hf upload` sends it, too
        _check_weights(model, directory)
        for file in directory.iterdir():
            fsync(file)
        publish_directory(directory, output)


def _card(source: Checkpoint, model: ModelConfig, data_set: str, num_classes: int) -> str:
    """The model card, without paths of the training's machine."""
    module = MODELS[model.type].__module__
    if module.startswith("swinv2_moe.models."):
        module = "swinv2_moe"
    training = source.meta["training"] or {}
    accuracy = "not measured with these weights"
    if training.get("last_top1") and training.get("validated_step") == source.meta["step"]:
        accuracy = f"top-1 {training['last_top1']:.2f}% of the validation images"
    size = measure_model(model, num_classes)
    tags = ["image-classification", "timm", "mixture-of-experts"]
    about = ModelCardData(library_name="timm", pipeline_tag="image-classification", tags=tags)
    return _CARD.format(
        front_matter=about.to_yaml(),
        type=model.type,
        classes=num_classes,
        model=describe_model(model),
        parameters=size.parameters / 1e6,
        macs=size.macs / 1e6,
        size=model.img_size,
        data_set=data_set,
        accuracy=accuracy,
        module=module,
        version=__version__,
    )


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
