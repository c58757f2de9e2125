"""The yacs tree of all keys, made from the sections, and the sections of a tree.

A field that `option` made is a key of its section's group: `DataConfig.img_size` is
`DATA.IMG_SIZE`. Its default, limits, allowed values and meaning stand there alone: the tree, the
checks and the reference (`swinv2-moe config --markdown`) read them. A field without a default
belongs to another group, and is there because the same code needs it. Lists are tuples in sections.
"""

import copy
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from yacs.config import CfgNode

from moe_core import MoEConfig
from moe_core.options import Option, options
from swinv2_moe.data.section import AugmentConfig, CropConfig, DataConfig
from swinv2_moe.files import is_same_path
from swinv2_moe.models.section import (
    TRUNKS,
    ExpertsConfig,
    ModelConfig,
    import_own_types,
    moe_defaults,
    trunk_group,
)
from swinv2_moe.train.section import (
    CheckpointConfig,
    DistillConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)


@dataclass(frozen=True, kw_only=True)
class AllSections:
    """Every section of a configuration, and the configuration itself as a run records it."""

    run: RunConfig
    checkpoint: CheckpointConfig
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    yaml: str  # the content of config.yaml, and "config" in the meta.json of checkpoints


class Tree(CfgNode):
    """All keys with their values.

    Attributes:
        given: the keys that a file or the command line has set; None: not known.
    """

    given: frozenset[str] | None = None

    def remember(self, given: Iterable[str]) -> None:
        """Set `given`, which is no key: yacs takes attributes for keys."""
        self.__dict__["given"] = frozenset(given)


def groups() -> list[tuple[str, type]]:
    """The sections by the group of their keys, with those of every registered model type."""
    import_own_types()
    return [
        ("", RunConfig),
        ("CHECKPOINT", CheckpointConfig),
        ("DATA", DataConfig),
        ("MODEL", ModelConfig),
        *((f"MODEL.{one.group}", one) for one in dict.fromkeys(TRUNKS.values()) if one.group),
        ("MODEL.MOE", ExpertsConfig),
        ("MODEL.MOE", MoEConfig),
        ("TRAIN", TrainConfig),
        ("TRAIN.OPTIMIZER", OptimizerConfig),
        ("TRAIN.DISTILL", DistillConfig),
        ("AUG", AugmentConfig),
        ("TEST", CropConfig),
    ]


def key_options() -> dict[str, Option]:
    """The option of each key."""
    by_key = {}
    for group, section in groups():
        for field, one in options(section):
            if one.is_key:
                by_key[f"{group}.{field.name.upper()}".lstrip(".")] = one
    return by_key


def default_config() -> Tree:
    """A mutable tree of all keys with their defaults."""
    config = Tree()
    for group, section in groups():
        node = config
        for name in group.split("."):
            if name:
                node = node.setdefault(name, CfgNode())
        node.update(copy.deepcopy(_defaults(section)))
    return config


@functools.cache
def _defaults(section: type) -> dict[str, object]:
    """The keys of a section with their defaults, whose tuples are lists."""
    defaults = {field.name: field.default for field, one in options(section) if one.is_key}
    if section is MoEConfig:
        defaults = moe_defaults()
    return {name.upper(): _with_lists(value) for name, value in defaults.items()}


def _with_lists(value: object) -> object:
    """The value with tuples replaced by lists, also inside of tuples."""
    if isinstance(value, tuple):
        return [_with_lists(item) for item in value]
    return value


def flatten(config: CfgNode, prefix: str = "") -> dict[str, Any]:
    """`{"TRAIN.BASE_LR": 1e-3, ...}`, in the order of definition."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, CfgNode):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class Change(NamedTuple):
    """A key whose value differs between two configurations. `affects` is as in `Option`."""

    key: str
    before: object
    now: object  # None: this key has left
    affects: str


def changed_keys(before: CfgNode, now: CfgNode) -> list[Change]:
    """The keys that a run has changed since its checkpoint, without those on which no result
    depends. Two names of one file are no change."""
    kinds, old, new = key_options(), flatten(before), flatten(now)
    changes = []
    for key, value in new.items():
        affects, former = kinds[key].affects, old[key]
        if key == "MODEL.MOE.CAPACITY_FACTOR" and now.MODEL.MOE.ROUTER == "expert_choice":
            affects = "accuracy"  # by default experts choose as many tokens in evaluation
        if key == "DATA.BATCH_SIZE" and new["DATA.GLOBAL_BATCH_SIZE"]:
            affects = ""  # follows from the number of ranks
        is_path = isinstance(value, str) and is_same_path(str(former), value)
        if affects and value != former and not is_path:
            changes.append(Change(key, former, value, affects))
    return changes


def run_config(config: CfgNode) -> RunConfig:
    """The section of the run itself: keys without a group."""
    return RunConfig(**_values(config))


def checkpoint_config(config: CfgNode) -> CheckpointConfig:
    """The section CHECKPOINT."""
    return CheckpointConfig(**_values(config.CHECKPOINT))


def data_config(config: CfgNode) -> DataConfig:
    """The section DATA, with AUG, TEST and all other keys that reading images needs."""
    return DataConfig(
        **_values(config.DATA),
        augment=_augment(config),
        test=CropConfig(**_values(config.TEST)),
        num_classes=config.MODEL.NUM_CLASSES,
        seed=config.SEED,
        device=config.DEVICE,
        validation_only=False,
    )


def model_config(config: CfgNode) -> ModelConfig:
    """The section MODEL, with the group of its type, MOE and all other keys that building a model
    needs."""
    return ModelConfig(
        **_values(config.MODEL),
        trunk=TRUNKS[config.MODEL.TYPE](**_values(trunk_group(config))),
        in_chans=config.DATA.CHANNELS,
        experts=_experts(config),
        img_size=config.DATA.IMG_SIZE,
        use_checkpoint=config.TRAIN.USE_CHECKPOINT,
    )


def train_config(config: CfgNode) -> TrainConfig:
    """The section TRAIN, with OPTIMIZER, DISTILL and all other keys that a training step needs."""
    return TrainConfig(
        **_values(config.TRAIN),
        optimizer=OptimizerConfig(**_values(config.TRAIN.OPTIMIZER)),
        distill=DistillConfig(**_values(config.TRAIN.DISTILL)),
        augment=_augment(config),
        batch_size=config.DATA.BATCH_SIZE,
        label_smoothing=config.MODEL.LABEL_SMOOTHING,
        aux_loss_weight=config.MODEL.MOE.AUX_LOSS_WEIGHT,
        seed=config.SEED,
        amp_enable=bool(config.AMP_ENABLE),
        amp_dtype=config.AMP_DTYPE,
        compile=config.COMPILE,
    )


def all_sections(config: CfgNode) -> AllSections:
    """All sections, for code that builds the parts of a run, and the YAML text that the run
    records."""
    return AllSections(
        run=run_config(config),
        checkpoint=checkpoint_config(config),
        data=data_config(config),
        model=model_config(config),
        train=train_config(config),
        yaml=config.dump(),
    )


def _augment(config: CfgNode) -> AugmentConfig:
    return AugmentConfig(**_values(config.AUG))


def layer_config(config: CfgNode) -> MoEConfig | None:
    """What all MoE layers have in common, with a model_dim and hidden_dim of 1; None if
    MODEL.MOE.NUM_EXPERTS is 0.

    Raises:
        ValueError: values that contradict each other.
    """
    values = _values(config.MODEL.MOE)
    num_experts = values["num_experts"]
    if not num_experts:
        return None
    layer_values = {name: values[name] for name in moe_defaults()}
    return MoEConfig(1, 1, num_experts, **layer_values)


def _experts(config: CfgNode) -> ExpertsConfig:
    values = _values(config.MODEL.MOE)
    for name in moe_defaults():
        del values[name]
    return ExpertsConfig(**values, layer=layer_config(config))


def _values(group: CfgNode) -> dict[str, Any]:
    """The values of a group's keys as `{"img_size": 192, ...}`, without nested groups."""
    values = {}
    for key, value in group.items():
        if isinstance(value, list):
            value = _with_tuples(value)
        if not isinstance(value, CfgNode):
            values[key.lower()] = value
    return values


def _with_tuples(value: object) -> object:
    """The value with lists replaced by tuples, also inside of lists."""
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    return value
