"""Any model of timm as the trunk of a run, with or without experts: MODEL.TYPE timm."""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from swinv2_moe.errors import UserError, one_line
from swinv2_moe.models.added_experts import add_experts
from swinv2_moe.models.protocol import AdaptedModel, MoEModel, as_moe_model
from swinv2_moe.models.section import (
    LAST_BLOCKS,
    TimmConfig,
    moe_defaults,
    register_model_type,
)
from swinv2_moe.models.timm_names import timm_description

_UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")
# Of MODEL.MOE: at their defaults, the experts compute what the FFN computes.
_OF_FFN = ("activation", "gated", "output_bias", "hidden_dropout")
_OPTIONAL = ("drop_path_rate",)
_OPTIONS = ["hidden_ratio", "aux_loss_weight", "eval_capacity_factor"]
_OPTIONS += ["expert_group", "expert_strategy"]
_MAX_REASON = 300


@register_model_type("timm", TimmConfig)
def timm_model(
    *,
    name: str,
    args: str = "",
    img_size: int | tuple[int, int] | None = None,
    in_chans: int = 3,
    num_classes: int = 1000,
    drop_path_rate: float = 0.0,
    num_experts: int = 0,
    moe_blocks: Sequence[Sequence[int]] = (),
    moe: Mapping[str, Any] | None = None,
    freeze_moe: bool = False,
    **others,
) -> MoEModel:
    """A newly initialised model of timm, with experts in `moe_blocks`.

    Args:
        name: timm's, with or without the tag of weights.
        args: arguments of timm's model, "patch_size=4 embed_dim=64". With `representation_size` a
            ViT has a PreLogits, as V-MoE.
        img_size: used by models whose size is fixed when they are built; None: timm's.
        moe_blocks: per stage, the blocks (from 0) whose FFN becomes a mixture of experts. Empty:
            the last two.
        moe: fields of MoEConfig. Activation, gated form, output bias and hidden dropout are those
            of the FFN, unless they differ from the defaults of MODEL.MOE.
        freeze_moe: as `freeze` of `add_experts`.
        others: options of `add_experts`, and further arguments of timm's model.

    Raises:
        UserError: an unknown name, or arguments with which timm cannot build the model.
        ValueError: as `add_experts`.
    """
    described = timm_description(name)
    options = {key: others.pop(key) for key in _OPTIONS if key in others}
    arguments: dict[str, Any] = {
        **others,
        "num_classes": num_classes,
        "in_chans": in_chans,
        "drop_path_rate": drop_path_rate,
    }
    if described.get("fixed_input_size") and img_size is not None:
        arguments["img_size"] = img_size
    arguments |= parse_arguments(args)
    representation_size = arguments.pop("representation_size", None)
    model: Any = as_moe_model(_create(name, arguments), TimmModel)
    if representation_size is not None:
        _add_pre_logits(model, name, representation_size)
    placement = ("device", "dtype")
    model.created_from = (name, {k: arguments[k] for k in arguments if k not in placement})
    if num_classes and not model.classifier_names():
        raise UserError(f"MODEL.NAME {name}: timm does not name its classifier")
    if num_experts:
        fields = dict(moe or {})
        defaults = moe_defaults()
        for field in _OF_FFN:
            if fields.get(field) == defaults[field]:
                del fields[field]
        blocks: Any = moe_blocks if any(moe_blocks) else f"last {LAST_BLOCKS}"
        add_experts(
            model, blocks, num_experts, upcycle=False, freeze=freeze_moe, **options, **fields
        )
    return model


class TimmModel(AdaptedModel):
    """A model of timm that `timm_model` has created."""

    created_from: tuple[str, dict[str, Any]]  # name and arguments of timm.create_model

    def convert_dense(self, tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        """As MoEModel: timm loads the tensors into a dense model, by its rules for the model."""
        name, arguments = self.created_from
        ffns = tuple({f"{key.partition('.moe.')[0]}." for key in tensors if ".moe." in key})
        own = tuple(f"{key}." for key, module in self.named_modules() if type(module) is PreLogits)
        kept = {key: tensors[key] for key in tensors if ".moe." in key or key.startswith(own)}
        if kept:  # timm loads the rest, with other weights in the place of the experts
            others = _create(name, dict(arguments)).state_dict().items()
            tensors = {key: tensor for key, tensor in tensors.items() if key not in kept}
            tensors |= {key: tensor for key, tensor in others if key.startswith(ffns)}
        described = timm_description(name)
        names = self.classifier_names()
        rows = [len(tensors[key]) for key in names[:1] if key in tensors]
        # in another layout the classifier is not found, or there is none
        counts = rows or list(dict.fromkeys([described.get("num_classes") or 0, 0]))
        overlay: dict[str, Any] = {"state_dict": None, "custom_load": False, "label_offset": 0}
        for num_classes in counts:
            overlay |= {"state_dict": dict(tensors), "num_classes": num_classes}
            try:
                with torch.random.fork_rng(devices=[]):  # the draws of a model that is filled
                    dense = timm.create_model(
                        name,
                        pretrained=True,
                        pretrained_cfg_overlay=overlay,
                        **arguments | {"num_classes": num_classes},
                    )
            except Exception as error:  # timm and its models raise any type
                reason = one_line(str(error))[:_MAX_REASON]
                continue
            found = dense.state_dict()
            return {key: found[key] for key in found if not key.startswith(ffns)} | kept
        raise UserError(f"{source} does not fit {name}: {reason}; nothing was loaded")


class PreLogits(nn.Sequential):
    """Features [B, M] -> tanh(fc(features)) [B, M], between a ViT's pooling and its classifier.

    Source: arXiv 2010.11929, section 3.1; the argument `representation_size` of V-MoE and of
    earlier versions of timm.
    """

    def __init__(self, dim: int, device=None, dtype=None) -> None:
        super().__init__()
        self.add_module("fc", nn.Linear(dim, dim, device=device, dtype=dtype))
        self.add_module("act", nn.Tanh())


def _add_pre_logits(model: nn.Module, name: str, size: object) -> None:
    """Raises UserError: the model is no ViT, or of another width."""
    if not isinstance(model, VisionTransformer) or not isinstance(model.fc_norm, nn.Identity):
        raise UserError(f"MODEL.ARGS representation_size={size}: {name} is no ViT of class tokens")
    if size != model.embed_dim:
        raise UserError(
            f"MODEL.ARGS representation_size={size}: must be the width of {name}, {model.embed_dim}"
        )
    like = model.norm.weight
    model.fc_norm = PreLogits(model.embed_dim, like.device, like.dtype)


def classifiers(name: str) -> tuple[str, ...]:
    """The names of a model's classifiers; two of a distilled one.

    Raises:
        UserError: as `timm_model`.
    """
    found = timm_description(name).get("classifier") or ()
    if isinstance(found, str):
        found = (found,)
    if not found:
        raise UserError(f"MODEL.NAME {name}: timm does not name its classifier")
    return tuple(found)


def _create(name: str, arguments: dict[str, Any]) -> nn.Module:
    """timm's model, without the arguments that not every model has."""
    while True:
        try:
            return timm.create_model(name, **arguments)
        except Exception as error:  # models raise any type for arguments that do not fit
            unknown = _UNKNOWN_ARGUMENT.search(str(error))
            if unknown and unknown[1] in _OPTIONAL and arguments.pop(unknown[1], None) is not None:
                continue
            given = " ".join(f"{key}={value}" for key, value in arguments.items())
            reason = one_line(str(error))[:_MAX_REASON] or type(error).__name__
            raise UserError(
                f"MODEL.NAME {name}: timm cannot build it with {given} ({reason})"
            ) from error


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments in "patch_size=4 embed_dim=64", as in `--model-kwargs` of timm's scripts.

    Raises:
        UserError: a word without "=".
    """
    arguments = {}
    for word in text.split():
        key, is_pair, value = word.partition("=")
        if not is_pair or not key.isidentifier():
            raise UserError(f"MODEL.ARGS is {text!r}: {word!r} is not of the form NAME=VALUE")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            arguments[key] = value
    return arguments
