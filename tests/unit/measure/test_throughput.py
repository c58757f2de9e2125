"""Rounds and their ratios, what is measured for which options, and the arithmetic of a row."""

import csv
import itertools
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_core import MoEConfig, MoELayer, RoutingStats
from swinv2_moe.errors import UserError
from swinv2_moe.measure import throughput
from swinv2_moe.measure.configurations import Combination, SpeedOptions, combinations
from swinv2_moe.measure.rounds import interleaved, matrix_product, working_memory
from swinv2_moe.measure.spread import Times, latencies, ratios
from swinv2_moe.measure.throughput import Row, Side
from swinv2_moe.models import Complexity

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart_digits.yaml"
CPU = torch.device("cpu")


def side(*milliseconds: float, run: str = "a", peak: int | None = 2**20, macs: int = 10**9) -> Side:
    return Side(Times(milliseconds, run), Complexity(1000, macs), 0.5, peak, 4000)


def row(moe: Side, dense: Side, mode="inference", batch_size=8, ranks=1) -> Row:
    combination = Combination(mode, batch_size, "float32", 1.25, "off")
    product = Times([1.0] * len(moe.times), moe.times.run)
    return Row(combination, ranks, "a machine", moe, dense, product, 10**9, 0.02, 1.5)


# Rounds


def test_rounds_alternate_and_warm_up_does_not_count():
    order = []
    times = interleaved(
        {name: lambda name=name: order.append(name) for name in "abc"}, rounds=3, warmup=1
    )
    assert "".join(order) == "cba" + "abc" + "cba" + "abc"
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_one_run_has_one_name_and_every_run_another():
    first, second = (interleaved({"a": int, "b": int}, rounds=2, warmup=0) for _ in range(2))
    assert first["a"].run == first["b"].run
    assert first["a"].run != second["a"].run
    assert len(ratios(first["a"], first["b"])) == 2
    with pytest.raises(ValueError, match=f"{first['a'].run}, {second['b'].run}"):
        ratios(first["a"], second["b"])
    with pytest.raises(ValueError, match="different runs"):
        ratios(first["a"], [1.0, 2.0])  # nobody knows when these were taken


def test_ratios_go_round_by_round():
    a, b = Times([2, 9], "r"), Times([1, 3], "r")
    assert ratios(a, b) == [2, 3]
    assert ratios([2, 9], [1, 3]) == [2, 3]
    with pytest.raises(ValueError, match="shorter"):
        ratios(a, Times([1], "r"))


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=120))
def test_percentiles_are_numpys(values):
    """A 99th percentile of fewer than 100 values would be little else than the largest."""
    last = {"p99": np.percentile(values, 99)} if len(values) >= 100 else {"max": max(values)}
    assert latencies(values) == pytest.approx(
        {"p50": np.median(values), "p90": np.percentile(values, 90)} | last
    )


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
@pytest.mark.parametrize("size", [2**26, 2**15], ids=["one large block", "many small ones"])
def test_working_memory_is_what_a_pass_needs_at_once(size):
    def work() -> None:
        torch.cat([torch.ones(size // 4) for _ in range(2**26 // size)])

    for _ in range(2):  # the second time, freed memory is at hand: it must count again
        assert working_memory(work, CPU) == pytest.approx(2 * 2**26, rel=0.1)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_working_memory_counts_results_that_reuse_memory():
    experts = MoELayer(MoEConfig(256, 1024, 4)).experts.requires_grad_(False)
    rows, offsets = torch.randn(16384, 256), torch.arange(4096, 16385, 4096, dtype=torch.int32)
    experts(rows, offsets)  # the libraries' own first needs
    first, again = (working_memory(lambda: experts(rows, offsets), CPU) for _ in range(2))
    assert first > 4 * rows.numel()  # the result, and what the kernel works in
    assert again == pytest.approx(first, rel=0.1)


def test_matrix_product_counts_its_flops():
    product, flops = matrix_product(torch.bfloat16, CPU)
    assert product().shape == (2048, 2048)
    assert (product().dtype, flops) == (torch.bfloat16, 2 * 2048**3)


# Options and combinations


def test_options_that_cannot_be():
    for options, message in (
        ({"mode": ("inference", "eval")}, "--mode is 'eval', allowed: inference, training"),
        ({"dtypes": ("float8",)}, "--dtypes is 'float8', allowed: float32, bfloat16, float16"),
        ({"compile": ("yes",)}, "--compile is 'yes', allowed: off, on"),
        ({"batch_sizes": (8, 0)}, "--batch-sizes is 0, it must be at least 1"),
        ({"rounds": 0}, "--rounds is 0, it must be at least 1"),
        ({"warmup": -1}, "--warmup is -1, it must be at least 0"),
    ):
        with pytest.raises(UserError) as error:
            SpeedOptions(**options)
        assert str(error.value) == message


def test_every_combination_once():
    chosen = [("inference", "training"), (1, 2), ("float32", "bfloat16")]
    chosen += [(1.25, 0.0), ("off", "on")]
    found = combinations(QUICKSTART, [], SpeedOptions(*chosen))
    expected = [Combination(*each) for each in itertools.product(*chosen)]
    assert [combination for combination, *_ in found] == expected
    for combination, moe, dense in found:
        for config, num_experts in ((moe, 8), (dense, 0)):
            moe_keys = config.MODEL.MOE
            assert num_experts == moe_keys.NUM_EXPERTS
            used = "CAPACITY_FACTOR" if combination.mode == "training" else "EVAL_CAPACITY_FACTOR"
            assert moe_keys[used] == combination.capacity_factor
            assert combination.batch_size == config.DATA.BATCH_SIZE
            assert (combination.dtype == "bfloat16") == config.AMP_ENABLE
            assert (combination.compile == "on") == config.COMPILE
            assert config.AUG.MIXUP == config.TRAIN.BASE_LR == 0


def test_without_factors_each_mode_has_the_configured_one():
    opts = ["MODEL.MOE.CAPACITY_FACTOR", "1.5", "MODEL.MOE.EVAL_CAPACITY_FACTOR", "2.0"]
    found = combinations(QUICKSTART, opts, SpeedOptions(("inference", "training"), (1,)))
    assert [combination.capacity_factor for combination, *_ in found] == [2.0, 1.5]


def test_what_is_named_twice_is_measured_once():
    twice = [("inference",) * 2, (2, 2), ("float32",) * 2, (0.0, 0.0), ("off", "off")]
    assert len(combinations(QUICKSTART, [], SpeedOptions(*twice))) == 1


# A value of --opts, and what the error line says of it
IGNORED = {
    "AMP_ENABLE true": "True, but --dtypes decides",
    "DATA.BATCH_SIZE 64": "64, but --batch-sizes decides",
    "DATA.GLOBAL_BATCH_SIZE 64": "64, but --batch-sizes decides",
    "MODEL.MOE.EVAL_CAPACITY_FACTOR 2": "2.0, but --capacity-factors decides",
    "TRAIN.ACCUMULATION_STEPS 4": "4, but what is measured has 1",
    "DATA.DATASET cifar10": "'cifar10', but the images are noise",
}


def test_opts_that_would_be_ignored():
    for opts, message in IGNORED.items():
        with pytest.raises(UserError) as error:
            combinations(QUICKSTART, opts.split(), SpeedOptions(capacity_factors=(1.25,)))
        assert str(error.value) == f"--opts {opts.split()[0]} is {message}"


def test_opts_may_say_what_is_measured_anyway():
    opts = "COMPILE true AMP_ENABLE true DATA.BATCH_SIZE 8 AUG.MIXUP 0 MODEL.MOE.TOP_K 2"
    options = SpeedOptions(("training",), (8,), ("bfloat16",), (), ("on",))
    ((_, config, _),) = combinations(QUICKSTART, opts.split(), options)
    assert config.MODEL.MOE.TOP_K == 2


def test_a_configuration_that_names_no_data_and_mixes_images_is_measured_too():
    file = QUICKSTART.parent / "in22k" / "swin_moe_small_window12_192_8expert.yaml"
    (found,) = combinations(file, [], SpeedOptions(("training",), (1,)))
    assert found[1].TRAIN.ACCUMULATION_STEPS == 1


def test_a_configuration_of_fine_tuning_is_measured_without_weights():
    file = QUICKSTART.parent / "tiny_imagenet" / "finetune_96.yaml"
    (found,) = combinations(file, [], SpeedOptions(("inference",), (1,)))
    assert found[1].MODEL.CLASS_MAP == ""


def test_a_dense_configuration_is_refused():
    with pytest.raises(UserError, match=r"quickstart_digits\.yaml: MODEL\.MOE\.NUM_EXPERTS is 0"):
        combinations(QUICKSTART, ["MODEL.MOE.NUM_EXPERTS", "0"], SpeedOptions())


# Rows


def test_a_rows_arithmetic():
    found = row(side(20, 40), side(10, 40), batch_size=8, ranks=2)
    assert found.images_per_second(found.moe) == [800, 400]  # 16 images
    assert found.ratio() == [0.5, 1]
    # a rank computes 8 x 2 x 1e9 FLOPs in 20 ms, the product 1e9 in 1 ms
    assert found.mfu(found.moe) == pytest.approx([0.8, 0.4])
    training = replace(found, combination=found.combination._replace(mode="training"))
    assert training.mfu(training.dense) == pytest.approx([4.8, 1.2])


def test_dropped_is_the_share_of_all_choices(monkeypatch):
    zero = torch.tensor(0.0)
    stats = [RoutingStats(torch.tensor(counts), torch.tensor(share), zero, zero)
             for counts, share in (([60, 20], 0.25), ([6, 14], 0.75))]  # fmt: skip
    layers = {str(i): SimpleNamespace(last_routing=found) for i, found in enumerate(stats)}
    monkeypatch.setattr(throughput, "moe_layers", lambda model: layers)
    # of 100 choices 20 and 15; 60 where 40 are even
    assert throughput._routing(None) == (0.35, 1.5)


def test_no_ratio_of_two_runs_reaches_a_table(tmp_path):
    found = row(side(20, 40, run="a"), side(10, 40, run="b"))
    for make in (
        found.ratio,
        lambda: found.mfu(found.dense),
        lambda: throughput.columns_of(found),
        lambda: throughput.write_csv([found], tmp_path / "t.csv"),
    ):
        with pytest.raises(ValueError, match="times of different runs"):
            make()
    assert not (tmp_path / "t.csv").exists()


def test_the_file_holds_every_round(tmp_path):
    rows = [row(side(20, 40), side(10.5, 40))]
    rows.append(row(side(3, peak=None), side(2, peak=None), mode="training"))
    throughput.write_csv(rows, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["dense_ms"] == "10.500 40.000"
    assert (first["run"], first["mode"]) == ("a", "inference")
    assert (first["rounds"], first["ranks"]) == ("2", "1")
    assert float(first["moe_over_dense"]) == statistics.median([10.5 / 20, 1])
    assert (float(first["moe_p50_ms"]), float(first["moe_max_ms"])) == pytest.approx((30, 40))
    assert (first["moe_peak_bytes"], second["moe_peak_bytes"]) == (str(2**20), "")
    with pytest.raises(UserError, match=r"--output .*none/t.csv: cannot be written"):
        throughput.write_csv(rows, tmp_path / "none" / "t.csv")


def test_the_slowest_ranks_time_counts():
    def gather(times):
        return [times, {"a": [1e9]}]

    world = SimpleNamespace(barrier=lambda: None, gather=gather)
    assert interleaved({"a": int}, rounds=1, warmup=0, world=world) == {"a": [1e9]}
