"""Models of timm with experts: those that tests try, and the page with their table.

python tests/timm_families.py > docs/reference/experts-in-timm.md
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import timm
import torch
from torch import nn

from moe_core import moe_layers
from swinv2_moe import add_experts


class Family(NamedTuple):
    title: str
    name: str  # timm's
    size: int  # of images, pixels
    arguments: Mapping[str, Any] = MappingProxyType({})  # that make it small


_VIT = {"embed_dim": 16, "depth": 3, "num_heads": 2}
_FOUR = {"depths": (1, 1, 1, 2)}
_SWIN = _FOUR | {"embed_dim": 8, "num_heads": (1, 1, 2, 2), "drop_path_rate": 0.0}
_WIDTHS = {"embed_dims": (8, 16, 24, 32)}
_SEQUENCER = {"layers": (1, 1, 1, 2), "embed_dims": (8, 16, 16, 16), "hidden_sizes": (4, 4, 4, 4)}

FAMILIES = [
    Family("ViT", "vit_tiny_patch16_224", 32, _VIT),
    Family("ViT, CLIP's with QuickGELU", "vit_base_patch32_clip_quickgelu_224", 64, _VIT),
    Family("ViT with relative positions", "test_vit_relpos", 160),
    Family("ViT on a ResNet", "vit_tiny_r_s16_p8_224", 32, _VIT),
    Family("ViT of any aspect", "naflexvit_base_patch16_gap", 32, _VIT),
    Family("ViT, parallel", "vit_small_patch16_18x2_224", 32, _VIT),
    Family("SAM", "samvit_base_patch16", 64, _VIT | {"global_attn_indexes": (1,)}),
    Family("DeiT, distilled", "deit_tiny_distilled_patch16_224", 32, _VIT),
    Family("DeiT III", "deit3_small_patch16_224", 32, _VIT),
    Family("DINOv2", "vit_small_patch14_dinov2", 28, _VIT),
    Family("DINOv2, giant (SwiGLU)", "vit_giant_patch14_dinov2", 28, _VIT | {"embed_dim": 24}),
    Family("DINOv3", "vit_small_patch16_dinov3", 32, _VIT),
    Family("DINOv3, plus (SwiGLU)", "vit_small_plus_patch16_dinov3", 32, _VIT),
    Family("SigLIP", "vit_base_patch16_siglip_224", 32, _VIT),
    Family("EVA", "eva_giant_patch14_224", 28, _VIT),
    Family("EVA-02 (SwiGLU)", "eva02_tiny_patch14_224", 28, _VIT),
    Family("BEiT", "beit_base_patch16_224", 32, _VIT),
    Family("CaiT", "cait_xxs24_224", 32, _VIT),
    Family("XCiT", "xcit_nano_12_p16_224", 32, _VIT),
    Family("ConViT", "convit_tiny", 32, _VIT),
    Family("PiT", "pit_ti_224", 64),
    Family("Hiera", "hiera_tiny_224", 224, {"embed_dim": 8, "stages": (1, 1, 1, 1)}),
    Family("MViTv2", "mvitv2_tiny", 64),
    Family("Swin", "swin_tiny_patch4_window7_224", 56, _SWIN),
    Family("SwinV2", "swinv2_tiny_window8_256", 64, _SWIN),
    Family("SwinV2-CR", "swinv2_cr_tiny_224", 56, _SWIN),
    Family("Twins", "twins_svt_small", 64, _FOUR | _WIDTHS | {"num_heads": (1,) * 4}),
    Family("DaViT", "davit_tiny", 64, _FOUR | {"embed_dims": (8,) * 4, "num_heads": (1,) * 4}),
    Family("FocalNet", "focalnet_tiny_srf", 64, {"mlp_ratio": 1.0}),
    Family("GCViT", "gcvit_xxtiny", 224, {"embed_dim": 16}),
    Family("NesT", "nest_tiny", 32),
    Family("CoaT", "coat_lite_tiny", 64, _WIDTHS),
    Family("CrossViT", "crossvit_tiny_240", 240, {"embed_dim": (8, 16), "num_heads": (1, 1)}),
    Family("TNT", "tnt_s_patch16_224", 32, {"depth": 3}),
    Family("VOLO", "volo_d1_224", 64, {"mlp_ratio": 1.0}),
    Family("MaxViT", "test_maxvit", 64),
    Family("CoAtNet (1x1 convolutions)", "test_coatnet", 64),
    Family("MobileViT", "mobilevit_xxs", 64),
    Family("EdgeNeXt", "edgenext_xx_small", 64),
    Family("EfficientFormer", "efficientformer_l1", 224, _WIDTHS | {"num_vit": 2}),
    Family("Next-ViT (1x1 convolutions)", "nextvit_small", 64, {"depths": (1, 1, 5, 2)}),
    Family("ConvNeXt", "test_convnext", 64),
    Family("ConvNeXt, 1x1 convolutions", "test_convnext2", 64),
    Family("InceptionNeXt (1x1 convolutions)", "inception_next_atto", 64),
    Family("PoolFormer (1x1 convolutions)", "poolformer_s12", 64),
    Family("MLP-Mixer", "mixer_s32_224", 64, {"mlp_ratio": (0.5, 1.0)}),
    Family("ResMLP", "resmlp_12_224", 64),
    Family("Sequencer2D", "sequencer2d_s", 64, _SEQUENCER),
]
# What experts cannot replace, or where there is nothing to replace.
REFUSED = [
    Family("ConvNeXt V2", "convnextv2_atto", 64),
    Family("EVA-02, base", "eva02_base_patch14_224", 28, _VIT),
    Family("PVTv2", "pvt_v2_b0", 64),
    Family("CAFormer", "caformer_s18", 64),
    Family("LeViT", "levit_128s", 224),
    Family("FastViT", "fastvit_sa12", 64),
    Family("TinyViT", "tiny_vit_5m_224", 64),
    Family("ViTamin", "vitamin_small_224", 64),
    Family("Visformer", "visformer_tiny", 64),
    Family("gMLP", "gmlp_s16_224", 64),
    Family("EfficientViT", "efficientvit_b0", 64),
    Family("RepViT", "repvit_m1", 64),
    Family("ResNet", "test_resnet", 64),
    Family("EfficientNet", "test_efficientnet", 64),
]


def create(family: Family, **arguments) -> nn.Module:
    """The dense model, with five classes."""
    arguments = {**family.arguments, "num_classes": 5, **arguments}
    if timm.get_pretrained_cfg(family.name).fixed_input_size:
        arguments["img_size"] = family.size
    return timm.create_model(family.name, **arguments)


_HEAD = """# Experts in models of timm

Tests build each model with random weights and few channels (timm {version},
`tests/unit/models/test_timm_families.py`). After `add_experts(model, "last 2", 4)` logits, features
and gradients are those of the dense model, within a relative error of 1e-7 in fp64.
With new experts the attached loss trains the routers, tried in
every fourth model. `python tests/timm_families.py` writes this page.

| family | model of timm | its last FFN as experts |
| --- | --- | --- |
"""

_REFUSED = """
These are refused in one line: experts have no norms, no convolutions over several positions and no
learned activations.

| family | model of timm | message |
| --- | --- | --- |
"""


def row(family: Family) -> str:
    """A line of the table."""
    with torch.device("meta"):
        model = create(family)
    try:
        ((name, layer),) = moe_layers(add_experts(model, "last 1", 4)).items()
        gated = ", gated" if layer.config.gated else ""
        result = f"`{name.removesuffix('.moe')}`, {layer.config.activation}{gated}"
    except ValueError as error:
        result = str(error).removesuffix("; experts cannot replace it")
    return f"| {family.title} | `{family.name}` | {result} |\n"


def page() -> str:
    """The page with both tables."""
    parts = [_HEAD.format(version=timm.__version__), *map(row, FAMILIES)]
    return "".join([*parts, _REFUSED, *map(row, REFUSED)])


if __name__ == "__main__":
    print(page(), end="")
