"""The classifier of pretrained weights, for a model with other classes."""

from pathlib import Path

import torch
from torch import Tensor

from swinv2_moe.config import ModelConfig
from swinv2_moe.errors import UserError, short
from swinv2_moe.files import read_bounded
from swinv2_moe.models.protocol import MoEModel

_MAX_BYTES = 1 << 26  # of a class map
_MAX_DIGITS = 9


def fit_head(tensors: dict[str, Tensor], model: MoEModel, config: ModelConfig) -> dict[str, Tensor]:
    """Pretrained `tensors` with the head that MODEL.NEW_HEAD and MODEL.CLASS_MAP ask for; without
    them, unchanged.

    Args:
        model: its own head is the new one.

    Raises:
        UserError: a class map that cannot be read or does not fit either side.
    """
    names, expected = model.classifier_names(), model.state_dict()
    if config.new_head:
        return tensors | {name: expected[name] for name in names}
    if not config.class_map or not all(name in tensors for name in names):
        return tensors
    bias = names[1]
    there, here = len(tensors[bias]), len(expected[bias])
    rows = read_class_map(Path(config.class_map))
    if len(rows) != here or max(rows, default=0) >= there:
        raise UserError(
            f"MODEL.CLASS_MAP {config.class_map}: {len(rows)} lines up to class"
            f" {max(rows, default=0)}, the model"
            f" has {here} classes and the pretrained weights have {there} (0 to {there - 1})"
        )
    rows = torch.tensor(rows)
    taken = {name: tensors[name][rows.clamp(min=0)] for name in names}
    for name, tensor in taken.items():
        tensor[rows < 0] = expected[name][rows < 0].to(tensor)
    return tensors | taken


def read_class_map(file: Path) -> list[int]:
    """For each class of the model the number (from 0) of its class in the pretrained weights, or -1
    where they have none, a line each: Swin's map22kto1k.txt, and what data/make_class_map.py
    writes.

    Raises:
        UserError: not such a file.
    """
    try:
        lines = read_bounded(file, _MAX_BYTES).decode().split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"MODEL.CLASS_MAP {file}: cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        if line != "-1" and not (line.isdecimal() and len(line) <= _MAX_DIGITS):
            raise UserError(
                f"MODEL.CLASS_MAP {file}: line {number}: {short(line)} is not the number of a class"
            )
    return [int(line) for line in lines]
