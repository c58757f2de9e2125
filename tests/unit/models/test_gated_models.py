"""Models whose experts are gated: configuration, parameters, MACs, and dense weights."""

import pytest
import torch
from safetensors.torch import save_file

from moe_core import moe_layers
from swinv2_moe.config import load_config, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model, load_dense
from swinv2_moe.models.build import count
from swinv2_moe.models.protocol import MoEModel

TINY = [
    "DATA.IMG_SIZE", "32", "MODEL.SWINV2.EMBED_DIM", "24", "MODEL.SWINV2.DEPTHS", "[1, 2]",
    "MODEL.SWINV2.NUM_HEADS", "[2, 4]", "MODEL.SWINV2.WINDOW_SIZE", "4",
    "MODEL.SWINV2.PRETRAINED_WINDOW_SIZES", "[0, 0]", "MODEL.MOE.BLOCKS", "[[], [1]]",
]  # fmt: skip
EXPERTS = ["MODEL.MOE.NUM_EXPERTS", "4", "MODEL.MOE.CAPACITY_FACTOR", "0.0"]
GATED = ["MODEL.MOE.GATED", "true", "MODEL.MOE.ACTIVATION", "silu"]


def model_of(*options: str) -> MoEModel:
    config = load_config(None, [*TINY, *options])
    return build_model(model_config(config), 10)


def test_two_thirds_of_the_hidden_dim_keep_parameters_and_macs():
    with torch.device("meta"):
        plain = model_of(*EXPERTS)
        gated = model_of(*EXPERTS, *GATED, "MODEL.MOE.HIDDEN_RATIO", "0.667")
    (layer,) = moe_layers(gated).values()
    assert layer.experts.w3.shape == (4, 128, 48)  # of 192 in the dense FFN
    counts = [count(model, 32, 3) for model in (plain, gated)]
    assert counts[0].macs == counts[1].macs
    more_biases = 4 * (2 * 128 - 192)  # b1 and b3
    assert counts[1].parameters == counts[0].parameters + more_biases


def test_a_gated_model_trains():
    torch.manual_seed(0)
    model = model_of(*EXPERTS, *GATED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, targets = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    losses = []
    for _ in range(15):
        logits, aux_loss = model.forward_with_aux(images)
        loss = torch.nn.functional.cross_entropy(logits, targets) + 0.01 * aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_dense_weights_are_not_copied_to_gated_experts(tmp_path):
    options = ["MODEL.PRETRAINED", "dense.safetensors", "MODEL.UPCYCLE", "weights"]
    with pytest.raises(
        UserError, match=r"MODEL.UPCYCLE is 'weights'.*third weight.*MODEL.MOE.GATED"
    ):
        load_config(None, [*TINY, *EXPERTS, *GATED, *options])
    save_file(model_of().state_dict(), tmp_path / "dense.safetensors")
    model = model_of(*EXPERTS, *GATED)
    with pytest.raises(UserError, match="they are gated"):
        load_dense(model, tmp_path / "dense.safetensors", upcycle=True)
    kept = load_dense(model, tmp_path / "dense.safetensors")
    assert {name.rpartition(".")[2] for name in kept} >= {"w1", "w2", "w3", "b3"}


def test_an_activation_of_gated_experts_needs_them():
    options = ["MODEL.MOE.ACTIVATION", "clamped_swiglu"]
    with pytest.raises(UserError, match=r"needs MODEL.MOE.GATED \(False\) to be True"):
        load_config(None, [*TINY, *EXPERTS, *options])
    load_config(None, [*TINY, *EXPERTS, *options, "MODEL.MOE.GATED", "true"])
