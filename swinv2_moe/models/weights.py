"""Weights into a model: all of them or none, and dense SwinV2 weights into one with experts."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from timm.models.swin_transformer_v2 import checkpoint_filter_fn
from torch import Tensor, nn

from swinv2_moe.errors import UserError

_DENSE_FFN = re.compile(r"(?P<block>layers\.\d+\.blocks\.\d+)\.mlp\.(?P<name>fc[12]\.(weight|bias))")


def load_strict(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load `state` if it fits the model exactly; otherwise change nothing.

    Raises:
        UserError: names `source` and every missing key, unexpected key and key of another shape.
    """
    problems = compare(model.state_dict(), state)
    if problems:
        raise UserError(f"{source} does not fit the model: {problems}; nothing was loaded")
    model.load_state_dict(state)


def compare(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    """What keeps `found` from taking the place of `expected`, in one line; empty if nothing does."""
    missing = [key for key in expected if key not in found]
    unexpected = [key for key in found if key not in expected]
    reshaped = [
        f"{key} ({list(found[key].shape)} there, {list(tensor.shape)} in the model)"
        for key, tensor in expected.items()
        if key in found and found[key].shape != tensor.shape
    ]
    parts = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
    return "; ".join(f"{len(keys)} {what}: {', '.join(keys)}" for what, keys in parts if keys)


def load_dense(model: nn.Module, source: str | Path | dict[str, Tensor], upcycle: bool = False) -> list[str]:
    """Dense SwinV2 weights (timm's naming or Microsoft's; a dict, .safetensors or .pth) into a model with experts.

    The trunk loads as it is. In MoE blocks the dense FFN goes into every expert if `upcycle`, otherwise it is left out
    and the experts keep their own values; routers keep theirs. (Sparse upcycling: arXiv 2212.05055.)

    Returns:
        The model's keys that the dense weights do not cover.

    Raises:
        UserError: a file that cannot be read, weights that do not fit; nothing is loaded then.
    """
    name = "the given weights" if isinstance(source, dict) else f"weights {source}"
    dense = source if isinstance(source, dict) else read_weights(Path(source))
    dense = checkpoint_filter_fn(dense, model)
    expected = model.state_dict()
    moe_blocks = {key.split(".mlp.moe.")[0] for key in expected if ".mlp.moe." in key}
    state, kept = dict(expected), []
    for key in list(dense):
        match = _DENSE_FFN.fullmatch(key)
        if match and match["block"] in moe_blocks:
            tensor = dense.pop(key)
            if upcycle:
                dense |= _to_experts(match["block"], match["name"], tensor, expected)
    for key in expected:
        is_covered = key in dense or (upcycle and ".mlp.moe.experts." in key)  # else missing, which is reported
        if ".mlp.moe." in key and not is_covered:
            kept.append(key)
            dense[key] = state[key]
    load_strict(model, dense, name)
    return kept


def _to_experts(block: str, name: str, tensor: Tensor, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """One dense FFN tensor, in the experts' layout (w2 is stored transposed), repeated for every local expert."""
    target = {"fc1.weight": "w1", "fc1.bias": "b1", "fc2.weight": "w2", "fc2.bias": "b2"}[name]
    key = f"{block}.mlp.moe.experts.{target}"
    if key not in expected:
        return {key: tensor}  # reported as unexpected
    tensor = tensor.t() if target == "w2" else tensor
    return {key: tensor.expand(len(expected[key]), *tensor.shape).contiguous()}


def read_weights(file: Path) -> dict[str, Tensor]:
    """A state dict from .safetensors or, read without running any code in it, .pth / .pt / .bin.

    Raises:
        UserError: no such file, or not a file of weights.
    """
    if not file.is_file():
        raise UserError(f"weights {file}: no such file")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"weights {file}: cannot be read as weights ({reason})") from error
    for key in ("model", "state_dict"):
        content = content.get(key, content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"weights {file}: holds no state dict of tensors")
    return content
