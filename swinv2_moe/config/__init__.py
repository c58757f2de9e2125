"""Configuration: yacs files and KEY VALUE pairs outside, typed frozen sections inside.

`load_config` reads and checks a yacs tree. `data_section`, `model_section`, `train_section` and
their siblings make from it what one part of the program needs. `python -m swinv2_moe.config` lists
every key.
"""

from swinv2_moe.config.checks import CHOICES, check_config
from swinv2_moe.config.defaults import default_config, flatten
from swinv2_moe.config.load import config_from_text, load_config, merge_opts, resolve_batch_size
from swinv2_moe.config.sections import (
    PUBLISHED_MOE,
    AugmentConfig,
    CheckpointConfig,
    CropConfig,
    DataConfig,
    ExpertsConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    TrunkConfig,
)
from swinv2_moe.config.typed import (
    checkpoint_section,
    data_section,
    model_section,
    run_section,
    train_section,
)

__all__ = [
    "CHOICES",
    "PUBLISHED_MOE",
    "AugmentConfig",
    "CheckpointConfig",
    "CropConfig",
    "DataConfig",
    "ExpertsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "TrainConfig",
    "TrunkConfig",
    "check_config",
    "checkpoint_section",
    "config_from_text",
    "data_section",
    "default_config",
    "flatten",
    "load_config",
    "merge_opts",
    "model_section",
    "resolve_batch_size",
    "run_section",
    "train_section",
]
