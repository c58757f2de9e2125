"""MODEL.MOE.HIDDEN_DROPOUT: hidden units of experts, and nothing else."""

from pathlib import Path

import pytest
import torch
from torch import nn

from moe_core import moe_layers
from swinv2_moe.config import load_config, model_config
from swinv2_moe.models import build_model

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart_digits.yaml"
OPTS = ["MODEL.DROP_PATH_RATE", "0", "MODEL.MOE.GATE_NOISE", "0", "MODEL.MOE.HIDDEN_DROPOUT"]


def build(rate):
    torch.manual_seed(0)
    return build_model(model_config(load_config(QUICKSTART, [*OPTS, str(rate)])), 10)


def test_experts_alone_have_dropout():
    model = build(0.4)
    assert len(moe_layers(model)) == 2
    for layer in moe_layers(model).values():
        assert layer.experts.config.hidden_dropout == 0.4
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert rates
    assert set(rates) == {0.0}


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_only_in_training(rate):
    layer = next(iter(moe_layers(build(rate)).values()))
    x = torch.randn(64, layer.config.model_dim, generator=torch.Generator().manual_seed(0))
    outputs = [layer.train()(x)[0] for _ in range(2)]
    assert torch.equal(outputs[0], outputs[1]) == (rate == 0.0)
    outputs = [layer.eval()(x)[0] for _ in range(2)]
    assert torch.equal(outputs[0], outputs[1])
