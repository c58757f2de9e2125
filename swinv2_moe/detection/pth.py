"""Read .pth files of detectors without running code in them, and load them completely or not."""

from pathlib import Path

from mmengine.runner.checkpoint import get_torch_safe_globals
from torch import nn

from swinv2_moe.detection.weights import use_windows
from swinv2_moe.errors import UserError
from swinv2_moe.models.weight_files import read_torch_file, unwrapped


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


def load_pth(model: nn.Module, content: dict, file: str) -> None:
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
