"""The yacs tree of all keys with their defaults, made from the sections."""

import copy
import functools
from typing import Any

from yacs.config import CfgNode

from moe_core.options import options
from swinv2_moe.config import sections
from swinv2_moe.data.section import AugmentConfig, CropConfig, DataConfig
from swinv2_moe.model_types import model_types


def _group(section: type) -> CfgNode:
    """The group of a section's keys, with their defaults."""
    return copy.deepcopy(_shared_group(section))


@functools.cache
def _shared_group(section: type) -> CfgNode:
    group = CfgNode()
    for field, option in options(section):
        if option.is_key:
            group[field.name.upper()] = _with_lists(field.default)
    return group


def _with_lists(value: object) -> object:
    """The value with tuples replaced by lists, also inside of tuples."""
    if isinstance(value, tuple):
        return [_with_lists(item) for item in value]
    return value


def default_config() -> CfgNode:
    """A mutable tree of all keys with their defaults, for the sections and every registered model
    type."""
    config = _group(sections.RunConfig)
    config.CHECKPOINT = _group(sections.CheckpointConfig)
    config.DATA = _group(DataConfig)
    config.MODEL = _group(sections.ModelConfig)
    for model_type in model_types().values():
        section = model_type.section
        config.MODEL[section.name] = CfgNode(copy.deepcopy(dict(section.defaults)))
    config.MODEL.MOE = _group(sections.ExpertsConfig)
    for name, default in sections.moe_defaults().items():
        config.MODEL.MOE[name.upper()] = default
    config.TRAIN = _group(sections.TrainConfig)
    config.TRAIN.OPTIMIZER = _group(sections.OptimizerConfig)
    config.AUG = _group(AugmentConfig)
    config.TEST = _group(CropConfig)
    return config


def flatten(config: CfgNode, prefix: str = "") -> dict[str, Any]:
    """`{"TRAIN.BASE_LR": 1e-3, ...}`, in the order of definition."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, CfgNode):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
