"""Schedules of the routing as text: their values, and one line for each that cannot be used."""

import pytest

from swinv2_moe.config import load_config, parse_schedule, train_config
from swinv2_moe.errors import UserError

EXPERTS = ["MODEL.MOE.NUM_EXPERTS", "4", "MODEL.MOE.BLOCKS", "[[],[],[1],[]]"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("epoch 0:2 1:1", [(0, 2), (0.99, 2), (1, 1), (7, 1)]),
        ("epoch 0:1.25 0.5:2 1:0", [(0, 1.25), (0.5, 2), (0.9, 2), (1, 0), (3, 0)]),
        ("epoch 0:1 2:2 4:1.5 linear", [(0, 1), (1, 1.5), (2, 2), (3, 1.75), (4, 1.5), (9, 1.5)]),
        ("epoch 0:3", [(0, 3), (5, 3)]),
    ],
)
def test_values(text, values):
    schedule = parse_schedule(text)
    assert [schedule.value(epoch, step=10**6) for epoch, _ in values] == [v for _, v in values]


def test_steps():
    schedule = parse_schedule("step 0:1 100:2 linear")
    assert [schedule.value(epoch=50, step=step) for step in (0, 25, 200)] == [1, 1.25, 2]


def test_empty_is_none():
    assert parse_schedule("") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2", "it must be like"),
        ("days 0:2", "it must be like"),
        ("epoch 0=2", "'0=2' is not POSITION:VALUE"),
        ("epoch 0:2, 1:1", "'0:2,' is not POSITION:VALUE"),
        ("epoch 0:nan", "must be finite"),
        ("epoch 1:2", "first position is 1, it must be 0"),
        ("epoch 0:2 3:1 3:2", "position 3 must be above 3"),
    ],
)
def test_a_schedule_that_cannot_be_used(text, message):
    with pytest.raises(UserError, match=message) as error:
        load_config(None, ["MODEL.MOE.TOP_K_SCHEDULE", text])
    assert str(error.value).startswith(f"MODEL.MOE.TOP_K_SCHEDULE is {text!r}: ")


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        (["MODEL.MOE.TOP_K_SCHEDULE", "epoch 0:1.5"], "1.5 is not a whole number"),
        (["MODEL.MOE.TOP_K_SCHEDULE", "epoch 0:0"], "0 is not a whole number"),
        (["MODEL.MOE.TOP_K_SCHEDULE", "step 0:5"], r"5 must be at most .*NUM_EXPERTS \(4\)"),
        (
            ["MODEL.MOE.TOP_K_SCHEDULE", "epoch 0:1", "MODEL.MOE.FREEZE", "true"],
            r"MODEL.MOE.FREEZE \(True\)",
        ),
        (
            ["MODEL.MOE.TOP_K_SCHEDULE", "epoch 0:1", "MODEL.MOE.ROUTER", "soft"],
            r"TOP_K_SCHEDULE is 'epoch 0:1': it cannot be used with MODEL.MOE.ROUTER 'soft'",
        ),
        (
            ["MODEL.MOE.CAPACITY_AUTO", "true", "MODEL.MOE.ROUTER", "expert_choice"],
            r"CAPACITY_AUTO is True: it cannot be used with MODEL.MOE.ROUTER 'expert_choice'",
        ),
        (
            ["MODEL.MOE.CAPACITY_AUTO", "true", "MODEL.MOE.FREEZE", "true"],
            r"CAPACITY_AUTO is True: with MODEL.MOE.FREEZE \(True\)",
        ),
        (["MODEL.MOE.EVAL_BATCH_PRIORITIZED", "yes"], "allowed: same, always, never"),
    ],
)
def test_values_that_contradict(opts, message):
    with pytest.raises(UserError, match=message):
        load_config(None, [*EXPERTS, "MODEL.PRETRAINED", "weights", *opts])


def test_in_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("MODEL: {MOE: {TOP_K_SCHEDULE: epoch 0:2 10:1}}\n")
    assert load_config(file).MODEL.MOE.TOP_K_SCHEDULE == "epoch 0:2 10:1"


def test_a_dense_model_has_no_automatic_capacity():
    auto = ["MODEL.MOE.CAPACITY_AUTO", "true"]
    assert not train_config(load_config(None, EXPERTS)).capacity_auto
    assert not train_config(load_config(None, auto)).capacity_auto
    assert train_config(load_config(None, EXPERTS + auto)).capacity_auto
