"""Detectors in .pth files, mmengine's among them: read without running code in them, and loaded
whole or not at all."""

from pathlib import Path

from mmengine.runner.checkpoint import get_torch_safe_globals
from torch import nn

from swinv2_moe.errors import UserError
from swinv2_moe.models.weight_files import read_torch_file, unwrapped


def read_pth(file: str) -> dict:
    """What the file holds, on the CPU: a state dict, or one below "state_dict" and perhaps a
    training's state.

    mmengine's own reader runs whatever a file names that torch refuses, and its `resume` the file's
    configuration: that is left out here.

    Raises:
        UserError: it cannot be read.
    """
    content = read_torch_file(Path(file), get_torch_safe_globals())
    if isinstance(content.get("meta"), dict):
        content["meta"].pop("config", None)
    return content


def load_pth(model: nn.Module, content: dict, file: str) -> None:
    """The weights in what `read_pth` returned, into a model.

    Raises:
        UserError: they do not fit.
    """
    state = {name.removeprefix("module."): tensor for name, tensor in unwrapped(content).items()}
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise UserError(
            f"checkpoint {file} cannot be used: {' '.join(str(error).split())}"
        ) from error
