"""A number that is not finite stops the run and is traced to where it begins."""

import pytest
import torch
from run_cases import assert_same, copy_of, saver_of
from tool_cases import refusal

from moe_core import moe_layers
from swinv2_moe.checkpoints.checkpoint import open_checkpoint
from swinv2_moe.errors import UserError
from swinv2_moe.train.record import Recorder

LAYER = "layers.1.blocks.0.attn.proj"


def poison_parameter(trainer, value):
    with torch.no_grad():
        trainer.step.model.get_submodule(LAYER).weight[0, 0] = value


def poison_expert(trainer, value):
    with torch.no_grad():
        trainer.step.model.layers[2].blocks[0].mlp.moe.experts.w2[3, 0, 0] = value


def poison_output(trainer, value):
    trainer.step.model.get_submodule(LAYER).register_forward_hook(
        lambda module, inputs, output: output * value
    )


def poison_gradient(trainer, value):
    trainer.step.model.get_submodule(LAYER).weight.register_hook(lambda gradient: gradient * value)


def poison_images(trainer, value):
    mixed = trainer.step._mixed
    trainer.step._mixed = lambda batch: (mixed(batch)[0] * value, batch.targets)


@pytest.mark.parametrize(("value", "clip"), [(float("nan"), 0.0), (float("inf"), 3.0)])
@pytest.mark.parametrize(
    ("poison", "begins"),
    [
        (poison_parameter, f"the parameter {LAYER}.weight"),
        (poison_expert, "the parameter layers.2.blocks.0.mlp.moe.experts.w2"),
        (poison_output, f"the output of layer {LAYER}"),
        (poison_gradient, f"the gradient of {LAYER}.weight"),
        (poison_images, "the input images"),
    ],
)
def test_the_step_and_the_layer_are_named(poison, begins, value, clip, make_trainer):
    trainer = make_trainer({"TRAIN.CLIP_GRAD": clip, "DATA.BATCH_SIZE": 16})
    batch = next(iter(trainer.data.train_loader))
    trainer.train_step([batch])
    poison(trainer, value)
    before = copy_of(trainer.step.model)
    message = refusal(trainer.train_step, [batch])
    assert message.startswith("step 2: ")
    assert message.endswith(f"begins at {begins}")
    assert_same(trainer.step.model.state_dict(), before)


@pytest.mark.parametrize("bad", [0, 1])
def test_accumulated_batches_are_all_examined(bad, make_trainer):
    trainer = make_trainer({"DATA.BATCH_SIZE": 16})
    loader = iter(trainer.data.train_loader)
    batches = [next(loader), next(loader)]
    batches[bad].images[0, 0, 0, 0] = float("nan")
    with pytest.raises(UserError, match="begins at the input images"):
        trainer.train_step(batches)


def test_a_run_stops_and_keeps_its_last_checkpoint(make_trainer, tmp_path):
    trainer = make_trainer()
    recorder = Recorder(tmp_path / "run", trainer.world, step=0)
    original = trainer._record_epoch
    trainer._record_epoch = lambda *args: (original(*args), poison_parameter(trainer, float("nan")))
    saver, save = saver_of(trainer, tmp_path / "checkpoints"), trainer.save

    def heal_save_and_poison(*args, **how):
        poison_parameter(trainer, 0.0)
        save(*args, **how)
        poison_parameter(trainer, float("nan"))

    trainer.save = heal_save_and_poison
    with pytest.raises(UserError, match="step 6: "):
        trainer.fit(recorder, saver)
    saver.wait()
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000005"


def test_fp16_stops_once_the_scale_cannot_be_the_reason(make_trainer):
    trainer = make_trainer({"AMP_ENABLE": True, "AMP_DTYPE": "float16", "DATA.BATCH_SIZE": 16})
    poison_gradient(trainer, float("inf"))
    batch = next(iter(trainer.data.train_loader))
    for _ in range(24):  # from 2**16 down to 2**-8
        trainer.train_step([batch])
    assert (trainer.step.scaler.scale, trainer.step.scaler.updates) == (2.0**-8, 0)
    with pytest.raises(UserError, match=rf"step 25: .* begins at the gradient of {LAYER}"):
        trainer.train_step([batch])


def poison_steps(trainer, steps):
    """Infinite gradients in these steps."""
    weight = trainer.step.model.get_submodule(LAYER).weight
    weight.register_hook(
        lambda gradient: gradient * float("inf") if trainer.progress.step + 1 in steps else gradient
    )


def test_steps_that_are_not_finite_are_skipped(make_trainer, tmp_path, capsys, read_metrics):
    trainer = make_trainer({"TRAIN.SKIP_NON_FINITE": 2, "TRAIN.MAX_STEPS": 8})
    poison_steps(trainer, {2, 3, 7})
    recorder = Recorder(tmp_path / "run", trainer.world, step=0)
    trainer.fit(recorder, saver_of(trainer, tmp_path / "checkpoints"))
    recorder.close()
    assert (trainer.progress.step, trainer.progress.skipped) == (8, 3)
    assert trainer.step.scaler.updates == 5
    said = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert said == [
        f"step {step}: loss or gradient not finite, skipped ({n} so far)"
        for n, step in enumerate((2, 3, 7), 1)
    ]
    assert all(torch.isfinite(parameter).all() for parameter in trainer.step.model.parameters())
    assert all(line["loss"] is not None for line in read_metrics(tmp_path / "run")[0])
    meta = open_checkpoint(tmp_path / "checkpoints" / "latest").meta
    assert meta["training"]["skipped"] == 3


def test_a_skipped_step_leaves_the_balance_as_it_is(make_trainer):
    trainer = make_trainer({"TRAIN.SKIP_NON_FINITE": 2, "MODEL.MOE.BALANCE": "bias"})
    poison_steps(trainer, {1})
    batch = next(iter(trainer.data.train_loader))
    trainer.train_step([batch])
    balances = [layer.balance for layer in moe_layers(trainer.step.model).values()]
    assert balances
    for balance in balances:
        assert not balance.bias.any()
        assert not balance.load.any()
    trainer.train_step([batch])
    assert all(balance.bias.any() for balance in balances)


def test_one_more_stops_the_run(make_trainer):
    trainer = make_trainer({"TRAIN.SKIP_NON_FINITE": 2, "DATA.BATCH_SIZE": 16})
    poison_steps(trainer, {2, 3, 4})
    batch = next(iter(trainer.data.train_loader))
    for _ in range(3):
        before = [parameter.clone() for parameter in trainer.step.model.parameters()]
        trainer.train_step([batch])
    assert all(map(torch.equal, before, trainer.step.model.parameters()))
    with pytest.raises(UserError, match="step 4: "):
        trainer.train_step([batch])


def test_a_loss_that_is_not_finite_with_a_gradient_that_is(make_trainer):
    trainer = make_trainer({"DATA.BATCH_SIZE": 16})
    losses = trainer.step.losses
    trainer.step.losses = lambda *inputs: (
        (found := losses(*inputs)) | {"loss": found["loss"] + float("inf")}
    )
    before = [parameter.clone() for parameter in trainer.step.model.parameters()]
    with pytest.raises(UserError, match=r"step 1: .* begins at the loss itself"):
        trainer.train_step([next(iter(trainer.data.train_loader))])
    assert all(map(torch.equal, before, trainer.step.model.parameters()))
