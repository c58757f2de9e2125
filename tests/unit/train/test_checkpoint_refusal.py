"""A checkpoint that does not fit is refused with every key named, and nothing changes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_core.files import fsync_and_hash
from swinv2_moe.errors import UserError
from swinv2_moe.train.checkpoint import (
    count_classes,
    find_checkpoint,
    load_weights,
    open_checkpoint,
    read_meta,
    write_meta,
)

LAYERS = [f"layers.{i}.blocks.0.mlp.moe" for i in (1, 2)]


@pytest.fixture
def save(make_trainer, save, tmp_path):
    """`save(keys)`: the checkpoint of a trainer after one step."""

    def run(keys=None):
        trainer = make_trainer((keys or {}) | {"DATA.BATCH_SIZE": 16})
        trainer.train_step([next(iter(trainer.data.train_loader))])
        return save(trainer, tmp_path / "checkpoints", is_best=True)

    return run


def refusal(trainer, directory):
    """The message with which `trainer` refuses, after checking that nothing of it changed."""
    before = {name: tensor.clone() for name, tensor in trainer.step.model.state_dict().items()}
    ema = (
        {n: t.clone() for n, t in trainer.step.ema.module.state_dict().items()}
        if trainer.step.ema
        else {}
    )
    with pytest.raises(UserError) as caught:
        trainer.resume(open_checkpoint(directory))
    assert all(
        tensor.equal(before[name]) for name, tensor in trainer.step.model.state_dict().items()
    )
    assert not ema or all(
        tensor.equal(ema[name]) for name, tensor in trainer.step.ema.module.state_dict().items()
    )
    assert (
        trainer.progress.epoch,
        trainer.progress.step,
        trainer.progress.best_top1,
        trainer.step.scaler.updates,
    ) == (0, 0, -1.0, 0)
    assert not trainer.step.optimizer.state
    assert "\n" not in str(caught.value)
    return str(caught.value)


def keys_of(trainer, *parts):
    return [name for name in trainer.step.model.state_dict() if any(part in name for part in parts)]


FC = [
    f"layers.{i}.blocks.0.mlp.fc{j}.{name}"
    for i in (1, 2)
    for j in (1, 2)
    for name in ("weight", "bias")
]
ROUTERS = [f"{layer}.router.weight" for layer in LAYERS]


@pytest.mark.parametrize(
    ("saved", "running", "named"),
    [
        ({}, {"MODEL.SWINV2.EMBED_DIM": 32}, None),  # None: every key
        (
            {},
            {"MODEL.MOE.NUM_EXPERTS": 8},
            [*ROUTERS, *(f"{layer}.experts: 4 there, 8" for layer in LAYERS)],
        ),
        (
            {"MODEL.MOE.NUM_EXPERTS": 8},
            {},
            [*ROUTERS, *(f"{layer}.experts: 8 there, 4" for layer in LAYERS)],
        ),
        (
            {},
            {"MODEL.MOE.NUM_EXPERTS": 0},
            [*ROUTERS, *FC, *(f"{layer}.experts: 4 there, 0" for layer in LAYERS)],
        ),
        (
            {"MODEL.MOE.NUM_EXPERTS": 0},
            {},
            [
                *ROUTERS,
                *FC,
                *(
                    f"{layer}.experts.{name}"
                    for layer in LAYERS
                    for name in ("w1", "b1", "w2", "b2")
                ),
            ],
        ),
        (
            {},
            {"MODEL.MOE.BLOCKS": [[], [], [0]]},
            [*FC[:4], ROUTERS[0], f"{LAYERS[0]}.experts: 4 there, 0"],
        ),
        ({}, {"MODEL.MOE.ROUTER": "cosine"}, [*ROUTERS, f"{LAYERS[0]}.router.sim_matrix"]),
        ({}, {"MODEL.MOE.OUTPUT_BIAS": False}, [f"{layer}.experts.b2" for layer in LAYERS]),
    ],
)
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


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "experts/layers.1.blocks.0.mlp.moe/0002.safetensors",
        "optimizer/exp_avg/model.safetensors",
        "optimizer/exp_avg_sq/experts/layers.2.blocks.0.mlp.moe/0003.safetensors",
        "ema/experts/layers.1.blocks.0.mlp.moe/0000.safetensors",
        "meta.json",
    ],
)
def test_damaged_and_missing_files_are_named(file, save, make_trainer):
    directory = save({"TRAIN.EMA_DECAY": 0.9})
    trainer = make_trainer({"TRAIN.EMA_DECAY": 0.9})
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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format_version": 2}, "has format version 2, this program knows 1"),
        ({"format_version": None}, "has format version null, this program knows 1"),
        ({"step": None}, "meta.json: step is null, it must be a whole number"),
        ({"training": None}, "holds weights alone, no state of a training run to go on from"),
    ],
)
def test_meta_of_another_kind(change, says, save, make_trainer):
    directory = save()
    write_meta(directory, read_meta(directory) | change)
    assert says in refusal(make_trainer(), directory)


@pytest.mark.parametrize("text", ["[]", "{}", "not JSON", '{"checksum": 1}', ""])
def test_meta_of_another_program(text, save, make_trainer):
    directory = save()
    (directory / "meta.json").write_text(text)
    assert "meta.json" in refusal(make_trainer(), directory)


def rewrite_trunk(directory, change):
    """The tensors of model.safetensors changed, under the right checksum."""
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file)
    meta = read_meta(directory)
    write_meta(directory, meta | {"files": meta["files"] | {file.name: fsync_and_hash(file)}})


@pytest.mark.parametrize("kind", [torch.int32, torch.complex64, torch.bool])
def test_numbers_that_are_not_floating_point(kind, save, make_trainer):
    directory = save()
    rewrite_trunk(
        directory, lambda tensors: tensors | {"norm.weight": tensors["norm.weight"].to(kind)}
    )
    assert "1 not of floating point: norm.weight" in refusal(make_trainer(), directory)


def test_weights_to_start_from_are_finite(save, make_trainer):
    directory, trainer = save(), make_trainer()
    rewrite_trunk(
        directory, lambda tensors: tensors | {"norm.weight": torch.full((64,), float("nan"))}
    )
    before = {name: tensor.clone() for name, tensor in trainer.step.model.state_dict().items()}
    with pytest.raises(UserError, match=r"norm\.weight holds values that are NaN or infinite"):
        load_weights(open_checkpoint(directory, weights_only=True), trainer.step.model)
    assert all(
        tensor.equal(before[name]) for name, tensor in trainer.step.model.state_dict().items()
    )


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


def test_a_path_without_a_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="holds no checkpoint"):
            find_checkpoint(str(path), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; a checkpoint is a directory"):
        find_checkpoint(str(tmp_path / "file"), tmp_path)
    assert find_checkpoint("auto", tmp_path) is None
