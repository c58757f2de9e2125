"""Registry of model types: the allowed values of MODEL.TYPE, and the keys below MODEL that each
type reads.

A new type is one file `swinv2_moe/models/NAME_moe.py`:

>>> VIT = Section("VIT", {"PATCH_SIZE": 16, ...}, ranges={"PATCH_SIZE": (1, inf)})
>>> @register_model_type("vit_moe", VIT)
... class VisionTransformerMoE(MoEModel, VisionTransformer): ...

Its keys then exist in every configuration, and `build_model` passes them to the class, in lower
case, as keyword arguments. If the section is in swinv2_moe.model_sections, configurations are
checked without importing the model.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from yacs.config import CfgNode

from swinv2_moe.model_sections import SECTIONS, Section, check_moe_blocks

__all__ = [
    "ModelType",
    "Section",
    "check_moe_blocks",
    "model_section",
    "model_type",
    "model_types",
    "register_model_type",
]

Model = TypeVar("Model", bound=type)
_MODELS = "swinv2_moe.models"


@dataclass
class ModelType:
    """A class of models and the section of the configuration that holds its arguments."""

    section: Section
    registered: type | None = None  # None: not imported yet

    @property
    def model(self) -> type:
        """The model class. The first access imports the models, which takes seconds."""
        if self.registered is None:
            importlib.import_module(_MODELS)
        assert self.registered is not None
        return self.registered


_TYPES = {name: ModelType(section) for name, section in SECTIONS.items()}


def register_model_type(name: str, section: Section) -> Callable[[Model], Model]:
    """Decorator that registers a subclass of `swinv2_moe.models.MoEModel` as a value of MODEL.TYPE.

    Raises:
        ValueError: the name is registered already.
    """
    existing = _TYPES.get(name, ModelType(section))
    if existing.registered or existing.section is not section:
        raise ValueError(f"MODEL.TYPE {name!r} is registered already: {existing.model}")

    def register(model: Model) -> Model:
        existing.registered = model
        _TYPES[name] = existing
        return model

    return register


def model_types() -> Mapping[str, ModelType]:
    """All model types by name. Imports the models only if the section of a model is not known."""
    _import_unknown()
    return _TYPES


@functools.cache
def _import_unknown() -> None:
    """Import the models if a model's file is not in SECTIONS, because its section is then in that
    file."""
    folder = Path(__file__).parent / "models"
    for module in pkgutil.iter_modules([str(folder)]):
        if module.name.endswith("_moe") and module.name not in _TYPES:
            importlib.import_module(_MODELS)


def model_type(config: CfgNode) -> ModelType:
    """The type that MODEL.TYPE names."""
    return model_types()[config.MODEL.TYPE]


def model_section(config: CfgNode) -> CfgNode:
    """The section of the configured model: MODEL.SWINV2, or the section of another model type."""
    return config.MODEL[model_type(config).section.name]
