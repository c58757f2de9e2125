"""The interface of models that training, checkpoints, parallelism, routing pictures and detection
use.

A backbone is a subclass of `MoEModel` and of one of timm's models. It inherits patch_embed,
group_matcher, set_grad_checkpointing, get_classifier and the initialisation from timm's model.
`MoEModel` adds the experts and the methods that locate them. `as_moe_model` makes any model of
timm a backbone.
"""

# B images, T tokens, K choices of a token, h x w tokens of a map, M model dim

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from timm.models import get_model_input_config
from torch import Tensor, nn

from moe_core import MoEConfig, MoELayer, ignore_experts, moe_layers
from moe_core.parallel import ExpertGroup, ParallelStrategy
from swinv2_moe.models.ffn import by_stage, find_blocks, form_of, stages_of
from swinv2_moe.models.moe_mlp import MoEMlp, separate_aux_loss, take_aux_loss
from swinv2_moe.models.section import PUBLISHED_MOE


class MoEModel(nn.Module):
    """Base class of the models: a timm model with mixtures of experts in `moe_blocks`.

    >>> class MineMoE(MoEModel, VisionTransformer): ...

    A subclass defines `block_stages` and overrides other methods where its model differs. A block
    keeps its FFN as `block.mlp`, with the layers fc1 and fc2.

    Args:
        num_experts: number of experts of each MoE layer, over all ranks of `expert_group`; 0: the
            dense model.
        moe_blocks: per stage, the blocks (from 0) whose FFN becomes a mixture of experts.
        moe: further MoEConfig fields, which override the published recipe.
        eval_capacity_factor: capacity factor in evaluation mode; None: that of `moe`, by default 0
            (dropless).
        hidden_ratio: hidden dim of an expert, in units of the hidden dim of the FFN that it
            replaces.
        freeze_moe: the MoE layers are not trained, and route as in evaluation.
        aux_loss_weight: factor of the auxiliary losses in training mode (`set_aux_loss_weight`).
        expert_group: the ranks over which the experts are distributed; None: this process has all
            experts.
        expert_strategy: how the ranks exchange tokens; "auto": the tuner searches.
        device, dtype: device and dtype of every parameter; None: torch's defaults.
        kwargs: arguments of timm's class.

    Raises:
        ValueError: moe_blocks names a stage or block that does not exist; also raised by MoEConfig
            and MoELayer.
    """

    classifier_name = "head"  # name of the linear layer that gives the logits

    if TYPE_CHECKING:  # timm's
        patch_embed: Any
        forward_features: Callable[..., Tensor]
        forward_head: Callable[..., Tensor]
        set_grad_checkpointing: Callable[..., None]

    def __init__(
        self,
        *,
        num_experts: int = 0,
        moe_blocks: Sequence[Sequence[int]] = (),
        moe: dict | None = None,
        eval_capacity_factor: float | None = None,
        hidden_ratio: float = 1.0,
        freeze_moe: bool = False,
        aux_loss_weight: float = 0.01,
        expert_group: ExpertGroup | dist.ProcessGroup | None = None,
        expert_strategy: ParallelStrategy | str = ParallelStrategy(),  # noqa: B008 - frozen
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        check_aux_loss_weight(aux_loss_weight)
        super().__init__(device=device, dtype=dtype, **kwargs)
        # one object for all layers, because the layers share its state
        expert_group = ExpertGroup.of(expert_group)
        stages = self.block_stages()
        values = PUBLISHED_MOE | (moe or {})
        chosen = by_stage(stages, moe_blocks, "moe_blocks") if num_experts else []
        if num_experts and not chosen:
            raise ValueError(f"moe_blocks ({moe_blocks}) names no block for the experts")
        block: Any
        for block in itertools.chain.from_iterable(stages):
            self.adapt_block(block)
            if block in chosen:
                dim = block.mlp.fc1.in_features
                hidden_dim = round(hidden_ratio * block.mlp.fc1.out_features)
                config = MoEConfig(dim, hidden_dim, num_experts, **values)
                config = complete_config(self, block, config, eval_capacity_factor)
                layer = MoELayer(config, expert_group, strategy=expert_strategy, device=device)
                block.mlp = MoEMlp(layer.to(dtype), freeze_moe, aux_loss_weight)
        self.init_weights(needs_reset=False)
        self.register_load_state_dict_post_hook(_recompute_buffers)
        ignore_experts(self)

    # Overridden by models that differ

    def block_stages(self) -> list[Any]:
        """The blocks of each stage, in the order of the forward pass. A ViT has one stage."""
        return [[block.module for block in stage] for stage in stages_of(find_blocks(self))]

    def adapt_block(self, block: Any) -> None:
        """Replace the parts of a timm block that differ. Called before the FFN is replaced by
        experts."""

    def tokens_of_image(self, block: Any) -> int:
        """The number of tokens of an image in a block, at the model's image size.

        Used by Soft MoE if the number of slots is not given.
        """
        index = [found.module for found in find_blocks(self)].index(block)
        twin: Any = copy.deepcopy(self).to("meta").eval()
        found = find_blocks(twin)[index]
        dim, counts = form_of(found).model_dim, []
        found.ffn.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel() // dim))
        dtype = next(self.parameters()).dtype
        twin(torch.empty(1, *self.input_shape(), device="meta", dtype=dtype))
        return counts[0]

    def token_maps(self, values: Tensor, output: Tensor) -> Tensor | None:
        """Arrange values of the tokens of an MoE layer at their places in the image.

        Args:
            values: [T, K], in the order of the layer's tokens.
            output: output of the layer's block: [B, h, w, M], [B, M, h, w], or [B, N, M] if
                `patch_embed` has the grid of the patches.

        Returns:
            [B, h, w, K], without tokens that have no place, such as a class token. None if the
            places of the tokens are not known.

        Raises:
            ValueError: the image has another size than the model's.
        """
        if output.ndim == 4:
            batch, *sides = output.shape
            height, width = sides[:2]
            if len(values) != batch * height * width:
                height, width = sides[1:]
            # a square picture has square maps; others, such as [B, windows, N, M], are no maps
            if len(values) != batch * height * width or height != width:
                return None
            return values.unflatten(0, (batch, height, width))
        grid = getattr(getattr(self, "patch_embed", None), "grid_size", None)
        if output.ndim != 3 or grid is None or len(values) != output.shape[:2].numel():
            return None
        values = values.unflatten(0, output.shape[:2])  # [B, N, K]
        patches = values[:, getattr(self, "num_prefix_tokens", 0) :]
        height, width = grid
        if patches.shape[1] != height * width:
            raise ValueError(
                f"{patches.shape[1]} patches do not fill the model's {height} x {width}:"
                " call set_input_size first"
            )
        return patches.unflatten(1, (height, width))

    def position_windows(self) -> list[int]:
        """For each stage the window side in tokens that its position biases were trained with.

        Empty for a model whose positions do not depend on windows.
        """
        return []

    def convert_dense(self, tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        """Convert dense weights in timm's or another layout to the names of this model.

        Args:
            source: name of the weights in messages.

        Raises:
            UserError: this model cannot use the weights.
        """
        return tensors

    # The same for all models

    def init_weights(self, *args, **kwargs) -> None:
        """As timm, and compute the buffers that no state dict has: after `to_empty` they have no
        values. `load_state_dict` also computes them."""
        super().init_weights(*args, **kwargs)  # type: ignore[misc]  # timm's
        _recompute_buffers(self)

    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.patch_embed.proj.in_channels, *self.patch_embed.img_size

    def classifier_names(self) -> tuple[str, ...]:
        """The names of the classifier's weight and bias. Two classifiers, as of a distilled DeiT,
        have four names."""
        return f"{self.classifier_name}.weight", f"{self.classifier_name}.bias"

    @torch.jit.ignore
    def set_aux_loss_weight(self, weight: float | Tensor) -> None:
        """Set the factor of the auxiliary losses in training mode: a number or a scalar tensor.

        In training mode their gradient is attached to the outputs of the MoE layers, so that
        `cross_entropy(model(images), targets).backward()` also balances the experts. A loss that is
        multiplied by a factor before `backward` (a loss scale, 1 / accumulated batches) needs the
        weight multiplied by the same factor. `forward_with_aux` does not use the weight.

        Source: Megatron-LM, MoEAuxLossAutoScaler.
        """
        for module in self.modules():
            if isinstance(module, MoEMlp):
                module.aux_loss_weight = weight

    def forward_with_aux(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """images [B, C, H, W] -> logits [B, classes] and the sum of the auxiliary losses.

        The sum is unweighted, and its gradient is not attached to the logits."""
        with separate_aux_loss(self):
            logits = self(images)
        return logits, take_aux_loss(self)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay: timm's and those of the MoE layers."""
        ours = {
            f"{prefix}.{name}"
            for prefix, layer in moe_layers(self).items()
            for name in layer.no_weight_decay()
        }
        timms = getattr(super(), "no_weight_decay", set)
        return set(timms()) | ours


class WithAuxLoss(nn.Module):
    """The model with its auxiliary loss as a second output. DistributedDataParallel and
    torch.compile wrap this module."""

    def __init__(self, model: MoEModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """As `MoEModel.forward_with_aux`."""
        return self.model.forward_with_aux(images)


class AdaptedModel(MoEModel):
    """A model that was created as one of timm's, and became a MoEModel (`as_moe_model`)."""

    timms_class: type  # the class that it was
    adapted_class: type  # AdaptedModel, or a subclass

    def __init__(self, *args, **kwargs) -> None:
        raise TypeError("create timm's model, then call add_experts")

    def __reduce_ex__(self, protocol) -> tuple:
        # pickle cannot find a class that was made at run time
        return _new_adapted, (self.adapted_class, self.timms_class), self.__dict__.copy()

    def input_shape(self) -> tuple[int, int, int]:
        """As MoEModel. For a model that takes images of any size, the size that timm names."""
        return get_model_input_config(self)["input_size"]

    def classifier_names(self) -> tuple[str, ...]:
        """As MoEModel."""
        heads = getattr(self, "pretrained_cfg", {}).get("classifier") or ()
        if isinstance(heads, str):
            heads = (heads,)
        present = dict(self.named_parameters())
        names = [f"{head}.{kind}" for head in heads for kind in ("weight", "bias")]
        return tuple(name for name in names if name in present) or tuple(names)


@functools.cache
def _adapted(base: Any, timms: Any) -> type:
    """The subclass of `base`, an AdaptedModel, and of a class of timm."""
    return type(timms.__name__, (base, timms), {"adapted_class": base, "timms_class": timms})


def _new_adapted(base: type, timms: type) -> nn.Module:
    adapted: Any = _adapted(base, timms)
    return adapted.__new__(adapted)


def as_moe_model(model: nn.Module, base: type[AdaptedModel] = AdaptedModel) -> MoEModel:
    """Make a model of timm a MoEModel, in place: only its class changes.

    It stays an instance of its former class, with the same modules, parameters and state dict.

    Args:
        base: its other class.
    """
    if not isinstance(model, MoEModel):
        pair: Any = (base, type(model))  # classes are hashable, whatever their instances are
        model.__class__ = _adapted(*pair)
        model.register_load_state_dict_post_hook(_recompute_buffers)
    return cast(MoEModel, model)


def complete_config(
    model: MoEModel, block: nn.Module, config: MoEConfig, eval_capacity_factor: float | None
) -> MoEConfig:
    """The configuration with the capacity factor of evaluation, if given, and for Soft MoE with as
    many slots as the block has tokens."""
    if config.routing == "soft" and config.slots_per_expert == 0:
        slots = math.ceil(model.tokens_of_image(block) / config.num_experts)
        config = replace(config, slots_per_expert=slots)
    if eval_capacity_factor is not None:
        config = replace(config, eval_capacity_factor=eval_capacity_factor)
    return config


def check_aux_loss_weight(weight: float) -> None:
    """Raise ValueError unless the factor of the auxiliary losses is finite and not negative."""
    if not 0 <= weight < math.inf:
        raise ValueError(f"aux_loss_weight ({weight}) must be finite and not negative")


def _recompute_buffers(model: nn.Module, *_) -> None:
    module: Any
    for module in model.modules():
        if hasattr(module, "init_non_persistent_buffers"):  # timm's blocks and attention
            module.init_non_persistent_buffers()
