"""What a run records survives what happens to the disk, as far as it can."""

import json
import shutil
import tracemalloc

import pytest
import torch
from run_cases import ALONE
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_core import RoutingStats
from swinv2_moe.errors import UserError
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.record import Recorder, dropped_share
from swinv2_moe.train.run import train
from swinv2_moe.train.sinks import _forget_after

ZERO = torch.tensor(0.0)


def steps(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "environment" not in line]


# TensorBoard's thread ends
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
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


def test_a_line_whose_writing_was_cut_off_is_dropped(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}).encode() for step in (1, 2, 5)]
    cut, glued = b'{"step": 3, "lo', b'{"step": 3, "lo{"step": 4, "loss": 1.0}'
    for rest in (cut, glued, b"[]", b"", b'{"step": "3"}', b'{"step": 3\xff\0'):
        content = b"\n".join([*lines[:2], rest, lines[2]]) + b"\n"
        (tmp_path / "metrics.jsonl").write_bytes(content)
        Recorder(tmp_path, ALONE, 4).close()
        assert steps(tmp_path) == [1, 2]


def test_a_resumed_run_does_not_read_its_records_at_once(tmp_path):
    """As many bytes as lines need, of 30 MB."""
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(3000):
            file.write(json.dumps({"step": step, "text": "x" * 10_000}) + "\n")
    tracemalloc.start()
    _forget_after(tmp_path / "metrics.jsonl", 2900)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert steps(tmp_path) == list(range(2901))
    assert peak < 3_000_000


def test_the_share_dropped_is_of_all_choices(tmp_path):
    """A layer of 30 choices counts three times as much as one of 10."""
    layers = {
        name: RoutingStats(torch.tensor([counts, 0]), torch.tensor(share), ZERO, ZERO)
        for name, counts, share in (("a", 30, 0.5), ("b", 10, 0.1))
    }
    recorder = Recorder(tmp_path, ALONE, 0)
    recorder.step({"step": 1, "epoch": 1, "loss": 1.0}, layers)
    recorder.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["moe/dropped_share"] == pytest.approx(16 / 40)
    assert dropped_share([layers["b"]]) == pytest.approx(0.1)
    assert dropped_share([RoutingStats(torch.zeros(2), ZERO, ZERO, ZERO)]) == 0


def test_a_run_that_goes_on_has_no_summary_yet(tmp_path, make_config, monkeypatch):
    """Until its new end; one that was finished keeps the one it has."""
    train(make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 1}))
    summary = tmp_path / "run" / "summary.json"
    before = summary.read_text()
    train(make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 1}), "auto")
    assert summary.read_text() == before
    monkeypatch.setattr(Trainer, "fit", lambda *args: None)  # a signal, say
    train(make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 3}), "auto")
    assert not summary.exists()


def test_a_disk_without_room_for_checkpoints(small_disk, make_config, capsys):
    """The run is trained to its end; then it says that its end was not saved."""
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - 1_000_000))
    config = make_config(small_disk / "run", {"TRAIN.MAX_STEPS": 4, "CHECKPOINT.STEPS": 2})
    with pytest.raises(UserError, match=r"the last checkpoint was not saved: .*No space left"):
        train(config)
    assert capsys.readouterr().out.count("was not saved, the newest is none") == 2
    assert steps(small_disk / "run") == [1, 2, 3, 4, 4]  # the last step and epoch
    (small_disk / "other").unlink()
    assert train(config, "auto")["steps"] == 4


def test_a_full_disk_leaves_the_earlier_configuration(small_disk):
    (small_disk / "run").mkdir()
    (small_disk / "run" / "config.yaml").write_text("SEED: 7")
    recorder = Recorder(small_disk / "run", ALONE, 0)
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    recorder.config("SEED: 8" * 10_000)
    assert (small_disk / "run" / "config.yaml").read_text() == "SEED: 7"


def test_the_tuners_decisions_are_recorded(tmp_path):
    decided = {"event": "decided", "layers": "M=8 H=16, inference"}
    decided |= {"to": "r=0 d=1 linear", "ms": 2.5}
    recorder = Recorder(tmp_path, ALONE, 0)
    recorder.strategies([decided], step=10)
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["strategy"]) for line in lines] == [(10, decided)]
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = curves.Tensors("strategy/M_8_H_16_inference/text_summary")
    assert text.tensor_proto.string_val == [b"r=0 d=1 linear, 2.5 ms"]
