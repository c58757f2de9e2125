"""Schedules of the routing on several ranks: resumed on the same ranks and on one."""

import json
from pathlib import Path

import torch.distributed as dist
from trainer_cases import assert_same_steps, make_trainer, resume, save, train_steps

# 44 steps an epoch: the fifth step is the last with top-2.
SCHEDULE = (
    "MODEL.MOE.TOP_K_SCHEDULE 'epoch 0:2 0.1:1' MODEL.MOE.GLOBAL_BALANCE True"
    " MODEL.MOE.BATCH_PRIORITIZED True"
)
AUTO = "MODEL.MOE.CAPACITY_AUTO True MODEL.MOE.CAPACITY_FACTOR 1.25"
FIRST_SAVE, SECOND_SAVE, LAST = 3, 6, 9


def train_and_save(rank: int, root: Path, options: str) -> None:
    """Two saves, one before the change and one after it; then resume from the first."""
    trainer = make_trainer(rank, 2, options)
    losses = train_steps(trainer, FIRST_SAVE)
    first = save(trainer, root / "first")
    losses += train_steps(trainer, SECOND_SAVE - FIRST_SAVE)
    save(trainer, root / "second")
    losses += train_steps(trainer, LAST - SECOND_SAVE)
    again = make_trainer(rank, 2, options)
    resume(again, first)
    assert train_steps(again, LAST - FIRST_SAVE) == losses[FIRST_SAVE:]
    assert again.routing.current == trainer.routing.current
    assert again.routing.state() == trainer.routing.state()
    states = [None, None]
    dist.all_gather_object(states, (trainer.routing.state(), trainer.routing.current))
    assert states[0] == states[1]
    if rank == 0:
        (root / "losses.json").write_text(json.dumps(losses[SECOND_SAVE:]))


def test_another_number_of_ranks(run_processes, tmp_path):
    run_processes(train_and_save, 2, tmp_path, SCHEDULE)
    alone = make_trainer(0, 1, SCHEDULE)
    resume(alone, tmp_path / "second" / f"step-{SECOND_SAVE:08d}")
    losses = train_steps(alone, LAST - SECOND_SAVE)
    assert alone.routing.current == {"moe/top_k": 1}
    expected = json.loads((tmp_path / "losses.json").read_text())
    assert_same_steps(losses, expected)


def test_automatic_capacity_is_agreed(run_processes, tmp_path):
    run_processes(train_and_save, 2, tmp_path, AUTO)
