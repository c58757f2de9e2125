"""Intervals, paired differences, the comparison at equal MACs and equal time, names of a plan, and
gradients of images that can be read."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_core import MoEConfig, MoELayer
from swinv2_moe.data import Batch
from swinv2_moe.errors import UserError
from swinv2_moe.measure.ablation_measure import router_gradients
from swinv2_moe.measure.ablation_plan import Plan, Variant, read_plan
from swinv2_moe.measure.ablation_results import Run, interval, summarize, warnings


def run(seed, top1, seconds=10.0, macs=100):
    epochs = [
        {"epoch": i + 1, "val_top1": value, "seconds": seconds} for i, value in enumerate(top1)
    ]
    summary = {"active_macs": macs, "images_per_second": 5.0, "parameters": 2_000_000}
    return Run(seed, SimpleNamespace(epochs=epochs, summary=summary), {}, {})


def plan():
    variants = {name: Variant(name, Path("a.yaml"), ()) for name in ("dense", "moe")}
    return Plan("dense", 3, variants)


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


class Classifier(torch.nn.Module):
    """Images [B, 4] with experts in place of a network."""

    def __init__(self):
        super().__init__()
        self.moe = MoELayer(MoEConfig(4, 8, 2, capacity_factor=0.0))

    def forward_with_aux(self, images):
        return self.moe(images)


def test_images_that_cannot_be_read_have_no_gradient():
    torch.manual_seed(0)
    model, images = Classifier(), torch.randn(6, 4)
    deployed = SimpleNamespace(
        world=SimpleNamespace(device="cpu"),
        config=SimpleNamespace(train=SimpleNamespace(aux_loss_weight=0.0)),
        autocast=nullcontext,
    )
    batch = Batch(images[:4], torch.tensor([0, 1, 2, 3]), [])
    with_bad = Batch(images, torch.tensor([0, 1, 2, 3, -1, -1]), ["a.png", "b.png"])
    only_bad = Batch(images[4:], torch.tensor([-1, -1]), ["a.png", "b.png"])
    expected = router_gradients(model, [batch], deployed)
    assert router_gradients(model, [with_bad, only_bad], deployed) == pytest.approx(expected)


def test_an_epoch_that_ends_with_the_controls_time_counts():
    runs = {"dense": [run(0, [1.0, 2.0])], "moe": [run(0, [1.5, 4.0])]}
    assert summarize(runs, plan())["moe"]["at control's time"].mean == 2.0
