"""A run that stops and goes on is the run that never stopped."""

import math
import shutil
import time

import pytest
import torch
from PIL import Image
from run_cases import interrupt_at, weights_of
from tool_cases import refusal

from swinv2_moe.checkpoints.checkpoint import open_checkpoint
from swinv2_moe.config import resolve_batch_size
from swinv2_moe.errors import UserError
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.progress import Progress
from swinv2_moe.train.run import train
from swinv2_moe.train.run_report import change_lines

EVERYTHING = {
    "TRAIN.EPOCHS": 3,
    "MODEL.DROP_PATH_RATE": 0.2,
    "MODEL.MOE.GATE_NOISE": 1.0,
    "MODEL.MOE.HIDDEN_DROPOUT": 0.1,
    "AUG.MIXUP": 0.8,
    "AUG.CUTMIX": 1.0,
    "AUG.REPROB": 0.25,
    "TRAIN.EMA_DECAY": 0.9,
    "TRAIN.LAYER_DECAY": 0.9,
    "TRAIN.ACCUMULATION_STEPS": 2,
    "DATA.BATCH_SIZE": 16,
}


def steps_done_from_now_on(monkeypatch):
    """Their numbers, as they are done."""
    original, steps = Trainer.train_step, []

    def train_step(self, batches):
        steps.append(self.progress.step + 1)
        return original(self, batches)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    return steps


def without_measurements(run, read_metrics):
    """The lines of a run without what its machine did: times, and the peak memory of this
    process."""
    steps, epochs = read_metrics(run)
    measured = ("images_per_second", "data_wait", "seconds", "memory_bytes")
    return [{k: v for k, v in line.items() if k not in measured} for line in steps + epochs]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, make_config):
    root = tmp_path_factory.mktemp("whole")
    return root, train(make_config(root / "run", EVERYTHING))


# from the end of an epoch (step 10), from the middle of one (step 12)
@pytest.mark.parametrize("every", [0, 3])
def test_an_interrupted_run_goes_on_exactly(
    every, uninterrupted, tmp_path, make_config, read_metrics, monkeypatch
):
    config = make_config(tmp_path / "run", EVERYTHING | {"CHECKPOINT.STEPS": every})
    with monkeypatch.context() as patch:
        interrupt_at(patch, 13)  # in the third epoch
        with pytest.raises(KeyboardInterrupt):
            train(config)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')  # what a power cut leaves
    torch.rand(7), torch.manual_seed(99)  # another state than the first run had
    again = steps_done_from_now_on(monkeypatch)
    summary = train(config, "auto")
    assert again == list(range(13 if every else 11, 16))
    whole, whole_summary = uninterrupted
    lines = [without_measurements(root / "run", read_metrics) for root in (tmp_path, whole)]
    assert lines[0] == lines[1]
    assert summary["val_top1"] == whole_summary["val_top1"]
    assert summary["best_val_top1"] == whole_summary["best_val_top1"]
    assert weights_of(whole / "run") == weights_of(tmp_path / "run")
    metas = [open_checkpoint(root / "run/checkpoints/latest").meta for root in (whole, tmp_path)]
    for meta in metas:
        del meta["training"]["time_to_target"], meta["training"]["epoch_seconds"]
    other = {"config": 0, "saved": 0, "checksum": 0}
    assert metas[0] | other == metas[1] | other


def test_the_whole_run_used_all_of_it(uninterrupted, read_metrics):
    steps, epochs = read_metrics(uninterrupted[0] / "run")
    assert len(steps) == 15
    assert len({line["loss"] for line in steps}) == 15
    assert len(epochs) == 3


def test_an_interruption_before_the_first_checkpoint(
    tmp_path, make_config, read_metrics, monkeypatch
):
    """ "auto" without a run starts one, too."""
    config = make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 3})
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            train(config, "auto")
    assert [line["step"] for line in read_metrics(tmp_path / "run")[0]] == [1, 2]
    train(config, "auto")
    assert [line["step"] for line in read_metrics(tmp_path / "run")[0]] == [1, 2, 3]


def test_resume_from_another_run_leaves_that_one_alone(
    uninterrupted, tmp_path, make_config, read_metrics
):
    source = uninterrupted[0] / "run"
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    config = make_config(tmp_path / "run", EVERYTHING | {"TRAIN.EPOCHS": 4})
    summary = train(config, str(source))
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before
    assert (summary["epochs"], summary["steps"]) == (4, 20)
    assert [line["step"] for line in read_metrics(tmp_path / "run")[0]] == [16, 17, 18, 19, 20]


def test_epochs_of_another_length(tmp_path, make_trainer, save):
    """Another global batch: the images seen count, steps go on counting, and the schedule follows
    the epochs."""
    first = make_trainer({"DATA.BATCH_SIZE": 10, "TRAIN.EPOCHS": 4})  # 16 steps an epoch
    progress = first.progress
    progress.epoch, progress.epoch_step, progress.step, progress.epoch_loss = 2, 9, 41, 18.0
    directory = save(first, tmp_path)
    second = make_trainer({"DATA.BATCH_SIZE": 40, "TRAIN.EPOCHS": 4})  # 4 steps an epoch
    second.resume(open_checkpoint(directory))
    progress = second.progress
    assert (progress.epoch, progress.epoch_step, progress.step) == (2, 2, 41)
    assert progress.epoch_loss == 4.0
    reference = make_trainer({"DATA.BATCH_SIZE": 40, "TRAIN.EPOCHS": 4})
    reference.progress.epoch, reference.progress.epoch_step = 2, 2
    reference.schedule.step_update(reference.progress.schedule_step)
    rates = [
        [group["lr"] for group in trainer.step.optimizer.param_groups]
        for trainer in (second, reference)
    ]
    assert rates[0] == rates[1]
    third = make_trainer({"DATA.BATCH_SIZE": 160, "TRAIN.EPOCHS": 4})
    third.resume(open_checkpoint(directory))
    progress = third.progress
    assert (progress.epoch, progress.epoch_step, progress.step) == (2, 0, 41)


def test_a_global_batch_size_over_the_ranks(make_config, tmp_path):
    config = make_config(tmp_path, {"DATA.GLOBAL_BATCH_SIZE": 96, "TRAIN.ACCUMULATION_STEPS": 2})
    assert [resolve_batch_size(config, n).DATA.BATCH_SIZE for n in (1, 2, 4, 8)] == [48, 24, 12, 6]
    message = r"DATA\.GLOBAL_BATCH_SIZE is 96, .* ranks \(5\) .*ACCUMULATION_STEPS \(2\)"
    with pytest.raises(UserError, match=message):
        resolve_batch_size(config, 5)
    config = make_config(tmp_path, {"DATA.GLOBAL_BATCH_SIZE": 6, "AUG.MIXUP": 0.8})
    with pytest.raises(UserError, match=r"DATA\.BATCH_SIZE is 3.*even"):
        resolve_batch_size(config, 2)


def test_other_class_names_are_refused(make_trainer, save, tmp_path):
    trainer = make_trainer()
    source = open_checkpoint(save(trainer, tmp_path / "run"))
    trainer.data.class_names[:2] = ["1", "0"]
    message = "was trained on other classes: class 0 is '0' in the checkpoint, '1' in the data"
    assert message in refusal(trainer.resume, source)
    trainer.data.class_names[:] = ["2", "a"]
    message = "other classes: only the checkpoint has 0, 1, 3, ... (9 in all); only the data has a"
    assert message in refusal(trainer.resume, source)


def test_numbered_folders_keep_the_order_of_their_run(
    make_config, tmp_path, monkeypatch, read_metrics
):
    """Earlier versions sorted them as text."""
    for split in ("train", "val"):
        for label in (1, 2, 10):
            (tmp_path / "data" / split / str(label)).mkdir(parents=True)
            for i in range(32):
                image = Image.new("L", (16, 16), 20 * label + i)
                image.save(tmp_path / "data" / split / str(label) / f"{i}.png")
    keys = {"DATA.DATASET": "folder", "DATA.PATH": tmp_path / "data", "CHECKPOINT.STEPS": 2}
    keys["DATA.NUM_WORKERS"] = 0
    runs = [make_config(tmp_path / name, keys) for name in ("whole", "run")]
    with monkeypatch.context() as patch:
        patch.setattr("swinv2_moe.data.sources.folder.subfolders", lambda folder: ["1", "10", "2"])
        train(runs[0])
        interrupt_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            train(runs[1])
    train(runs[1], "auto")
    metas = [
        open_checkpoint(tmp_path / run / "checkpoints/latest").meta for run in ("whole", "run")
    ]
    assert [meta["class_names"] for meta in metas] == 2 * [["1", "10", "2"]]
    lines = [without_measurements(tmp_path / run, read_metrics) for run in ("whole", "run")]
    assert lines[0] == lines[1]
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "run")


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_averaging_cannot_begin_or_end_within_a_run(before, after, make_trainer, save, tmp_path):
    source = open_checkpoint(save(make_trainer({"TRAIN.EMA_DECAY": before}), tmp_path / "run"))
    with pytest.raises(UserError, match=rf"TRAIN\.EMA_DECAY is {after}; this cannot change"):
        make_trainer({"TRAIN.EMA_DECAY": after}).resume(source)


def test_a_finished_run_keeps_its_configuration_and_does_not_go_on_elsewhere(make_config, tmp_path):
    train(make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 2}))
    written = (tmp_path / "run" / "config.yaml").read_text()
    train(make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 2, "TRAIN.BASE_LR": 5.0}), "auto")
    assert (tmp_path / "run" / "config.yaml").read_text() == written
    config = make_config(tmp_path / "other", {"TRAIN.MAX_STEPS": 2})
    with pytest.raises(
        UserError, match=r"has done all steps; to continue from it in .*/other, raise"
    ):
        train(config, str(tmp_path / "run"))
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def changes_of(make_trainer, save, tmp_path, keys, epoch=1):
    """A trainer with other keys that goes on from the end of an epoch, and its lines about them."""
    first = make_trainer()
    progress = first.progress
    progress.epoch, progress.step, progress.validated_step = epoch, 5 * epoch, 5 * epoch
    progress.best_top1 = progress.last_top1 = 75.0
    source = open_checkpoint(save(first, tmp_path / "run"))
    second = make_trainer(keys)
    second.resume(source)
    return second, change_lines(second)


def test_only_keys_on_which_results_depend_are_changes(make_trainer, save, tmp_path):
    keys = {"PRINT_FREQ": 7, "OUTPUT": tmp_path / "moved", "DATA.NUM_WORKERS": 3, "TIMEOUT": 7}
    keys |= {"CHECKPOINT.KEEP_LAST": 9, "MODEL.MOE.KERNELS": "torch", "TRAIN.TARGET_TOP1": 5}
    trainer, lines = changes_of(make_trainer, save, tmp_path, keys)
    assert lines == []
    assert trainer.progress.best_top1 == 75.0


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("DATA.MEAN", [0.3], [0.1]),
        ("MODEL.MOE.EVAL_CAPACITY_FACTOR", 0.0, 1.25),
        ("MODEL.MOE.TOP_K", 1, 2),
    ],
)
def test_what_accuracies_are_measured_of_begins_a_new_best(
    key, before, now, make_trainer, save, tmp_path
):
    both = {"DATA.CHANNELS": 1, "DATA.MEAN": [0.3], "DATA.STD": [0.3], "TEST.CROP_RATIO": 1.0}
    both["MODEL.SWINV2.PRETRAINED_WINDOW_SIZES"] = [4, 4, 2]

    def make(keys=None):
        return make_trainer(both | (keys or {}))

    trainer, lines = changes_of(make, save, tmp_path, {key: now})
    assert lines == [
        f"warning: {key} was {before!r} and is {now!r}: accuracies until now were measured"
        " otherwise, and the best one is chosen anew"
    ]
    assert trainer.progress.best_top1 == -1.0


@pytest.mark.parametrize(
    ("keys", "effect"),
    [
        (
            {"MODEL.MOE.CAPACITY_FACTOR": (1.25, 2.5), "TRAIN.WEIGHT_DECAY": (0.05, 0.3)},
            "training goes on with the changed value",
        ),
        (
            {"MODEL.PRETRAINED": ("", "other.pth"), "MODEL.CLASS_MAP": ("", "new")},
            "no effect, it says what a run starts from, and this one goes on",
        ),
    ],
)
def test_a_change_that_keeps_the_best_is_named(keys, effect, make_trainer, save, tmp_path):
    now = {key: value for key, (_, value) in keys.items()}
    trainer, lines = changes_of(make_trainer, save, tmp_path, now)
    assert lines == [
        f"{key} was {before!r} and is {value!r}: {effect}" for key, (before, value) in keys.items()
    ]
    assert trainer.progress.best_top1 == 75.0


def test_a_finished_schedule_goes_on_as_one_of_the_new_length(make_trainer, save, tmp_path):
    """Warm-up of 1 epoch, then half a cosine over the other 3: 1 of them is done."""
    trainer, lines = changes_of(make_trainer, save, tmp_path, {"TRAIN.EPOCHS": 4}, epoch=2)
    train = trainer.config.train
    low, high = train.min_lr * 32 / 512, train.base_lr * 32 / 512
    now = low + (high - low) * (1 + math.cos(math.pi / 3)) / 2
    assert lines == [
        "TRAIN.EPOCHS was 2 and is 4: the schedule of the learning rate has changed",
        f"learning rate of the next step: {low:.2e} before, {now:.2e} now. It is that of a run"
        " which began with the new values, after 2 of its 4 epochs",
    ]
    assert max(group["lr"] for group in trainer.step.optimizer.param_groups) == pytest.approx(now)


def test_another_batch_changes_the_learning_rate(make_trainer, save, tmp_path):
    trainer, lines = changes_of(make_trainer, save, tmp_path, {"DATA.BATCH_SIZE": 16})
    before, now = (trainer.config.train.base_lr * batch / 512 for batch in (32, 16))
    assert lines[0].startswith("DATA.BATCH_SIZE was 32 and is 16: ")
    assert lines[1].startswith(f"learning rate of the next step: {before:.2e} before, {now:.2e} ")


def test_fewer_epochs_than_are_done_end_the_run(make_config, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, 8)  # in the second epoch
        with pytest.raises(KeyboardInterrupt):
            train(make_config(tmp_path / "run", {"TRAIN.EPOCHS": 3, "TRAIN.WARMUP_EPOCHS": 0}))
    capsys.readouterr()
    keys = {"TRAIN.EPOCHS": 1, "TRAIN.WARMUP_EPOCHS": 0}
    assert train(make_config(tmp_path / "run", keys), "auto")["epochs"] == 1
    said = capsys.readouterr().out
    assert "TRAIN.EPOCHS was 3 and is 1: 1 are done, so the run ends here" in said
    assert "learning rate of the next step" not in said
    assert (tmp_path / "run" / "summary.json").exists()


def test_data_that_moved_keep_the_best(make_trainer, save, tmp_path):
    """The same validation images; of other sizes or names they are others."""
    for split in ("train", "val"):
        for label in (1, 2):
            (tmp_path / "data" / split / str(label)).mkdir(parents=True)
            for i in range(32):
                image = Image.new("L", (16, 16), 20 * label + i)
                image.save(tmp_path / "data" / split / str(label) / f"{i}.png")
    shutil.copytree(tmp_path / "data", tmp_path / "moved")

    def make(keys=None):
        folder = {"DATA.DATASET": "folder", "DATA.NUM_WORKERS": 0, "DATA.PATH": tmp_path / "data"}
        return make_trainer(folder | (keys or {}))

    keys = {"DATA.PATH": tmp_path / "moved"}
    trainer, (line,) = changes_of(make, save, tmp_path, keys)
    assert line.endswith("training goes on with the changed value")
    assert trainer.progress.best_top1 == 75.0
    shutil.rmtree(tmp_path / "run")
    Image.new("L", (17, 17), 3).save(tmp_path / "moved" / "val" / "1" / "3.png")
    trainer, (line,) = changes_of(make, save, tmp_path, keys)
    assert line.startswith("warning: DATA.PATH was ")
    assert trainer.progress.best_top1 == -1.0


def test_a_finished_run_is_not_changed(make_trainer, save, tmp_path):
    keys = {"DATA.INTERPOLATION": "bilinear"}
    trainer, (line,) = changes_of(make_trainer, save, tmp_path, keys, epoch=2)
    assert line.endswith(
        "no effect, all steps are done; TRAIN.EPOCHS or TRAIN.MAX_STEPS continue the run"
    )
    assert trainer.progress.best_top1 == 75.0


def test_the_next_validation_is_the_best_where_the_best_is_gone(make_config, tmp_path, monkeypatch):
    keys = {"TRAIN.MAX_STEPS": 5, "TRAIN.EPOCHS": 2}
    train(make_config(tmp_path / "run", keys))
    source = tmp_path / "run" / "checkpoints" / "latest"
    load = Progress.load
    perfect = {"best_top1": 100.0, "best_score": 100.0}  # cannot be exceeded
    monkeypatch.setattr(
        Progress, "load", lambda self, step, state: load(self, step, state | perfect)
    )
    keys["TRAIN.MAX_STEPS"] = 10
    train(make_config(tmp_path / "other", keys), str(source))
    best = tmp_path / "other" / "checkpoints" / "best"
    assert best.resolve().name == "step-00000010"


def test_the_seconds_of_an_epoch_count_both_parts(make_config, tmp_path, read_metrics, monkeypatch):
    """Each step takes a thousand seconds: next to that, no machine is slow."""
    original, real, steps = Trainer.train_step, time.perf_counter, []

    def slow_step(self, batches):
        steps.append(self.progress.step)
        if len(steps) == 3:
            self.stop.received = "SIGTERM"
        return original(self, batches)

    monkeypatch.setattr(Trainer, "train_step", slow_step)
    monkeypatch.setattr(time, "perf_counter", lambda: real() + 1000 * len(steps))
    keys = {"TRAIN.EPOCHS": 1, "TRAIN.WARMUP_EPOCHS": 0}
    assert train(make_config(tmp_path / "run", keys)) is None
    train(make_config(tmp_path / "run", keys), "auto")
    (epoch,) = read_metrics(tmp_path / "run")[1]
    assert steps == [0, 1, 2, 3, 4]
    assert epoch["seconds"] >= 5000


def test_the_loss_scale_goes_on(make_trainer, save, tmp_path):
    keys = {"AMP_ENABLE": True, "AMP_DTYPE": "float16"}
    trainer, resumed = make_trainer(keys), make_trainer(keys)
    trainer.step.scaler.scale = 8.0
    resumed.resume(open_checkpoint(save(trainer, tmp_path)))
    assert resumed.step.scaler.scale == 8.0
