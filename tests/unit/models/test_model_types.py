"""A model type of one file: registered by a decorator, then configured, built and checked."""

from dataclasses import dataclass

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from moe_core.options import option
from swinv2_moe.config import default_config, load_config, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel, build_model, measure_model
from swinv2_moe.models.section import MODELS, TRUNKS, Trunk, register_model_type, trunk_group


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    before = dict(TRUNKS), dict(MODELS)
    yield
    for registry, content in zip((TRUNKS, MODELS), before, strict=True):
        registry.clear()
        registry.update(content)


@dataclass(frozen=True, kw_only=True)
class MineConfig(Trunk):
    group = "MINE"

    patch_size: int = option(8, "pixels")
    embed_dim: int = option(8, "channels")
    depth: int = option(2, "blocks", least=1, most=9)
    num_heads: int = option(2, "heads")


def register(trunk: type[Trunk] = MineConfig) -> None:
    @register_model_type("mine", trunk)
    class Mine(MoEModel, VisionTransformer):
        def block_stages(self):
            return [self.blocks]


def test_a_type_of_ones_own_is_configured_and_built():
    register()
    opts = "MODEL.TYPE mine MODEL.MINE.EMBED_DIM 16 DATA.IMG_SIZE 16 DATA.CHANNELS 1"
    opts += " DATA.MEAN [0.5] DATA.STD [0.5] MODEL.MOE.NUM_EXPERTS 2 MODEL.MOE.BLOCKS [[1]]"
    config = load_config(None, opts.split())
    assert trunk_group(config).EMBED_DIM == 16
    model = build_model(model_config(config), num_classes=3)
    assert type(model).__name__ == "Mine"
    logits, aux_loss = model.forward_with_aux(torch.randn(2, 1, 16, 16))
    assert logits.shape == (2, 3)
    assert aux_loss > 0
    parameters = sum(p.numel() for p in model.parameters())
    assert measure_model(model_config(config), 3).parameters == parameters


@pytest.mark.parametrize(
    ("opts", "text"),
    [
        (["MODEL.TYPE", "mines"], "did you mean mine?"),
        (["MODEL.TYPE", "mine", "MODEL.MINE.DEPTH", "10"], "MODEL.MINE.DEPTH is 10"),
        (["MODEL.TYPE", "mine", "MODEL.MINE.DEPHT", "1"], "did you mean MODEL.MINE.DEPTH?"),
    ],
)
def test_its_values_are_checked(opts, text):
    register()
    with pytest.raises(UserError) as raised:
        load_config(None, opts)
    assert text in str(raised.value)


def test_defaults_are_not_shared():
    default_config().MODEL.SWINV2.DEPTHS.append(1)
    assert default_config().MODEL.SWINV2.DEPTHS == [2, 2, 18, 2]


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ValueError, match="'timm' is registered already"):
        register_model_type("timm", MineConfig)
