"""MODEL.UPCYCLE run on two ranks, each with its own experts: as on one."""

import json
from pathlib import Path

import pytest
import torch
from trainer_cases import SAME_STEPS, make_trainer, resume, save, train_steps

DENSE = "MODEL.MOE.NUM_EXPERTS 0"
BEFORE, AFTER = 3, 2  # steps


def experts_options(source: Path) -> str:
    return f"MODEL.PRETRAINED {source} MODEL.UPCYCLE run"


def go_on(rank: int, source: Path, options: str, file: Path) -> None:
    trainer = make_trainer(rank, 2, f"{experts_options(source)} {options}")
    resume(trainer, source)
    losses = train_steps(trainer, AFTER)
    if rank == 0:
        file.write_text(json.dumps(losses))


# more ranks than experts: each has a part of one
@pytest.mark.parametrize(
    "options",
    ["MODEL.MOE.GLOBAL_BALANCE True", "TRAIN.SHARD_TRUNK True", "MODEL.MOE.NUM_EXPERTS 1"],
)
def test_two_ranks(run_processes, tmp_path, options):
    dense = make_trainer(0, 1, DENSE)
    train_steps(dense, BEFORE)
    source = save(dense, tmp_path)
    options += " MODEL.MOE.AUX_LOSS_WEIGHT 0"
    run_processes(go_on, 2, source, options, tmp_path / "losses.json")
    alone = make_trainer(0, 1, f"{experts_options(source)} {options}")
    resume(alone, source)
    found = torch.tensor(json.loads((tmp_path / "losses.json").read_text()))
    expected = torch.tensor(train_steps(alone, AFTER))
    # loss and gradient norm; the auxiliary loss is that of each rank's tokens
    torch.testing.assert_close(found[:, ::2], expected[:, ::2], **SAME_STEPS)
