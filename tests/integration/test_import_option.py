"""tools/*.py --import: a router, a loss and an activation outside of the package, through training,
resuming and evaluation."""

import json
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart_digits.yaml"
TOOLS = sorted((Path(__file__).parents[2] / "tools").glob("*.py"))
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
NAMES = ["MODEL.MOE.ROUTER", "outside_router", "MODEL.MOE.AUX_LOSS", "outside_loss"]
NAMES += ["MODEL.MOE.ACTIVATION", "outside_activation"]


@pytest.mark.parametrize("file", TOOLS, ids=lambda file: file.stem)
def test_every_command_has_the_option(file):
    assert "CommandParser(" in file.read_text()
    assert "ArgumentParser(" not in file.read_text()


def test_training_resuming_and_evaluating(start_ranks, small, tmp_path):
    outside, run = tmp_path / "outside.py", tmp_path / "run"
    outside.write_text(OUTSIDE)
    train = ["--cfg", CONFIG, "--output", run]
    opts = ["--opts", *small, *NAMES]
    imports = ["--import", outside]
    stop = ["TRAIN.MAX_STEPS", 2]
    for rank in start_ranks(2, "tools/train.py", *imports, *train, *opts, *stop):
        assert (rank.status, rank.err) == (0, "")
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
