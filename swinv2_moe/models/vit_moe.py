"""Vision Transformer with mixtures of experts in chosen blocks: timm's ViT, moe_core's FFNs.

Sources: ViT, arXiv 2010.11929; V-MoE, arXiv 2106.05974, which puts experts in every other block.
"""

# B images, N tokens of an image, K choices of a token, h x w patches, M model dim

from typing import Any

from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from swinv2_moe.models.protocol import MoEModel
from swinv2_moe.models.section import VitConfig, register_model_type


@register_model_type("vit_moe", VitConfig)
class VisionTransformerMoE(MoEModel, VisionTransformer):
    """timm's VisionTransformer (any of its arguments, by keyword) with experts in `moe_blocks`.

    A ViT has one stage: `moe_blocks=((1, 3, 5),)` names three of its blocks. The class token is
    routed like every other token.
    """

    def block_stages(self) -> list[nn.ModuleList | nn.Sequential]:
        """As MoEModel."""
        return [self.blocks]

    def tokens_of_image(self, block: Any) -> int:
        """As MoEModel."""
        return self.patch_embed.num_patches + self.num_prefix_tokens

    def token_maps(self, values: Tensor, output: Tensor) -> Tensor:
        """As MoEModel. `output` is [B, N, M]; its first tokens are not patches.

        Raises:
            ValueError: the image has another size than the model's.
        """
        values = values.unflatten(0, output.shape[:2])  # [B, N, K]
        patches = values[:, self.num_prefix_tokens :]
        height, width = self.patch_embed.grid_size
        if patches.shape[1] != height * width:
            raise ValueError(
                f"{patches.shape[1]} patches do not fill the model's {height} x {width}:"
                " call set_input_size first"
            )
        return patches.unflatten(1, (height, width))

    def convert_dense(self, tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        """As MoEModel; resizes position embeddings and patch embeddings."""
        return checkpoint_filter_fn(tensors, self)


# Names for timm.create_model


def _cfg() -> dict:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_INCEPTION_MEAN,
        "std": IMAGENET_INCEPTION_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


default_cfgs = generate_default_cfgs(
    {
        "vit_moe.untrained": _cfg(),
        "vit_moe_tiny_patch16_224.untrained": _cfg(),
        "vit_moe_small_patch16_224.untrained": _cfg(),
    }
)


def _create(variant: str, pretrained: bool, variant_args: dict, kwargs: dict):
    """A model with 8 experts in every second block, unless `kwargs` says otherwise."""
    args = {"num_experts": 8, "depth": 12, "patch_size": 16} | variant_args | kwargs
    args.setdefault("moe_blocks", (tuple(range(1, args["depth"], 2)),))
    return build_model_with_cfg(
        VisionTransformerMoE,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": args.pop("out_indices", 3), "feature_cls": "getter"},
        **args,
    )


@register_model
def vit_moe(pretrained: bool = False, **kwargs) -> VisionTransformerMoE:
    """ViT-MoE of any size; without arguments, the tiny size."""
    args = {"embed_dim": 192, "num_heads": 3}
    return _create("vit_moe", pretrained, args, kwargs)


@register_model
def vit_moe_tiny_patch16_224(pretrained: bool = False, **kwargs) -> VisionTransformerMoE:
    """ViT-Ti/16, experts in every second block."""
    args = {"embed_dim": 192, "num_heads": 3}
    return _create("vit_moe_tiny_patch16_224", pretrained, args, kwargs)


@register_model
def vit_moe_small_patch16_224(pretrained: bool = False, **kwargs) -> VisionTransformerMoE:
    """ViT-S/16, experts in every second block."""
    args = {"embed_dim": 384, "num_heads": 6}
    return _create("vit_moe_small_patch16_224", pretrained, args, kwargs)
