"""Configuration: yacs files and KEY VALUE pairs outside, typed frozen sections inside.

`load_config` reads and checks a yacs tree. `data_config`, `model_config`, `train_config` and
similar functions return the typed section for one part of the program. `swinv2-moe config`
lists every key.
"""

from swinv2_moe.config.checks import check_config, choices
from swinv2_moe.config.everyday import EVERYDAY, everyday_opts
from swinv2_moe.config.load import (
    as_opts,
    changed,
    config_from_text,
    load_config,
    merge_opts,
    resolve_batch_size,
)
from swinv2_moe.config.tree import (
    AllSections,
    Change,
    all_sections,
    changed_keys,
    data_config,
    default_config,
    flatten,
    model_config,
    train_config,
)

__all__ = [
    "EVERYDAY",
    "AllSections",
    "Change",
    "all_sections",
    "as_opts",
    "changed",
    "changed_keys",
    "check_config",
    "choices",
    "config_from_text",
    "data_config",
    "default_config",
    "everyday_opts",
    "flatten",
    "load_config",
    "merge_opts",
    "model_config",
    "resolve_batch_size",
    "train_config",
]
