"""A checkpoint that does not fit is refused with every key named, and nothing changes."""

from pathlib import Path

import pytest
import tool_cases
import torch
from run_cases import ALONE, LAYERS, assert_same, copy_of
from safetensors.torch import load_file, save_file

from moe_core.files import fsync_and_hash
from swinv2_moe.checkpoints.checkpoint import (
    count_classes,
    find_checkpoint,
    open_checkpoint,
    read_meta,
    write_meta,
    write_weights,
)
from swinv2_moe.checkpoints.deployed import Deployed
from swinv2_moe.config import all_sections, config_from_text
from swinv2_moe.convert.convert import export_weights, import_weights
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model
from swinv2_moe.models.weight_files import read_metadata
from swinv2_moe.start.initial import as_trained, settings_of_weights


@pytest.fixture
def save(make_trainer, save, tmp_path):
    """`save(keys)`: the checkpoint of a trainer after one step."""

    def run(keys=None):
        trainer = make_trainer((keys or {}) | {"DATA.BATCH_SIZE": 16})
        trainer.train_step([next(iter(trainer.data.train_loader))])
        return save(trainer, tmp_path / "checkpoints", is_best=True)

    return run


@pytest.fixture(scope="module")
def save_once(tmp_path_factory, make_config):
    """A checkpoint of weights, which tests restore."""
    sections = all_sections(make_config(tmp_path_factory.mktemp("once")))
    directory = tmp_path_factory.mktemp("saved") / "step-00000000"
    model = build_model(sections.model, 10)
    names = [str(digit) for digit in range(10)]
    write_weights(directory, model, model.state_dict(), sections.yaml, names)
    return directory


def refusal(trainer, directory):
    """The message with which `trainer` refuses, after checking that nothing of it changed."""
    models = [trainer.step.model]
    if trainer.step.ema:
        models.append(trainer.step.ema.module)
    before = [copy_of(model) for model in models]
    message = tool_cases.refusal(lambda: trainer.resume(open_checkpoint(directory)))
    for model, tensors in zip(models, before, strict=True):
        assert_same(model.state_dict(), tensors)
    progress = trainer.progress
    assert (progress.epoch, progress.step, progress.best_top1) == (0, 0, -1.0)
    assert trainer.step.scaler.updates == 0
    assert not trainer.step.optimizer.state
    return message


def keys_of(trainer, *parts):
    return [name for name in trainer.step.model.state_dict() if any(part in name for part in parts)]


FC = [
    f"layers.{i}.blocks.0.mlp.fc{j}.{name}"
    for i in (1, 2)
    for j in (1, 2)
    for name in ("weight", "bias")
]
ROUTERS = [f"{layer}.router.weight" for layer in LAYERS]


BIASES = [f"{layer}.experts.{key}" for layer in LAYERS for key in ("w1", "b1", "w2", "b2")]


def counts(there: int, here: int) -> list[str]:
    return [f"{layer}.experts: {there} there, {here}" for layer in LAYERS]


ARCHITECTURES = [  # of the checkpoint, of the run, what is named
    ({}, {"MODEL.SWINV2.EMBED_DIM": 32}, None),  # None: every key
    ({}, {"MODEL.MOE.NUM_EXPERTS": 8}, [*ROUTERS, *counts(4, 8)]),
    ({}, {"MODEL.MOE.NUM_EXPERTS": 0}, [*ROUTERS, *FC, *counts(4, 0)]),
    ({"MODEL.MOE.NUM_EXPERTS": 0}, {}, [*ROUTERS, *FC, *BIASES]),
    ({}, {"MODEL.MOE.BLOCKS": [[], [], [0]]}, [*FC[:4], ROUTERS[0], counts(4, 0)[0]]),
]


@pytest.mark.parametrize(("saved", "running", "named"), ARCHITECTURES)
def test_other_architectures(saved, running, named, save, make_trainer):
    directory, trainer = save(saved), make_trainer(running)
    message = refusal(trainer, directory)
    named = keys_of(trainer, "") if named is None else named
    if running.get("MODEL.SWINV2.EMBED_DIM"):
        # their shapes do not follow the width
        unchanged = ("logit_scale", "cpb_mlp", "head.fc.bias")
        named = [key for key in named if not any(part in key for part in unchanged)]
    assert sum(name in message for name in named) >= min(3, len(named)), message
    assert "nothing was loaded" in message


def test_another_number_of_classes(save, make_trainer):
    trainer = make_trainer()
    trainer.step.model.reset_classifier(7)
    message = refusal(trainer, save())
    assert "head.fc.weight ([10, 64] there, [7, 64] in the model)" in message
    assert "head.fc.bias ([10] there, [7] in the model)" in message


def test_another_optimizer(save, make_trainer):
    message = refusal(make_trainer({"TRAIN.OPTIMIZER.NAME": "sgd"}), save())
    assert "'sgd' needs optimizer/momentum_buffer" in message


def test_an_average_that_is_not_there(save, make_trainer):
    message = refusal(make_trainer({"TRAIN.EMA_DECAY": 0.9}), save())
    assert "its run had averaged weights: False, TRAIN.EMA_DECAY is 0.9" in message


def test_damaged_and_missing_files_are_named(save, make_trainer):
    directory = save({"TRAIN.EMA_DECAY": 0.9})
    trainer = make_trainer({"TRAIN.EMA_DECAY": 0.9})
    for file in (
        "model.safetensors",
        f"experts/{LAYERS[0]}/0002.safetensors",
        "optimizer/exp_avg/model.safetensors",
        f"optimizer/exp_avg_sq/experts/{LAYERS[1]}/0003.safetensors",
        f"ema/experts/{LAYERS[0]}/0000.safetensors",
        "meta.json",
    ):
        content = (directory / file).read_bytes()
        (directory / file).write_bytes(content[: len(content) // 2])
        message = refusal(trainer, directory)
        assert file in message or (directory / file).name in message
        (directory / file).unlink()
        message = refusal(trainer, directory)
        layer = file.split("/")[-2] if "experts" in file else file
        assert layer in message
        (directory / file).write_bytes(content)
    trainer.resume(open_checkpoint(directory))
    assert (trainer.progress.epoch, trainer.progress.step) == (0, 1)


def test_meta_of_another_kind(save, make_trainer):
    directory, trainer = save(), make_trainer()
    meta = read_meta(directory)
    for change, says in (
        ({"format_version": 2}, "has format version 2, this program knows 1"),
        ({"format_version": None}, "has format version null, this program knows 1"),
        ({"step": None}, "meta.json: step is null, it must be a whole number"),
        ({"training": None}, "holds only weights, no training state to continue from"),
    ):
        write_meta(directory, meta | change)
        assert says in refusal(trainer, directory)
    for text in ("[]", "{}", "not JSON", '{"checksum": 1}', ""):
        (directory / "meta.json").write_text(text)
        assert "meta.json" in refusal(trainer, directory)


def rewrite_trunk(directory, change):
    """The tensors of model.safetensors changed, under the right checksum."""
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file)
    meta = read_meta(directory)
    write_meta(directory, meta | {"files": meta["files"] | {file.name: fsync_and_hash(file)}})


def test_numbers_that_are_not_floating_point(save, make_trainer):
    directory, trainer = save(), make_trainer()
    for kind in (torch.int32, torch.complex64, torch.bool):
        rewrite_trunk(
            directory, lambda t, kind=kind: t | {"norm.weight": t["norm.weight"].real.to(kind)}
        )
        assert "1 not of floating point: norm.weight" in refusal(trainer, directory)


def test_a_detectors_training(save, make_trainer):
    directory = save()
    meta = read_meta(directory)
    training = {"epoch": 1, "iter": 1, "param_groups": [], "param_schedulers": []}
    training["loss_scaler"] = meta["training"]["loss_scaler"]
    write_meta(directory, meta | {"training": training})
    assert "is of the training of a detector" in refusal(make_trainer(), directory)


def test_a_checkpoint_without_a_classifier(save, make_trainer):
    directory = save()
    rewrite_trunk(
        directory, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("head.")}
    )
    with pytest.raises(UserError, match="has no classifier") as caught:
        count_classes(open_checkpoint(directory), make_trainer().config.model)
    assert "\n" not in str(caught.value)


def test_the_position_in_an_epoch_that_has_become_shorter(save, make_trainer):
    """It would not end: no step is left, and the epoch is not complete."""
    directory = save()
    meta = read_meta(directory)
    write_meta(directory, meta | {"training": meta["training"] | {"epoch_step": 10_000}})
    trainer = make_trainer({"DATA.BATCH_SIZE": 16})
    trainer.resume(open_checkpoint(directory))
    assert trainer.progress.epoch_step == trainer.progress.steps_per_epoch


READERS = {
    "a command": lambda found, config: Deployed(ALONE, found, config).model(10),
    "features": lambda found, config: Deployed(ALONE, found, config).model(0),
    "pretrained": lambda found, _: settings_of_weights(str(found.directory), 3),
    "single": lambda found, _: export_weights("single", found.directory, OUTPUT),
    "hub": lambda found, _: export_weights("hub", found.directory, OUTPUT),
}
OUTPUT = Path("new.safetensors")
# Built, they would fill any memory, or take hours.
ABSURD = [
    ("SWINV2.EMBED_DIM", 1 << 14, "patch_embed.proj.weight ([16, 3, 2, 2] there, [16384, 3, 2"),
    ("SWINV2.EMBED_DIM", 1 << 50, "MODEL.SWINV2.EMBED_DIM is 1125899906842624, the files hold "),
    ("SWINV2.DEPTHS", [100_000, 1, 1], "MODEL.SWINV2.DEPTHS is (100000, 1, 1), the files hold "),
    ("MOE.NUM_EXPERTS", 10**9, f"{LAYERS[0]}.experts: 4 there, 1000000000 in the model"),
    ("MOE.NUM_SHARED_EXPERTS", 10**9, f"missing: {LAYERS[0]}.shared.w1"),
    ("MOE.HIDDEN_RATIO", 1e17, "MODEL has more numbers than torch can count ("),
]


@pytest.mark.parametrize(
    ("reader", "key", "value", "says"),
    [("a command", *absurd) for absurd in ABSURD]
    + [(reader, *ABSURD[4]) for reader in list(READERS)[1:]],
)
def test_an_absurd_network_is_compared_with_its_files_before_it_is_built(
    reader, key, value, says, save_once, tmp_path, monkeypatch
):
    """Also where the files of the checkpoint are a few KB."""
    monkeypatch.chdir(tmp_path)
    meta = read_meta(save_once)
    text = meta["config"]
    config = config_from_text(text, "checkpoint").clone()
    config.defrost()
    group, _, name = key.partition(".")
    config.MODEL[group][name] = value
    write_meta(save_once, meta | {"config": config.dump(), "windows": None})
    try:
        found = open_checkpoint(save_once)
        message = tool_cases.refusal(READERS[reader], found, all_sections(config))
    finally:
        write_meta(save_once, meta)
    assert says in message
    assert not OUTPUT.exists()


def test_an_absurd_network_is_not_trained_further(make_config, save_once, tmp_path):
    """`train RUN` takes the configuration from config.yaml."""
    opts = {"MODEL.MOE.NUM_EXPERTS": 10**9}
    message = tool_cases.refusal(
        as_trained, make_config(tmp_path, opts), open_checkpoint(save_once), ALONE
    )
    assert "4 there, 1000000000 in the model; nothing was loaded" in message


def test_windows_and_images_that_no_memory_holds(make_config, save_once, tmp_path):
    opts = {"DATA.IMG_SIZE": 1 << 16, "MODEL.SWINV2.WINDOW_SIZE": 1 << 12}
    message = tool_cases.refusal(
        as_trained, make_config(tmp_path, opts), open_checkpoint(save_once), ALONE
    )
    assert "DATA.IMG_SIZE 65536 and the windows of its model need " in message


def test_a_single_file_of_an_absurd_network(save_once, tmp_path):
    file = tmp_path / "one.safetensors"
    export_weights("single", save_once, file)
    metadata = read_metadata(file)
    metadata["config"] = metadata["config"].replace("NUM_EXPERTS: 4", "NUM_EXPERTS: 1000000000")
    save_file(load_file(file), file, metadata)
    says = f"{LAYERS[0]}.experts.w1 ([4, "
    assert says in tool_cases.refusal(settings_of_weights, str(file), 3)
    assert says in tool_cases.refusal(import_weights, "single", file, tmp_path / "imported")


def test_a_path_without_a_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="holds no checkpoint"):
            find_checkpoint(str(path), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; a checkpoint is a directory"):
        find_checkpoint(str(tmp_path / "file"), tmp_path)
    assert find_checkpoint("auto", tmp_path) is None
