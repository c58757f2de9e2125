"""The counters of a run and their state in a checkpoint."""

import json

import pytest

from swinv2_moe.train.evaluation import Accuracy
from swinv2_moe.train.progress import PhaseTimes, Progress, TimeToTarget
from swinv2_moe.train.step import StepResult


def make(epochs=2, max_steps=0, steps_per_epoch=3, global_batch=10, target=0.0) -> Progress:
    to_target = TimeToTarget(target, PhaseTimes())
    return Progress(epochs, max_steps, steps_per_epoch, global_batch, to_target)


def result(loss=1.0, finite=True, skipped=False) -> StepResult:
    return StepResult(loss, 0.0, 1.0, finite, skipped, False)


def test_steps_and_validations_are_counted() -> None:
    progress = make()
    for _ in range(3):
        progress.count_step(result(2.0))
    assert (progress.step, progress.epoch_step, progress.epoch_loss) == (3, 3, 6.0)
    assert not progress.finished
    assert progress.schedule_step == 3
    assert progress.count_validation(40.0)
    assert (progress.epoch, progress.epoch_step, progress.epoch_loss) == (1, 0, 0.0)
    for _ in range(3):
        assert not progress.is_last_step
        progress.count_step(result())
    assert progress.is_last_step  # of the last epoch, which is complete once it is validated
    assert not progress.steps_done
    assert not progress.count_validation(30.0)
    assert progress.finished
    assert (progress.best_top1, progress.last_top1) == (40.0, 30.0)


def test_a_limit_of_steps_ends_a_run_within_an_epoch() -> None:
    progress = make(max_steps=2)
    progress.count_step(result())
    assert not progress.steps_done
    progress.count_step(result())
    assert progress.steps_done
    assert progress.is_last_step
    assert not progress.finished  # not validated
    progress.count_validation(10.0)
    assert progress.finished
    assert (progress.epoch, progress.epoch_step) == (0, 2)


def test_steps_that_are_not_finite() -> None:
    progress = make()
    progress.count_step(result(float("nan"), finite=False, skipped=True))
    assert (progress.step, progress.skipped, progress.epoch_loss) == (1, 1, 0.0)
    assert progress.epoch_losses == 0
    progress.count_step(result(2.5))
    assert (progress.epoch_loss, progress.epoch_losses) == (2.5, 1)
    other = make(global_batch=5)  # of the two steps' 20 images, 15 fit into an epoch
    other.load(2, progress.state())
    assert other.epoch_loss / other.epoch_losses == 2.5


def test_the_state_goes_through_json() -> None:
    progress = make(target=50.0)
    for loss in (1.0, 0.1):
        progress.count_step(result(loss))
        progress.loss_watch.add(loss)
    progress.to_target.validated(1, 2, 60.0, joules=7.5)
    state = json.loads(json.dumps(progress.state()))
    other = make(target=50.0)
    other.load(2, state)
    again, before = other.state(), progress.state()
    assert again.pop("time_to_target")["costs"] == before.pop("time_to_target")["costs"]
    assert again == before
    assert other.step == 2
    assert other.to_target.reached is not None


@pytest.mark.parametrize(("global_batch", "epoch_step"), [(10, 2), (5, 3), (30, 0), (100, 0)])
def test_another_global_batch(global_batch: int, epoch_step: int) -> None:
    progress = make()
    for _ in range(2):
        progress.count_step(result(2.0))
    other = make(global_batch=global_batch)
    other.load(2, progress.state())
    assert other.epoch_step == epoch_step
    assert other.epoch_loss == 2.0 * epoch_step
    assert other.epoch_losses == epoch_step


def test_a_state_of_earlier_versions() -> None:
    progress = make()
    progress.count_step(result(3.0))
    state = progress.state()
    del state["time_to_target"], state["loss_watch"], state["epoch_losses"]
    progress = make()
    progress.load(1, state)
    assert (progress.epoch_loss, progress.epoch_losses) == (3.0, 1)
    assert progress.to_target.validations == []
    assert not progress.loss_watch.has_warned


def test_of_equal_accuracies_the_later_one_is_the_best() -> None:
    progress = make()
    found = [progress.count_validation(top1) for top1 in (40.0, 40.0, 39.0, 41.0)]
    assert found == [True, True, False, True]


def test_another_measure_chooses_the_best() -> None:
    progress = make()
    progress.best_by = "loss"
    found = [
        progress.count_validation(*pair) for pair in ((90.0, -0.8), (95.0, -0.9), (80.0, -0.7))
    ]
    assert found == [True, False, True]
    assert (progress.best_top1, progress.last_top1) == (80.0, 80.0)
    again = make()
    again.best_by = "loss"
    again.load(0, progress.state())
    assert not again.count_validation(99.0, -0.75)
    again = make()  # by top-1: scores of the loss are not compared with it
    again.load(0, progress.state())
    assert again.count_validation(10.0, 10.0)
    assert Accuracy(90.0, 99.0, 50.0, float("nan"), 10, []).score("loss") == -1e30
    assert Accuracy(90.0, 99.0, 50.0, 0.5, 10, []).score("balanced") == 50
