"""The README.md of a model in timm's hub form, filled from its checkpoint."""

from pathlib import PurePath

from yacs.config import CfgNode

from swinv2_moe.config import default_config, flatten, model_config
from swinv2_moe.convert.summary import describe_model
from swinv2_moe.models import Complexity
from swinv2_moe.models.section import MODELS
from swinv2_moe.output import printable
from swinv2_moe.train.checkpoint import Checkpoint

# Keys whose values may be paths of the machine of the training.
PATH_KEYS = (
    "OUTPUT",
    "DATA.PATH",
    "DATA.TRAIN_LIST",
    "DATA.VAL_LIST",
    "DATA.STAGE",
    "MODEL.PRETRAINED",
    "MODEL.CLASS_MAP",
    "TRAIN.DISTILL.TEACHER",
    "TRAIN.DISTILL.CACHE",
)
_NOT_IN_CARDS = {*PATH_KEYS, "DEVICE", "TIMEOUT", "DATA.NUM_WORKERS", "MODEL.MOE.KERNELS"}
_HUBS = ("timm:", "hf-hub:", "bundled:")
_CARD = """\
---
library_name: timm
pipeline_tag: image-classification
tags:
- image-classification
- timm
- mixture-of-experts
# license: name the licence of the weights here, for example apache-2.0
---
# {title}

An image classifier with mixtures of experts, trained with SwinV2-MoE.

| | |
| --- | --- |
{facts}

Parameters are those of all experts. MACs are those that one image of {size} x {size} pixels
activates.

## Use

```python
import timm
import torch
from PIL import Image

import {module}  # registers the model with timm

model = timm.create_model("local-dir:DIRECTORY", pretrained=True).eval()
# after an upload: timm.create_model("hf-hub:OWNER/NAME", pretrained=True)
data = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**data, is_training=False)
image = Image.open("picture.jpg").convert("{mode}")
with torch.inference_mode():
    probabilities = model(transform(image)[None]).softmax(1)[0]
names = model.pretrained_cfg.get("label_names", range(model.num_classes))
for number in probabilities.topk(min(5, len(names))).indices.tolist():
    print(f"{{probabilities[number]:.1%}} {{names[number]}}")
```

Without `pretrained=True` timm creates the model with random weights. Upload: `hf upload OWNER/NAME
DIRECTORY`.

## Configuration

The keys of the training that differ from the defaults, without paths:

```yaml
{keys}
```

## Licence

Not stated. The owner of the weights names it here and in the first lines of this file.
"""


def last_part(key: str, value: str) -> str:
    """The last part of the path in a key of PATH_KEYS. Names of models stay as they are; of
    `timm:NAME@FILE` NAME stays."""
    if key in ("MODEL.PRETRAINED", "TRAIN.DISTILL.TEACHER") and value.startswith(_HUBS):
        name, at, file = value.partition("@")
        if value.startswith("timm:"):
            file = PurePath(file).name
        return f"{name}{at}{file}"
    return PurePath(value).name


def model_card(
    source: Checkpoint, config: CfgNode, num_classes: int, complexity: Complexity
) -> str:
    """The model card, in Markdown.

    Args:
        source: the checkpoint. Its meta.json has the accuracy, if the run validated at its step.
        config: configuration of the training.
    """
    section = model_config(config)
    module = MODELS[section.type].__module__
    if module.startswith("swinv2_moe.models."):
        module = "swinv2_moe"
    mode = "RGB"
    if section.in_chans == 1:
        mode = "L"
    facts = {
        "model": describe_model(section),
        "data set": _data_set(config, num_classes),
        "accuracy": _accuracy(source.meta),
        "parameters": f"{complexity.parameters / 1e6:,.2f}M",
        "MACs": f"{complexity.macs / 1e6:,.1f}M",
        "weights": f"step {source.meta['step']}, {_kind_of_weights(source)}",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return _CARD.format(
        title=f"{section.title}, {num_classes} classes",
        facts=rows,
        size=section.img_size,
        module=module,
        mode=mode,
        keys=_changed_keys(config),
    )


def _data_set(config: CfgNode, num_classes: int) -> str:
    """The kind of the data set and its number of classes. The path is omitted, since it may be
    private."""
    return f"{config.DATA.DATASET} ({num_classes:,} classes); name the images here"


def _accuracy(meta: dict) -> str:
    """The run's validation accuracy of these weights."""
    training = meta["training"] or {}
    top1 = training.get("last_top1")
    if top1 is None or training.get("validated_step") != meta["step"]:
        return "not measured with these weights"
    return f"top-1 {top1:.2f}% of the validation images"


def _kind_of_weights(source: Checkpoint) -> str:
    if source.weights_section == "ema":
        return "averaged over steps"
    return "as trained"


def _changed_keys(config: CfgNode) -> str:
    defaults = flatten(default_config())
    lines = []
    for name, value in flatten(config).items():
        if value != defaults[name] and name not in _NOT_IN_CARDS:
            lines.append(printable(f"{name}: {value}"))
    return "\n".join(lines)
