"""The yacs tree of all keys, made from the sections, and the sections of a tree.

A field that `option` made is a key of its section's group: `DataConfig.img_size` is
`DATA.IMG_SIZE`. Its default, limits, allowed values and meaning stand there alone: the tree, the
checks and the reference (`swinv2-moe config --markdown`) read them. A field without a default
belongs to another group, and is there because the same code needs it. Lists are tuples in sections.
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
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


Values = dict[str, dict[str, Any]]  # by group and name: {"DATA": {"img_size": 192}}


def _by_group(config: CfgNode) -> Values:
    """The values of all keys, with lists as tuples. A group without keys is empty."""
    values: Values = defaultdict(dict)
    for key, value in flatten(config).items():
        group, _, name = key.rpartition(".")
        values[group][name.lower()] = _with_tuples(value)
    return values


def all_sections(config: CfgNode, amp_enable: bool | None = None) -> AllSections:
    """All sections, for code that builds the parts of a run, and the YAML text that the run
    records.

    Args:
        amp_enable: in place of AMP_ENABLE, which the YAML text keeps; None: AMP_ENABLE.
    """
    values = _by_group(config)
    if amp_enable is not None:
        values[""]["amp_enable"] = amp_enable
    return AllSections(
        run=RunConfig(**values[""]),
        checkpoint=CheckpointConfig(**values["CHECKPOINT"]),
        data=_data_section(values),
        model=_model_section(values),
        train=_train_section(values),
        yaml=config.dump(),
    )


def data_config(config: CfgNode) -> DataConfig:
    """The section DATA, with AUG, TEST and all other keys that reading images needs."""
    return _data_section(_by_group(config))


def model_config(config: CfgNode) -> ModelConfig:
    """The section MODEL, with the group of its type, MOE and all other keys that building a model
    needs."""
    return _model_section(_by_group(config))


def train_config(config: CfgNode) -> TrainConfig:
    """The section TRAIN, with OPTIMIZER, DISTILL and all other keys that a training step needs."""
    return _train_section(_by_group(config))


def _data_section(values: Values) -> DataConfig:
    return DataConfig(
        **values["DATA"],
        augment=AugmentConfig(**values["AUG"]),
        test=CropConfig(**values["TEST"]),
        num_classes=values["MODEL"]["num_classes"],
        seed=values[""]["seed"],
        device=values[""]["device"],
        shuffle_val=_is_limited(values["MODEL.MOE"]),
        validation_only=False,
    )


def _is_limited(moe: Mapping[str, Any]) -> bool:
    """Whether the experts' choices depend on the images of a batch in evaluation."""
    affected = {"soft": False, "expert_choice": not moe["choose_per_image"]}
    is_limited = moe["eval_capacity_factor"] != 0
    return bool(moe["num_experts"]) and affected.get(moe["router"], is_limited)


def _model_section(values: Values) -> ModelConfig:
    trunk = TRUNKS[values["MODEL"]["type"]]
    experts = {name: one for name, one in values["MODEL.MOE"].items() if name not in moe_defaults()}
    return ModelConfig(
        **values["MODEL"],
        trunk=trunk(**values[f"MODEL.{trunk.group}"] if trunk.group else {}),
        in_chans=values["DATA"]["channels"],
        experts=ExpertsConfig(**experts, layer=layer_config(values["MODEL.MOE"])),
        img_size=values["DATA"]["img_size"],
        use_checkpoint=values["TRAIN"]["use_checkpoint"],
    )


def _train_section(values: Values) -> TrainConfig:
    run = values[""]
    return TrainConfig(
        **values["TRAIN"],
        optimizer=OptimizerConfig(**values["TRAIN.OPTIMIZER"]),
        distill=DistillConfig(**values["TRAIN.DISTILL"]),
        augment=AugmentConfig(**values["AUG"]),
        batch_size=values["DATA"]["batch_size"],
        label_smoothing=values["MODEL"]["label_smoothing"],
        aux_loss_weight=values["MODEL.MOE"]["aux_loss_weight"],
        seed=run["seed"],
        amp_enable=bool(run["amp_enable"]),
        amp_dtype=run["amp_dtype"],
        compile=run["compile"],
    )


def layer_config(moe: Mapping[str, Any]) -> MoEConfig | None:
    """What all MoE layers have in common, with a model_dim and hidden_dim of 1; None without
    experts.

    Args:
        moe: the values of MODEL.MOE by name: {"num_experts": 8}.

    Raises:
        ValueError: values that contradict each other.
    """
    if not moe["num_experts"]:
        return None
    return MoEConfig(1, 1, moe["num_experts"], **{name: moe[name] for name in moe_defaults()})


def _with_tuples(value: object) -> object:
    """The value with lists replaced by tuples, also inside of lists."""
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    return value
