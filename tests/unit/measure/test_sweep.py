"""Intervals, paired differences, the comparison at equal MACs and equal time, what counts until a
target, names and grids of a plan."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from swinv2_moe.errors import UserError
from swinv2_moe.measure.sweep import (
    Run,
    SweepPlan,
    Variant,
    interval,
    markdown,
    read_plan,
    summarize,
    warnings,
)


def run(seed, top1, seconds=10.0, macs=100, target=0.0, **summary):
    epochs = [
        {"epoch": i + 1, "val_top1": value, "seconds": seconds} for i, value in enumerate(top1)
    ]
    summary |= {"active_macs": macs, "images_per_second": 5.0, "parameters": 2_000_000}
    config = SimpleNamespace(TRAIN=SimpleNamespace(TARGET_TOP1=target))
    record = SimpleNamespace(epochs=epochs, summary=summary, config=config)
    return Run(seed, record, {}, {})


def plan():
    variants = {name: Variant(name, Path("a.yaml"), ()) for name in ("dense", "moe")}
    return SweepPlan("dense", 3, variants)


def test_interval_of_three_values():
    """t(0.975, 2) = 4.303; the standard deviation of 1, 2 and 3 is 1."""
    result = interval([1.0, 2.0, 3.0])
    assert result.mean == 2
    assert result.half_width == pytest.approx(4.3027 / 3**0.5, abs=1e-4)


def test_one_value_has_no_interval():
    assert interval([4.0]).half_width is None


def test_differences_are_paired_by_seed():
    runs = {"dense": [run(0, [10.0]), run(1, [20.0])], "moe": [run(1, [22.0]), run(0, [12.0])]}
    difference = summarize(runs, plan())["moe"]["to control"]
    assert (difference.mean, difference.half_width) == (2.0, 0.0)


def test_at_equal_time_a_slower_run_has_fewer_epochs():
    runs = {"dense": [run(0, [1.0, 2.0])], "moe": [run(0, [1.5, 4.0], seconds=15.0)]}
    columns = summarize(runs, plan())["moe"]
    assert columns["to control"].mean == 2.0
    assert columns["at control's time"].mean == -0.5


def test_other_macs_are_named():
    runs = {"dense": [run(0, [1.0])], "moe": [run(0, [1.0], macs=103)]}
    assert warnings(summarize(runs, plan()), "dense") == [
        "warning: moe has +3.0% active MACs beside dense"
    ]


PLAN = """
control: {control}
seeds: 1
variants:
  8: {{base: {base}}}
stages:
  10: {{variants: {variants}}}
"""


@pytest.fixture
def write_plan(tmp_path):
    def write(control, variants):
        base = tmp_path / "base.yaml"
        base.touch()
        file = tmp_path / "plan.yaml"
        file.write_text(PLAN.format(control=control, variants=variants, base=base))
        return file

    return write


def test_names_may_be_numbers(write_plan):
    plan = read_plan(write_plan("8", "[8]"), "10")
    assert (plan.control, list(plan.variants)) == ("8", ["8"])


@pytest.mark.parametrize(
    ("control", "variants", "message"),
    [
        ("[8]", "[8]", r"control is '\[8\]', allowed: 8"),
        ("8", "[{8: 1}]", r"stages.10.variants: no such variant '{8: 1}'"),
    ],
)
def test_names_that_are_none_are_refused(write_plan, control, variants, message):
    with pytest.raises(UserError, match=message):
        read_plan(write_plan(control, variants), "10")


def test_an_epoch_that_ends_with_the_controls_time_counts():
    runs = {"dense": [run(0, [1.0, 2.0])], "moe": [run(0, [1.5, 4.0])]}
    assert summarize(runs, plan())["moe"]["at control's time"].mean == 2.0


def test_epochs_and_steps_until_the_target():
    """Of the runs that reached it."""
    reached = run(0, [50.0], target=40.0, target_epoch=4, target_step=3)
    missed = run(1, [30.0], target=40.0, target_epoch=None, target_step=None)
    results = summarize({"dense": [reached, missed], "moe": []}, plan())
    columns = results["dense"]
    assert (columns["reached"], columns["epochs to target"].mean) == (1, 4)
    assert columns["steps to target"].mean == 3
    assert "| 1 of 2 |" in markdown(results, plan())


def test_columns_without_a_value_are_omitted():
    table = markdown(summarize({"dense": [run(0, [1.0])], "moe": []}, plan()), plan())
    head = table.splitlines()[0]
    columns = ["variant", "seeds", "top-1, %", "parameters, M", "MACs, M", "images/s, training"]
    assert head == f"| {' | '.join([*columns, 'minutes'])} |"


def test_opts_of_a_plan_are_keys(write_plan):
    file = write_plan("8", "[8]")
    file.write_text(file.read_text() + "opts: {AUG.MIXUP: 0.5, AUG.CUTMIXES: 0}\n")
    with pytest.raises(UserError, match=r"opts: unknown key AUG.CUTMIXES"):
        read_plan(file)
    file.write_text(file.read_text().replace("AUG.CUTMIXES", "AUG.CUTMIX"))
    assert read_plan(file).variants["8"].opts == ("AUG.MIXUP", "0.5", "AUG.CUTMIX", "0")


def test_a_grid_makes_a_variant_of_each_combination(write_plan):
    file = write_plan("8-1-0.5", "['8-2-0.5', '8-1-0.5']")
    with file.open("a") as stream:
        stream.write("grid: {DATA.BATCH_SIZE: [1, 2], TRAIN.BASE_LR: [0.5]}\n")
    opts = {name: variant.opts for name, variant in read_plan(file).variants.items()}
    assert opts == {
        "8-1-0.5": ("DATA.BATCH_SIZE", "1", "TRAIN.BASE_LR", "0.5"),
        "8-2-0.5": ("DATA.BATCH_SIZE", "2", "TRAIN.BASE_LR", "0.5"),
    }
    assert list(read_plan(file, "10").variants) == ["8-2-0.5", "8-1-0.5"]
    file.write_text(file.read_text().replace("[0.5]", "0.5"))
    with pytest.raises(UserError, match=r"grid.TRAIN.BASE_LR is 0.5, it must be a list"):
        read_plan(file)


def with_grid(file, grid, opts="{}"):
    file.write_text(f"{file.read_text()}opts: {opts}\ngrid: {grid}\n")
    return file


def test_lists_in_a_grid_are_named_by_their_numbers(write_plan):
    file = with_grid(write_plan("8-1", "[8-2]"), "{MODEL.MOE.BLOCKS: [[[], [0]], [[], [1]]]}")
    opts = {name: variant.opts for name, variant in read_plan(file).variants.items()}
    assert opts == {
        "8-1": ("MODEL.MOE.BLOCKS", "[[], [0]]"),
        "8-2": ("MODEL.MOE.BLOCKS", "[[], [1]]"),
    }


def test_a_grid_with_a_value_twice_is_refused(write_plan):
    with pytest.raises(UserError, match="grid: two variants have the name '8-1'"):
        read_plan(with_grid(write_plan("8-1", "[8-1]"), "{SEED: [1, 1]}"))
