"""The interface of models that training, checkpoints, parallelism, routing pictures and detection
use.

A backbone is a subclass of `MoEModel` and of one of timm's models. It inherits patch_embed,
group_matcher, set_grad_checkpointing, get_classifier and the initialisation from timm's model.
`MoEModel` adds the experts and the methods that locate them.
"""

# B images, T tokens, K choices of a token, h x w tokens of a map, M model dim

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_core import MoEConfig, MoELayer, ignore_experts, moe_layers
from moe_core.parallel import ExpertGroup, ParallelStrategy
from swinv2_moe.models.moe_mlp import MoEMlp, separate_aux_loss, take_aux_loss
from swinv2_moe.models.section import PUBLISHED_MOE


class MoEModel(nn.Module):
    """Base class of the models: a timm model with mixtures of experts in `moe_blocks`.

    >>> class VisionTransformerMoE(MoEModel, VisionTransformer): ...

    A subclass defines `block_stages` and overrides other methods where its model differs. A block
    keeps its FFN as `block.mlp`, with the layers fc1 and fc2.

    Args:
        num_experts: number of experts of each MoE layer, over all ranks of `expert_group`; 0: the
            dense model.
        moe_blocks: per stage, the blocks (from 0) whose FFN becomes a mixture of experts.
        moe: further MoEConfig fields, which override the published recipe.
        eval_capacity_factor: capacity factor in evaluation mode; None: that of `moe`, by default 0
            (dropless).
        eval_batch_prioritized: `batch_prioritized` in evaluation mode; None: as in training.
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

    classifier = "head"  # name of the linear layer that gives the logits

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
        eval_batch_prioritized: bool | None = None,
        hidden_ratio: float = 1.0,
        freeze_moe: bool = False,
        aux_loss_weight: float = 0.01,
        expert_group: ExpertGroup | dist.ProcessGroup | None = None,
        expert_strategy: ParallelStrategy | str = ParallelStrategy(),  # noqa: B008 - frozen
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        if not 0 <= aux_loss_weight < math.inf:
            raise ValueError(f"aux_loss_weight ({aux_loss_weight}) must be finite and not negative")
        super().__init__(device=device, dtype=dtype, **kwargs)
        # one object for all layers, because the layers share its state
        expert_group = ExpertGroup.of(expert_group)
        stages = self.block_stages()
        values = PUBLISHED_MOE | (moe or {})
        if num_experts:
            _check_moe_blocks(moe_blocks, [len(blocks) for blocks in stages])
        for i, blocks in enumerate(stages):
            block: Any
            for j, block in enumerate(blocks):
                self.adapt_block(block)
                if not num_experts or i >= len(moe_blocks) or j not in moe_blocks[i]:
                    continue
                dim = block.mlp.fc1.in_features
                hidden_dim = round(hidden_ratio * block.mlp.fc1.out_features)
                config = MoEConfig(dim, hidden_dim, num_experts, **values)
                if config.routing == "soft" and config.slots_per_expert == 0:
                    slots = math.ceil(self.tokens_of_image(block) / num_experts)
                    config = replace(config, slots_per_expert=slots)
                if eval_capacity_factor is not None:
                    config = replace(config, eval_capacity_factor=eval_capacity_factor)
                layer = MoELayer(config, expert_group, strategy=expert_strategy, device=device)
                block.mlp = MoEMlp(
                    layer.to(dtype), freeze_moe, eval_batch_prioritized, aux_loss_weight
                )
        self.init_weights(needs_reset=False)
        self.register_load_state_dict_post_hook(_recompute_buffers)
        ignore_experts(self)

    # Defined by each model

    def block_stages(self) -> list[nn.ModuleList | nn.Sequential]:
        """The blocks of each stage, in the order of the forward pass. A ViT has one stage."""
        raise NotImplementedError

    # Overridden by models that differ

    def adapt_block(self, block: Any) -> None:
        """Replace the parts of a timm block that differ. Called before the FFN is replaced by
        experts."""

    def tokens_of_image(self, block: Any) -> int:
        """The number of tokens of an image in a block, at the model's image size.

        Used by Soft MoE if the number of slots is not given.
        """
        height, width = block.input_resolution
        return height * width

    def token_maps(self, values: Tensor, output: Tensor) -> Tensor:
        """Arrange values of the tokens of an MoE layer at their places in the image.

        Args:
            values: [T, K], in the order of the layer's tokens.
            output: output of the layer's block, here [B, h, w, M].

        Returns:
            [B, h, w, K], without tokens that have no place, such as a class token.
        """
        return values.unflatten(0, output.shape[:3])

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

    def classifier_names(self) -> tuple[str, str]:
        """The names of the classifier's weight and bias."""
        return f"{self.classifier}.weight", f"{self.classifier}.bias"

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
        return super().no_weight_decay() | ours  # type: ignore[misc]  # timm's


class WithAuxLoss(nn.Module):
    """The model with its auxiliary loss as a second output. DistributedDataParallel and
    torch.compile wrap this module."""

    def __init__(self, model: MoEModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """As `MoEModel.forward_with_aux`."""
        return self.model.forward_with_aux(images)


def _recompute_buffers(model: nn.Module, *_) -> None:
    module: Any
    for module in model.modules():
        if hasattr(module, "init_non_persistent_buffers"):  # timm's blocks and attention
            module.init_non_persistent_buffers()


def _check_moe_blocks(moe_blocks: Sequence[Sequence[int]], depths: Sequence[int]) -> None:
    """Raise ValueError unless `moe_blocks` names blocks that stages of `depths` blocks have."""
    if not any(moe_blocks):
        raise ValueError(f"moe_blocks ({moe_blocks}) names no block for the experts")
    if len(moe_blocks) > len(depths):
        raise ValueError(
            f"moe_blocks ({moe_blocks}) has {len(moe_blocks)} stages, the model has {len(depths)}"
        )
    for stage, blocks in enumerate(moe_blocks):
        for block in blocks:
            if not 0 <= block < depths[stage]:
                raise ValueError(
                    f"moe_blocks names block {block} of stage {stage}, which has {depths[stage]}"
                    " blocks"
                )
