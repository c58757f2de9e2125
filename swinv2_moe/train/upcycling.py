"""MODEL.UPCYCLE_CONTINUE: continue a dense run as a run of a model with experts.

Each expert begins as a copy of the dense FFN, with copies of its moments. Routers and shared
experts are initialised at random, and their moments are zero. Source: sparse upcycling, arXiv
2212.05055.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from swinv2_moe.config import TrainConfig
from swinv2_moe.errors import UserError
from swinv2_moe.models.weights import compare, has_dense_twin, to_experts
from swinv2_moe.train.checkpoint import Checkpoint, find_checkpoint, read_dense
from swinv2_moe.train.distributed import World


def find_dense(pretrained: str, config: TrainConfig, world: World) -> Checkpoint:
    """The dense checkpoint in MODEL.PRETRAINED, from which the run continues. Every rank calls
    this.

    Raises:
        UserError: there is no checkpoint, it has experts, or no step is left.
    """
    source = find_checkpoint(pretrained, Path(), world, "MODEL.PRETRAINED")
    assert source is not None, "only --resume auto may be without one"
    if source.meta["experts"]:
        raise UserError(
            f"checkpoint {source.directory} has experts, MODEL.UPCYCLE_CONTINUE True needs a dense"
            " run"
        )
    training, step = source.meta["training"], source.meta["step"]
    if training and training["epoch"] >= config.epochs:
        raise UserError(
            f"checkpoint {source.directory} has done {training['epoch']} epochs,"
            f" MODEL.UPCYCLE_CONTINUE True needs TRAIN.EPOCHS ({config.epochs}) above that"
        )
    if 0 < config.max_steps <= step:
        raise UserError(
            f"checkpoint {source.directory} has done {step} steps,"
            f" MODEL.UPCYCLE_CONTINUE True needs TRAIN.MAX_STEPS ({config.max_steps}) above that"
        )
    return source


def read_upcycled(
    source: Checkpoint, section: str, model: nn.Module, expected: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Read a section of a dense checkpoint for a model with experts. Arguments as in
    `swinv2_moe.train.checkpoint.read_section`.

    Parameters without a dense twin keep the values in `expected`; their moments are 0.

    Raises:
        UserError: the section does not fit the model; all differences are named.
    """
    tensors = to_experts(read_dense(source, section, model), model)
    for name, tensor in expected.items():
        if has_dense_twin(name):
            continue
        tensors[name] = tensor
        if section.startswith("optimizer/"):
            tensors[name] = torch.zeros_like(tensor)
    difference = compare(expected, tensors)
    if difference:
        raise UserError(
            f"checkpoint {source.directory}: it cannot be upcycled into the model: {difference};"
            " nothing was loaded"
        )
    return tensors
