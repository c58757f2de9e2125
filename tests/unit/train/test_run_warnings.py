"""Runs that will probably come to nothing are told so, in one line, and go on."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from swinv2_moe.config import data_config, load_config, train_config
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.progress import LossWatch
from swinv2_moe.train.run import train
from swinv2_moe.train.run_report import start_warnings

CONFIGS = Path(__file__).parents[3] / "configs"
SGD = {"TRAIN.OPTIMIZER.NAME": "sgd"}
START, RECENT = LossWatch.START, LossWatch.RECENT


def warned_at(losses, watch=None) -> list[int]:
    """The steps, from 1, at which there is a warning."""
    watch = watch or LossWatch()
    return [step for step, loss in enumerate(losses, 1) if watch.add(loss)]


def test_a_loss_far_above_its_start():
    diverging = [2.0] * START + [5.0] * 3 * RECENT
    assert warned_at(diverging) == [START + RECENT]
    watch = LossWatch()
    (warning,) = filter(None, map(watch.add, diverging))
    assert warning.startswith(
        "the loss of the last 20 steps (median 5.00) is far above that of the first 10 (2.00);"
    )


def test_a_run_that_goes_on_with_other_images(make_config, tmp_path, capsys):
    config = make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 1})
    train(config)
    capsys.readouterr()
    train(make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 2}), "auto")
    assert "DATA.PATH was" not in capsys.readouterr().out
    other = {"TRAIN.MAX_STEPS": 3, "DATA.PATH": str(tmp_path)}
    train(make_config(tmp_path / "run", other), "auto")
    line = f"warning: DATA.PATH was {config.DATA.PATH!r} and is '{tmp_path}': accuracies until now"
    assert line in capsys.readouterr().out


def test_losses_that_are_no_reason_to_warn():
    for losses in (
        [2.0] * START + [0.1] * 200,
        [7.0] * START + [13.9] * 200,  # above, not twice
        [0.01] * START + [1.0] * 200,  # a hundred times, but less than 1 above
        [2.0] * START + ([2.0] * RECENT + [1e6] * (RECENT // 2 - 1)) * 10,  # spikes
        [2.0] * START + [math.nan, math.inf] * 200,  # for others to notice
        [2.0] * START + [99.0] * (RECENT - 1),
    ):
        assert warned_at(losses) == []


def test_a_run_that_goes_on_knows_its_start_and_warns_once():
    watch = LossWatch()
    assert warned_at([2.0] * START + [99.0] * 5, watch) == []
    again = LossWatch()
    again.load(json.loads(json.dumps(watch.state())))
    assert warned_at([99.0] * 2 * RECENT, again) == [RECENT]
    once_more = LossWatch()
    once_more.load(json.loads(json.dumps(again.state())))
    assert warned_at([99.0] * 2 * RECENT, once_more) == []


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"TRAIN.BASE_LR": 8e3},
            "the learning rate reaches 500 (TRAIN.BASE_LR is 8000, for 512 images a step), adamw",
        ),
        ({"TRAIN.BASE_LR": 8e3} | SGD, "sgd usually trains with 1e-06 to 10"),
        ({"TRAIN.BASE_LR": 8e-11, "TRAIN.MIN_LR": 0, "TRAIN.WARMUP_LR": 0}, "reaches 5e-12"),
        ({"TRAIN.BASE_LR": 0, "TRAIN.MIN_LR": 0}, None),
        ({"TRAIN.BASE_LR": 1.6}, None),
        ({"TRAIN.BASE_LR": 80} | SGD, None),
    ],
)
def test_learning_rates(keys, says, make_trainer):
    lines = start_warnings(make_trainer(keys))
    assert [says in line for line in lines] == [True] * (says is not None)


def test_a_mean_of_other_pixels(make_trainer):
    trainer = make_trainer()
    data = replace(trainer.config.data, mean=(123.675,), std=(58.4,))
    trainer.config = replace(trainer.config, data=data)
    lines = start_warnings(trainer)
    assert [line.partition(":")[0] for line in lines] == [
        "DATA.MEAN is [123.675]",
        "DATA.STD is [58.4]",
    ]


def test_the_configurations_of_this_repository_have_usual_learning_rates(make_trainer):
    trainer = make_trainer()
    plans = list(CONFIGS.glob("ablations/*.yaml"))
    others = [*CONFIGS.rglob("recipe.yaml"), *plans]
    files = [file for file in CONFIGS.rglob("*.yaml") if file not in others]
    assert len(files) > 30
    for file in files:
        config = load_config(file, ["MODEL.PRETRAINED", "weights"], data="data")
        training, data = train_config(config), data_config(config)
        trainer.config = replace(trainer.config, train=training, data=data)
        for ranks in (1, 8):
            trainer.step.learning_rate = training.scaled_rate(training.base_lr, ranks)
            assert start_warnings(trainer) == [], file


def test_data_of_one_class(make_config, tmp_path, capsys):
    data = tmp_path / "data"
    for first, split in enumerate(("train", "val")):
        (data / split / "cat").mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (16, 16), (40 * i + first,) * 3).save(
                data / split / "cat" / f"{i}.png"
            )
    keys = {"DATA.DATASET": "folder", "DATA.PATH": data, "DATA.BATCH_SIZE": 2, "TRAIN.MAX_STEPS": 1}
    assert train(make_config(tmp_path / "run", keys | {"DATA.NUM_WORKERS": 0}))["steps"] == 1
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    says = "all 4 training images are of one class ('cat'), there is nothing to learn"
    assert said == [f"warning: DATA.PATH {data}: {says}"]


def test_a_run_that_diverges(make_config, tmp_path, capsys, monkeypatch):
    """The warnings stand between the other lines, and the run goes on to its end."""
    train_step = Trainer.train_step
    losses = {False: 2.0, True: 50.0}

    def diverge(self, batches):
        result = train_step(self, batches)
        return result._replace(loss=losses[self.progress.step > START])

    monkeypatch.setattr(Trainer, "train_step", diverge)
    last = START + RECENT + 3
    keys = {"TRAIN.BASE_LR": 1e3, "TRAIN.EPOCHS": 20, "TRAIN.MAX_STEPS": last}
    keys["DATA.BATCH_SIZE"] = 16
    assert train(make_config(tmp_path / "run", keys))["steps"] == last
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [line.split(",")[0].split("(")[0] for line in said] == [
        "warning: the learning rate reaches 31.25 ",
        f"warning: step {START + RECENT}: the loss of the last {RECENT} steps ",
    ]
