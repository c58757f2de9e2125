"""MODEL.UPCYCLE run: a dense run that goes on with experts, its epoch and its state."""

import pytest
import torch
from run_cases import assert_same, interrupt_at, weights_of

from swinv2_moe.checkpoints.checkpoint import open_checkpoint
from swinv2_moe.errors import UserError
from swinv2_moe.train.run import train

DENSE = {"MODEL.MOE.NUM_EXPERTS": 0, "TRAIN.EPOCHS": 3, "TRAIN.EMA_DECAY": 0.9}
# No randomness that experts add, and no drops.
QUIET = {"MODEL.DROP_PATH_RATE": 0.0, "MODEL.MOE.GATE_NOISE": 0.0, "MODEL.MOE.CAPACITY_FACTOR": 0.0}
QUIET |= {"MODEL.MOE.AUX_LOSS_WEIGHT": 0.0, "TRAIN.EPOCHS": 3, "TRAIN.EMA_DECAY": 0.9}
BLOCK = "layers.1.blocks.0.mlp"
REGULARISED = {
    "MODEL.MOE.HIDDEN_DROPOUT": 0.3,
    "TRAIN.LAYER_DECAY": 0.9,
    "MODEL.MOE.BALANCE": "bias",
}


def continued(source):
    return {"MODEL.PRETRAINED": str(source), "MODEL.UPCYCLE": "run"}


def train_steps(trainer, count):
    """The losses of the next steps."""
    trainer.data.set_epoch(trainer.progress.epoch, skip_steps=trainer.progress.epoch_step)
    trainer.step.wrapped.train()
    batches = iter(trainer.data.train_loader)
    return [trainer.train_step([next(batches)]).loss for _ in range(count)]


@pytest.fixture
def dense(make_trainer, save, tmp_path):
    """A dense trainer after three steps of an epoch of five, and its checkpoint."""
    trainer = make_trainer(QUIET | DENSE)
    train_steps(trainer, 3)
    return trainer, save(trainer, tmp_path / "dense")


def test_the_loss_and_the_state_go_on(dense, make_trainer):
    twin, source = dense
    trainer = make_trainer(QUIET | continued(source))
    trainer.resume(open_checkpoint(source))
    assert trainer.progress.step == 3
    assert trainer.progress.epoch_step == 3
    rates = [
        max(group["lr"] for group in each.step.optimizer.param_groups) for each in (trainer, twin)
    ]
    assert rates[0] == rates[1]
    state = trainer.step.optimizer.state
    parameters = dict(trainer.step.model.named_parameters())
    twins = dict(twin.step.model.named_parameters())
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = state[parameters[f"{BLOCK}.moe.experts.w2"]][kind]
        expected = twin.step.optimizer.state[twins[f"{BLOCK}.fc2.weight"]][kind]
        assert all(torch.equal(expert, expected.t()) for expert in moments)
        assert not state[parameters[f"{BLOCK}.moe.router.weight"]][kind].any()
    assert float(state[parameters[f"{BLOCK}.moe.experts.w2"]]["step"]) == 3
    assert float(state[parameters[f"{BLOCK}.moe.router.weight"]]["step"]) == 0
    averaged = trainer.step.ema.module.state_dict()[f"{BLOCK}.moe.experts.w1"]
    expected = twin.step.ema.module.state_dict()[f"{BLOCK}.fc1.weight"]
    assert all(torch.equal(expert, expected) for expert in averaged)
    # the norm behind an expert takes the gate's value out, up to its epsilon
    assert train_steps(trainer, 1) == pytest.approx(train_steps(twin, 1), rel=1e-4)


def test_validations_of_the_dense_run_do_not_count(make_trainer, save, tmp_path):
    twin = make_trainer(QUIET | DENSE)
    train_steps(twin, 3)
    twin.progress.count_validation(80.0)
    twin.progress.to_target.validated(1, 3, 80.0)
    source = save(twin, tmp_path / "dense")
    trainer = make_trainer(QUIET | continued(source) | {"TRAIN.TARGET_TOP1": 70.0})
    trainer.resume(open_checkpoint(source))
    progress = trainer.progress
    assert (progress.best_top1, progress.last_top1) == (-1.0, None)
    assert progress.to_target.reached is None


def test_a_continued_run_resumes_exactly(dense, make_trainer, save, tmp_path):
    _, source = dense
    keys = REGULARISED | {"TRAIN.EPOCHS": 3, "TRAIN.EMA_DECAY": 0.9} | continued(source)
    trainer = make_trainer(keys)
    trainer.resume(open_checkpoint(source))
    train_steps(trainer, 1)
    saved = open_checkpoint(save(trainer, tmp_path / "experts"))
    assert saved.meta["training"]["dense_updates"] == 3
    again = make_trainer(keys)
    again.resume(saved)
    assert train_steps(again, 1) == train_steps(trainer, 1)
    assert_same(again.step.model.state_dict(), trainer.step.model.state_dict())


def test_a_run_in_pieces_with_all_regularisation(make_config, tmp_path, read_metrics, monkeypatch):
    """A dense run, then two runs with experts: one without a stop, one that is killed."""
    keys = REGULARISED | {"TRAIN.EPOCHS": 3, "TRAIN.WARMUP_EPOCHS": 1, "CHECKPOINT.STEPS": 2}
    dense_keys = {"TRAIN.EPOCHS": 3, "MODEL.MOE.NUM_EXPERTS": 0, "TRAIN.MAX_STEPS": 5}
    train(make_config(tmp_path / "dense", dense_keys))
    keys |= continued(tmp_path / "dense")
    train(make_config(tmp_path / "whole", keys), "auto")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 9)
        with pytest.raises(KeyboardInterrupt):
            train(make_config(tmp_path / "killed", keys))
    train(make_config(tmp_path / "killed", keys), "auto")
    steps, epochs = read_metrics(tmp_path / "whole")
    assert [line["step"] for line in steps] == list(range(6, 16))
    assert [line["epoch"] for line in epochs] == [2, 3]
    losses = [line["loss"] for line in read_metrics(tmp_path / "killed")[0]]
    assert losses == [line["loss"] for line in steps]
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")
    assert (tmp_path / "whole" / "checkpoints" / "best").exists()


def test_sources_that_do_not_go_on(dense, make_config, tmp_path):
    _, source = dense
    keys = continued(source) | {"TRAIN.EMA_DECAY": 0.9}
    config = make_config(tmp_path / "a", keys | {"MODEL.MOE.HIDDEN_RATIO": 0.5})
    with pytest.raises(UserError, match=r"cannot be upcycled .*experts\.w1 .*nothing was loaded"):
        train(config)
    weights = continued(source / "model.safetensors")
    with pytest.raises(UserError, match=r"MODEL\.PRETRAINED .*safetensors: its format is None"):
        train(make_config(tmp_path / "b", weights))
    complete = {"MODEL.MOE.NUM_EXPERTS": 0, "TRAIN.EPOCHS": 1, "TRAIN.WARMUP_EPOCHS": 0}
    train(make_config(tmp_path / "complete", complete))
    keys = continued(tmp_path / "complete") | {"TRAIN.EPOCHS": 1, "TRAIN.WARMUP_EPOCHS": 0}
    with pytest.raises(UserError, match=r"has done 1 epochs, .* needs TRAIN\.EPOCHS \(1\) above"):
        train(make_config(tmp_path / "c", keys))
    few = {"MODEL.MOE.NUM_EXPERTS": 0, "TRAIN.MAX_STEPS": 2}
    train(make_config(tmp_path / "few", few))
    keys = continued(tmp_path / "few") | {"TRAIN.MAX_STEPS": 2}
    with pytest.raises(UserError, match=r"has done 2 steps, .* TRAIN\.MAX_STEPS \(2\) above"):
        train(make_config(tmp_path / "c2", keys))
    train(make_config(tmp_path / "experts", {"TRAIN.MAX_STEPS": 1}))
    with pytest.raises(UserError, match=r"has experts, MODEL\.UPCYCLE run needs a dense"):
        train(make_config(tmp_path / "d", continued(tmp_path / "experts")))


def test_keys_that_contradict(make_config, tmp_path):
    for key, value in (
        ("MODEL.CLASS_MAP", "new"),
        ("MODEL.CLASS_MAP", "map.txt"),
    ):
        with pytest.raises(UserError, match=rf"{key} is .*UPCYCLE 'run' it must be"):
            make_config(tmp_path, continued("run") | {key: value})
