"""What a run records survives what happens to the disk, as far as it can."""

import json
import shutil

import pytest
import torch

from swinv2_moe.engine import train
from swinv2_moe.engine.distributed import World
from swinv2_moe.engine.record import Recorder
from swinv2_moe.errors import UserError

ALONE = World(0, 1, torch.device("cpu"))


def steps(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "environment" not in line]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread ends
def test_a_full_disk_costs_records_and_not_the_run(small_disk, capsys):
    recorder = Recorder(small_disk / "run", ALONE, 0)
    recorder.step({"step": 1, "epoch": 1, "loss": 1.0}, {})
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    for step in range(2, 60):
        recorder.step({"step": step, "epoch": 1, "loss": 1.0}, {})
        recorder.epoch({"epoch": 1, "val_top1": 1.0}, step)
    recorder.summary({"val_top1": 1.0})
    said = [line for line in capsys.readouterr().out.splitlines() if "may be lost" in line]
    assert len(said) == 1
    assert "No space left on device" in said[0]
    (small_disk / "other").unlink()
    recorder.close()
    Recorder(small_disk / "run", ALONE, 30).close()
    assert all(step <= 30 for step in steps(small_disk / "run"))


@pytest.mark.parametrize("rest", ['{"step": 3, "lo', '{"step": 3, "lo{"step": 4, "loss": 1.0}', "[]", ""])
def test_a_line_whose_writing_was_cut_off_is_dropped(rest, tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:2], rest, lines[2]]) + "\n")
    Recorder(tmp_path, ALONE, 4).close()
    assert steps(tmp_path) == [1, 2]


def test_a_disk_without_room_for_checkpoints(small_disk, make_config, capsys):
    """The run is trained to its end; then it says that its end was not saved."""
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - 1_000_000))
    config = make_config(small_disk / "run", {"TRAIN.MAX_STEPS": 4, "CHECKPOINT.STEPS": 2})
    with pytest.raises(UserError, match=r"the last checkpoint was not saved: .*No space left"):
        train(config)
    assert capsys.readouterr().out.count("was not saved, the newest is none") == 2
    assert steps(small_disk / "run") == [1, 2, 3, 4, 4]
    (small_disk / "other").unlink()
    assert train(config, "auto")["steps"] == 4
