"""--checkpoint best, latest or a step: which checkpoint of a run it means, and the line on it."""

import pytest

from swinv2_moe.checkpoints.checkpoint import select_checkpoint
from swinv2_moe.errors import UserError


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of three steps, the middle one the best."""
    root = tmp_path / "run" / "checkpoints"
    for name in ("step-00000010", "step-00000020", "step-00000030", "step-00000030-1"):
        (root / name).mkdir(parents=True)
    (root / "best").symlink_to("step-00000020")
    (root / "latest").symlink_to("step-00000030-1")
    return tmp_path / "run"


def test_the_best(run):
    path, line = select_checkpoint(str(run))
    assert path == str(run / "checkpoints" / "step-00000020")
    assert line == ("step-00000020: the best in validation (--checkpoint latest: step-00000030-1)")


def test_the_best_that_is_the_newest(run):
    (run / "checkpoints" / "best").unlink()
    (run / "checkpoints" / "best").symlink_to("step-00000030-1")
    path, line = select_checkpoint(str(run), "best")
    assert path == str(run)  # a damaged one is passed over
    assert line == "step-00000030-1: the best in validation and the newest"


def test_a_run_without_a_best_one(run):
    (run / "checkpoints" / "best").unlink()
    line = "the newest checkpoint of the run, which has no best one"
    assert select_checkpoint(str(run), "best") == (str(run), line)


def test_the_newest_or_a_step(run):
    line = "the newest checkpoint of the run"
    assert select_checkpoint(str(run), "latest") == (str(run), line)
    steps = {"10": "step-00000010", "020": "step-00000020", "30": "step-00000030-1"}
    for step, name in steps.items():
        path, line = select_checkpoint(str(run), step)
        assert (path, line) == (str(run / "checkpoints" / name), f"{name}: as --checkpoint says")
    # a directory of checkpoints is a run
    assert select_checkpoint(str(run / "checkpoints"), "10")[0].endswith("step-00000010")


def test_a_checkpoint_and_what_is_none_are_left_to_who_opens_them(run, tmp_path):
    for path in (run / "checkpoints" / "step-00000010", tmp_path / "nothing"):
        assert select_checkpoint(str(path)) == (str(path), "")


def test_what_cannot_be_selected(run):
    with pytest.raises(UserError, match=r"--checkpoint 7: .*run has .* the steps 10, 20, 30"):
        select_checkpoint(str(run), "7")
    for which in ("newest", "-1", "1.5", ""):
        with pytest.raises(UserError, match=f"--checkpoint {which}: must be best, latest, final"):
            select_checkpoint(str(run), which)


def test_the_tenth_checkpoint_of_a_step_is_newer_than_the_ninth(run):
    for number in (9, 10):
        (run / "checkpoints" / f"step-00000030-{number}").mkdir()
    path, _ = select_checkpoint(str(run), "30")
    assert path == str(run / "checkpoints" / "step-00000030-10")
