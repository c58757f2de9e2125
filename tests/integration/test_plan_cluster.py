"""tools/plan_cluster.py in this process: table, refusals; and its step times against
published ones."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tool_cases import Finished, assert_one_line, command

from moe_core.parallel import PROFILES, cost_model
from swinv2_moe.config import load_config, model_config, train_config
from swinv2_moe.measure import cluster

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart_digits.yaml"
CFG = ("--cfg", QUICKSTART)
CLUSTER = "--nodes 2 --gpus-per-node 8"
_counted = {}


@pytest.fixture
def plan(monkeypatch, capsys):
    """`plan(*arguments)` -> status, output, errors. Models are counted once: it takes most of the
    time."""
    describe = cluster.count_model

    def describe_once(config):
        if repr(config) not in _counted:
            _counted[repr(config)] = describe(config)
        return _counted[repr(config)]

    monkeypatch.setattr(cluster, "count_model", describe_once)
    return command("plan_cluster", monkeypatch, capsys)


@pytest.fixture
def rows(plan):
    """`rows(*arguments)`: the rows of the table that is printed, and all that is."""

    def run(*arguments: object) -> tuple[dict[int, list[str]], str]:
        status, out, err = plan(*arguments)
        assert (status, err) == (0, "")
        return rows_of(out), out

    return run


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def rows_of(out: str) -> dict[int, list[str]]:
    """Cells after the first, by number of GPUs; marks are dropped."""
    lines = [re.sub(r"[*!] ", "", line).split() for line in out.splitlines()]
    return {
        int(cells[0].replace(",", "")): cells[1:]
        for cells in lines
        if len(cells) == 9 and cells[0][0].isdigit()
    }


def test_table(rows):
    rows, out = rows(*CFG, CLUSTER, "--opts MODEL.MOE.NUM_EXPERTS 64")
    assert list(rows) == [2**k for k in range(13)]
    marked = [line.split() for line in out.splitlines() if line.strip().startswith("* ")]
    assert [words[1] for words in marked if "%" in " ".join(words)] == ["16"]
    for gpus, (nodes, _, _, share, r, d, algorithm, memory) in rows.items():
        assert number(nodes) == max(gpus // 8, 1)
        assert 0 <= float(share.rstrip("%")) < 100
        assert float(memory) > 0
        assert algorithm in ("linear", "2dh", "-")
        assert (algorithm == "2dh") <= (gpus > 8)
        assert (r == "-") == (gpus == 1)
        assert (d == "-") == (r in ("-", "0"))


def test_a_configuration_of_fine_tuning_needs_no_images_and_no_weights(rows):
    found, _ = rows("--cfg tiny_imagenet/finetune_96 --nodes 1 --gpus-per-node 1")
    assert 1 in found


def test_a_dense_model_exchanges_nothing(rows):
    found, _ = rows(*CFG, CLUSTER, "--opts MODEL.MOE.NUM_EXPERTS 0")
    assert len(found) == 13
    assert all(row[3:7] == ["0.0%", "-", "-", "-"] for row in found.values())


def test_gpus_that_cannot_share_the_experts_are_left_out_with_a_note(rows):
    # the second time the user's cluster is one of them
    for nodes, gpus in ((3, [1, 2, 12]), (1, [1, 2])):
        six = "--gpus-per-node 4 --opts MODEL.MOE.NUM_EXPERTS 6 MODEL.MOE.EXPERT_PARALLEL_SIZE 6"
        found, out = rows(*CFG, "--nodes", nodes, six)
        assert list(found) == gpus
        assert "\n4 GPUs left out: num_experts (6)" in out
        assert len([line for line in out.splitlines() if "left out" in line]) == 11


def test_experts_that_do_not_divide_over_all_gpus_are_in_groups(rows):
    found, out = rows(*CFG, "--nodes 1 --gpus-per-node 4 --opts MODEL.MOE.NUM_EXPERTS 6")
    assert {1, 2, 4} <= set(found)
    assert "left out" not in out


def test_replicas_of_the_experts_keep_the_exchange_in_a_node(rows):
    size = "--opts MODEL.MOE.EXPERT_PARALLEL_SIZE"
    everywhere, in_a_node = (rows(*CFG, CLUSTER, size, n)[0][256] for n in (0, 8))
    assert float(in_a_node[3].rstrip("%")) < float(everywhere[3].rstrip("%")) / 5
    assert number(in_a_node[1]) < number(everywhere[1])
    assert in_a_node[6] == "linear"
    _, out = rows(*CFG, "--nodes 1 --gpus-per-node 12", size, 8)
    note = (
        "12 GPUs left out: the number of GPUs (12) must be a multiple of"
        " MODEL.MOE.EXPERT_PARALLEL_SIZE (8)"
    )
    assert note in out


def test_this_machine_and_another_batch_size(rows):
    steps = []
    for batch in (16, 64):
        found, out = rows(*CFG, CLUSTER, "--profile here --batch-size", batch)
        assert f"{batch} images per GPU" in out
        steps.append(number(found[1][1]))
    assert steps[1] > steps[0]


def test_a_global_batch_is_divided_over_the_gpus(rows):
    opts = "--opts DATA.GLOBAL_BATCH_SIZE 256 TRAIN.ACCUMULATION_STEPS 2"
    found, out = rows(*CFG, CLUSTER, opts)
    assert "8 GPUs a node, 256 images per step over all GPUs; predicted" in out
    assert list(found) == [2**k for k in range(8)]
    for _, step, images, *_ in found.values():
        assert number(images) == pytest.approx(256 / number(step) * 1000, rel=0.05)  # rounded
    note = (
        "256 GPUs left out: DATA.GLOBAL_BATCH_SIZE is 256, it must be divisible by the number of"
        " ranks (256) times TRAIN.ACCUMULATION_STEPS (2)"
    )
    assert note in out
    found, out = rows(*CFG, CLUSTER, "--batch-size 16", opts)
    assert "16 images per GPU; predicted" in out
    assert 256 in found


BAD_INPUT = {
    "--nodes 0": "--nodes is 0",
    "--gpus-per-node -1": "--gpus-per-node is -1",
    "--opts DATA.GLOBAL_BATCH_SIZE 15 TRAIN.ACCUMULATION_STEPS 2": (
        "DATA.GLOBAL_BATCH_SIZE is 15 ... (1) times TRAIN.ACCUMULATION_STEPS (2)"
    ),
    "--output plan.png": "--output has left: the figure is gone, the table has its numbers",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_one_line(words, plan):
    assert_one_line(Finished(*plan(*CFG, CLUSTER, words)), BAD_INPUT[words])


def test_scales():
    assert cluster.scales(8, 16) == [2**k for k in range(13)]
    assert cluster.scales(6, 18) == [1, 2, 4, 6, 12, 18, 24, 48, 96, 192, 384, 768, 1536, 3072]
    assert cluster.scales(1, 5000)[-2:] == [4096, 5000]


def test_memory_is_sharded_and_recomputation_saves_activations():
    config = load_config(QUICKSTART)
    machine, model = PROFILES["h100"], cluster.count_model(model_config(config))
    training = train_config(config)
    one, eight = (cluster.predict_step(model, training, machine, gpus, 8, 64) for gpus in (1, 8))
    assert one.memory > eight.memory > 16 * (model.trunk_parameters + model.expert_parameters / 8)
    less = load_config(QUICKSTART, ["TRAIN.USE_CHECKPOINT", "true"])
    recomputing = cluster.count_model(model_config(less))
    assert recomputing.kept < model.kept == model.activations == recomputing.activations
    slower = cluster.predict_step(recomputing, train_config(less), machine, 1, 8, 64)
    assert slower.memory < one.memory
    assert slower.step > one.step


def test_published_images_per_second(monkeypatch):
    """The second table of docs/explanation/planner.md: SwinV2-MoE-B beside its dense
    model on A100s (arXiv 2206.03382, table 7)."""
    stated = {}
    for line in (ROOT / "docs" / "explanation" / "planner.md").read_text().splitlines():
        case, *cells = line.strip("| ").split(" | ")
        stated[tuple(case.split(", "))] = cells[:2]
    shape_of = cost_model.LayerShape.of
    # Tutel's buffers are padded: no counts are exchanged
    monkeypatch.setattr(
        cost_model.LayerShape, "of", lambda *args: replace(shape_of(*args), counts_first=False)
    )
    for name, file in (("dense", "dense"), ("MoE", "32expert")):
        file = ROOT / "configs" / "in22k" / f"swin_moe_base_window12_192_{file}.yaml"
        config = load_config(file, ["TRAIN.ACCUMULATION_STEPS", "1"])
        model = cluster.count_model(model_config(config))
        for gpus in (8, 32, 128):
            found = cluster.predict_step(
                model, train_config(config), PROFILES["a100-hdr"], gpus, 8, 128
            )
            published, predicted = map(float, stated[name, f"{gpus} GPUs"])
            assert found.images / found.step / gpus == pytest.approx(predicted, abs=0.51)
            assert predicted == pytest.approx(published, rel=0.15)


def test_a_run_is_refused_in_one_line(monkeypatch, capsys):
    run = command("plan_cluster", monkeypatch, capsys)
    for words in ("mine", "--run mine"):
        says = "has left: --cfg RUN/config.yaml predicts a step"
        assert_one_line(run(words, CLUSTER), says)
        assert_one_line(run(words), says)


def test_the_configuration_of_a_run_with_held_out_images_can_be_planned(monkeypatch, capsys):
    run = command("plan_cluster", monkeypatch, capsys)
    held_out = "--cfg imagenette_96 --opts DATA.VAL_SPLIT 0.2"
    assert "images/s" in str(run(f"{held_out} DATA.DATASET folder", CLUSTER))
