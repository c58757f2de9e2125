"""The plan of an ablation: a YAML file of variants and seeds, and its checked form.

    control: dense
    seeds: 3
    opts: {TRAIN.EPOCHS: 14}
    variants:
      dense: {base: configs/tiny_imagenet/dense.yaml}
      soft: {base: configs/tiny_imagenet/8expert.yaml, opts: {MODEL.MOE.ROUTER: soft}}
    stages:
      final: {seeds: 3, variants: [dense, soft], opts: {TRAIN.EPOCHS: 30}}

`opts` of a variant override those of the stage, and these override those of the plan.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from yacs.config import CfgNode

from swinv2_moe.config import (
    as_opts,
    config_from_text,
    default_config,
    flatten,
    load_config,
    resolve_batch_size,
)
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import MAX_YAML_CHARS, parse_yaml, read_bounded

_NAME = re.compile(r"[A-Za-z0-9_.+-]+")
_PLAN_KEYS = ("control", "seeds", "opts", "variants", "stages")
_STAGE_KEYS = ("seeds", "opts", "variants")
_VARIANT_KEYS = ("base", "opts")


@dataclass(frozen=True)
class Variant:
    """A configuration to train: a configuration file and keys that override it."""

    name: str
    base: Path
    opts: tuple[str, ...]  # KEY VALUE ...

    def config(self, seed: int, data: str | None) -> CfgNode:
        """The configuration of a run on one process.

        Raises:
            UserError: the base or the keys cannot be used; the message names the variant.
        """
        opts = list(self.opts) + ["SEED", str(seed)]
        try:
            return resolve_batch_size(load_config(self.base, opts, data), 1)
        except UserError as error:
            raise UserError(f"variant {self.name}: {error}") from error


@dataclass(frozen=True)
class Plan:
    """The runs of one stage: each variant with the seeds from 0 to `seeds` - 1."""

    control: str
    seeds: int
    variants: dict[str, Variant]

    def select(self, names: Sequence[str]) -> list[Variant]:
        """The variants with these names, in the plan's order; all of them if there are no names.

        Raises:
            UserError: a name that the plan does not have.
        """
        for name in names:
            if name not in self.variants:
                raise UserError(
                    f"--only {name}: no such variant, allowed: {', '.join(self.variants)}"
                )
        return [v for v in self.variants.values() if not names or v.name in names]


def read_plan(file: str | Path, stage: str | None = None, seeds: int | None = None) -> Plan:
    """The plan in a YAML file, or one of its stages.

    Args:
        seeds: number of seeds in place of the file's.

    Raises:
        UserError: a file that is not a plan; the message names the key.
    """
    try:
        content = parse_yaml(read_bounded(file, 4 * MAX_YAML_CHARS).decode())
    except OSError as error:
        raise UserError(f"--plan {file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"--plan {file}: not a plan ({one_line(str(error))})") from error
    try:
        return _plan(content, stage, seeds)
    except ValueError as error:
        raise UserError(f"--plan {file}: {error}") from error


def _plan(content: object, stage: str | None, seeds: int | None) -> Plan:
    plan = _mapping(content, "the file", _PLAN_KEYS)
    opts = _opts(plan.get("opts", {}), "opts")
    definitions = _by_name(plan.get("variants"), "variants")
    names = list(definitions)
    num_seeds = plan.get("seeds")
    if stage is not None:
        stages = _by_name(plan.get("stages", {}), "stages")
        if stage not in stages:
            raise ValueError(f"no stage {stage!r}, allowed: {', '.join(stages) or 'none'}")
        settings = _mapping(stages[stage], f"stages.{stage}", _STAGE_KEYS)
        num_seeds = settings.get("seeds", num_seeds)
        names = settings.get("variants", names)
        opts |= _opts(settings.get("opts", {}), f"stages.{stage}.opts")
    if seeds is not None:
        num_seeds = seeds
    if type(num_seeds) is not int or num_seeds < 1:
        raise ValueError(f"seeds is {num_seeds!r}, it must be a number of at least 1")
    if not isinstance(names, list):
        raise ValueError(f"stages.{stage}.variants is {names!r}, it must be a list of names")
    variants = {}
    for name in map(str, names):
        if name not in definitions:
            raise ValueError(f"stages.{stage}.variants: no such variant {name!r}")
        variants[name] = _variant(name, definitions[name], opts)
    control = str(plan.get("control"))
    if control not in variants:
        raise ValueError(f"control is {control!r}, allowed: {', '.join(variants) or 'none'}")
    return Plan(control, num_seeds, variants)


def _variant(name: str, content: object, common: dict[str, object]) -> Variant:
    if not _NAME.fullmatch(name):
        raise ValueError(f"variants: {name!r} is no name of a directory")
    definition = _mapping(content, f"variants.{name}", _VARIANT_KEYS)
    base = definition.get("base")
    if not isinstance(base, str):
        raise ValueError(f"variants.{name}.base is {base!r}, it must be a configuration file")
    if not Path(base).is_file():
        raise ValueError(f"variants.{name}.base {base}: no such file")
    opts = common | _opts(definition.get("opts", {}), f"variants.{name}.opts")
    if "SEED" in opts:
        raise ValueError(f"variants.{name}.opts: SEED is set by the ablation")
    return Variant(name, Path(base), tuple(as_opts(opts)))


def _opts(content: object, where: str) -> dict[str, object]:
    opts = _mapping(content, where)
    for key in opts:
        if key not in flatten(default_config()):
            raise ValueError(f"{where}: unknown key {key}")
    return opts


def _mapping(content: object, where: str, allowed: Sequence[str] = ()) -> dict:
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {content!r}, it must have KEY: VALUE lines")
    for key in content:
        if allowed and key not in allowed:
            raise ValueError(f"{where}: unknown key {key!r}, allowed: {', '.join(allowed)}")
    return content


def _by_name(content: object, where: str) -> dict[str, object]:
    """A mapping with its names as strings, because YAML reads some names as numbers."""
    return {str(name): value for name, value in _mapping(content, where).items()}


def check_unchanged(directory: Path, source: str, config: CfgNode) -> None:
    """Check that a run in `directory`, if there is one, has the configuration `config`.

    Args:
        source: what says so, for the message.

    Raises:
        UserError: the configurations differ; the message names the first key that differs.
    """
    file = directory / "config.yaml"
    if not file.is_file():
        return
    recorded = flatten(config_from_text(file.read_text(), str(file)))
    for key, value in flatten(config).items():
        if key != "OUTPUT" and recorded[key] != value:
            raise UserError(
                f"{directory}: its run has {key} {recorded[key]!r}, {source} now has"
                f" {value!r}; another --output starts anew"
            )
