"""tools/*.py --import: a router, a loss, an activation and a dataset outside of the package,
through training, resuming, evaluation and export.
"""

import json
from pathlib import Path

import numpy as np

from swinv2_moe.commands import COMMANDS

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart_digits.yaml"
FOLDER = Path(__file__).parents[2] / "swinv2_moe" / "commands"
OUTSIDE = """
import torch
from moe_core import AuxiliaryLoss, register_activation, register_loss, register_router


@register_router("outside_router")
class Router(torch.nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        self.linear = torch.nn.Linear(config.model_dim, config.num_experts, device=device)

    def forward(self, tokens):
        return self.linear(tokens)


@register_loss("outside_loss")
class Loss(AuxiliaryLoss):
    def sums(self, scores):
        return scores.probs.square().sum(0, keepdim=True)

    def value(self, sums, num_tokens):
        return sums.sum() / num_tokens


@register_activation("outside_activation")
def squared_relu(x):
    return x.relu().square()
"""
DATASET = """
import numpy as np

from swinv2_moe.commands import COMMANDS
from swinv2_moe.data import ImageArrays, Sources, register_dataset


@register_dataset("outside_npz")
def outside_npz(config):
    sources = []
    for split in ("train", "val"):
        content = np.load(f"{config.path}/{split}.npz")
        sources.append(ImageArrays(split, content["images"], content["targets"]))
    return Sources(sources[0], sources[1], ["dark", "bright"])
"""
NAMES = ["MODEL.MOE.ROUTER", "outside_router", "MODEL.MOE.AUX_LOSS", "outside_loss"]
NAMES += ["MODEL.MOE.ACTIVATION", "outside_activation"]


def test_every_command_has_the_option():
    for name in COMMANDS.keys() - {"config"}:  # it has a parser of its own
        text = (FOLDER / f"{name.replace('-', '_')}.py").read_text()
        assert "CommandParser(" in text, name
        assert "ArgumentParser(" not in text, name


def test_training_resuming_and_evaluating(start_ranks, small, tmp_path):
    outside, run = tmp_path / "outside.py", tmp_path / "run"
    outside.write_text(OUTSIDE)
    train = ["--cfg", CONFIG, "--output", run]
    opts = ["--opts", *small, *NAMES]
    imports = ["--import", outside]
    stop = ["TRAIN.MAX_STEPS", 2]
    (first,) = start_ranks(1, "tools/train.py", *imports, *train, *opts, *stop)
    assert (first.status, first.err) == (0, "")
    first_line = (run / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first_line)["environment"]["imported"] == str(outside)

    (refused,) = start_ranks(1, "tools/train.py", *train, "--resume", "auto", *opts)
    assert refused.status == 2
    assert "error: MODEL.MOE.ROUTER is 'outside_router', allowed: linear, cosine" in refused.err
    (refused,) = start_ranks(1, "tools/evaluate.py", "--resume", run)
    assert refused.status == 2
    assert refused.err.count("\n") == 1
    assert "its configuration cannot be used (MODEL.MOE.ROUTER is 'outside_router'" in refused.err

    (resumed,) = start_ranks(
        1, "tools/train.py", *train, *imports, "--resume", "auto", *opts, "TRAIN.MAX_STEPS", 4
    )
    assert (resumed.status, resumed.err) == (0, "")
    assert f"imported {outside}" in resumed.out.replace("\n", "")
    (evaluated,) = start_ranks(1, "tools/evaluate.py", *imports, "--resume", run)
    assert (evaluated.status, evaluated.err) == (0, "")


def test_a_dataset_trains_evaluates_and_is_exported(start_ranks, small, tmp_path):
    outside, run = tmp_path / "outside.py", tmp_path / "run"
    outside.write_text(DATASET)
    for split, count in (("train", 64), ("val", 20)):
        targets = np.arange(count) % 2
        images = np.full((count, 16, 16, 3), 60, np.uint8)
        images[targets == 1] += 120
        np.savez(tmp_path / f"{split}.npz", images=images, targets=targets)
    imports = ["--import", outside]
    train = ["--cfg", CONFIG, "--data", tmp_path, "--output", run]
    opts = ["--opts", *small, "DATA.DATASET", "outside_npz", "TRAIN.MAX_STEPS", 2]

    for rank in start_ranks(2, "tools/train.py", *imports, *train, *opts):
        assert (rank.status, rank.err) == (0, "")
    (refused,) = start_ranks(1, "tools/evaluate.py", "--resume", run)
    assert refused.status == 2
    assert "its configuration cannot be used (DATA.DATASET is 'outside_npz'" in refused.err
    (evaluated,) = start_ranks(
        1, "tools/evaluate.py", *imports, "--resume", run, "--data", tmp_path
    )
    assert (evaluated.status, evaluated.err) == (0, "")
    exported = tmp_path / "exported"
    (done,) = start_ranks(
        1, "tools/export.py", *imports, "--resume", run, "--output", exported, "--format", "torch"
    )
    assert (done.status, done.err) == (0, "")
    assert (exported / "model.json").is_file()
