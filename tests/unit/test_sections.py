"""Typed sections of a configuration, and the defaults that they define."""

from dataclasses import FrozenInstanceError, dataclass, fields

import pytest

from moe_core import MoEConfig
from moe_core.options import Option, option, options
from swinv2_moe.config import (
    all_sections,
    as_opts,
    changed_keys,
    config_from_text,
    data_config,
    default_config,
    load_config,
    model_config,
    reference,
    resolve_batch_size,
    train_config,
)
from swinv2_moe.config.reference import describe
from swinv2_moe.config.tree import key_options
from swinv2_moe.errors import UserError
from swinv2_moe.models.section import PUBLISHED_MOE

EXPERTS = {"MODEL.MOE.NUM_EXPERTS": 4, "MODEL.MOE.BLOCKS": [[], [], [1], []]}
# MODEL.MOE's defaults that are not MoEConfig's: the published recipe (arXiv 2206.03382, section 5),
# and a number where MoEConfig leaves the choice to torch
DIFFERENT = {
    "GATE_NOISE": (1.0, 0.0),
    "NORMALIZE_GATES": (False, True),
    "BATCH_PRIORITIZED": (True, False),
    "AUX_LOSS": ("load_importance", "gshard"),
    "INIT_STD": (0.02, None),
}


def test_the_defaults_of_the_experts_are_those_of_the_engine_but_for_the_recipe():
    moe, engine = default_config().MODEL.MOE, MoEConfig(1, 1, 1)
    different = {}
    for field in fields(MoEConfig):
        key, default = field.name.upper(), getattr(engine, field.name)
        if key in moe and key != "NUM_EXPERTS" and moe[key] != default:
            different[key] = (moe[key], default)
    assert different == DIFFERENT
    assert {name.upper() for name in PUBLISHED_MOE} == set(DIFFERENT) - {"INIT_STD"}


def test_each_section_has_its_own_keys_and_what_else_it_needs():
    config = load_config(None, as_opts({"SEED": 3, "DATA.BATCH_SIZE": 6, "AMP_ENABLE": True}))
    data, train = data_config(config), train_config(config)
    assert (data.seed, data.batch_size, data.augment.scale) == (3, 6, (0.08, 1.0))
    assert (data.test.crop_ratio, data.channels, data.mean) == (0.875, 3, (0.485, 0.456, 0.406))
    assert (train.batch_size, train.optimizer.name, train.amp_enable) == (6, "adamw", True)
    sections = all_sections(config)
    assert (sections.run.seed, sections.checkpoint.keep_last) == (3, 2)
    with pytest.raises(FrozenInstanceError):
        data.seed = 4


def test_the_layer_of_the_experts_is_embedded():
    opts = as_opts(EXPERTS | {"MODEL.MOE.TOP_K": 2, "MODEL.MOE.ACTIVATION": "silu"})
    model = model_config(load_config(None, opts))
    layer = model.experts.layer
    assert layer.num_experts == 4
    assert (layer.top_k, layer.activation, layer.gate_noise) == (2, "silu", 1.0)
    assert model.experts.blocks == ((), (), (1,), ())
    assert MoEConfig(1, 1, 4, **model.experts.layer_fields()) == layer


def test_a_dense_model_has_no_layer_of_experts():
    experts = model_config(load_config()).experts
    assert experts.layer is None
    assert experts.layer_fields() == {}


def test_values_as_opts():
    assert as_opts({"SEED": 1, "AMP_ENABLE": False}) == ["SEED", "1", "AMP_ENABLE", "False"]


@dataclass
class Described:
    key_one: int = option(1, "beside `key_two` and `a_value`", least=0)
    key_two: str = option("x", "a text", choices=("x", "y"))
    other: int = 3


def test_options_of_a_section():
    assert [field.name for field, _ in options(Described)] == ["key_one", "key_two"]
    one, two = (each for _, each in options(Described))
    assert (one.limits(), Option("", 0, 1).limits()) == ("at least 0", "between 0 and 1")
    assert (two.allowed(), two.limits()) == (("x", "y"), "")
    assert reference._with_keys(one.meaning, {"key_two"}) == "beside `KEY_TWO` and `a_value`"
    assert Option("", 0, 1, choices=lambda: ["a"]).allowed() == ["a"]


def test_keys_below_a_prefix():
    described = describe("data.val_split")
    assert described.startswith("DATA.VAL_SPLIT: 0.0\n    float, 0 to 0.9\n")
    below = describe("TRAIN.OPTIMIZER")
    assert "TRAIN.OPTIMIZER.NAME" in below
    assert "TRAIN.EPOCHS" not in below
    with pytest.raises(UserError, match=r"'DATA.VALSPLIT'; did you mean DATA.VAL_SPLIT"):
        describe("DATA.VALSPLIT")


def test_each_key_says_what_another_value_changes():
    kinds = {key: one.affects for key, one in key_options().items()}
    assert set(kinds.values()) == {"", "rate", "accuracy", "training", "start"}
    # what a validation reads besides the weights
    for key in ("DATA.PATH", "DATA.VAL_SPLIT", "DATA.MEAN", "DATA.IMG_SIZE", "TEST.CROP_RATIO"):
        assert kinds[key] == "accuracy", key


def test_two_names_of_one_folder_are_no_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, now = (load_config(None, ["DATA.PATH", p]) for p in ("d", str(tmp_path / "d")))
    assert changed_keys(before, now) == []
    (change,) = changed_keys(before, load_config(None, ["DATA.PATH", "e"]))
    assert change == ("DATA.PATH", "d", "e", "accuracy")
    hostile = config_from_text('DATA: {PATH: "d\\0"}', "checkpoint")
    assert [one.key for one in changed_keys(hostile, now)] == ["DATA.PATH"]


def test_the_batch_of_a_rank_is_no_change_where_the_global_one_is_given():
    opts = ["DATA.GLOBAL_BATCH_SIZE", "64"]
    before, now = (resolve_batch_size(load_config(None, opts), ranks) for ranks in (1, 2))
    assert changed_keys(before, now) == []


@pytest.mark.parametrize(
    ("keys", "is_random"),
    [
        ({}, False),  # dropless: an image does not depend on the others
        ({"EVAL_CAPACITY_FACTOR": 1.25}, True),
        ({"EVAL_CAPACITY_FACTOR": -1.0}, True),
        ({"ROUTER": "expert_choice", "EVAL_CAPACITY_FACTOR": 1.0}, True),
        ({"ROUTER": "expert_choice", "CHOOSE_PER_IMAGE": True}, False),
        ({"ROUTER": "soft"}, False),
        ({"EVAL_CAPACITY_FACTOR": 1.25, "NUM_EXPERTS": 0}, False),
    ],
)
def test_images_that_affect_each_other_are_validated_in_a_random_order(keys, is_random):
    moe = EXPERTS | {f"MODEL.MOE.{key}": value for key, value in keys.items()}
    assert data_config(load_config(None, as_opts(moe))).shuffle_val is is_random
