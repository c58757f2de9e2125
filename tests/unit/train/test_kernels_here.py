"""MODEL.MOE.KERNELS that cannot run on the device are refused before anything is written."""

import platform
from dataclasses import replace

import pytest
from run_cases import ALONE

from moe_core import MoEConfig
from swinv2_moe.config import load_config, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.ranks.world import expert_group

# of another kind of machine than this one
ELSEWHERE = "avx2" if platform.machine() == "aarch64" else "neon"


def experts_with(kernels: str):
    opts = ["MODEL.MOE.NUM_EXPERTS", 4, "MODEL.MOE.BLOCKS", [[], [], [1], []]]
    experts = model_config(load_config(None, opts)).experts
    layer = replace(experts.layer, kernels=kernels)
    assert isinstance(layer, MoEConfig)
    return replace(experts, layer=layer)


def test_what_cannot_run_is_one_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    here = rf"kernels \('{ELSEWHERE}'\) cannot run here: this CPU lacks the instructions"
    for kernels, says in (
        ("triton", r"kernels \('triton'\) cannot run on device type 'cpu'"),
        (ELSEWHERE, here),
    ):
        with pytest.raises(UserError, match=says):
            expert_group(experts_with(kernels), ALONE)
    assert expert_group(experts_with("torch"), ALONE) is None


def test_a_dense_model_has_no_kernels():
    config = load_config(None, ["MODEL.MOE.NUM_EXPERTS", 0, "MODEL.MOE.KERNELS", "triton"])
    assert expert_group(model_config(config).experts, ALONE) is None
