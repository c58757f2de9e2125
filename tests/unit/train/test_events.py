"""What a run says of its time: the event log, the time to a target accuracy, the wait for data."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import yaml
from mlperf_logging.mllog import constants
from run_cases import ALONE, saver_of

from swinv2_moe.checkpoints.checkpoint import open_checkpoint
from swinv2_moe.data.datasets import ImageDataset
from swinv2_moe.data.prepare.staging import read_staging
from swinv2_moe.errors import UserError
from swinv2_moe.ranks.world import World
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.progress import PHASES, Batches, PhaseTimes, TimeToTarget, accounted_share
from swinv2_moe.train.record import Recorder
from swinv2_moe.train.run import train
from swinv2_moe.train.sinks import Event, EventLog, Mark

RULES = "hpc_3.0.0/common.yaml"  # of the checker
STAGED = {"started": 1_700_000_000.5, "seconds": 12.5, "bytes": 5_000_000_000}
BEFORE = [
    "staging_start",
    "staging_stop",
    "cache_clear",
    "init_start",
    "seed",
    "global_batch_size",
    "train_samples",
    "eval_samples",
]
BEFORE += ["opt_base_learning_rate", "init_stop", "run_start"]
EPOCH = ["epoch_start", "epoch_stop", "eval_start", "eval_accuracy", "eval_stop"]


def events(run):
    lines = (run / "events.log").read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, make_config):
    """Two runs in this process, the first one interrupted in its second epoch and resumed; its two
    summaries."""
    root = tmp_path_factory.mktemp("runs")
    (root / "staging.json").write_text(json.dumps(STAGED))
    keys = {"TRACKER": "mlperf", "SEED": 3, "DATA.PATH": root, "DATA.BATCH_SIZE": 64}
    keys["TRAIN.TARGET_TOP1"] = 0.1
    config = make_config(root / "a", keys)
    with pytest.MonkeyPatch.context() as patch:
        train_step = Trainer.train_step
        patch.setattr(
            Trainer, "train_step", lambda self, batches: train_step(self, stop(self, batches))
        )
        train(config)
    assert not (root / "a" / "summary.json").exists()
    other = make_config(root / "b", keys | {"TRAIN.MAX_STEPS": 1, "TRAIN.TARGET_TOP1": 100})
    return root, train(other), train(config, "auto")


def stop(trainer, batches):
    """A signal in the second epoch."""
    if trainer.progress.epoch == 1:
        trainer.stop.received = "SIGTERM"
    return batches


def test_events_in_their_order(runs):
    root, *_ = runs
    first = [*BEFORE, *EPOCH, *EPOCH[:2], "run_stop"]
    second = [*BEFORE, *EPOCH, "run_stop", "tracked_stats"]
    assert [event["key"] for event in events(root / "a")] == [*first, *second]
    assert [event["key"] for event in events(root / "b")] == [*BEFORE, *EPOCH, "run_stop"]
    for event in events(root / "a"):
        assert event["key"] in [*vars(constants).values(), "tracked_stats"]
        ending = event["key"].split("_")[-1]
        kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
        assert event["event_type"] == kinds.get(ending, "POINT_IN_TIME")
        assert ("epoch_num" in event["metadata"]) == (event["key"] in EPOCH)
    found = [event for event in events(root / "a") if not event["key"].startswith("staging")]
    times = [event["time_ms"] / 1000 for event in found]
    assert times == sorted(times)
    assert (root / "staging.json").stat().st_mtime < times[0] < times[-1] < time.time()


def test_what_the_events_say(runs):
    root, *_ = runs
    found = events(root / "a")
    points = [event for event in found if event["event_type"] == "POINT_IN_TIME"]
    values = {event["key"]: event["value"] for event in points}
    accuracy = values.pop("eval_accuracy")
    assert 0 < accuracy < 1
    stats = values.pop("tracked_stats")
    assert stats["phases"]["staging"] == STAGED["seconds"]
    assert stats["time_to_solution"] == pytest.approx(sum(stats["phases"].values()))
    assert values.pop("cache_clear") is False
    assert values.pop("opt_base_learning_rate") == pytest.approx(2e-3)
    samples = {"train_samples": 160, "eval_samples": 40}
    assert values == samples | {"seed": 3, "global_batch_size": 64}
    epochs = [event["metadata"]["epoch_num"] for event in found if event["key"] in EPOCH]
    assert epochs == [1] * 5 + [2] * 7
    ends = [event["metadata"]["status"] for event in found if event["key"] == "run_stop"]
    assert ends == ["success", "success"]
    assert events(root / "b")[-1]["metadata"]["status"] == "aborted"  # its target was not reached
    start, stop = found[:2]
    assert (start["time_ms"], stop["time_ms"]) == (1_700_000_000_500, 1_700_000_013_000)
    assert stop["metadata"]["bytes"] == STAGED["bytes"]


def test_the_summary(runs):
    root, missed, summary = runs
    assert json.loads((root / "a" / "summary.json").read_text()) == summary
    assert (summary["target_top1"], summary["target_epoch"], summary["target_step"]) == (0.1, 1, 2)
    at = {}
    for event in events(root / "a")[:17]:
        at[event["key"], event["metadata"].get("epoch_num")] = event["time_ms"] / 1000
    least = at["eval_stop", 1] - at["epoch_start", 1]  # all in the part before
    most = at["epoch_start", 2] - at["run_start", None]
    assert least - 0.01 <= summary["seconds_to_target"] <= most + 0.01
    assert missed["target_top1"] == 100
    assert missed["seconds_to_target"] is missed["target_epoch"] is None
    assert (summary["staging_seconds"], summary["staging_bytes_per_second"]) == (12.5, 4e8)
    assert 0 < summary["data_wait_share"] < 1


def test_the_time_to_solution(runs):
    _, _, summary = runs
    phases = summary["phases_to_target"]
    assert list(phases) == ["staging", *PHASES]
    assert summary["time_to_solution"] == pytest.approx(sum(phases.values()))
    assert accounted_share(phases) >= 0.95
    for phase in ("start", "data", "training", "validation"):
        assert 0 < phases[phase] <= summary["phases"][phase]


def test_mlcommons_own_checker_accepts_the_log(runs, tmp_path):
    """By the rules that MLPerf HPC 3.0 has for all its benchmarks, without the names of a
    submission and of its benchmark, which no run here is."""
    from mlperf_logging.compliance_checker import mlp_compliance

    rules = yaml.safe_load((Path(mlp_compliance.__file__).parent / RULES).read_text())
    kept = [rule for rule in rules if not str(rule.get("KEY", {}).get("NAME")).startswith("submi")]
    assert len(rules) - len(kept) == 4
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(kept))
    log = tmp_path / "events.log"
    log.write_text((runs[0] / "b" / "events.log").read_text())
    checker = mlp_compliance.make_checker("hpc", "3.0.0", False, True)
    valid, *_ = mlp_compliance.main(str(log), str(tmp_path / "rules.yaml"), checker)
    assert valid
    # the checker sees what is missing
    lines = [line for line in log.read_text().splitlines(True) if '"run_stop"' not in line]
    log.write_text("".join(lines))
    checker = mlp_compliance.make_checker("hpc", "3.0.0", False, True)
    assert not mlp_compliance.main(str(log), str(tmp_path / "rules.yaml"), checker)[0]


def test_a_finished_run_has_no_more_events(runs, make_config, capsys):
    root, *_ = runs
    before = (root / "b" / "events.log").read_text()
    keys = {"TRACKER": "mlperf", "DATA.PATH": root, "DATA.BATCH_SIZE": 64, "TRAIN.MAX_STEPS": 1}
    again = train(make_config(root / "b", keys | {"TRAIN.TARGET_TOP1": 0.1}), "auto")
    assert (root / "b" / "events.log").read_text() == before
    assert again["target_step"] == 1  # the other target of before hides nothing
    said = capsys.readouterr()
    assert "TRAIN.TARGET_TOP1 0.1% reached after" in said.out
    assert "staging the data took 12.5 s (400.0 MB/s)" in said.out
    assert ":::MLLOG" not in said.out + said.err


def test_only_the_main_rank_writes_and_only_if_asked_to(tmp_path):
    recorder = Recorder(tmp_path / "a", World(1, 2, torch.device("cpu")), 0, "mlperf")
    with recorder.interval("epoch", epoch_num=1):
        recorder.mark("seed", 1)
    recorder.close()
    assert not list(tmp_path.iterdir())
    recorder = Recorder(tmp_path, ALONE, 0)
    recorder.mark("seed", 1)
    recorder.close()
    assert not (tmp_path / "events.log").exists()


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path):
    (tmp_path / "events.log").write_text(':::MLLOG {"key": "seed"}\n:::MLLOG {"key')
    log = EventLog(tmp_path / "events.log")
    log.write(Event(mark=Mark("seed", 7)))
    log.close(True)
    lines = (tmp_path / "events.log").read_text().splitlines()
    assert lines[:2] == [':::MLLOG {"key": "seed"}', ':::MLLOG {"key']
    assert json.loads(lines[2].removeprefix(":::MLLOG "))["value"] == 7


def test_a_full_disk_costs_events_and_not_the_run(small_disk, capsys):
    recorder = Recorder(small_disk / "run", ALONE, 0, "mlperf")
    recorder.mark("seed", 1)
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    for epoch in range(99):
        with recorder.interval("epoch", epoch_num=epoch):
            pass
    recorder.close()
    said = capsys.readouterr()
    assert all("may be lost" in line for line in said.out.splitlines())
    assert said.out.count("No space left on device") == 1
    assert not said.err
    assert ":::MLLOG" in (small_disk / "run" / "events.log").read_text()


NO_RECORDS = [
    "",
    "{",
    "[]",
    '{"started": 1, "seconds": 2}',
    '{"started": NaN, "seconds": 2, "bytes": 3}',
    "[" * 100_000,
    "1" * 5000,
    " " * 5000 + json.dumps(STAGED),
]


@pytest.mark.timeout(300)
def test_a_staging_record_that_cannot_be_read(tmp_path):
    record = tmp_path / "staging.json"
    for text in NO_RECORDS:
        record.write_text(text)
        with pytest.raises(UserError, match=r"staging.json is not what `swinv2-moe stage` writes"):
            read_staging(str(tmp_path))
    record.unlink()
    os.mkfifo(record)
    with pytest.raises(UserError, match="not a regular file"):
        read_staging(str(tmp_path))


def test_staging_that_took_no_time_has_no_rate(tmp_path):
    (tmp_path / "staging.json").write_text(json.dumps(STAGED | {"seconds": 0}))
    assert read_staging(str(tmp_path)).rate is None
    (tmp_path / "staging.json").write_text(json.dumps(STAGED | {"overlapped": True}))
    assert read_staging(str(tmp_path)) is None  # earlier versions copied while training read
    assert read_staging("") is read_staging(str(tmp_path / "elsewhere")) is None


def test_time_to_target(clock):
    before = TimeToTarget(50, PhaseTimes())
    clock.append(5)
    before.phases.started()
    reached = []
    for epoch, top1 in enumerate((30, 49.9), 1):
        clock.append(10)
        reached.append(before.validated(epoch, epoch * 7, top1))
    assert (before.reached, str(before)) == (None, "TRAIN.TARGET_TOP1 50% not reached")
    clock.append(2)
    state = json.loads(json.dumps(before.state()))
    clock.append(1000)  # between the parts
    after = TimeToTarget(50, PhaseTimes())
    after.load(state)
    clock.append(3)
    after.phases.started()
    for epoch, top1 in enumerate((50, 45, 60), 3):
        clock.append(10)
        reached.append(after.validated(epoch, epoch * 7, top1))
    assert reached == [False, False, True, False, False]
    assert after.reached[:4] == (3, 21, 32, 50)
    assert after.reached.phases == dict.fromkeys(PHASES, 0) | {"start": 8, "other": 32}
    assert str(after) == "TRAIN.TARGET_TOP1 50% reached after 32.0 s, in epoch 3 (step 21)"
    for target, seconds in ((40, 20), (60, 52)):  # another target when the run is resumed
        other = TimeToTarget(target, PhaseTimes())
        other.load(after.state())
        assert other.reached.seconds == seconds


def test_no_target_is_never_reached(clock):
    without = TimeToTarget(0, PhaseTimes())
    assert not without.validated(1, 7, 90)
    assert without.reached is None


def test_a_checkpoint_without_times(make_trainer, save, tmp_path):
    trainer = make_trainer({"TRAIN.TARGET_TOP1": 50})
    source = open_checkpoint(save(trainer, tmp_path / "checkpoints"))
    del source.meta["training"]["time_to_target"]
    trainer.resume(source)
    state = trainer.progress.to_target.state()
    assert state["validations"] == []
    assert state["phases"].keys() == set(PHASES)


def slow(clock, seconds):
    for passes in seconds:
        clock.append(passes)
        yield passes


def test_the_wait_is_what_the_loader_takes(clock):
    batches, shares = Batches(slow(clock, [9, 1, 1, 1, 6]), 2, PhaseTimes()), []
    for _group in batches:
        clock.append(2)
        shares.append(batches.wait_share())
    assert shares == [10 / 12, 2 / 4]
    assert batches.waited == 18  # with the rest, which is left out


def test_groups_are_whole():
    assert list(Batches(range(7), 2, PhaseTimes())) == [[0, 1], [2, 3], [4, 5]]
    assert list(Batches(range(2), 3, PhaseTimes())) == []


def test_a_slow_disk_shows(make_trainer, tmp_path, monkeypatch, read_metrics):
    """Each reading of a training batch takes a thousand seconds: next to that, no machine is
    slow."""
    trainer = make_trainer({"TRAIN.MAX_STEPS": 1})
    original, train_set = ImageDataset.__getitems__, trainer.data.train_loader.dataset
    real, readings = time.perf_counter, []

    def read_slowly(self, indices):
        if self is train_set:
            readings.append(len(indices))
        return original(self, indices)

    monkeypatch.setattr(ImageDataset, "__getitems__", read_slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: real() + 1000 * len(readings))
    recorder = Recorder(tmp_path / "run", ALONE, 0)
    trainer.fit(recorder, saver_of(trainer, tmp_path / "checkpoints"))
    recorder.close()
    (step,), _ = read_metrics(tmp_path / "run")
    assert readings == [32]
    assert 0.3 < trainer.data_wait_share() < 1
    assert 0.3 < step["data_wait"] < 1
