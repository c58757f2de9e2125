"""The configuration is strict: what cannot work stops in one line that names the key, its value and
what is allowed."""

import os
import re
import subprocess
import sys

import pytest
import yaml

from moe_core.parallel import ParallelStrategy, parse_strategy
from swinv2_moe.config import config_from_text, default_config, flatten, load, load_config
from swinv2_moe.config.load import merge_opts
from swinv2_moe.errors import UserError
from swinv2_moe.files import read_bounded


def write(path, content):
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def fails(*opts, file=None):
    """The one line with which the configuration is refused."""
    with pytest.raises(UserError) as caught:
        load_config(file, opts)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_defaults_are_valid_frozen_and_not_shared():
    config = load_config()
    assert flatten(config) == flatten(default_config())
    assert config.is_frozen()
    config = default_config()
    config.MODEL.SWINV2.DEPTHS.append(1)
    assert default_config().MODEL.SWINV2.DEPTHS == [2, 2, 18, 2]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("DATA.IMG_SZIE", "DATA.IMG_SIZE"),
        ("MODLE.TYPE", "MODEL.TYPE"),
        ("TRAIN.LR", "TRAIN.BASE_LR"),
        ("train.optimizer.name", "TRAIN.OPTIMIZER.NAME"),
        ("TRAIN.BATCH_SIZE", "DATA.BATCH_SIZE"),
        ("ema", "TRAIN.EMA_DECAY"),
        ("ZZZZ", "swinv2-moe config"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one(key, nearest, tmp_path):
    message = fails(key, "1")
    assert f"unknown key {key} (value '1')" in message
    assert "'1'" in message
    assert nearest in message.split("value", 1)[1]
    content = 1
    for name in reversed(key.split(".")):
        content = {name: content}
    file = write(tmp_path / "c.yaml", content)
    assert str(file) in fails(file=file)


@pytest.mark.parametrize(
    ("opts", "names"),
    [
        # wrong types
        (["DATA.IMG_SIZE", "big"], ["DATA.IMG_SIZE", "'big'", "int"]),
        (["DATA.IMG_SIZE", "True"], ["DATA.IMG_SIZE", "True", "int"]),
        (["TRAIN.BASE_LR", "fast"], ["TRAIN.BASE_LR", "'fast'", "float"]),
        (["AMP_ENABLE", "1"], ["AMP_ENABLE", "1", "bool"]),
        (["AMP_ENABLE", "atuo"], ["'atuo'", "False, True, auto", "did you mean auto?"]),
        (["MODEL.SWINV2.DEPTHS", "['a', 2, 2, 2]"], ["MODEL.SWINV2.DEPTHS", "'a'", "int"]),
        (["MODEL.SWINV2.DEPTHS", "{[]: 1}"], ["MODEL.SWINV2.DEPTHS", "list"]),
        (["MODEL.MOE.BLOCKS", "[1, 2, 3, 4]"], ["MODEL.MOE.BLOCKS", "1", "list"]),
        (["DATA.IMG_SIZE.X", "3"], ["DATA.IMG_SIZE", "int"]),
        (["DATA", "3"], ["DATA", "group of keys", "'3'"]),
        # ranges and choices
        (["DATA.BATCH_SIZE", "0"], ["DATA.BATCH_SIZE", "0", "at least 1"]),
        (["MODEL.DROP_PATH_RATE", "1.5"], ["MODEL.DROP_PATH_RATE", "1.5", "between 0 and"]),
        (["TRAIN.BASE_LR", "nan"], ["TRAIN.BASE_LR", "'nan'"]),
        (["MODEL.MOE.CAPACITY_FACTOR", "1e999"], ["MODEL.MOE.CAPACITY_FACTOR", "inf", "finite"]),
        (["MODEL.MOE.GATE_NOISE", "-1"], ["MODEL.MOE.GATE_NOISE", "-1", "at least 0"]),
        (["MODEL.SWINV2.NUM_HEADS", "[0, 6, 12, 24]"], ["MODEL.SWINV2.NUM_HEADS", "0"]),
        (["MODEL.SWINV2.DEPTHS", "[]"], ["MODEL.SWINV2.DEPTHS", "[]"]),
        (
            ["MODEL.TYPE", "swin_mo"],
            ["MODEL.TYPE", "'swin_mo'", "swinv2_moe, swin_moe", "did you mean swin_moe?"],
        ),
        (
            ["MODEL.SWINV2.PRETRAINED_WINDOW_SIZES", "[0, 0, -1, 0]"],
            ["MODEL.SWINV2.PRETRAINED_WINDOW_SIZES", "-1", "at least 0"],
        ),
        # contradictions
        (
            ["MODEL.SWINV2.NUM_HEADS", "[3, 6]"],
            ["MODEL.SWINV2.NUM_HEADS", "[3, 6]", "4 stages", "DEPTHS"],
        ),
        (["MODEL.SWINV2.NUM_HEADS", "[5, 6, 12, 24]"], ["MODEL.SWINV2.NUM_HEADS", "96", "5 heads"]),
        (
            ["MODEL.MOE.BLOCKS", "[[], [], [], [2]]"],
            ["MODEL.MOE.BLOCKS", "stage 3", "block 2", "numbered from 0"],
        ),
        (["MODEL.MOE.NUM_EXPERTS", "8"], ["MODEL.MOE.NUM_EXPERTS", "8", "MODEL.MOE.BLOCKS"]),
        (
            ["TRAIN.EPOCHS", "10", "TRAIN.WARMUP_EPOCHS", "10"],
            ["TRAIN.WARMUP_EPOCHS", "10", "TRAIN.EPOCHS (10)"],
        ),
        (["TRAIN.MIN_LR", "1"], ["TRAIN.MIN_LR", "1.0", "TRAIN.BASE_LR (0.000125)"]),
        (["DATA.DATASET", "list"], ["DATA.DATASET", "list", "DATA.TRAIN_LIST"]),
        (["DATA.DATASET", "folder"], ["DATA.DATASET", "folder", "DATA.PATH", "--data"]),
        (["DATA.BATCH_SIZE", "5"], ["DATA.BATCH_SIZE", "5", "AUG.MIXUP", "even"]),
        (["AUG.SCALE", "[1e-6, 1]"], ["AUG.SCALE", "1e-06 of an image has less than 1 of its"]),
        (["AUG.SCALE", "[0.5, 0.1]"], ["AUG.SCALE", "[0.5, 0.1]", "smaller one first"]),
        (["DATA.CHANNELS", "1"], ["DATA.MEAN", "1 entries"]),
        (["DATA.STD", "[1, 1, 1e999]"], ["DATA.STD", "inf", "finite"]),
        (["MODEL.UPCYCLE", "run"], ["MODEL.UPCYCLE", "run", "MODEL.PRETRAINED"]),
        (["DATA.IMG_SIZE"], ["--opts", "pairs", "'DATA.IMG_SIZE'"]),
        # what no literal is made of
        (["DATA.IMG_SIZE", "-" * 60_000 + "1"], ["DATA.IMG_SIZE", "'---", "int"]),
        (["DATA.IMG_SIZE", "1" + "+1" * 20_000], ["DATA.IMG_SIZE", "'1+1", "int"]),
        (["PRINT_FREQ", "9" * 400], ["PRINT_FREQ", "999", "64 bits"]),
        (["TRAIN.BASE_LR", "0x" + "f" * 20_000], ["TRAIN.BASE_LR", "64 bits"]),
        (["MODEL.MOE.BLOCKS", f"[[{10**400}], [], [], []]"], ["MODEL.MOE.BLOCKS[0][0]", "64 bits"]),
        # limits against sizes that would take forever
        (["DATA.IMG_SIZE", str(10**15)], ["DATA.IMG_SIZE", str(10**15), "between 1 and 65536"]),
    ],
)
def test_a_value_that_cannot_work_is_named(opts, names):
    message = fails(*opts)
    assert len(message) < 1000
    assert [name for name in names if name not in message] == [], message


def test_experts_contradictions():
    moe = ["MODEL.MOE.NUM_EXPERTS", "4", "MODEL.MOE.BLOCKS", "[[], [], [1], []]"]
    message = fails(*moe, "MODEL.MOE.TOP_K", "5")
    assert "MODEL.MOE.TOP_K is 5" in message
    assert "MODEL.MOE.NUM_EXPERTS (4)" in message
    message = fails(
        *moe, "MODEL.MOE.AUX_LOSS", "load_importance_tutel", "MODEL.MOE.GATE_NOISE", "0"
    )
    assert "MODEL.MOE.GATE_NOISE" in message
    assert load_config(None, [*moe, "MODEL.MOE.TOP_K", "4"]).MODEL.MOE.TOP_K == 4
    message = fails(*moe, "MODEL.MOE.ROUTER", "soft", "MODEL.MOE.BALANCE", "bias")
    assert message == "MODEL.MOE: balance ('bias') must be 'loss' with router 'soft'"
    message = fails(*moe, "MODEL.MOE.CHOOSE_PER_IMAGE", "True")
    assert "choose_per_image (True) needs a router of expert choice" in message


@pytest.mark.parametrize(
    ("opts", "says"),
    [
        (["MODEL.CLASS_MAP", "new"], "needs trained weights (MODEL.PRETRAINED)"),
        (["MODEL.CLASS_MAP", "map.txt"], "MODEL.CLASS_MAP is 'map.txt'"),
    ],
)
def test_keys_without_effect_are_refused_but_not_in_checkpoints(opts, says):
    assert says in fails(*opts)
    written = default_config()
    merge_opts(written, opts)
    assert flatten(config_from_text(written.dump(), "checkpoint")) == flatten(written)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("r1 r2", "'r1 r2': strategy ('r1 r2') has two words for r"),
        ("", "MODEL.MOE.STRATEGY is '': strategy ('') is empty"),
        ("auto r0", "has words of a fixed strategy after 'auto'"),
        ("auto linear", "has words of a fixed strategy after 'auto'"),
        ("d0", "pipeline_degree (0) must be"),
        ("r0 static", "r (0) must be 1 with exchange 'static'"),
        ("r1 linaer", "all_to_all ('linaer') must be one of linear"),
    ],
)
def test_a_strategy_that_cannot_be_meant(text, says):
    assert says in fails("MODEL.MOE.STRATEGY", text)


@pytest.mark.parametrize(
    ("text", "ordered"),
    [
        ("auto", "auto"),
        ("auto n8", "auto n8"),
        ("d2 r0", "r0 d2 linear"),
        ("n4  static 2dh d2", "r1 d2 2dh static n4"),
    ],
)
def test_equal_strategies_have_one_text(text, ordered):
    opts = ["MODEL.MOE.STRATEGY", text]
    assert flatten(load_config(None, opts))["MODEL.MOE.STRATEGY"] == ordered
    assert flatten(config_from_text("", "run", opts))["MODEL.MOE.STRATEGY"] == ordered


def test_a_strategy_is_read_as_it_is_written():
    strategy = ParallelStrategy(1, 2, "2dh", 8, "static")
    assert ParallelStrategy.parse(f"{strategy} n8") == strategy
    assert parse_strategy("2dh n4 d2") == (ParallelStrategy(1, 2, "2dh", 4), 4)
    assert parse_strategy("auto n8") == ("auto", 8)


def test_mixup_that_is_off_needs_no_even_batch():
    odd = ["DATA.BATCH_SIZE", "63", "AUG.MIXUP", "0.8"]
    assert "DATA.BATCH_SIZE is 63" in fails(*odd)
    assert load_config(None, [*odd[:2], "AUG.MIXUP", "0", "AUG.CUTMIX", "0"]).DATA.BATCH_SIZE == 63


@pytest.mark.parametrize("size", [96, 192, 384])
def test_windows_tile_the_image(size):
    load_config(None, ["DATA.IMG_SIZE", str(size)])


# window 12, patch 4: the first map of 224 px has 56 patches a side
@pytest.mark.parametrize("size", [48, 100, 224])
def test_windows_must_tile_the_image(size):
    message = fails("DATA.IMG_SIZE", str(size))
    assert f"DATA.IMG_SIZE is {size}" in message
    assert "12 (MODEL.SWINV2.WINDOW_SIZE)" in message
    for suggestion in message.rsplit(":", 1)[1].split(","):
        load_config(None, ["DATA.IMG_SIZE", suggestion.strip()])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("TRAIN.BASE_LR", "1e-3", 1e-3),
        ("AMP_ENABLE", "true", True),
        ("AMP_ENABLE", "auto", "auto"),
        ("MODEL.SWINV2.DEPTHS", "[1, 2, 3, 4]", [1, 2, 3, 4]),
        ("MODEL.SWINV2.DEPTHS", "(1, 2, 3, 4)", [1, 2, 3, 4]),
        ("DATA.MEAN", "[0, 0.5, 1]", [0.0, 0.5, 1.0]),
        ("MODEL.MOE.BLOCKS", "((), (1,), [0], [])", [[], [1], [0], []]),
        ("AUG.AUTO_AUGMENT", "", ""),
        ("OUTPUT", "5", "5"),
    ],
)
def test_forms_of_opts(key, text, value):
    found = flatten(load_config(None, [key, text]))[key]
    assert found == value
    assert type(found) is type(value)


def test_yaml_numbers_that_yaml_reads_as_text(tmp_path):
    file = write(tmp_path / "c.yaml", "TRAIN: {BASE_LR: 1e-3, EPOCHS: 20}\n")
    assert load_config(file).TRAIN.BASE_LR == 1e-3


def test_base_files_come_first_and_opts_last(tmp_path):
    write(tmp_path / "a.yaml", {"SEED": 1, "PRINT_FREQ": 1, "TRAIN": {"EPOCHS": 11}})
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "b.yaml", {"BASE": ["../a.yaml"], "SEED": 2, "SAVE_FREQ": 2})
    file = write(
        tmp_path / "sub" / "c.yaml", {"BASE": ["b.yaml"], "SAVE_FREQ": 3, "TRAIN": {"EPOCHS": 12}}
    )
    config = load_config(file, ["TRAIN.EPOCHS", "13"])
    assert (config.PRINT_FREQ, config.SEED, config.SAVE_FREQ, config.TRAIN.EPOCHS) == (1, 2, 3, 13)
    again = write(tmp_path / "dump.yaml", config.dump())
    assert flatten(load_config(again)) == flatten(config)


@pytest.mark.parametrize("base", ["c.yaml", "../{here}/c.yaml", "b.yaml"])
def test_base_in_a_circle(base, tmp_path):
    write(tmp_path / "b.yaml", {"BASE": ["c.yaml"]})
    file = write(tmp_path / "c.yaml", {"BASE": [base.format(here=tmp_path.name)]})
    assert "BASE names itself in a circle" in fails(file=file)


def test_files_that_share_a_base_give_what_they_gave_one_after_the_other(tmp_path):
    write(tmp_path / "recipe.yaml", {"SEED": 1, "PRINT_FREQ": 1})
    write(tmp_path / "a.yaml", {"BASE": ["recipe.yaml"], "SEED": 2, "SAVE_FREQ": 2})
    write(tmp_path / "b.yaml", {"BASE": ["recipe.yaml", "recipe.yaml"], "PRINT_FREQ": 3})
    config = load_config(
        write(tmp_path / "c.yaml", {"BASE": ["a.yaml", "b.yaml"], "TRAIN": {"EPOCHS": 12}})
    )
    assert (config.SEED, config.PRINT_FREQ, config.SAVE_FREQ, config.TRAIN.EPOCHS) == (1, 3, 2, 12)


@pytest.mark.timeout(120)
def test_a_base_that_is_named_twice_at_each_level_is_read_once(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(
        load, "read_bounded", lambda file, limit: reads.append(file) or read_bounded(file, limit)
    )
    write(tmp_path / "0.yaml", {"SEED": 7})
    for level in range(1, 25):
        write(tmp_path / f"{level}.yaml", {"BASE": [f"{level - 1}.yaml"] * 2})
    assert load_config(tmp_path / "24.yaml").SEED == 7
    assert len(reads) == 25


def test_the_number_of_base_files_is_bounded(tmp_path):
    write(tmp_path / "0.yaml", {"SEED": 3})
    for level in range(1, 40):
        write(tmp_path / f"{level}.yaml", {"BASE": [f"{level - 1}.yaml"]})
    assert load_config(tmp_path / "31.yaml").SEED == 3
    assert "BASE names more than 32 files in all" in fails(file=tmp_path / "39.yaml")
    many = write(tmp_path / "many.yaml", {"BASE": ["0.yaml"] * 33})
    assert "BASE has 33 entries, at most 32 are allowed" in fails(file=many)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "content", [{"BASE": ["/dev/zero"]}, {"BASE": ["pipe"]}, {"BASE": ["large.yaml"]}]
)
def test_a_base_that_is_no_ordinary_file(content, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large.yaml", "wb") as file:
        file.truncate(1 << 40)
    message = fails(file=write(tmp_path / "c.yaml", content))
    assert re.search(r"cannot be read \((not a regular file|larger than 65,536 bytes)\)", message)


@pytest.mark.parametrize("base", ["a.yaml", None, [1], {"a": 1}, ["a\0b"]])
def test_base_must_be_a_list_of_files(base, tmp_path):
    write(tmp_path / "a.yaml", {"SEED": 1})
    message = fails(file=write(tmp_path / "c.yaml", {"BASE": base}))
    assert "BASE" in message
    assert repr(base) in message
    assert "list" in message


def test_recorded_keys_that_left_and_changed_the_training_are_told():
    text = "MODEL: {MOE: {TOP_K_SCHEDULE: 'epoch 0:2', CAPACITY_AUTO: false}}"
    assert load.left_keys(text) == {"MODEL.MOE.TOP_K_SCHEDULE": "epoch 0:2"}
    assert load.left_keys("TRAIN: {EPOCHS: 2}") == {}


def test_what_left_is_refused_but_in_recorded_configurations(tmp_path):
    for left, reason in load._LEFT.items():
        key, _, value = left.replace("'", "").partition(" ")
        content: dict = {}
        group = content
        *groups, name = key.split(".")
        for outer in groups:
            group = group.setdefault(outer, {})
        group[name] = value or 5
        text = yaml.safe_dump(content)
        assert config_from_text(text, "checkpoint RUN") == default_config()
        says = f"this {'value' if value else 'key'} has left, {reason}"
        assert says in fails(file=write(tmp_path / "c.yaml", text))
        (tmp_path / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
        recorded = write(tmp_path / "run" / "config.yaml", text + "\nSEED: 3\n")
        assert load_config(recorded).SEED == 3  # `train RUN` and `--cfg RUN/config.yaml`
        given = value or "17"
        assert fails(key, given).endswith(f"{key} is {given!r}: {says}")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("a: [1, 2\nb: 3", "not valid YAML"),
        ("just text", "expected KEY: VALUE"),
        (b"\xff\xfe\x00\x01", "not valid YAML"),
        ("DATA: 5", "group of keys"),
        ("BASE: [missing.yaml]", "missing.yaml: cannot be read"),
        ("[1, 2]: 3", "not valid YAML"),
        ('"a\\nb": 1', "unknown key a b"),
        ("SEED: " + "9" * 5000, "not valid YAML"),
        (
            "SEED: 0x" + "f" * 20_000,
            "SEED is int that is too large to print, it must fit into 64 bits",
        ),
        ("SEED: !!int ''", "not valid YAML (a value is not what its tag says)"),
        ("SEED: " + "[" * 2000, "nested more than 32 levels deep"),
        ("a: &a [*a]", "too large with its aliases written out"),
        ("X: " + "y" * 30_000, "unknown key X"),
    ],
)
def test_a_file_that_is_no_configuration(content, says, tmp_path):
    file = tmp_path / "c.yaml"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.write_text(content)
    message = fails(file=file)
    assert says in message
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("SEED: 0x" + "f" * 20_000, "64 bits"),
        ("[" * 5000, "nested"),
        ("a: &a [*a]", "too large"),
        ("[1, 2]", "expected KEY: VALUE lines, found list"),
        ("DATA: {BATCH_SIZE: -5}", "DATA.BATCH_SIZE is -5"),
    ],
)
def test_a_configuration_of_a_checkpoint_that_cannot_be_used(text, says):
    with pytest.raises(UserError, match="somewhere: its configuration cannot be used") as caught:
        config_from_text(text, "somewhere")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_opts_override_saved_values():
    config = config_from_text("SEED: 1\nPRINT_FREQ: 2\n", "run", ["SEED", "3"])
    assert (config.SEED, config.PRINT_FREQ) == (3, 2)
    with pytest.raises(UserError, match=r"^DATA\.BATCH_SIZE is 0"):
        config_from_text("SEED: 1\n", "run", ["DATA.BATCH_SIZE", "0"])


def test_a_file_without_keys_a_directory_and_a_detector_are_no_configurations(tmp_path):
    empty = write(tmp_path / "c.yaml", "# nothing\n")
    assert "c.yaml: has no keys" in fails(file=empty)
    assert load_config(write(tmp_path / "d.yaml", "BASE: [c.yaml]\nSEED: 1\n")).SEED == 1
    assert "is a directory; names are those of the files in " in fails(file=tmp_path)
    assert "--cfg '': is empty; names are those of the files in " in fails(file="")
    assert "configures a detector" in fails(file="detection/shapes/mask_rcnn")


def test_data_and_output_arguments(tmp_path):
    config = load_config(None, data=str(tmp_path), output="there")
    data, output = config.DATA, config.OUTPUT
    assert (data.DATASET, data.PATH, output) == ("folder", str(tmp_path), "there")
    lists = ["DATA.DATASET", "list", "DATA.TRAIN_LIST", "t", "DATA.VAL_LIST", "v"]
    assert load_config(None, lists, data="d").DATA.DATASET == "list"


def test_the_list_of_keys_ends_silently_when_its_reader_does():
    command = [sys.executable, "-m", "swinv2_moe.config"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


def test_the_module_lists_every_key():
    lines = subprocess.run(
        [sys.executable, "-m", "swinv2_moe.config"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == list(flatten(default_config()))


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0), (3, 1), (4, 3)])
def test_fewer_epochs_shorten_the_warm_up_of_a_file(epochs, warmup, caplog, monkeypatch):
    config = load_config("quickstart_digits", ["TRAIN.EPOCHS", str(epochs)])
    shortened = config.TRAIN.WARMUP_EPOCHS
    assert shortened == warmup
    lines = [record.getMessage() for record in caplog.records]
    if warmup == 3:
        assert lines == []
    else:
        assert lines == [
            f"TRAIN.WARMUP_EPOCHS is {warmup}, not 3, because TRAIN.EPOCHS is {epochs}"
        ]
    monkeypatch.setenv("RANK", "1")  # the main rank alone says it
    caplog.clear()
    load_config("quickstart_digits", ["TRAIN.EPOCHS", str(epochs)])
    assert not caplog.records


def test_a_warm_up_that_is_asked_for_is_not_shortened():
    with pytest.raises(UserError, match=r"TRAIN\.WARMUP_EPOCHS is 3"):
        load_config("quickstart_digits", ["TRAIN.EPOCHS", "3", "TRAIN.WARMUP_EPOCHS", "3"])


def test_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "config.yaml"
    file.write_text("OUTPUT: ~/runs/mine\nMODEL: {PRETRAINED: ~/runs/dense}\n")
    config = load_config(file)
    assert config.OUTPUT == "/home/me/runs/mine"
    assert config.MODEL.PRETRAINED == "/home/me/runs/dense"


def test_the_batch_of_a_rank_follows_from_the_global_one():
    config = load_config(None, ["DATA.GLOBAL_BATCH_SIZE", "48", "TRAIN.ACCUMULATION_STEPS", "3"])
    assert load.resolve_batch_size(config, 2).DATA.BATCH_SIZE == 8
