"""Registry of model types: what MODEL.TYPE may name, and the keys below MODEL that each type reads.

A new type is one file `swinv2_moe/models/NAME_moe.py`:

>>> VIT = Section("VIT", {"PATCH_SIZE": 16, "IN_CHANS": 3, ...}, ranges={"PATCH_SIZE": (1, inf)})
>>> @register_model_type("vit_moe", VIT)
... class VisionTransformerMoE(MoEModel, VisionTransformer): ...

Its keys then exist in every configuration, and `build_model` passes them to the class, in lower
case, as keyword arguments.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from yacs.config import CfgNode

from swinv2_moe.errors import UserError

Model = TypeVar("Model", bound=type)


def _check_nothing(config: CfgNode) -> None:
    """The check of a section whose values cannot contradict each other."""


@dataclass(frozen=True)
class Section:
    """A group of keys below MODEL, read by one model type or several.

    Args:
        name: of the group: MODEL.<name>.
        defaults: each key's default; IN_CHANS (1 or 3) must be among them.
        ranges: the lowest and the highest value of a key, both included.
        check: raises UserError for values of a configuration that contradict each other.
        sizes: keys that summaries of a model show, under the names that they show them by.
        meanings: what a key means, for the reference of keys.
    """

    name: str
    defaults: Mapping[str, object]
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    check: Callable[[CfgNode], None] = _check_nothing
    sizes: Mapping[str, str] = field(default_factory=dict)
    meanings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelType:
    """A class of models and the section of the configuration that holds its arguments."""

    model: type
    section: Section


_TYPES: dict[str, ModelType] = {}


def register_model_type(name: str, section: Section) -> Callable[[Model], Model]:
    """A decorator that makes a subclass of `swinv2_moe.models.MoEModel` selectable by MODEL.TYPE.

    Raises:
        ValueError: the name is taken.
    """
    if name in _TYPES:
        raise ValueError(f"MODEL.TYPE {name!r} is registered already: {_TYPES[name].model}")

    def register(model: Model) -> Model:
        _TYPES[name] = ModelType(model, section)
        return model

    return register


def model_types() -> Mapping[str, ModelType]:
    """Every registered type by name. Imports the models, which register themselves."""
    importlib.import_module("swinv2_moe.models")
    return _TYPES


def model_type(config: CfgNode) -> ModelType:
    """The type that MODEL.TYPE names."""
    return model_types()[config.MODEL.TYPE]


def model_section(config: CfgNode) -> CfgNode:
    """The keys of the configured model: MODEL.SWINV2, or what its type has instead."""
    return config.MODEL[model_type(config).section.name]


def check_moe_blocks(config: CfgNode, depths: Sequence[int]) -> None:
    """Raise UserError where MODEL.MOE.BLOCKS names a block that no stage of `depths` has."""
    blocks = config.MODEL.MOE.BLOCKS
    for stage, chosen in enumerate(blocks):
        depth = 0
        if stage < len(depths):
            depth = depths[stage]
        for block in chosen:
            if not (isinstance(block, int) and 0 <= block < depth):
                raise UserError(
                    f"MODEL.MOE.BLOCKS is {blocks}: stage {stage} has no block {block}, its"
                    f" {depth} blocks count from 0"
                )
