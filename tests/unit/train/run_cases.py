"""What the tests of training runs share."""

import hashlib
from pathlib import Path

import pytest
import torch

from swinv2_moe.checkpoints.saver import Saver
from swinv2_moe.ranks.world import World
from swinv2_moe.train.loop import Trainer

ALONE = World(0, 1, torch.device("cpu"))
LAYERS = ["layers.1.blocks.0.mlp.moe", "layers.2.blocks.0.mlp.moe"]  # of the small model


def saver_of(trainer: Trainer, root: Path, source: object = None, **how) -> Saver:
    return Saver(root, trainer.world, trainer.config.checkpoint.keep_last, source, **how)


def interrupt_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C before this step of every run."""
    original = Trainer.train_step

    def train_step(self, batches):
        if self.progress.step + 1 == step:
            raise KeyboardInterrupt
        return original(self, batches)

    patch.setattr(Trainer, "train_step", train_step)


def weights_of(run: Path) -> dict[str, str]:
    """The checksum of each file of tensors in a run's newest checkpoint."""
    newest = run / "checkpoints" / "latest"
    files = {str(path.relative_to(newest)): path for path in newest.rglob("*.safetensors")}
    assert files
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def copy_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Bit for bit the same tensors, NaN included."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(
            tensor, second[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
