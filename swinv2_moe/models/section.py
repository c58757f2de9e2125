"""The section MODEL of a configuration, and the registry of model types.

Any model of timm is of the type `timm`. A new type is one file `swinv2_moe/models/NAME_moe.py`:

>>> @dataclass(frozen=True, kw_only=True)
... class MineConfig(Trunk):
...     group = "MINE"
...     patch_size: int = option(16, "side of a patch, pixels", least=1)
>>> @register_model_type("mine_moe", MineConfig)
... class MineMoE(MoEModel, VisionTransformer): ...

The keys of MODEL.MINE then exist in every configuration, and `build_model` passes them to the class
as keyword arguments. This module does not import torch: if the section is here, configurations are
read without importing the model.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from yacs.config import CfgNode

from moe_core import MoEConfig
from moe_core.options import option, options
from swinv2_moe.errors import UserError

Model = TypeVar("Model", bound=Callable)


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """The keys of one model type or several: arguments of its class, in a group below MODEL."""

    group: ClassVar[str] = ""  # MODEL.<group>; empty: no keys of its own
    # Fields that summaries of a model show, by the names that they show them by.
    sizes: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    def check(config: CfgNode) -> None:
        """Raise UserError for values of a configuration that contradict each other."""

    @staticmethod
    def implied(config: CfgNode) -> dict[str, object]:
        """Values of other keys that belong to the model, where the user has not set them."""
        return {}


LAST_BLOCKS = 2  # of a model of timm, which have experts where MODEL.MOE.BLOCKS names none


def count_moe_layers(blocks: Sequence[Sequence[int]]) -> int:
    """The number of MoE layers of MODEL.MOE.BLOCKS in a model with experts."""
    return sum(map(len, blocks)) or LAST_BLOCKS


def check_moe_blocks(config: CfgNode, depths: Sequence[int]) -> None:
    """Raise UserError where MODEL.MOE.BLOCKS names a block that no stage of `depths` has."""
    blocks = config.MODEL.MOE.BLOCKS
    for stage, chosen in enumerate(blocks):
        if chosen and stage >= len(depths):
            raise UserError(
                f"MODEL.MOE.BLOCKS is {blocks}: it names blocks of stage {stage}, the last stage of"
                f" the model is {len(depths) - 1}"
            )
        for block in chosen:
            if not (isinstance(block, int) and 0 <= block < depths[stage]):
                raise UserError(
                    f"MODEL.MOE.BLOCKS is {blocks}: stage {stage} has no block {block}, its"
                    f" {depths[stage]} blocks are numbered from 0"
                )


def check_swinv2(config: CfgNode) -> None:
    """Raise UserError for values of MODEL.SWINV2 that contradict each other or the image size."""
    swin, moe = config.MODEL.SWINV2, config.MODEL.MOE
    stages = len(swin.DEPTHS)
    for name, value in (
        ("SWINV2.NUM_HEADS", swin.NUM_HEADS),
        ("SWINV2.PRETRAINED_WINDOW_SIZES", swin.PRETRAINED_WINDOW_SIZES),
        ("MOE.BLOCKS", moe.BLOCKS),
    ):
        if len(value) != stages:
            raise UserError(
                f"MODEL.{name} is {value}, it must have one entry for each of the {stages} stages"
                f" of MODEL.SWINV2.DEPTHS ({swin.DEPTHS})"
            )
    for name in ("DEPTHS", "NUM_HEADS"):
        if not swin[name] or min(swin[name]) < 1:
            raise UserError(
                f"MODEL.SWINV2.{name} is {swin[name]}, it must have an entry of at least 1 for each"
                " stage"
            )
    if min(swin.PRETRAINED_WINDOW_SIZES) < 0:
        raise UserError(
            f"MODEL.SWINV2.PRETRAINED_WINDOW_SIZES is {swin.PRETRAINED_WINDOW_SIZES}, its entries"
            " must be at least 0"
        )
    for stage, heads in enumerate(swin.NUM_HEADS):
        dim = swin.EMBED_DIM * 2**stage
        if dim % heads:
            raise UserError(
                f"MODEL.SWINV2.NUM_HEADS is {swin.NUM_HEADS}: the {dim} channels of stage {stage}"
                f" (MODEL.SWINV2.EMBED_DIM {swin.EMBED_DIM}) cannot be divided over {heads} heads"
            )
    check_moe_blocks(config, swin.DEPTHS)
    _check_image_size(config)


def _check_image_size(config: CfgNode) -> None:
    """Every stage's feature map must be whole windows, or no larger than one window."""
    size, swin = config.DATA.IMG_SIZE, config.MODEL.SWINV2
    if not tiles(size, swin):
        unit = swin.PATCH_SIZE * 2 ** (len(swin.DEPTHS) - 1)
        good = [s for s in range(unit, size + 16 * unit, unit) if tiles(s, swin)]
        near = sorted(sorted(good, key=lambda s: abs(s - size))[:3])
        raise UserError(
            f"DATA.IMG_SIZE is {size}, windows of {swin.WINDOW_SIZE} (MODEL.SWINV2.WINDOW_SIZE) on"
            f" patches of {swin.PATCH_SIZE} cannot tile it; sizes near it that work:"
            f" {', '.join(map(str, near))}"
        )


def tiles(size: int, swin: CfgNode) -> bool:
    """Whether the windows of MODEL.SWINV2 tile an image of `size` pixels in every stage."""
    if size % (swin.PATCH_SIZE * 2 ** (len(swin.DEPTHS) - 1)):
        return False
    sides = [size // swin.PATCH_SIZE // 2**stage for stage in range(len(swin.DEPTHS))]
    return all(side <= swin.WINDOW_SIZE or side % swin.WINDOW_SIZE == 0 for side in sides)


@dataclass(frozen=True, kw_only=True)
class SwinV2Config(Trunk):
    """MODEL.SWINV2."""

    group: ClassVar = "SWINV2"
    sizes: ClassVar = {"dim": "embed_dim", "depths": "depths"}
    check = staticmethod(check_swinv2)

    patch_size: int = option(4, "side of a patch, pixels", least=1)
    embed_dim: int = option(
        96,
        "channels of the first stage; each further stage has twice as many",
        least=1,
    )
    depths: tuple[int, ...] = option((2, 2, 18, 2), "blocks of each stage")
    num_heads: tuple[int, ...] = option(
        (3, 6, 12, 24),
        "attention heads of each stage; each number divides the stage's channels",
        affects="accuracy",
    )
    window_size: int = option(
        12,
        "side of an attention window, patches",
        least=1,
        affects="accuracy",
    )
    pretrained_window_sizes: tuple[int, ...] = option(
        (0, 0, 0, 0),
        "for each stage, the window side that the pretrained weights were trained with; 0:"
        " `window_size`",
        affects="accuracy",
    )


def check_timm(config: CfgNode) -> None:
    """Raise UserError if no model of timm is named. What only timm knows is checked when the model
    is built."""
    if not config.MODEL.NAME:
        raise UserError(
            "MODEL.NAME is '': MODEL.TYPE timm needs the name of a model of timm, such as"
            " vit_small_patch16_224.augreg_in21k"
        )


@dataclass(frozen=True, kw_only=True)
class TimmConfig(Trunk):
    """A model of timm: MODEL.NAME and MODEL.ARGS, without a group of its own."""

    check = staticmethod(check_timm)

    @staticmethod
    def implied(config: CfgNode) -> dict[str, object]:
        """Size and preparation of images, as timm names them.

        Raises:
            UserError: timm has no such model.
        """
        if not config.MODEL.NAME:
            return {}
        from swinv2_moe.models.timm_names import settings  # imports torch

        return settings(config.MODEL.NAME)


# By type, the values of MODEL.TYPE.
TRUNKS: dict[str, type[Trunk]] = {
    "swinv2_moe": SwinV2Config,
    "swin_moe": SwinV2Config,
    "timm": TimmConfig,
}
# What builds a model, by type; the model's file registers it.
MODELS: dict[str, Callable] = {}


def register_model_type(name: str, trunk: type[Trunk]) -> Callable[[Model], Model]:
    """Decorator that registers a subclass of `swinv2_moe.models.MoEModel`, or a function that
    returns a MoEModel, as a value of MODEL.TYPE.

    Raises:
        ValueError: the name is registered already.
    """
    if name in MODELS or TRUNKS.get(name, trunk) is not trunk:
        raise ValueError(f"MODEL.TYPE {name!r} is registered already: {MODELS.get(name)}")

    def register(model: Model) -> Model:
        TRUNKS[name] = trunk
        MODELS[name] = model
        return model

    return register


def model_files() -> list[str]:
    """The modules `NAME_moe` of this package; each registers the model type of its name."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [module.name for module in modules if module.name.endswith("_moe")]


@functools.cache
def import_own_types() -> None:
    """Import the models whose section is in the model's own file."""
    for name in model_files():
        if name not in TRUNKS:
            importlib.import_module(f"{__package__}.{name}")


def trunk_group(config: CfgNode) -> CfgNode:
    """The keys of the configured model: MODEL.SWINV2, or the group of another model type. Empty
    for a type without a group."""
    return config.MODEL.get(TRUNKS[config.MODEL.TYPE].group, CfgNode())


# Swin-MoE's recipe, arXiv 2206.03382, section 5: the defaults of MODEL.MOE and of the registered
# timm models where they differ from MoEConfig's, which suit any mixture of experts.
PUBLISHED_MOE = {
    "gate_noise": 1.0,
    "normalize_gates": False,
    "batch_prioritized": True,
    "aux_loss": "load_importance",
}


def moe_defaults() -> dict[str, object]:
    """The keys of MODEL.MOE that are fields of MoEConfig, by the field's name, with their
    defaults."""
    defaults = {field.name: field.default for field, one in options(MoEConfig) if one.is_key}
    # A key has a number; timm initialises the trunk's linear layers with the same.
    return defaults | PUBLISHED_MOE | {"init_std": 0.02}


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """MODEL.MOE: where the experts are and how ranks share them. What a layer computes is in
    `layer`; its keys are MoEConfig's fields (`moe_defaults`)."""

    num_experts: int = option(0, "number of experts over all ranks; 0: the dense model", least=0)
    expert_parallel_size: int = option(
        0,
        "ranks per expert group; the groups are replicas; 0: all ranks, or as many as the experts"
        " divide over",
        least=0,
        affects="",
    )
    strategy: str = option(
        "r1 d1 linear",
        "how the ranks of a group exchange data, words in any order. `r0`: weights are gathered;"
        " `r1`: tokens are sent. `d4`: in 4 chunks, whose exchange overlaps with computation."
        " `linear`, `2dh` (inside the nodes, then between them), `channels` (shared memory, CPU"
        " processes of one machine) or a registered all-to-all. `static`: each expert receives"
        " its capacity from each rank, so no counts are exchanged. `n8`: ranks on each node,"
        " otherwise torchrun's. `auto`, or `auto n8`: the tuner searches",
        affects="",
    )
    blocks: tuple[tuple[int, ...], ...] = option(
        ((), (), (), ()),
        "for each stage, the blocks (from 0) that have experts. With `MODEL.TYPE` `timm` no"
        " block at all means the last two",
    )
    hidden_ratio: float = option(
        1.0,
        "hidden dim of an expert, in units of the FFN's: 0.5 with `top_k` 2, or 0.667 with"
        " `gated`, has the dense model's MACs",
        least=0.001,
    )
    aux_loss_weight: float = option(0.01, "factor of the auxiliary loss in the loss", least=0)
    freeze: bool = option(
        False,
        "routers and experts keep the values of `MODEL.PRETRAINED` and route as in evaluation",
    )

    # What all layers have in common: model_dim and hidden_dim are 1, each block has its own. None:
    # the dense model.
    layer: MoEConfig | None

    @property
    def eval_capacity_factor(self) -> float:
        """The capacity factor in evaluation; 0 of a dense model, which drops nothing."""
        if self.layer is None:
            return 0.0
        return self.layer.eval_capacity_factor

    def layer_fields(self) -> dict[str, object]:
        """The fields of `layer` without its shape; none of a dense model."""
        if self.layer is None:
            return {}
        return {name: getattr(self.layer, name) for name in moe_defaults()}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """MODEL: the network and the weights that it starts from."""

    type: str = option(
        "swinv2_moe",
        "`swinv2_moe`: res-post-norm, cosine attention; `swin_moe`: the released pre-norm form;"
        " `timm`: the model `MODEL.NAME` of timm; or a type of your own",
        choices=TRUNKS,
        affects="accuracy",
    )
    name: str = option(
        "",
        "with `MODEL.TYPE` `timm`: a model of timm. Size of images, mean, std, interpolation and"
        " crop are timm's, unless they are given",
        affects="accuracy",
    )
    args: str = option(
        "",
        "with `MODEL.TYPE` `timm`: arguments of the model, such as `patch_size=4 embed_dim=64`",
        affects="accuracy",
    )
    num_classes: int = option(0, "number of classes; 0: that of the data", least=0)
    drop_path_rate: float = option(0.1, "largest rate of stochastic depth", least=0, most=0.999)
    label_smoothing: float = option(
        0.1,
        "share of a label that is spread over all classes",
        least=0,
        most=0.999,
    )
    pretrained: str = option(
        "",
        "a run or a checkpoint; a `.safetensors` or `.pth` file; a directory in timm's form; or"
        " `bundled:tiny`, `timm:NAME`, `hf-hub:OWNER/NAME`, `efficientnet_lite2` (extra `teacher`)",
        affects="start",
    )
    upcycle: str = option(
        "",
        "copy each FFN of a dense `MODEL.PRETRAINED` to the experts of its block. `weights`: a"
        " new training starts. `run`: the dense run goes on, with its optimiser's state. Empty:"
        " off",
        choices=("", "weights", "run"),
        affects="start",
    )
    class_map: str = option(
        "",
        "for a `MODEL.PRETRAINED` with other classes. `new`: its classifier is not loaded."
        " Otherwise a file with a line for each class: its row in the pretrained classifier, from"
        " 0, or -1",
        affects="start",
    )

    trunk: Trunk  # the group of the type
    in_chans: int  # DATA.CHANNELS
    experts: ExpertsConfig
    img_size: int  # DATA.IMG_SIZE
    use_checkpoint: bool  # TRAIN.USE_CHECKPOINT

    @property
    def title(self) -> str:
        """The model's name for people: timm's, or its type."""
        return self.name or self.type
