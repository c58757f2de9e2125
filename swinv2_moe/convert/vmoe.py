"""V-MoE's models as this project's: the configuration of a checkpoint, and its tensors' names.

The model is a ViT of timm with experts. Its sizes are those of the tensors. How it was trained to
route is not in a checkpoint: the values are those of the published configurations
(vmoe/configs/vmoe_paper), of fine-tuning where it differs. Two differences remain. In evaluation no
token is dropped here, as in theirs of S/32 at 224 px. In training a limit counts the tokens of a
rank's batch, theirs the tokens of 8 images.

Source: google-research/vmoe; arXiv 2106.05974.
"""

# M model dim, H hidden dim, E experts, N tokens, P patch side

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import timm
import torch
from torch import Tensor
from yacs.config import CfgNode

from swinv2_moe.config import load_config
from swinv2_moe.errors import UserError, short

_POSITIONS = "Encoder/posembed_input/pos_embedding"  # [1, N, M]
_EMBEDDING = "embedding/kernel"  # [P, P, channels, M]
_BLOCK = re.compile(r"Encoder/encoderblock_(0|[1-9]\d{0,3})/(.+)")
_ROUTER = "Moe/Router/dense/kernel"  # [M, E]
_WIDTHS = {192: "tiny", 384: "small", 512: "small", 768: "base", 1024: "large", 1280: "huge"}
_ROUTING = {
    "TOP_K": 2,
    "ROUTER": "linear",
    "NORMALIZE_GATES": False,
    "GATE_NOISE": 1.0,
    "BATCH_PRIORITIZED": False,
    "CAPACITY_FACTOR": 1.5,
    "AUX_LOSS": "load_importance",
    "AUX_LOSS_WEIGHT": 0.01,  # their 0.005 for each of the two losses
}
_NAMES = {
    "LayerNorm_0/scale": "norm1.weight",
    "LayerNorm_0/bias": "norm1.bias",
    "LayerNorm_1/scale": "norm2.weight",
    "LayerNorm_1/bias": "norm2.bias",
    "SelfAttention/out/kernel": "attn.proj.weight",
    "SelfAttention/out/bias": "attn.proj.bias",
    "Mlp/Dense_0/kernel": "mlp.fc1.weight",
    "Mlp/Dense_0/bias": "mlp.fc1.bias",
    "Mlp/Dense_1/kernel": "mlp.fc2.weight",
    "Mlp/Dense_1/bias": "mlp.fc2.bias",
    _ROUTER: "mlp.moe.router.weight",
    "Moe/Mlp/Dense_0/kernel": "mlp.moe.experts.w1",
    "Moe/Mlp/Dense_0/bias": "mlp.moe.experts.b1",
    "Moe/Mlp/Dense_1/kernel": "mlp.moe.experts.w2",
    "Moe/Mlp/Dense_1/bias": "mlp.moe.experts.b2",
}
_OUTSIDE = {
    "cls": "cls_token",
    _POSITIONS: "pos_embed",
    _EMBEDDING: "patch_embed.proj.weight",
    "embedding/bias": "patch_embed.proj.bias",
    "Encoder/encoder_norm/scale": "norm.weight",
    "Encoder/encoder_norm/bias": "norm.bias",
    "pre_logits/kernel": "fc_norm.fc.weight",
    "pre_logits/bias": "fc_norm.fc.bias",
    "head/kernel": "head.weight",
    "head/bias": "head.bias",
}


def vmoe_config(tensors: Mapping[str, Tensor], source: Path, opts: Sequence[str] = ()) -> CfgNode:
    """The configuration of the model whose parameters these are.

    Args:
        tensors: as `read_vmoe` returns them.
        source: named in errors.
        opts: KEY VALUE pairs, which prevail.

    Raises:
        UserError: the tensors are not those of a V-MoE with a class token, or as `load_config`.
    """
    _check(tensors, source)
    patch, _, channels, dim = tensors[_EMBEDDING].shape
    side = math.isqrt(tensors[_POSITIONS].shape[1] - 1)
    size = side * patch
    blocks = sorted({int(match[1]) for match in map(_BLOCK.fullmatch, tensors) if match})
    prefix = "Encoder/encoderblock_{}/"
    routers = [block for block in blocks if prefix.format(block) + _ROUTER in tensors]
    experts = {tensors[prefix.format(block) + _ROUTER].shape[1] for block in routers}
    if len(experts) > 1:
        raise UserError(f"{source}: its blocks have different numbers of experts")
    hidden = {
        tensor.shape[-1]
        for name, tensor in tensors.items()
        if name.endswith("Mlp/Dense_0/kernel") and _BLOCK.fullmatch(name)
    }
    heads = tensors[prefix.format(0) + "SelfAttention/query/kernel"].shape[1]
    arguments = {
        "patch_size": patch,
        "embed_dim": dim,
        "depth": len(blocks),
        "num_heads": heads,
        "mlp_ratio": max(hidden, default=dim) / dim,
        "act_layer": "gelu_tanh",
    }
    if "pre_logits/kernel" in tensors:
        arguments["representation_size"] = dim
    name = f"vit_{_WIDTHS.get(dim, 'base')}_patch{patch}_{size}"
    values: dict[str, object] = {
        "MODEL.TYPE": "timm",
        "MODEL.NAME": name if timm.is_model(name) else "vit_base_patch16_224",
        "MODEL.ARGS": " ".join(f"{key}={value}" for key, value in arguments.items()),
        "DATA.IMG_SIZE": size,
        "DATA.CHANNELS": channels,
        "DATA.MEAN": [0.5] * channels,
        "DATA.STD": [0.5] * channels,
        "DATA.INTERPOLATION": "bilinear",
        "TEST.CROP_RATIO": 0.875 if size <= 224 else 0.0,  # larger ones are resized to the square
    }
    if routers:
        values |= {f"MODEL.MOE.{key}": value for key, value in _ROUTING.items()}
        values |= {"MODEL.MOE.NUM_EXPERTS": experts.pop(), "MODEL.MOE.BLOCKS": [routers]}
    given = [text for pair in values.items() for text in map(str, pair)]
    return load_config(None, [*given, *opts])


def _check(tensors: Mapping[str, Tensor], source: Path) -> None:
    """Raise UserError unless these are the tensors of a V-MoE, as far as sizes are read of them."""
    first = "Encoder/encoderblock_0/SelfAttention/query/kernel"
    for name, dims in ((_EMBEDDING, 4), (_POSITIONS, 3), (first, 3), ("cls", 3)):
        if name not in tensors:
            raise UserError(f"{source}: has no {name}; a V-MoE with a class token can be imported")
        if tensors[name].ndim != dims:
            raise UserError(f"{source}: {name} has {tensors[name].ndim} dimensions, not {dims}")
    patch, width = tensors[_EMBEDDING].shape[:2]
    if patch != width:
        raise UserError(f"{source}: its patches are of {patch} x {width} pixels, not square")
    patches = tensors[_POSITIONS].shape[1] - 1
    if math.isqrt(max(patches, 0)) ** 2 != patches or patches < 1:
        raise UserError(f"{source}: its {patches} patches are no square")
    blocks = {int(match[1]) for match in map(_BLOCK.fullmatch, tensors) if match}
    absent = sorted(set(range(max(blocks) + 1)) - blocks)
    if absent:
        raise UserError(f"{source}: has no block {absent[0]} of {max(blocks) + 1}")
    for name, tensor in tensors.items():
        if name.endswith(_ROUTER) and tensor.ndim != 2:
            raise UserError(
                f"{source}: {short(name)} has {tensor.ndim} dimensions, as in an ensemble of"
                " experts (E3), which cannot be imported"
            )


def from_vmoe(tensors: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    """The tensors under this project's names, in its layout. Unknown names stay as they are.

    Raises:
        UserError: a tensor has another number of dimensions than the published ones.
    """
    state = {}
    try:
        for name, tensor in tensors.items():
            match = _BLOCK.fullmatch(name)
            if match is None:
                state[_OUTSIDE.get(name, name)] = _as_linear(name, tensor)
            elif not re.match("SelfAttention/(query|key|value)/", match[2]):
                new = _NAMES.get(match[2], match[2])
                state[f"blocks.{match[1]}.{new}"] = _as_linear(match[2], tensor)
        for name in tensors:
            match = re.fullmatch(r"Encoder/encoderblock_(\d+)/SelfAttention/query/(\w+)", name)
            if match:
                parts = [
                    tensors[name.replace("/query/", f"/{part}/")]
                    for part in ("query", "key", "value")
                ]
                kind = {"kernel": "weight"}.get(match[2], match[2])
                state[f"blocks.{match[1]}.attn.qkv.{kind}"] = _packed(parts)
    except (KeyError, IndexError, RuntimeError) as error:
        raise UserError(f"{source}: {short(name)} does not fit a V-MoE ({error})") from error
    return state


def _as_linear(name: str, tensor: Tensor) -> Tensor:
    """Of a kernel [in, out], the weight [out, in]; other tensors in this project's layout."""
    if name == _EMBEDDING:
        return tensor.permute(3, 2, 0, 1)  # [M, channels, P, P]
    if name == "Moe/Mlp/Dense_0/kernel":
        return tensor.mT  # [E, M, H] -> [E, H, M]
    if name == "SelfAttention/out/kernel":
        return tensor.flatten(0, 1).t()  # [heads, head dim, M] -> [M, M]
    if name.endswith("/kernel") and name != "Moe/Mlp/Dense_1/kernel":
        return tensor.t()
    return tensor


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Query, key and value in one: kernels [M, heads, head dim] -> [3 M, M], biases -> [3 M]."""
    if parts[0].ndim == 3:
        return torch.cat([part.flatten(1).t() for part in parts])
    return torch.cat([part.flatten() for part in parts])
