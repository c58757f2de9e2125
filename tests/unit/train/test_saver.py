"""Saving: behind the training's back, in turns, within bounds; and what happens when it fails."""

import errno
import shutil
import threading
from pathlib import Path

import pytest
import torch
from run_cases import ALONE, assert_same, copy_of, saver_of

from moe_core.checkpoint import write_tensors
from swinv2_moe.checkpoints import saver as saver_module
from swinv2_moe.checkpoints.checkpoint import (
    checkpoints_below,
    find_checkpoint,
    open_checkpoint,
    read_section,
)
from swinv2_moe.checkpoints.saver import Saver, StagingBuffers
from swinv2_moe.errors import UserError
from swinv2_moe.train.run import train


def step(trainer):
    trainer.data.set_epoch(trainer.progress.epoch, skip_steps=trainer.progress.epoch_step)
    trainer.step.wrapped.train()
    trainer.train_step([next(iter(trainer.data.train_loader))])


@pytest.fixture
def begin(make_trainer, tmp_path):
    """`begin(keys)`: a trainer after one step, its saver and what that says."""

    def make(keys=None, root=tmp_path / "checkpoints"):
        trainer, said = make_trainer({"DATA.BATCH_SIZE": 16} | (keys or {})), []
        step(trainer)
        return trainer, saver_of(trainer, root, print_line=said.append), said

    return make


def weights(directory: Path, trainer) -> dict[str, torch.Tensor]:
    """The model's weights in a checkpoint."""
    model = trainer.step.model
    return read_section(open_checkpoint(directory), "", model, model.state_dict())


def write(trainer, saver, **how) -> None:
    trainer.save(saver, **how)
    saver.close()


@pytest.mark.parametrize("staging", [4096, 1, 0])  # MB: all of it, a part, nothing
def test_training_goes_on_while_a_checkpoint_is_written(staging, begin, monkeypatch):
    monkeypatch.setattr(saver_module, "STAGING_BYTES", staging << 20)
    trainer, saver, _ = begin({"MODEL.SWINV2.EMBED_DIM": 32})
    before = copy_of(trainer.step.model)
    gate, threads = threading.Event(), set()

    def write_in_the_thread_when_let(file, tensors):
        threads.add(threading.current_thread().name.split("_")[0])
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(20)
        write_tensors(file, tensors)

    monkeypatch.setattr(saver_module, "write_tensors", write_in_the_thread_when_let)
    trainer.save(saver)
    with torch.no_grad():
        for parameter in trainer.step.model.parameters():
            parameter.zero_()
    assert not checkpoints_below(saver.root)
    gate.set()
    saver.close()
    both = {"checkpoint", "MainThread"}
    assert threads == {4096: {"checkpoint"}, 1: both, 0: {"MainThread"}}[staging]
    assert_same(weights(saver.root / "latest", trainer), before)
    assert saver.staging.allocated <= staging * 2**20


def test_without_staging_nothing_is_copied(begin, monkeypatch):
    monkeypatch.setattr(saver_module, "STAGING_BYTES", 0)
    trainer, saver, _ = begin()
    moments = [t for state in trainer.step.optimizer.state.values() for t in state.values()]
    tensors = [*trainer.step.model.parameters(), *moments]
    memory = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    written = []

    def write_in_place(file, tensors):
        for tensor in tensors.values():
            assert tensor.is_contiguous()  # or it would be copied for writing
            assert any(first <= tensor.data_ptr() < end for first, end in memory)
        written.append(file)
        write_tensors(file, tensors)

    monkeypatch.setattr(saver_module, "write_tensors", write_in_place)
    write(trainer, saver)
    assert len(written) == 3 * (1 + 2 * 4)


def test_staging_is_bounded_and_used_again():
    staging, tensors = StagingBuffers(limit=100), {"a": torch.ones(10), "b": torch.zeros(10)}
    first = staging.copy(tensors)
    assert first["a"].equal(tensors["a"])
    assert first["b"].equal(tensors["b"])
    assert staging.copy(tensors) is None
    small = staging.copy({"c": torch.ones(5)})
    assert (staging.allocated, staging.copy({"c": torch.ones(1)})) == (100, None)
    staging.give_back(first)
    staging.give_back(small)
    again = staging.copy(tensors)
    assert {t.data_ptr() for t in again.values()} == {t.data_ptr() for t in first.values()}
    assert staging.allocated == 100


def fails_once(monkeypatch, name, after=0):
    """Make the n-th call of a function that the saver uses fail as on a full disk; later ones
    work."""
    real, calls = getattr(saver_module, name), []

    def maybe(*args):
        calls.append(args)
        if len(calls) == after + 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
        return real(*args)

    monkeypatch.setattr(saver_module, name, maybe)


@pytest.mark.parametrize(
    ("function", "after", "staging"),
    [
        ("write_tensors", 0, 4096),
        ("write_tensors", 0, 0),
        ("write_tensors", 7, 4096),
        ("write_tensors", 7, 0),
        ("fsync_and_hash", 3, 4096),
        ("write_meta", 0, 4096),
        ("publish_directory", 0, 4096),
    ],
)
def test_a_failed_save_is_said_and_harms_nothing(function, after, staging, begin, monkeypatch):
    monkeypatch.setattr(saver_module, "STAGING_BYTES", staging << 20)
    trainer, saver, said = begin()
    write(trainer, saver)
    fails_once(monkeypatch, function, after)
    step(trainer)
    trainer.save(saver)
    message = r"the last checkpoint was not saved: .*No space left on device"
    with pytest.raises(UserError, match=message):
        saver.close()
    (line,) = said
    assert line.startswith("the checkpoint of step 2 was not saved, the newest is step-00000001: ")
    assert {path.name for path in saver.root.iterdir()} == {"step-00000001", "latest"}
    assert find_checkpoint("auto", saver.root).meta["step"] == 1
    step(trainer)
    write(trainer, saver)
    assert find_checkpoint("auto", saver.root).meta["step"] == 3


def test_a_full_disk_leaves_the_run_alive(small_disk, begin):
    trainer, saver, said = begin({}, small_disk / "checkpoints")
    write(trainer, saver)
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - 300_000))
    for _ in range(2):
        step(trainer)
        trainer.save(saver)
        saver.wait()
    assert [line.split(":")[0] for line in said] == [
        f"the checkpoint of step {n} was not saved, the newest is step-00000001" for n in (2, 3)
    ]
    assert find_checkpoint("auto", saver.root).meta["step"] == 1
    (small_disk / "other").unlink()
    write(trainer, saver)
    assert find_checkpoint("auto", saver.root).meta["step"] == 3


def test_a_directory_that_cannot_be_made(begin):
    trainer, saver, said = begin()
    saver.root.write_text("in the way")
    trainer.save(saver)
    assert "was not saved, the newest is none: " in said[0]
    step(trainer)
    with pytest.raises(UserError, match="the last checkpoint was not saved"):
        saver.close()


def test_the_newest_and_the_best_are_kept(begin):
    trainer, saver, _ = begin({"CHECKPOINT.KEEP_LAST": 3})
    for is_best in (False, True, False, False, False, False):
        write(trainer, saver, is_best=is_best)
        step(trainer)
    kept = [path.name for path in checkpoints_below(saver.root)]
    assert kept == [f"step-{n:08d}" for n in (6, 5, 4, 2)]
    assert (saver.root / "best").resolve().name == "step-00000002"
    assert (saver.root / "latest").resolve().name == "step-00000006"


def test_another_save_of_the_same_step_replaces_nothing(begin):
    trainer, saver, _ = begin()
    for accuracy in (1.0, 2.0, 3.0):
        trainer.progress.last_top1 = accuracy
        write(trainer, saver)
    kept = [path.name for path in checkpoints_below(saver.root)]
    assert kept == ["step-00000001-2", "step-00000001-1"]
    assert find_checkpoint("auto", saver.root).meta["training"]["last_top1"] == 3.0


def test_going_back_sets_newer_checkpoints_aside(begin):
    trainer, saver, _ = begin({"CHECKPOINT.KEEP_LAST": 9})
    for _ in range(3):
        write(trainer, saver, is_best=trainer.progress.step == 3)
        step(trainer)
    (saver.root / ".step-00000009.tmp").mkdir()
    said = []
    saver_of(
        trainer, saver.root, open_checkpoint(saver.root / "step-00000002"), print_line=said.append
    )
    names = {"step-00000001", "step-00000002", "set-aside-step-00000003"}
    assert {path.name for path in saver.root.iterdir()} == names
    assert "step-00000003 is now set-aside-step-00000003" in said[0]
    assert find_checkpoint("auto", saver.root).meta["step"] == 2


def test_two_runs_of_the_same_length_set_aside(begin):
    trainer, saver, _ = begin()
    for name in ("set-aside-step-00000001", "set-aside-step-00000001-1"):
        write(trainer, saver)
        saver_of(trainer, saver.root, print_line=lambda line: None)
        assert (saver.root / name).is_dir()


def test_a_run_whose_last_save_fails_says_so(tmp_path, make_config, monkeypatch, capsys):
    config = make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 4, "CHECKPOINT.STEPS": 2})
    fails_once(monkeypatch, "publish_directory", after=1)
    with pytest.raises(UserError, match="the last checkpoint was not saved"):
        train(config)
    message = "the checkpoint of step 4 was not saved, the newest is step-00000002"
    assert message in capsys.readouterr().out
    assert train(config, "auto")["steps"] == 4


def test_pruning_killed_half_way_leaves_no_half_a_checkpoint(begin, monkeypatch):
    trainer, saver, _ = begin({"CHECKPOINT.KEEP_LAST": 1})
    write(trainer, saver)
    step(trainer)
    # killed before it
    monkeypatch.setattr(saver_module.shutil, "rmtree", lambda *args, **kwargs: None)
    write(trainer, saver)
    assert [path.name for path in checkpoints_below(saver.root)] == ["step-00000002"]
    assert (saver.root / ".step-00000001.old.tmp").is_dir()
    monkeypatch.undo()
    saver_of(trainer, saver.root, open_checkpoint(saver.root / "latest"))
    assert {path.name for path in saver.root.iterdir()} == {"step-00000002", "latest"}


def test_links_that_cannot_be_moved_are_said(begin, monkeypatch):
    trainer, saver, said = begin()
    fails_once(monkeypatch, "replace_link")
    trainer.save(saver)
    saver.close()  # no error: it is saved
    assert said[0].startswith(
        "step-00000001 is saved, but its links or older checkpoints could not be updated: "
    )
    assert find_checkpoint("auto", saver.root).meta["step"] == 1


def test_going_on_from_a_checkpoint_of_another_name(begin):
    trainer, saver, _ = begin()
    write(trainer, saver)
    aside = saver.root / "set-aside-step-00000001"
    (saver.root / "step-00000001").rename(aside)
    write(trainer, saver_of(trainer, saver.root, open_checkpoint(aside)))
    assert find_checkpoint("auto", saver.root).directory.name == "step-00000001"


def test_the_error_of_any_rank_is_that_of_the_save(tmp_path, monkeypatch):
    saver = Saver(tmp_path, ALONE, keep_last=2)
    saver.group = object()

    def gather(results, own, group):
        results[:] = [own, ({"b": {}}, "a full disk")]

    monkeypatch.setattr(saver_module.dist, "all_gather_object", gather)
    assert saver._gather_records(({"a": {}}, None)) == ({"a": {}, "b": {}}, "a full disk")
