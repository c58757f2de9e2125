"""The backbone `SwinV2MoE`: this project's trunk, at any image size, for mmdetection's necks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature

import torch.distributed as dist
from mmdet.registry import MODELS
from mmengine.model import BaseModule
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn

from moe_core import moe_layers
from moe_core.parallel import ExpertGroup, ParallelStrategy, largest_group, make_expert_groups
from swinv2_moe.detection.weights import load_pretrained
from swinv2_moe.errors import UserError
from swinv2_moe.models import SwinTransformerV2MoE, take_aux_loss
from swinv2_moe.models.build import MODELS as MODEL_TYPES
from swinv2_moe.models.padding import Size, mask_blocks, stage_maps
from swinv2_moe.models.weights import rank_experts
from swinv2_moe.start.initial import TrainedWith

# Arguments of the trunk that the backbone sets, and the collector of others.
_SET_HERE = {
    "img_size",
    "num_classes",
    "always_partition",
    "dynamic_img_size",
    "aux_loss_weight",
    "strict_img_size",
    "expert_group",
    "expert_strategy",
    "kwargs",
}


@MODELS.register_module()
class SwinV2MoE(BaseModule):
    """The feature maps of chosen stages, each with a LayerNorm, as in Swin Transformer's detection.

    Attention and routing ignore padding (models/padding.py): to patches, windows and merged pairs,
    and around images that are smaller than their batch, if the detector gives their sizes
    (`images_of`).

    Args:
        model: a model type with SwinV2's windows: "swinv2_moe", or "swin_moe" for the released,
            pre-norm form.
        out_indices: the stages whose maps come out; the last one must be among them.
        patch_size: in pixels; map i has stride `patch_size * 2**i` and `embed_dim * 2**i` channels.
        aux_loss_weight: weight of the MoE layers' auxiliary loss. In training its gradient is
            attached to the maps (MoEModel.set_aux_loss_weight), so that any detector balances the
            experts.
        expert_parallel: distribute the experts over all processes; False: each process has all.
        expert_strategy: with expert_parallel, how the processes exchange tokens: "auto", which
            searches, or the fields of a moe_core ParallelStrategy, such as `dict(r=0)`; None: no
            chunks, linear all-to-all.
        with_cp: recompute activations in the backward pass.
        pretrained: a run of this project (classifier or detector), a checkpoint, or a file of
            weights.
        init_cfg: must be None; use `pretrained` for weights.
        trunk: arguments of SwinTransformerV2MoE: embed_dim, depths, num_heads, window_size,
            num_experts, moe_blocks, moe, eval_capacity_factor, freeze_moe, drop_path_rate,
            pretrained_window_sizes (the unit of positions), ...

    Raises:
        UserError: an unknown argument, or values that do not fit each other or the number of
            processes. For a wrong type it is also a TypeError, as of mmdetection's backbones.
    """

    def __init__(
        self,
        *,
        model: str = "swinv2_moe",
        out_indices: Sequence[int] = (0, 1, 2, 3),
        patch_size: int = 4,
        aux_loss_weight: float = 0.01,
        expert_parallel: bool = False,
        expert_strategy: str | dict | None = None,
        with_cp: bool = False,
        pretrained: str | None = None,
        init_cfg: dict | None = None,
        **trunk,
    ) -> None:
        _check_weights(pretrained, init_cfg)
        _check_names(trunk)
        super().__init__()
        if not isinstance(out_indices, Sequence):
            raise UserError(f"backbone.out_indices ({out_indices!r}) must be a list of stages")
        self.out_indices, self.aux_loss_weight = tuple(out_indices), aux_loss_weight
        self.with_cp, self.pretrained = with_cp, pretrained
        forms = _forms()
        if model not in forms:
            raise UserError(f"backbone.model ({model!r}) must be one of {', '.join(forms)}")
        _check_stages(**trunk)
        group = None
        if expert_parallel and trunk.get("num_experts"):
            group = _expert_group(trunk["num_experts"])
        try:
            self.trunk = mask_blocks(
                forms[model](
                    # not used afterwards: windows and masks are computed for each batch
                    img_size=32 * patch_size,
                    patch_size=patch_size,
                    num_classes=0,
                    always_partition=True,
                    dynamic_img_size=True,
                    aux_loss_weight=aux_loss_weight,
                    expert_group=group,
                    expert_strategy=_strategy(expert_strategy),
                    **trunk,
                )
            )
        except (ValueError, AssertionError) as error:  # timm asserts what it checks
            raise UserError(f"backbone: {error}") from error
        last = len(self.trunk.block_stages()) - 1
        if not self.out_indices or self.out_indices[-1] != last or min(self.out_indices) < 0:
            raise UserError(
                f"backbone.out_indices ({list(out_indices)}) must end with the last stage ({last})"
            )
        self.trunk.norm = nn.Identity()  # each output has its own norm
        self.norms = nn.ModuleList(
            nn.LayerNorm(self.trunk.feature_info[i]["num_chs"]) for i in self.out_indices
        )
        self.trained_with: TrainedWith | None = None  # what `pretrained` was trained with
        self._image_sizes: list[Size] | None = None
        self._register_load_state_dict_pre_hook(self._keep_rank_experts)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Feature maps of images [B, 3, H, W].

        Returns:
            For each of `out_indices` a map [B, C, H / stride, W / stride], rounded up.
        """
        norms = dict(zip(self.out_indices, self.norms, strict=True))
        maps = []
        for i, (x, presence) in enumerate(
            stage_maps(self.trunk, images, self._image_sizes, self.with_cp)
        ):
            if i in norms:
                maps.append(presence.keep(norms[i](x)).permute(0, 3, 1, 2).contiguous())
        return tuple(maps)

    @contextmanager
    def images_of(self, sizes: Sequence[Size] | None) -> Iterator[None]:
        """Within the block, a batch's images have these sizes (pixels, from the top left corner).

        mmdetection passes only the batch to a backbone, so that the detector gives the sizes here.
        """
        self._image_sizes = None
        if sizes is not None:
            self._image_sizes = [(height, width) for height, width in sizes]
        try:
            yield
        finally:
            self._image_sizes = None

    def aux_loss(self) -> Tensor | None:
        """The weighted auxiliary loss of the last forward pass; None if no experts are trained.

        It has a gradient after a pass within `separate_aux_loss`."""
        loss = take_aux_loss(self.trunk)
        if not any(layer.experts.w1.requires_grad for layer in moe_layers(self.trunk).values()):
            return None
        return self.aux_loss_weight * loss

    def init_weights(self) -> None:
        """Load `pretrained`, if given. The trunk has already initialised itself.

        Raises:
            UserError: weights that cannot be read or do not fit.
        """
        if self.pretrained:
            self.trained_with = load_pretrained(self.trunk, self.pretrained)
        self._is_init = True

    def _keep_rank_experts(self, state: dict[str, Tensor], prefix: str, *_) -> None:
        """Keep this rank's experts: mmengine's files contain the whole model."""
        state.update(rank_experts(state, self, prefix))


class _WrongArgument(UserError, TypeError):
    """An argument of the wrong type or name: one line for the user, a TypeError for mmdetection."""


def _check_weights(pretrained: str | None, init_cfg: dict | None) -> None:
    if pretrained is not None and not isinstance(pretrained, str):
        raise _WrongArgument(f"backbone.pretrained ({pretrained!r}) must be a path or None")
    if init_cfg is not None:
        raise UserError(
            f"backbone.init_cfg ({init_cfg!r}) must be None; backbone.pretrained names the weights"
        )


def _strategy(value: str | dict | None) -> ParallelStrategy | str:
    """The strategy of the MoE layers, from the backbone's `expert_strategy`."""
    if value == "auto":
        return "auto"
    if value is None:
        return ParallelStrategy()
    if not isinstance(value, dict):
        raise UserError(
            f"backbone.expert_strategy ({value!r}) must be 'auto', None or the fields of a"
            " ParallelStrategy"
        )
    try:
        return ParallelStrategy(**value)
    except (TypeError, ValueError) as error:
        raise UserError(f"backbone.expert_strategy ({value!r}): {error}") from error


def _forms() -> dict[str, type[SwinTransformerV2MoE]]:
    """The model types that run at any image size: those with SwinV2's windows."""
    return {
        name: model
        for name, model in MODEL_TYPES.items()
        if isinstance(model, type) and issubclass(model, SwinTransformerV2MoE)
    }


def _check_names(trunk: dict) -> None:
    parameters = [
        name
        for cls in (SwinTransformerV2, SwinTransformerV2MoE)
        for name in signature(cls).parameters
    ]
    allowed = sorted(set(parameters) - _SET_HERE)
    for name, value in trunk.items():
        if name not in allowed:
            raise _WrongArgument(
                f"backbone.{name} ({value!r}) is not an argument of SwinV2MoE, whose trunk takes"
                f" {', '.join(allowed)}"
            )


def _check_stages(
    embed_dim: int = 96,
    depths: Sequence[int] = (2, 2, 6, 2),
    num_heads: Sequence[int] = (3, 6, 12, 24),
    pretrained_window_sizes: Sequence[int] = (0, 0, 0, 0),
    **others,
) -> None:
    """Check the arguments of stages, which timm does not. The defaults are timm's."""
    sequences = {
        "depths": depths,
        "num_heads": num_heads,
        "pretrained_window_sizes": pretrained_window_sizes,
    }
    for name, value in sequences.items():
        if not isinstance(value, Sequence):
            raise UserError(f"backbone.{name} ({value!r}) must have a number for each stage")
    if len(pretrained_window_sizes) < len(depths):
        raise UserError(
            f"backbone.pretrained_window_sizes ({pretrained_window_sizes!r}) must have a number "
            f"for each of the stages {depths!r}"
        )
    if len(depths) != len(num_heads):
        raise UserError(
            f"backbone.num_heads ({num_heads!r}) must have a number for each of the stages"
            f" {depths!r}"
        )
    for stage, heads in enumerate(num_heads):
        if embed_dim * 2**stage % heads:
            raise UserError(
                f"backbone.num_heads ({num_heads!r}): {heads} must divide the"
                f" {embed_dim * 2**stage} channels of stage {stage}"
            )


def _expert_group(num_experts: int) -> ExpertGroup | None:
    """The group of as many processes as the experts divide over; None for a single process."""
    if dist.is_initialized():
        group = make_expert_groups(largest_group(num_experts, dist.get_world_size()))
        group.for_torch_tools = False  # as in `swinv2_moe.ranks.world.expert_group`
        return group
    return None
