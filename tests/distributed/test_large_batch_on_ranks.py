"""LAMB and LARS on several ranks give the losses of one."""

import json
from pathlib import Path

import pytest
from trainer_cases import assert_same_steps, make_trainer, train_steps

STEPS = 4


def train(rank: int, size: int, options: str, file: Path) -> None:
    losses = train_steps(make_trainer(rank, size, options), STEPS)
    if rank == 0:
        file.write_text(json.dumps(losses))


@pytest.mark.parametrize(("name", "rate"), [("lamb", 0.05), ("lars", 5.0)])
def test_losses_do_not_depend_on_the_ranks(run_processes, tmp_path, name, rate):
    options = f"TRAIN.OPTIMIZER.NAME {name} TRAIN.BASE_LR {rate} TRAIN.WARMUP_EPOCHS 0"
    options += " MODEL.MOE.GLOBAL_BALANCE True"
    alone = train_steps(make_trainer(0, 1, options), STEPS)
    for size in (2, 4):
        file = tmp_path / f"{size}.json"
        run_processes(train, size, size, options, file)
        assert_same_steps(json.loads(file.read_text()), alone)
