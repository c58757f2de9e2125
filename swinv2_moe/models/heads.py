"""Adapt the classifier of pretrained weights to a model with other classes."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from swinv2_moe.config import ModelConfig
from swinv2_moe.errors import UserError, short
from swinv2_moe.files import read_bounded
from swinv2_moe.models.protocol import MoEModel

_MAX_BYTES = 1 << 26  # limit of a class map
_MAX_DIGITS = 9


def fit_head(
    tensors: dict[str, Tensor],
    model: MoEModel,
    config: ModelConfig,
    rows: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Replace the head of pretrained `tensors` as MODEL.NEW_HEAD, MODEL.CLASS_MAP or `rows` say.

    Without any of these the tensors are returned unchanged.

    Args:
        model: the source of the rows that the pretrained head does not have.
        rows: without these keys: for each class of the model, its row in the pretrained head, or
            NO_CLASS.

    Raises:
        UserError: the class map cannot be read, or does not match the model or the weights.
    """
    names, expected = model.classifier_names(), model.state_dict()
    if config.new_head:
        return tensors | {name: expected[name] for name in names}
    has_map = config.class_map or rows is not None
    if not has_map or not all(name in tensors for name in names):
        return tensors
    bias = names[1]
    num_pretrained, num_classes = len(tensors[bias]), len(expected[bias])
    if not config.class_map:
        if max(rows) >= num_pretrained:
            raise UserError(
                f"MODEL.PRETRAINED {config.pretrained}: its classifier has {num_pretrained} rows,"
                " fewer than it has class names"
            )
        return tensors | _head_of_rows(tensors, expected, names, rows)
    rows = read_class_map(Path(config.class_map))
    highest = max(rows, default=0)
    if len(rows) != num_classes or highest >= num_pretrained:
        raise UserError(
            f"MODEL.CLASS_MAP {config.class_map}: {len(rows)} lines up to class {highest}, the"
            f" model has {num_classes} classes and the pretrained weights have {num_pretrained}"
            f" (0 to {num_pretrained - 1})"
        )
    return tensors | _head_of_rows(tensors, expected, names, rows)


def _head_of_rows(
    tensors: dict[str, Tensor],
    expected: dict[str, Tensor],
    names: Sequence[str],
    rows: Sequence[int],
) -> dict[str, Tensor]:
    """The head's tensors from rows of `tensors`, and of `expected` for rows below 0."""
    chosen = torch.tensor(rows)
    head = {name: tensors[name][chosen.clamp(min=0)] for name in names}
    for name, tensor in head.items():
        tensor[chosen < 0] = expected[name][chosen < 0].to(tensor)
    return head


def read_class_map(file: Path) -> list[int]:
    """Read a class map, such as Swin's map22kto1k.txt or a file of data/make_class_map.py.

    It has one line for each class of the model: the number (from 0) of the class in the pretrained
    weights, or -1 if the weights do not have this class.

    Raises:
        UserError: the file cannot be read, or is not a class map.
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
