"""A trunk's weights from what this project has trained."""

from pathlib import Path

from torch import Tensor, nn

from moe_core import count_experts, moe_layers
from swinv2_moe.errors import UserError
from swinv2_moe.models import SwinTransformerV2MoE, load_dense, load_strict
from swinv2_moe.models.weight_files import read_weights
from swinv2_moe.train import checkpoint

_KEY = "backbone.pretrained"
_OF_DETECTOR = "backbone.trunk."  # what a trunk's names begin with in a detector


def load_pretrained(trunk: SwinTransformerV2MoE, source: str) -> None:
    """The weights of a run (its newest whole checkpoint), of a checkpoint, or of a file, into a
    trunk without head.

    A run is one of tools/train.py or tools/detect.py. A file is one of `convert_checkpoint.py
    export single`, or has dense weights for a dense trunk.

    Raises:
        UserError: what cannot be read or is another model's, with both values; nothing is loaded
            then.
    """
    if not Path(source).is_dir():
        _load_file(trunk, Path(source))
        return
    found = checkpoint.find_checkpoint(source, Path(), key=_KEY, weights_only=True)
    section = ""
    if found.has("ema"):
        section = "ema"
    tensors = checkpoint.read_tensors(found, section, nn.Module())
    experts = count_experts(found.directory / section)
    prefix = ""
    if any(name.startswith(_OF_DETECTOR) for name in tensors):
        prefix = _OF_DETECTOR
    _check_facts(trunk, source, _facts(_below(prefix, tensors), _below(prefix, experts)))
    windows = found.meta.get("backbone_windows" if prefix else "windows")
    if windows not in (None, trunk.position_windows()):
        raise UserError(
            f"{_KEY} {source}: its positions are measured by windows of {windows}, the backbone's"
            " by"
            f" {trunk.position_windows()}; backbone.pretrained_window_sizes={windows} measures them"
            " likewise"
        )
    checkpoint.load_weights(found, _in_detector(trunk) if prefix else trunk, _without_head)


def _below(prefix: str, values: dict) -> dict:
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }


def _in_detector(trunk: SwinTransformerV2MoE) -> nn.Module:
    """The trunk under the names that it has in a detector."""
    return nn.ModuleDict({"backbone": nn.ModuleDict({"trunk": trunk})})


def _load_file(trunk: SwinTransformerV2MoE, file: Path) -> None:
    tensors = read_weights(file)
    experts = {
        name.removesuffix(".experts.w1"): len(tensor)
        for name, tensor in tensors.items()
        if name.endswith(".experts.w1")
    }
    _check_facts(trunk, str(file), _facts(tensors, experts))
    if experts:
        tensors = _without_head(tensors)
        load_strict(trunk, tensors | own_experts(tensors, trunk), f"{_KEY} {file}")
    else:
        load_dense(trunk, tensors, fit=_without_head)


def own_experts(state: dict[str, Tensor], model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Of expert tensors in `state` that are whole, where the model's are not, this rank's part."""
    own = {}
    for layer_name, layer in moe_layers(model).items():
        first, count, part, num_parts = layer.shard
        for name, parameter in layer.experts.named_parameters():
            key = f"{prefix}{layer_name}.experts.{name}"
            if (
                key in state
                and state[key].shape != parameter.shape
                and len(state[key]) == layer.config.num_experts
            ):
                own[key] = state[key][first : first + count].chunk(num_parts, 1)[part]
    return own


def _facts(tensors: dict[str, Tensor], experts: dict[str, int]) -> dict:
    """What tells models apart, under the names of the backbone's arguments."""
    blocks = {
        tuple(map(int, name.split(".")[1:4:2]))
        for name in tensors
        if name.startswith("layers.") and ".blocks." in name
    }
    depths = [
        sum(stage == i for stage, _ in blocks)
        for i in range(1 + max((stage for stage, _ in blocks), default=-1))
    ]
    embedding = tensors.get("patch_embed.proj.weight")
    heads = [
        tensors.get(f"layers.{stage}.blocks.0.attn.cpb_mlp.2.weight")
        for stage in range(len(depths))
    ]
    return {
        "model": "swinv2_moe"
        if any(name.endswith("logit_scale") for name in tensors)
        else "swin_moe",
        "patch_size": None if embedding is None else embedding.shape[-1],
        "embed_dim": None if embedding is None else embedding.shape[0],
        "depths": depths,
        "num_heads": [None if weight is None else len(weight) for weight in heads],
        "num_experts": max(experts.values(), default=0),
        "MoE layers": sorted(
            name.removesuffix(".mlp.moe").replace("layers.", "").replace(".blocks", "")
            for name in experts
        ),
    }


def _check_facts(trunk: SwinTransformerV2MoE, source: str, there: dict) -> None:
    layers = {name: layer.config.num_experts for name, layer in moe_layers(trunk).items()}
    here = _facts(trunk.state_dict(), layers)
    differ = [
        f"{name} is {there[name]} there, {here[name]} in the backbone"
        for name in here
        if there[name] != here[name]
    ]
    if differ:
        raise UserError(
            f"{_KEY} {source}: of another model: {'; '.join(differ)}; nothing was loaded"
        )


def _without_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A classifier's, or a detector's, trunk."""
    of_detector = {
        name: tensor for name, tensor in tensors.items() if name.startswith(_OF_DETECTOR)
    }
    return of_detector or {
        n: tensor for n, tensor in tensors.items() if not n.startswith(("norm.", "head."))
    }
