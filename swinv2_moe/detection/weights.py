"""Load weights that this project has trained into a detector's trunk, and .pth files of detectors
into detectors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.logging import MMLogger
from mmengine.runner.checkpoint import get_torch_safe_globals
from torch import Tensor, nn

from moe_core import count_experts, expert_parameters, moe_layers
from swinv2_moe.checkpoints import checkpoint
from swinv2_moe.errors import UserError
from swinv2_moe.models import SwinTransformerV2MoE, load_dense, load_strict
from swinv2_moe.models.hub import fetch_weights, is_hub_name, local_file
from swinv2_moe.models.positions import set_windows
from swinv2_moe.models.weight_files import read_torch_file, read_weights, unwrapped
from swinv2_moe.models.weights import rank_experts
from swinv2_moe.start.initial import TrainedWith, settings_of_weights

_KEY = "backbone.pretrained"
_DETECTOR_PREFIX = "backbone.trunk."  # of a trunk's names in a detector


def load_pretrained(trunk: SwinTransformerV2MoE, source: str) -> TrainedWith:
    """Load the weights of a run, a checkpoint or a file into a trunk without head.

    Args:
        source: `bundled:tiny`, `timm:NAME`, a run of `train` or `detect` (its newest complete
            checkpoint is used), a checkpoint, a file of `convert-checkpoint export single`, or a
            file of dense weights for a dense trunk.

    Returns:
        what the weights were trained with, as far as it is known.

    Raises:
        UserError: weights that cannot be read or are another model's; nothing is loaded.
    """
    trained = settings_of_weights(source, len(trunk.layers))
    if is_hub_name(source):
        _load_file(trunk, fetch_weights(source, _KEY), trained)
        return trained
    source = local_file(source)
    if not Path(source).is_dir():
        _load_file(trunk, Path(source), trained)
        return trained
    pretrained = checkpoint.open_newest(Path(source), _KEY)
    section = ""
    if pretrained.has("ema"):
        section = "ema"
    tensors = checkpoint.read_tensors(pretrained, section, nn.Module())
    experts = count_experts(pretrained.directory / section)
    prefix = ""
    if any(name.startswith(_DETECTOR_PREFIX) for name in tensors):
        prefix = _DETECTOR_PREFIX
    _check_facts(trunk, source, _facts(_below(prefix, tensors), _below(prefix, experts)))
    windows_key = "windows"
    if prefix:
        windows_key = "backbone_windows"
    use_windows(trunk, pretrained.meta.get(windows_key), f"{_KEY} {source}")
    model: Any = trunk
    if prefix:
        model = _in_detector(trunk)
    checkpoint.load_weights(pretrained, model, _without_head)
    return trained


def use_windows(trunk: SwinTransformerV2MoE, windows: Sequence[int] | None, source: str) -> None:
    """Compute position biases for the window sizes of the weights, unless
    backbone.pretrained_window_sizes is given.

    Args:
        windows: the window size of each stage in the weights; None or empty if not known.
        source: name of the weights in messages.

    Raises:
        UserError: the backbone has other windows by configuration, or another number of stages.
    """
    current = trunk.position_windows()
    if not windows or list(windows) == current:
        return
    attention = [stage.blocks[0].attn for stage in trunk.layers]
    if any(any(attn.pretrained_window_size) for attn in attention) or len(windows) != len(current):
        raise UserError(
            f"{source}: its position biases are for windows of {list(windows)}, the backbone's for"
            f" {current}; set backbone.pretrained_window_sizes={list(windows)}"
        )
    set_windows(trunk, windows)
    MMLogger.get_current_instance().info(
        f"backbone.pretrained_window_sizes={list(windows)}, as in {source}"
    )


def check_preprocessing(detector: nn.Module, trained: TrainedWith, source: str) -> None:
    """Warn if the detector normalises images otherwise than the training of `source` did."""
    preprocessor = getattr(detector, "data_preprocessor", None)
    for key, name in (("DATA.MEAN", "mean"), ("DATA.STD", "std")):
        values = getattr(preprocessor, name, None)
        if values is None or key not in trained.values:
            continue
        expected = [round(255 * value, 3) for value in trained.values[key]]
        present = [round(value, 3) for value in values.flatten().tolist()]
        if len(present) != len(expected) or any(map(_differ, present, expected)):
            MMLogger.get_current_instance().warning(
                f"model.data_preprocessor.{name} is {present}, the weights of {_KEY} {source} were"
                f" trained with {expected}"
            )


def _differ(first: float, second: float) -> bool:
    return abs(first - second) > 0.1  # of 255; configurations round


def _below(prefix: str, values: dict) -> dict:
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }


def _in_detector(trunk: SwinTransformerV2MoE) -> nn.Module:
    """A module whose parameter names are those of a detector with this trunk."""
    return nn.ModuleDict({"backbone": nn.ModuleDict({"trunk": trunk})})


def _load_file(trunk: SwinTransformerV2MoE, file: Path, trained: TrainedWith) -> None:
    if trained.line:
        MMLogger.get_current_instance().info(f"{_KEY} {file}: {trained.line}")
    tensors = read_weights(file)
    experts = {
        name.removesuffix(".experts.w1"): len(tensor)
        for name, tensor in tensors.items()
        if name.endswith(".experts.w1")
    }
    _check_facts(trunk, str(file), _facts(tensors, experts))
    use_windows(trunk, trained.windows, f"{_KEY} {file}")
    if experts:
        tensors = _without_head(tensors)
        load_strict(trunk, tensors | rank_experts(tensors, trunk), f"{_KEY} {file}")
    else:
        load_dense(trunk, tensors, fit=_without_head)


def _facts(tensors: dict[str, Tensor], experts: dict[str, int]) -> dict:
    """Properties that distinguish models, under the names of the backbone's arguments.

    Args:
        tensors: the trunk's state dict.
        experts: number of experts by MoE layer.
    """
    blocks = set()  # (stage, block)
    for name in tensors:
        if name.startswith("layers.") and ".blocks." in name:
            parts = name.split(".")
            blocks.add((int(parts[1]), int(parts[3])))
    num_stages = 1 + max((stage for stage, _ in blocks), default=-1)
    depths, heads = [], []
    for stage in range(num_stages):
        depths.append(sum(block_stage == stage for block_stage, _ in blocks))
        heads.append(_length(tensors.get(f"layers.{stage}.blocks.0.attn.cpb_mlp.2.weight")))
    model, patch_size = "swin_moe", None
    if any(name.endswith("logit_scale") for name in tensors):
        model = "swinv2_moe"
    embedding = tensors.get("patch_embed.proj.weight")
    if embedding is not None:
        patch_size = embedding.shape[-1]
    return {
        "model": model,
        "patch_size": patch_size,
        "embed_dim": _length(embedding),
        "depths": depths,
        "num_heads": heads,
        "num_experts": max(experts.values(), default=0),
        "MoE layers": sorted(
            name.removesuffix(".mlp.moe").replace("layers.", "").replace(".blocks", "")
            for name in experts
        ),
    }


def _length(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    return tensor.shape[0]


def _check_facts(trunk: SwinTransformerV2MoE, source: str, facts: dict) -> None:
    layers = {name: layer.config.num_experts for name, layer in moe_layers(trunk).items()}
    expected = _facts(trunk.state_dict(), layers)
    differ = [
        f"{name} is {facts[name]} there, {expected[name]} in the backbone"
        for name in expected
        if facts[name] != expected[name]
    ]
    if differ:
        raise UserError(
            f"{_KEY} {source}: of another model: {'; '.join(differ)}; nothing was loaded"
        )


def _without_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the trunk in a detector's or a classifier's state dict."""
    trunk = {name: tensor for name, tensor in tensors.items() if name.startswith(_DETECTOR_PREFIX)}
    if trunk:
        return trunk
    heads = ("norm.", "head.")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(heads)}


def read_pth(file: str) -> dict:
    """The content of the file on the CPU: a state dict, or "state_dict" and a training's state.

    Unlike mmengine's reader, this runs no code that the file names. The file's configuration, which
    mmengine's `resume` would run, is removed.

    Raises:
        UserError: the file cannot be read.
    """
    content = read_torch_file(Path(file), get_torch_safe_globals())
    if isinstance(content.get("meta"), dict):
        content["meta"].pop("config", None)
    return content


def load_pth(model: Any, content: dict, file: str) -> None:
    """Load the weights of `read_pth`'s result into a model.

    Raises:
        UserError: the weights do not fit.
    """
    state = {name.removeprefix("module."): tensor for name, tensor in unwrapped(content).items()}
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise UserError(
            f"checkpoint {file} cannot be used: {' '.join(str(error).split())}"
        ) from error
    meta = content.get("meta")
    windows = meta.get("backbone_windows") if isinstance(meta, dict) else None
    if isinstance(windows, list) and all(type(w) is int and 0 < w <= 4096 for w in windows):
        use_windows(model.backbone.trunk, windows, f"checkpoint {file}")


def sharded_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Expert parameters by name if the ranks have different experts, otherwise none."""
    is_sharded = any(layer.group.size > 1 for layer in moe_layers(model).values())
    if is_sharded:
        return expert_parameters(model)
    return {}
