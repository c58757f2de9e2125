"""One and four processes train the same model, and every expert exists once."""

import json
import os
import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tool_cases import assert_one_line, command

from moe_core import moe_layers
from moe_core.parallel import ExpertGroup
from swinv2_moe.config import load_config, model_config
from swinv2_moe.models import build_model

QUICKSTART = "configs/quickstart_digits.yaml"
# Dropless, no noise, no dropout, no auxiliary loss: what is left does not depend on how tokens lie
# on ranks.
EXACT = (
    "MODEL.MOE.CAPACITY_FACTOR 0 MODEL.MOE.EVAL_CAPACITY_FACTOR 0 MODEL.MOE.GATE_NOISE 0"
    " MODEL.DROP_PATH_RATE 0 MODEL.MOE.AUX_LOSS_WEIGHT 0 MODEL.MOE.NUM_EXPERTS 8"
)
STEPS = 8
LAYERS = ["layers.1.blocks.0.mlp.moe", "layers.2.blocks.0.mlp.moe"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, start_ranks, small):
    """{ranks: (run directory, what the first printed)} for 1 and 4 processes at a global batch of
    64."""
    root, found = tmp_path_factory.mktemp("ranks"), {}
    for ranks in (1, 4):
        opts = [*small, EXACT, "DATA.BATCH_SIZE", 64 // ranks, "TRAIN.MAX_STEPS", STEPS]
        output = root / str(ranks)
        words = ["--cfg", QUICKSTART, "--output", output, "--opts", *opts]
        ended = start_ranks(ranks, "tools/train.py", *words)
        assert [outcome.status for outcome in ended] == [0] * ranks, ended
        assert not any(outcome.out for outcome in ended[1:])
        assert not any(outcome.err for outcome in ended), ended
        found[ranks] = (output, ended[0].out)
    return found


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_the_loss_curve_does_not_depend_on_the_ranks(runs):
    """Sums in another order differ by some 2^-24; eight steps make that larger, by far less than
    100 times. An image in a tie may be classified otherwise."""
    single = losses(runs[1][0])
    assert len(single) == STEPS
    assert single[-1] < single[0]
    assert losses(runs[4][0]) == pytest.approx(single, rel=1e-4)
    one, four = (json.loads((runs[n][0] / "summary.json").read_text()) for n in (1, 4))
    assert four["world_size"] == 4
    assert four["parameters"] == one["parameters"]
    assert four["val_top1"] == pytest.approx(one["val_top1"], abs=100 * 1.5 / 360)


def test_only_the_first_rank_speaks(runs):
    compiling = "moe_core kernels: compiling"  # on a machine that has not done so before
    lines = [line for line in runs[4][1].splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(compiling)]
    starts = (
        "swinv2_moe \\(",
        "moe_core kernels: .*torch on cpu",
        "epoch 1/2",
        r"[\d,]+ images/s in training",
        "final",
        "next: .*report",
        " +.*predict",
        " +.*export",
    )
    assert len(lines) == len(starts), lines
    assert all(re.match(start, line) for line, start in zip(lines, starts, strict=True)), lines
    assert "4 processes on cpu" in lines[0]


def test_a_checkpoint_holds_every_expert_once(runs):
    """Every section: weights and both moments; none equal to another, all as one process trained
    them. Where a second moment is small, AdamW divides by its root and makes differences larger."""
    single, spread = (runs[n][0] / "checkpoints" / "latest" for n in (1, 4))
    files = sorted(str(path.relative_to(single)) for path in single.rglob("*.safetensors"))
    assert files == sorted(str(path.relative_to(spread)) for path in spread.rglob("*.safetensors"))
    assert len(files) == 3 * (1 + 2 * 8)
    for file in files:
        expected, found = load_file(single / file), load_file(spread / file)
        assert expected.keys() == found.keys()
        for name in expected:
            same = torch.allclose(found[name], expected[name], rtol=1e-2, atol=1e-3)
            assert same, f"{file} {name}"
    for layer in LAYERS:
        files = [spread / "experts" / layer / f"{e:04d}.safetensors" for e in range(8)]
        experts = [load_file(file)["w1"] for file in files]
        assert all((experts[a] - experts[b]).abs().max() > 1e-3 for a in range(8) for b in range(a))


def test_a_checkpoint_of_four_ranks_in_one_process(runs, monkeypatch, capsys):
    summary = json.loads((runs[4][0] / "summary.json").read_text())
    finished = command("evaluate", monkeypatch, capsys)("--resume", runs[4][0])
    assert (finished.status, finished.err) == (0, "")
    rows = [line.split()[:2] for line in finished.out.splitlines()]
    assert ["360", f"{summary['val_top1']:.2f}%"] in rows


def test_a_run_of_four_ranks_goes_on_in_one_process(runs, train_command, small, tmp_path):
    opts = [*small, EXACT, "DATA.BATCH_SIZE 64 TRAIN.MAX_STEPS", STEPS + 2]
    words = ["--cfg", QUICKSTART, "--resume", runs[4][0], "--output", tmp_path / "run"]
    finished = train_command(*words, "--opts", *opts)
    assert (finished.status, finished.err) == (0, "")
    assert len(losses(tmp_path / "run")) == 2


def test_a_run_goes_on_where_its_experts_do_not_divide_over_the_ranks(
    runs, start_ranks, small, tmp_path
):
    found = {}
    for ranks in (1, 3):
        opts = [*small, EXACT, "DATA.BATCH_SIZE", 48 // ranks, "TRAIN.MAX_STEPS", STEPS + 2]
        words = ["--cfg", QUICKSTART, "--resume", runs[4][0], "--output", tmp_path / str(ranks)]
        ended = start_ranks(ranks, "tools/train.py", *words, "--opts", *opts)
        assert [outcome.status for outcome in ended] == [0] * ranks, ended
        found[ranks] = losses(tmp_path / str(ranks))
    assert "8 experts do not divide over 3 ranks: each group of 1 has all of them" in ended[0].out
    assert len(found[1]) == 2
    assert found[3] == pytest.approx(found[1], rel=1e-4)


@dataclass(eq=False)
class ProcessGroupOfFour:
    """What building a model takes of a process group."""

    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return 4


def test_ranks_share_the_experts_out(request, monkeypatch):
    """The ranks' experts, put together, are the experts of one process; everything else is the same
    everywhere."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    config = load_config(request.config.rootpath / QUICKSTART)
    torch.manual_seed(5)
    single = build_model(model_config(config), 10).state_dict()
    parts = []
    for rank in range(4):
        torch.manual_seed(5)
        group = ExpertGroup.of(ProcessGroupOfFour(rank))
        group.for_torch_tools = False  # its DTensors would need a real process group
        model = build_model(model_config(config), 10, group)
        assert [layer.shard.num_experts for layer in moe_layers(model).values()] == [2, 2]
        parts.append(model.state_dict())
    for name, tensor in single.items():
        if ".experts." in name:
            assert torch.equal(torch.cat([part[name] for part in parts]), tensor), name
        else:
            assert all(torch.equal(part[name], tensor) for part in parts), name


def test_experts_that_do_not_divide_over_a_given_group(start_ranks, tmp_path):
    words = ["--cfg", QUICKSTART, "--output", tmp_path / "run"]
    keys = "--opts MODEL.MOE.NUM_EXPERTS 3 MODEL.MOE.EXPERT_PARALLEL_SIZE 2 DEVICE cpu"
    first, second = start_ranks(2, "tools/train.py", *words, keys)
    says = "MODEL: num_experts (3) must be divisible by the expert-parallel size (2)"
    assert_one_line(first, f"error: {says}")
    assert_one_line(second, f"error: {says} (rank 1)")  # no launcher has ended it
    assert os.listdir(tmp_path) == []
