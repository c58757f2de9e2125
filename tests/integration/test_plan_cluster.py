"""tools/plan_cluster.py in this process: table, figure, refusals; and its step times against
published ones."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from tool_cases import command

from moe_core.parallel import PROFILES, cost_model
from swinv2_moe import planner
from swinv2_moe.config import load_config, model_config, train_config
from swinv2_moe.train import train

ROOT = Path(__file__).parents[2]
CFG = ("--cfg", str(ROOT / "configs" / "quickstart_digits.yaml"))
CLUSTER = ("--nodes", "2", "--gpus-per-node", "8")


@pytest.fixture
def plan(monkeypatch, capsys, tmp_path):
    """`plan(*arguments)` -> status, output, errors, the figure's path."""
    run, figure = command("plan_cluster", monkeypatch, capsys), tmp_path / "plan.png"
    return lambda *arguments: (*run("--output", figure, *arguments), figure)


def rows_of(out: str) -> dict[int, list[str]]:
    """Cells after the first, by number of GPUs; marks are dropped."""
    lines = [re.sub(r"[*!] ", "", line).split() for line in out.splitlines()]
    return {
        int(cells[0].replace(",", "")): cells[1:]
        for cells in lines
        if len(cells) == 9 and cells[0][0].isdigit()
    }


def test_table_and_figure(plan):
    status, out, err, figure = plan(*CFG, *CLUSTER, "--opts", "MODEL.MOE.NUM_EXPERTS", "64")
    assert (status, err) == (0, "")
    rows = rows_of(out)
    assert list(rows) == [2**k for k in range(13)]
    assert [
        line.split()[1]
        for line in out.splitlines()
        if line.strip().startswith("* ") and "%" in line
    ] == ["16"]
    for gpus, (nodes, _, _, share, r, d, algorithm, memory) in rows.items():
        assert int(nodes.replace(",", "")) == max(gpus // 8, 1)
        assert 0 <= float(share.rstrip("%")) < 100
        assert float(memory) > 0
        assert algorithm in ("linear", "2dh", "-")
        assert (algorithm == "2dh") <= (gpus > 8)
        assert (r == "-") == (gpus == 1)
        assert (d == "-") == (r in ("-", "0"))
    with Image.open(figure) as image:
        assert image.format == "PNG"
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(2**24)) > 20  # drawn on


def test_a_dense_model_exchanges_nothing(plan):
    status, out, err, _ = plan(*CFG, *CLUSTER, "--opts", "MODEL.MOE.NUM_EXPERTS", "0")
    assert (status, err) == (0, "")
    rows = rows_of(out)
    assert len(rows) == 13
    assert all(row[3:7] == ["0.0%", "-", "-", "-"] for row in rows.values())


def test_gpus_that_cannot_share_the_experts_are_left_out_with_a_note(plan):
    # the second time the user's cluster is one of them
    for nodes, rows in ((3, [1, 2, 12]), (1, [1, 2])):
        six = ("--gpus-per-node", "4", "--opts", "MODEL.MOE.NUM_EXPERTS", "6")
        status, out, err, figure = plan(*CFG, "--nodes", nodes, *six)
        assert (status, err) == (0, "")
        assert list(rows_of(out)) == rows
        assert "\n4 GPUs left out: num_experts (6)" in out
        assert len([line for line in out.splitlines() if "left out" in line]) == 11
        figure.unlink()


def test_replicas_of_the_experts_keep_the_exchange_in_a_node(plan):
    size = ("MODEL.MOE.EXPERT_PARALLEL_SIZE",)
    everywhere, in_a_node = (
        rows_of(plan(*CFG, *CLUSTER, "--opts", *size, n)[1])[256] for n in ("0", "8")
    )
    assert float(in_a_node[3].rstrip("%")) < float(everywhere[3].rstrip("%")) / 5
    assert float(in_a_node[1].replace(",", "")) < float(everywhere[1].replace(",", ""))
    assert in_a_node[6] == "linear"
    note = plan(*CFG, "--nodes", "1", "--gpus-per-node", "12", "--opts", *size, "8")[1]
    assert (
        "12 GPUs left out: the number of GPUs (12) must be a multiple of"
        " MODEL.MOE.EXPERT_PARALLEL_SIZE (8)" in note
    )


def test_this_machine_and_another_batch_size(plan):
    cells = {}
    for batch in (16, 64):
        status, out, err, _ = plan(*CFG, *CLUSTER, "--profile", "here", "--batch-size", batch)
        assert (status, err) == (0, "")
        assert f"{batch} images per GPU" in out
        cells[batch] = rows_of(out)[1]
    assert float(cells[64][1].replace(",", "")) > float(cells[16][1].replace(",", ""))


def test_a_global_batch_is_divided_over_the_gpus(plan):
    opts = ("--opts", "DATA.GLOBAL_BATCH_SIZE", "256", "TRAIN.ACCUMULATION_STEPS", "2")
    status, out, err, _ = plan(*CFG, *CLUSTER, *opts)
    assert (status, err) == (0, "")
    assert "8 GPUs a node, 256 images per step over all GPUs; predicted" in out
    rows = rows_of(out)
    assert list(rows) == [2**k for k in range(8)]
    for _, step, images, *_ in rows.values():
        step, images = float(step.replace(",", "")), float(images.replace(",", ""))
        assert images == pytest.approx(256 / step * 1000, rel=0.05)  # step is rounded
    assert (
        "256 GPUs left out: DATA.GLOBAL_BATCH_SIZE is 256, it must be divisible by the number of"
        " ranks (256) times TRAIN.ACCUMULATION_STEPS (2)" in out
    )
    out = plan(*CFG, *CLUSTER, "--batch-size", "16", *opts)[1]
    assert "16 images per GPU; predicted" in out
    assert 256 in rows_of(out)


LANGUAGE_MODEL = ["layers=4", "dim=256", "hidden=1024", "experts=16", "context=128"]


def test_a_language_model_is_compared_with_its_einsum_form(plan):
    words = ("--language-model", *LANGUAGE_MODEL, "--batch-size", "32")
    status, out, err, figure = plan(*words, *CLUSTER, "--opts", "AMP_ENABLE", "true")
    assert (status, err) == (0, "")
    assert "45M parameters on a100-hdr, 8 GPUs a node, 32 x 128 tokens per GPU" in out
    assert "tokens/s" in out
    rows = rows_of(out)
    assert list(rows) == [2**k for k in range(13)]
    step, tokens = (float(rows[16][column].replace(",", "")) for column in (1, 2))
    assert tokens == pytest.approx(16 * 32 * 128 / step * 1000, rel=0.05)  # step is rounded
    table = out[out.index("MoE layers by einsums and by rows on 16 GPUs") :].splitlines()
    numbers = [line.split()[-4:] for line in table if line.strip().startswith(("einsums", "rows"))]
    layers, layer_gains, steps, step_gains = zip(*(map(float, row) for row in numbers), strict=True)
    assert layers[0] > layers[1] >= layers[2]
    assert steps[0] > steps[1] >= steps[2]
    assert layer_gains[0] == step_gains[0] == 1
    assert steps[2] == step
    assert figure.exists()


def test_a_language_model_without_an_einsum_form(plan):
    words = ("--language-model", *LANGUAGE_MODEL)
    out = plan(*words, "--nodes", "4", "--gpus-per-node", "8")[1]
    assert "left out: the einsum form needs num_experts (16)" in out
    out = plan(*words, "experts=0", *CLUSTER)[1]
    assert "einsum" not in out


BAD_INPUT = {
    "no nodes": (["--nodes", "0"], ["--nodes is 0"]),
    "no GPUs": (["--gpus-per-node", "-1"], ["--gpus-per-node is -1"]),
    "no images": (["--batch-size", "0"], ["--batch-size is 0"]),
    "global batch": (
        ["--opts", "DATA.GLOBAL_BATCH_SIZE", "15", "TRAIN.ACCUMULATION_STEPS", "2"],
        ["DATA.GLOBAL_BATCH_SIZE is 15", "(1) times TRAIN.ACCUMULATION_STEPS (2)"],
    ),
    "no configuration": (["--cfg", "none.yaml"], ["none.yaml", "cannot be read"]),
    "unknown key": (["--opts", "MODEL.MOE.EXPERTS", "4"], ["unknown key MODEL.MOE.EXPERTS"]),
    "no directory": (
        ["--output", "nowhere/plan.png"],
        ["nowhere/plan.png", "must be a file in a directory that exists"],
    ),
    "output is a directory": (
        ["--output", "."],
        ["--output .", "must be a file that ends in .png"],
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line(case, plan):
    arguments, texts = BAD_INPUT[case]
    status, out, err, figure = plan(*CFG, *CLUSTER, *arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert [text for text in texts if text not in err] == []
    assert not figure.exists()


def test_a_bad_word_of_a_language_model_is_one_line(plan):
    status, out, err, _ = plan("--language-model", "layers=2", "depth=3", *CLUSTER)
    assert (status, out) == (2, "")
    assert err.startswith("error: --language-model depth=3: must be NAME=NUMBER")
    assert err.count("\n") == 1


def test_scales():
    assert planner.scales(8, 16) == [2**k for k in range(13)]
    assert planner.scales(6, 18) == [1, 2, 4, 6, 12, 18, 24, 48, 96, 192, 384, 768, 1536, 3072]
    assert planner.scales(1, 5000)[-2:] == [4096, 5000]


def test_memory_is_sharded_and_recomputation_saves_activations():
    config = load_config(CFG[1])
    machine, model = PROFILES["h100"], planner.describe(model_config(config))
    training = train_config(config)
    one, eight = (planner.predict(model, training, machine, gpus, 8, 64) for gpus in (1, 8))
    assert one.memory > eight.memory > 16 * (model.trunk_parameters + model.expert_parameters / 8)
    less = load_config(CFG[1], ["TRAIN.USE_CHECKPOINT", "true"])
    recomputing = planner.describe(model_config(less))
    assert recomputing.kept < model.kept == model.activations == recomputing.activations
    slower = planner.predict(recomputing, train_config(less), machine, 1, 8, 64)
    assert slower.memory < one.memory
    assert slower.step > one.step


def test_published_images_per_second(monkeypatch):
    """The second table of docs/explanation/planner.md: SwinV2-MoE-B beside its dense
    model on A100s (arXiv 2206.03382, table 7)."""
    lines = (ROOT / "docs" / "explanation" / "planner.md").read_text().splitlines()
    stated = {
        tuple(line.split(" | ")[0].strip("| ").split(", ")): line.strip("| ").split(" | ")[1:3]
        for line in lines
    }
    shape_of = cost_model.LayerShape.of
    # Tutel's buffers are padded: no counts are exchanged
    monkeypatch.setattr(
        cost_model.LayerShape, "of", lambda *args: replace(shape_of(*args), counts_first=False)
    )
    for name, file in (("dense", "dense"), ("MoE", "32expert")):
        file = ROOT / "configs" / "in22k" / f"swin_moe_base_window12_192_{file}.yaml"
        config = load_config(file, ["TRAIN.ACCUMULATION_STEPS", "1"])
        model = planner.describe(model_config(config))
        for gpus in (8, 32, 128):
            found = planner.predict(model, train_config(config), PROFILES["a100-hdr"], gpus, 8, 128)
            published, predicted = map(float, stated[name, f"{gpus} GPUs"])
            assert found.images / found.step / gpus == pytest.approx(predicted, abs=0.51)
            assert predicted == pytest.approx(published, rel=0.15)


def test_the_time_of_a_run_on_more_gpus(plan, tmp_path):
    config = load_config(
        ROOT / "configs" / "quickstart_digits.yaml",
        ["TRAIN.EPOCHS", "2", "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.TARGET_TOP1", "1"]
        + ["DATA.NUM_WORKERS", "0", "MODEL.SWINV2.DEPTHS", "[1, 1, 1]", "MODEL.MOE.BLOCKS"]
        + ["[[], [0], [0]]", "DEVICE", "cpu"],
        output=str(tmp_path / "run"),
    )
    train(config)
    status, out, err, figure = plan("--run", tmp_path / "run", *CLUSTER)
    assert (status, err) == (0, "")
    assert not figure.exists()
    first, *lines = out.splitlines()
    assert first.startswith(f"time to 1% top-1 of {tmp_path / 'run'}: 22 steps of 64 images,")
    times = [line.replace("*", "").split() for line in lines]
    columns = next(words for words in times if words[:1] == ["GPUs"])
    assert columns[-1] == "all"
    rows = {int(words[0]): words for words in times if words[:1] and words[0].isdigit()}
    assert list(rows) == [1, 2, 4, 8, 16, 32, 64]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert float(rows[1][-1]) == pytest.approx(summary["time_to_solution"], abs=0.3)
    assert float(rows[16][-1]) < float(rows[1][-1])


def test_refusals_of_a_run(plan, tmp_path):
    def refusal(*words) -> str:
        status, _, err, _ = plan(*words, *CLUSTER)
        assert (status, err.count("\n")) == (2, 1), err
        return err

    assert "is not a run directory" in refusal("--run", tmp_path / "none")
    message = refusal("--run", tmp_path, "--opts", "SEED", "1")
    assert "--run takes the configuration of the run: leave out --batch-size and --opts" in message
