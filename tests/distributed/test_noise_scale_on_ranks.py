"""The gradient's noise scale is that of the global batch, on any number of ranks."""

from pathlib import Path

import pytest
from trainer_cases import make_trainer, train_steps

OPTIONS = "TRAIN.NOISE_SCALE_FREQ 3 MODEL.MOE.GLOBAL_BALANCE True TRAIN.BASE_LR 1e-5"
OPTIONS += " TRAIN.MIN_LR 0 TRAIN.WARMUP_LR 0"
STEPS = 5


def noise_scale(rank: int, size: int) -> float | None:
    trainer = make_trainer(rank, size, OPTIONS)
    train_steps(trainer, STEPS)
    return trainer.step.noise.value


def write(rank: int, size: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(noise_scale(rank, size)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_find_what_one_finds(run_processes, tmp_path, ranks):
    expected = noise_scale(0, 1)
    assert expected is not None
    run_processes(write, ranks, ranks, tmp_path)
    for rank in range(ranks):
        assert float((tmp_path / str(rank)).read_text()) == pytest.approx(expected, rel=1e-3)
