"""Files and checkpoints of earlier versions load: keys that are gone are named in one line with
what became of them, and a value that trained weights depend on is refused."""

import logging
from functools import partial

import pytest
import yaml

from moe_core import moe_layers
from moe_core.parallel import ParallelStrategy, parse_strategy
from swinv2_moe.config import (
    config_from_text,
    default_config,
    flatten,
    given_keys,
    load,
    load_config,
)
from swinv2_moe.config.retired import RETIRED, Retired, warn_once
from swinv2_moe.errors import UserError
from swinv2_moe.measure.configurations import Options, combinations, repeatable_step
from swinv2_moe.models import SwinTransformerV2MoE, protocol


@pytest.fixture
def lines(caplog):
    """A function that returns the lines logged since its last call."""
    caplog.set_level(logging.WARNING)
    warn_once.cache_clear()

    def since():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        warn_once.cache_clear()
        return found

    return since


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def another(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [item + 1 for item in value]
    return value + 1


REMOVED = [key for key, retired in RETIRED.items() if not retired.moved_to]
MOVED = [key for key, retired in RETIRED.items() if retired.moved_to]


@pytest.mark.parametrize("key", REMOVED)
def test_its_default_changes_nothing_and_is_reported_where_somebody_wrote_it(key, tmp_path, lines):
    value = RETIRED[key].default
    said = [f"{key} ({value!r}) is no key any more: {RETIRED[key].became}"]
    assert flatten(load_config(None, [key, str(value)])) == flatten(default_config())
    assert lines() == said
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(nested(key, value)))
    assert flatten(load_config(file)) == flatten(default_config())
    assert lines() == said
    text = yaml.safe_dump(nested(key, value))
    assert flatten(config_from_text(text, "run")) == flatten(default_config())
    assert lines() == []


@pytest.mark.parametrize("key", MOVED)
def test_a_value_that_another_key_has_now(key, lines):
    retired = RETIRED[key]
    text = yaml.safe_dump(nested(key, retired.default))
    assert flatten(config_from_text(text, "run")) == flatten(default_config())
    assert lines() == []
    assert flatten(load_config(None, [key, str(retired.default)])) == flatten(default_config())
    said = f"{key} ({retired.default!r}) is a part of {retired.moved_to} now, for example"
    if key == "TEST.CROP":
        said = "TEST.CROP (True) is a part of TEST.CROP_RATIO now: 0.875"
    else:
        said += f" {retired.became}"
    assert lines() == [said]


@pytest.mark.parametrize("key", REMOVED)
def test_another_value_is_reported_or_refused(key, lines):
    retired = RETIRED[key]
    value = another(retired.default)
    text = yaml.safe_dump(nested(key, value))
    said = f"{key} ({value!r}) is no key any more: {retired.became}"
    if retired.shapes_weights:
        with pytest.raises(UserError) as caught:
            load_config(None, [key, str(value)])
        assert str(caught.value).startswith(f"{said}; commit ")
        with pytest.raises(UserError, match="run: its configuration cannot be used"):
            config_from_text(text, "run")
        return
    assert flatten(config_from_text(text, "run")) == flatten(default_config())
    assert lines() == [said]
    assert flatten(load_config(None, [key, str(value)])) == flatten(default_config())
    assert lines() == [said]


def test_old_values_are_read_in_their_old_type(monkeypatch, tmp_path):
    monkeypatch.setitem(RETIRED, "TRAIN.OLD", Retired(0.5, "it is 0.5", True))
    with pytest.raises(UserError, match=r"^--opts TRAIN\.OLD is 'much' \(str\), it must be of"):
        load_config(None, ["TRAIN.OLD", "much"])
    with pytest.raises(UserError, match=r"^TRAIN\.OLD \(1\.0\) is no key any more: it is 0\.5"):
        load_config(None, ["TRAIN.OLD", "1"])
    load_config(None, ["TRAIN.OLD", "0.5"])


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("STRATEGY off", "r1 d1 linear"),
        ("STRATEGY off RANKS_PER_NODE 2 R 0", "r1 d1 linear n2"),
        ("STRATEGY auto", "auto"),
        ("STRATEGY auto RANKS_PER_NODE 8", "auto n8"),
        ("STRATEGY fixed", "r1 d1 linear"),
        ("STRATEGY fixed R 0 PIPELINE_DEGREE 2", "r0 d2 linear"),
        ("STRATEGY fixed ALL_TO_ALL 2dh EXCHANGE static RANKS_PER_NODE 4", "r1 d1 2dh static n4"),
        ("RANKS_PER_NODE 2", "r1 d1 linear n2"),
    ],
)
def test_the_six_keys_of_a_strategy(old, now, lines):
    opts, group, words = [], {}, old.split()
    for name, value in zip(words[::2], words[1::2], strict=True):
        opts += [f"MODEL.MOE.{name}", value]
        group[name] = int(value) if value.isdigit() else value
    config = load_config(None, opts)
    assert now == config.MODEL.MOE.STRATEGY
    lines()
    config = config_from_text(yaml.safe_dump({"MODEL": {"MOE": group}}), "run")
    assert now == config.MODEL.MOE.STRATEGY
    assert lines() == []


def test_a_strategy_is_merged_from_a_file_and_its_base(tmp_path):
    base = {"MODEL": {"MOE": {"STRATEGY": "fixed", "ALL_TO_ALL": "2dh"}}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"BASE": ["base.yaml"], "MODEL": {"MOE": {"R": 0}}}))
    assert load_config(file).MODEL.MOE.STRATEGY == "r0 d1 2dh"
    opts = ["MODEL.MOE.PIPELINE_DEGREE", "4"]
    assert load_config(file, opts).MODEL.MOE.STRATEGY == "r0 d4 2dh"


@pytest.mark.parametrize(
    ("opts", "says"),
    [
        (["MODEL.MOE.R", "0"], "MODEL.MOE.R (0) is a part of MODEL.MOE.STRATEGY now, for example"),
        (
            ["MODEL.MOE.STRATEGY", "fixed", "MODEL.MOE.RANKS_PER_NODE", "-1"],
            "MODEL.MOE.RANKS_PER_NODE is -1, it must be at least 0",
        ),
        (
            ["MODEL.MOE.R", "0", "MODEL.MOE.STRATEGY", "d4 2dh"],
            "MODEL.MOE.R is 0, but MODEL.MOE.STRATEGY is 'd4 2dh', which replaces it",
        ),
        (["MODEL.MOE.STRATEGY", "r1 r2"], "'r1 r2': strategy ('r1 r2') has two words for r"),
        (["MODEL.MOE.STRATEGY", ""], "MODEL.MOE.STRATEGY is '': strategy ('') is empty"),
        (["MODEL.MOE.STRATEGY", "auto r0"], "has words of a fixed strategy after 'auto'"),
        (["MODEL.MOE.STRATEGY", "auto linear"], "has words of a fixed strategy after 'auto'"),
        (["MODEL.MOE.STRATEGY", "d0"], "pipeline_degree (0) must be"),
        (["MODEL.MOE.STRATEGY", "r0 static"], "r (0) must be 1 with exchange 'static'"),
        (["MODEL.MOE.STRATEGY", "r1 linaer"], "all_to_all ('linaer') must be one of linear"),
    ],
)
def test_a_strategy_that_cannot_be_meant(opts, says):
    with pytest.raises(UserError) as caught:
        load_config(None, opts)
    assert says in str(caught.value)


def test_a_strategy_is_read_as_it_is_written():
    strategy = ParallelStrategy(1, 2, "2dh", 8, "static")
    assert ParallelStrategy.parse(f"{strategy} n8") == strategy
    assert parse_strategy("2dh n4 d2") == (ParallelStrategy(1, 2, "2dh", 4), 4)
    assert parse_strategy("auto n8") == ("auto", 8)


@pytest.mark.parametrize(
    ("old", "key", "now", "line"),
    [
        ("MODEL.NEW_HEAD True", "MODEL.CLASS_MAP", "new", "MODEL.NEW_HEAD (True) is a part of"),
        ("MODEL.UPCYCLE True", "MODEL.UPCYCLE", "weights", "MODEL.UPCYCLE is 'weights' now, not"),
        ("MODEL.UPCYCLE false", "MODEL.UPCYCLE", "", "MODEL.UPCYCLE is '' now, not False"),
        (
            "MODEL.UPCYCLE True MODEL.UPCYCLE_CONTINUE True",
            "MODEL.UPCYCLE",
            "run",
            "MODEL.UPCYCLE_CONTINUE (True) is a part of MODEL.UPCYCLE now: 'run'",
        ),
        ("TEST.CROP False", "TEST.CROP_RATIO", 0, "TEST.CROP (False) is a part of TEST.CROP_RATIO"),
        ("TEST.CROP_RATIO 0 TEST.CROP True", "TEST.CROP_RATIO", 0.875, "is 0.875 now, not 0.0"),
        (
            "MODEL.SWINV2.IN_CHANS 1 DATA.MEAN [0] DATA.STD [1]",
            "DATA.CHANNELS",
            1,
            "MODEL.SWINV2.IN_CHANS (1) is a part of DATA.CHANNELS now: 1",
        ),
    ],
)
def test_values_that_other_keys_have(old, key, now, line, lines):
    opts = old.split()
    if key.startswith("MODEL"):
        opts += ["MODEL.PRETRAINED", "a", "MODEL.MOE.NUM_EXPERTS", "2"]
        opts += ["MODEL.MOE.BLOCKS", "[[], [], [1], []]"]
    assert flatten(load_config(None, opts))[key] == now
    assert any(line in said for said in lines())


@pytest.mark.parametrize(("model_type", "channels"), [("vit_moe", 1), ("swinv2_moe", 3)])
def test_the_channels_are_those_of_the_model_type(model_type, channels):
    """Saved configurations have the keys of all model types."""
    saved = f"MODEL: {{TYPE: {model_type}, VIT: {{IN_CHANS: 1}}, SWINV2: {{IN_CHANS: 3}}}}"
    saved += f"\nDATA: {{MEAN: {[0.5] * channels}, STD: {[1.0] * channels}}}"
    data = config_from_text(saved, "run").DATA
    assert channels == data.CHANNELS


def test_a_map_of_classes_contradicts_a_new_head():
    opts = ["MODEL.NEW_HEAD", "True", "MODEL.CLASS_MAP", "map.txt", "MODEL.PRETRAINED", "a"]
    with pytest.raises(UserError, match=r"NEW_HEAD is True, but MODEL\.CLASS_MAP is 'map\.txt'"):
        load_config(None, opts)


def test_mixing_that_was_switched_off():
    aug = load_config(None, ["AUG.MIXUP_PROB", "0", "DATA.BATCH_SIZE", "63"]).AUG
    assert (aug.MIXUP, aug.CUTMIX) == (0, 0)


@pytest.mark.parametrize("value", [0, 3])
def test_fields_in_exports_of_earlier_versions(value, monkeypatch, lines):
    """They acted in training alone, so that the exported weights are of use without them."""
    monkeypatch.setitem(protocol._RETIRED_FIELDS, "depth_of_gates", 0)
    make = partial(SwinTransformerV2MoE, num_experts=2, moe_blocks=[[], [], [1]], device="meta")
    model = make(moe={"depth_of_gates": value, "top_k": 2, "round_to": value})
    (layer,) = moe_layers(model).values()
    assert layer.config.top_k == 2
    said = " ".join(lines())
    for name in ("depth_of_gates", "round_to"):
        assert (f"{name} (3) is no field of MoEConfig any more" in said) == bool(value)


def test_an_argument_in_exports_of_earlier_versions():
    """Whose weights would compute something else without it."""
    make = partial(SwinTransformerV2MoE, num_classes=2, device="meta")
    make(moe_norm="post")
    with pytest.raises(ValueError, match=r"^moe_norm \('before_gate'\) is no argument any more: "):
        make(moe_norm="before_gate")


@pytest.fixture
def file_with_experts(tmp_path):
    file = tmp_path / "experts.yaml"
    file.write_text("MODEL: {MOE: {NUM_EXPERTS: 2, BLOCKS: [[], [], [1], []]}}")
    return file


@pytest.mark.parametrize("key", RETIRED)
def test_measurements_take_them_in_opts(key, file_with_experts):
    opts = [key, str(RETIRED[key].default)]
    repeatable_step(file_with_experts, opts, None, None)
    combinations(file_with_experts, opts, Options())


@pytest.mark.parametrize(
    ("opts", "key", "value"),
    [
        ("TEST.CROP False", "TEST.CROP_RATIO", 0),
        ("AUG.MIXUP_PROB 0", "AUG.MIXUP", 0),
        ("MODEL.MOE.STRATEGY fixed MODEL.MOE.R 0", "MODEL.MOE.STRATEGY", "r0 d1 linear"),
    ],
)
def test_measurements_have_the_values_that_other_keys_have_now(opts, key, value, file_with_experts):
    config = repeatable_step(file_with_experts, opts.split(), None, None)
    assert flatten(config)[key] == value
    ((_, config, _),) = combinations(file_with_experts, opts.split(), Options(batch_sizes=(1,)))
    assert flatten(config)[key] == value


def test_measurements_refuse_opts_without_effect(file_with_experts):
    with pytest.raises(
        UserError, match=r"^--opts TRAIN\.BASE_LR is 0\.5, but what is measured has"
    ):
        repeatable_step(file_with_experts, ["TRAIN.BASE_LR", "0.5"], None, None)
    with pytest.raises(
        UserError, match=r"^--opts DATA\.BATCH_SIZE is 3, but --batch-sizes decides"
    ):
        combinations(file_with_experts, ["DATA.BATCH_SIZE", "3"], Options())


UPCYCLED = "upcycle/swinv2_moe_tiny_window8_256_8expert"
NEW_CLASSES = "tiny_imagenet/finetune_96"


@pytest.mark.parametrize(
    ("file", "opts", "key", "value"),
    [
        (UPCYCLED, "MODEL.UPCYCLE_CONTINUE True", "MODEL.UPCYCLE", "run"),
        (UPCYCLED, "MODEL.UPCYCLE_CONTINUE False", "MODEL.UPCYCLE", "weights"),
        (NEW_CLASSES, "MODEL.NEW_HEAD True", "MODEL.CLASS_MAP", "new"),
        (NEW_CLASSES, "MODEL.NEW_HEAD False", "MODEL.CLASS_MAP", ""),
    ],
)
def test_old_opts_over_files_with_new_values(file, opts, key, value):
    opts = [*opts.split(), "MODEL.PRETRAINED", "a", "MODEL.UPCYCLE_NOISE", "0"]
    assert flatten(load_config(file, opts, data="."))[key] == value


@pytest.mark.parametrize(
    ("saved", "opts", "key", "value"),
    [
        ("TEST: {CROP_RATIO: 0}", "TEST.CROP True", "TEST.CROP_RATIO", 0.875),
        ("TEST: {CROP: false}", "TEST.CROP True", "TEST.CROP_RATIO", 0.875),
        ("TEST: {CROP: false}", "TEST.CROP_RATIO 0.9", "TEST.CROP_RATIO", 0),
        ("TEST: {CROP: true}", "TEST.CROP_RATIO 0", "TEST.CROP_RATIO", 0),
        (
            "MODEL: {NEW_HEAD: true, PRETRAINED: a}",
            "MODEL.NEW_HEAD False",
            "MODEL.CLASS_MAP",
            "",
        ),
        (
            "MODEL: {MOE: {STRATEGY: auto}}",
            "MODEL.MOE.RANKS_PER_NODE 8",
            "MODEL.MOE.STRATEGY",
            "auto n8",
        ),
        (
            "MODEL: {MOE: {STRATEGY: fixed, R: 0}}",
            "MODEL.MOE.RANKS_PER_NODE 8",
            "MODEL.MOE.STRATEGY",
            "r0 d1 linear n8",
        ),
        (
            "MODEL: {MOE: {STRATEGY: fixed, R: 0}}",
            "MODEL.MOE.STRATEGY 2dh",
            "MODEL.MOE.STRATEGY",
            "r1 d1 2dh",
        ),
    ],
)
def test_opts_over_saved_values(saved, opts, key, value, tmp_path, lines):
    """They are merged before old keys are translated, over files as over checkpoints."""
    assert flatten(config_from_text(saved, "run", opts.split()))[key] == value
    assert all(line.startswith((opts.split()[0], key)) for line in lines())
    (tmp_path / "c.yaml").write_text(saved)
    assert flatten(load_config(tmp_path / "c.yaml", opts.split()))[key] == value


def test_a_crop_that_was_written_counts_as_given():
    assert "TEST.CROP_RATIO" in given_keys(load_config(None, ["TEST.CROP", "True"]))


def test_equal_strategies_have_one_text():
    opts = ["MODEL.MOE.STRATEGY", "n4  static 2dh d2"]
    assert load_config(None, opts).MODEL.MOE.STRATEGY == "r1 d2 2dh static n4"
    assert config_from_text("", "run", opts).MODEL.MOE.STRATEGY == "r1 d2 2dh static n4"


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("NEW_HEAD", "MODEL.NEW_HEAD is a part of MODEL.CLASS_MAP now"),
        ("TRAIN.EXPERT_WEIGHT_DECAY", "experts have TRAIN.WEIGHT_DECAY"),
        ("MOMENTUM", "TRAIN.OPTIMIZER.MOMENTUM is no key any more: it is always 0.9"),
        ("MLP_RATIO", "did you mean MODEL.SWINV2.MLP_RATIO?"),
    ],
)
def test_an_unknown_key_that_an_earlier_version_had(key, says):
    assert says in load.nearest_key(key)
