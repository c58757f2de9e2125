"""Optimiser, schedule, accumulation, precision, averaging."""

import pytest
import torch

from moe_core.ops.native import instruction_sets
from swinv2_moe.checkpoints.checkpoint import open_checkpoint
from swinv2_moe.checkpoints.deployed import open_deployed
from swinv2_moe.config import all_sections, load_config, train_config
from swinv2_moe.data.datasets import Batch
from swinv2_moe.errors import UserError
from swinv2_moe.ranks.precision import build_autocast, usable_amp
from swinv2_moe.ranks.world import World
from swinv2_moe.train.optim import LossScaler, build_optimizer, build_schedule
from swinv2_moe.train.run import train

PLAIN = {"MODEL.MOE.CAPACITY_FACTOR": 0.0, "MODEL.MOE.GATE_NOISE": 0.0, "MODEL.DROP_PATH_RATE": 0.0}
PLAIN |= {"MODEL.MOE.AUX_LOSS_WEIGHT": 0.0}


def options_of(step, *names):
    """{parameter: (option, ...)} of the optimizer."""
    parameters = {parameter: name for name, parameter in step.model.named_parameters()}
    found = {}
    for group in step.optimizer.param_groups:
        for parameter in group["params"]:
            found[parameters[parameter]] = tuple(group[name] for name in names)
    return found


EXEMPT = ("bias", "norm", "cpb_mlp", "logit_scale", "experts.b", "temperature", "sim_matrix")
EXEMPT += ("projector",)


def test_weight_decay_groups(make_trainer):
    step = make_trainer({"MODEL.MOE.ROUTER": "cosine"}).step
    decay = options_of(step, "weight_decay")
    assert len(decay) == len(list(step.model.parameters()))
    assert len(step.optimizer.param_groups) == 2  # with and without weight decay
    for name, (found,) in decay.items():
        assert found == (0.0 if any(part in name for part in EXEMPT) else 0.05), name


def test_schedule_at_its_key_steps(make_config, make_trainer, tmp_path):
    keys = {"TRAIN.EPOCHS": 6, "TRAIN.WARMUP_EPOCHS": 2, "TRAIN.BASE_LR": 4e-3}
    keys |= {"TRAIN.WARMUP_LR": 4e-5, "TRAIN.MIN_LR": 4e-4, "TRAIN.LAYER_DECAY": 0.5}
    keys["TRAIN.ACCUMULATION_STEPS"] = 2
    config = train_config(make_config(tmp_path, keys | {"DATA.BATCH_SIZE": 64}))
    rate = config.scaled_rate(config.base_lr, world_size=2)
    assert rate == pytest.approx(4e-3 * 2 * 2 * 64 / 512)
    optimizer = build_optimizer(config, make_trainer().step.model, rate)
    schedule = build_schedule(config, optimizer, steps_per_epoch=10, world_size=2)

    def rates(step=None):
        if step is not None:
            schedule.step_update(step)
        found = [group["lr"] for group in optimizer.param_groups]
        return max(found), min(found)

    assert rates()[0] == pytest.approx(2e-5)  # before the first step
    expected = {0: 2e-5, 10: (2e-5 + 2e-3) / 2, 20: 2e-3, 40: (2e-3 + 2e-4) / 2, 60: 2e-4, 75: 2e-4}
    for step, value in expected.items():
        assert rates(step)[0] == pytest.approx(value, rel=1e-6), step
    highest, lowest = rates(20)
    assert lowest == pytest.approx(highest * 0.5**4)  # stem, three blocks, head


def test_learning_rate_grows_with_the_root_of_the_batch():
    rates = {}
    for scaling in ("linear", "sqrt", "none"):
        opts = ["DATA.BATCH_SIZE", "1024", "TRAIN.LR_SCALING", scaling]
        config = train_config(load_config("quickstart_digits", opts))
        rates[scaling] = config.scaled_rate(1e-3, world_size=8)
    assert rates == {"linear": pytest.approx(16e-3), "sqrt": pytest.approx(4e-3), "none": 1e-3}


def test_accumulation_beyond_an_epoch(make_config, tmp_path):
    config = make_config(tmp_path / "run", {"TRAIN.ACCUMULATION_STEPS": 6})
    message = r"TRAIN\.ACCUMULATION_STEPS is 6, an epoch has only 5 batches"
    with pytest.raises(UserError, match=message):
        train(config)
    assert not (tmp_path / "run").exists()


def test_the_average_is_what_is_validated_and_saved(make_trainer, save, tmp_path):
    trainer = make_trainer({"TRAIN.EMA_DECAY": 0.5})
    averages = list(trainer.step.ema.module.parameters())
    for average in averages:
        average.data.zero_()
    trainer.step.ema.update(trainer.step.model)
    for average, parameter in zip(averages, trainer.step.model.parameters(), strict=True):
        torch.testing.assert_close(average, 0.5 * parameter)
    accuracy = trainer.validate()
    with torch.no_grad():
        for parameter in trainer.step.model.parameters():
            parameter.fill_(float("nan"))
    assert trainer.validate() == accuracy
    directory = save(trainer, tmp_path)
    twin = make_trainer({"TRAIN.EMA_DECAY": 0.5})
    twin.resume(open_checkpoint(directory))
    assert twin.validate() == accuracy


def test_a_slow_average_follows_a_short_run(make_trainer):
    """The decay after t earlier steps is t / (t + 9), up to TRAIN.EMA_DECAY."""
    step = make_trainer({"TRAIN.EMA_DECAY": 0.9999}).step
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch = Batch(images, torch.arange(4), [])
    expected = {}
    for t in range(4):
        step.run([batch], t)
        for name, value in step.model.state_dict().items():
            now = value.double()
            before = expected.get(name, now)
            expected[name] = before + (now - before) * 9 / (t + 9)
    for name, value in step.ema.module.state_dict().items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert [step.ema.get_decay(number) for number in (1, 10, 10**6)] == [0, 0.5, 0.9999]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_trains(dtype, make_config, tmp_path, read_metrics, monkeypatch):
    monkeypatch.setattr(instruction_sets, "cpu_words", frozenset)  # AMP is on on any CPU
    train(make_config(tmp_path / "run", {"AMP_ENABLE": True, "AMP_DTYPE": dtype}))
    steps, epochs = read_metrics(tmp_path / "run")
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]
    assert ("loss_scale" in steps[0]) == (dtype == "float16")


@pytest.mark.parametrize(
    ("enable", "dtype", "feature"),
    [(True, "bfloat16", "amx_bf16"), (True, "float16", "asimdhp"), ("auto", "bfloat16", "bf16")],
)
def test_mixed_precision_is_off_on_a_cpu_without_instructions(
    enable, dtype, feature, make_config, tmp_path, monkeypatch, capsys, caplog
):
    keys = {"AMP_ENABLE": enable, "AMP_DTYPE": dtype, "TRAIN.MAX_STEPS": 1}
    config = make_config(tmp_path / "run", keys)
    words = frozenset({"avx512f", feature})
    monkeypatch.setattr(instruction_sets, "cpu_words", lambda: words)
    world, sections = World(0, 1, torch.device("cpu")), all_sections(config)
    assert usable_amp(enable, dtype, world) == (True, [])
    assert usable_amp(False, dtype, world) == (False, [])
    with build_autocast(sections.run.amp_enable, sections.run.amp_dtype, world)():
        assert torch.is_autocast_enabled("cpu")
    words = frozenset({"avx512f"})
    assert usable_amp(enable, dtype, World(0, 1, torch.device("meta"))) == (True, [])
    train(config)
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"AMP_ENABLE is {enable}: off, because this CPU has no instructions for {dtype}" in printed
    )
    assert ("warning: AMP_ENABLE" in printed) == (enable != "auto")
    with open_deployed(str(tmp_path / "run")) as deployed:
        assert not deployed.config.run.amp_enable
        stays = f"AMP_ENABLE: {str(enable).lower()}"
        assert stays in deployed.config.yaml
    assert f"no instructions for {dtype}" in caplog.text


def test_mixed_precision_reaches_the_model(make_trainer):
    trainer = make_trainer({"AMP_ENABLE": True})
    with trainer.step.autocast():
        assert trainer.step.wrapped(torch.randn(2, 3, 16, 16))[0].dtype == torch.bfloat16
    plain = make_trainer()
    with plain.step.autocast():
        assert plain.step.wrapped(torch.randn(2, 3, 16, 16))[0].dtype == torch.float32


def test_loss_scaler():
    scaler = LossScaler(enabled=True)
    assert scaler.scale == 65536
    scaler.update(finite=False)
    assert (scaler.scale, scaler.updates) == (32768, 0)
    for _ in range(scaler.GROWTH_INTERVAL - 1):
        scaler.update(finite=True)
    assert scaler.scale == 32768
    scaler.update(finite=True)
    assert (scaler.scale, scaler.updates) == (65536, 2000)
    twin = LossScaler(enabled=True)
    twin.load(scaler.state())
    assert twin.state() == scaler.state()
    while not scaler.exhausted:
        scaler.update(finite=False)
    assert scaler.scale < 1
    off = LossScaler(enabled=False)
    assert (off.scale, off.exhausted) == (1, True)
    off.load(twin.state())
    assert (off.scale, off.updates) == (1, 2000)


def test_a_step_after_an_overflow_changes_nothing(make_trainer):
    trainer = make_trainer({"AMP_ENABLE": True, "AMP_DTYPE": "float16"})
    trainer.step.scaler.scale = 2.0**120
    before = [p.clone() for p in trainer.step.model.parameters()]
    batch = next(iter(trainer.data.train_loader))
    trainer.train_step([batch])
    scaler = trainer.step.scaler
    assert (trainer.progress.step, scaler.scale, scaler.updates) == (1, 2.0**119, 0)
    assert all(map(torch.equal, trainer.step.model.parameters(), before))
    scaler.scale = 2.0**8
    trainer.train_step([batch])
    assert scaler.updates == 1
    assert not all(map(torch.equal, trainer.step.model.parameters(), before))


def test_sgd_and_checkpointing_train(make_config, tmp_path, read_metrics):
    keys = {"TRAIN.OPTIMIZER.NAME": "sgd", "TRAIN.USE_CHECKPOINT": True, "TRAIN.MAX_STEPS": 2}
    train(make_config(tmp_path / "run", keys))
    train(make_config(tmp_path / "run", keys | {"TRAIN.MAX_STEPS": 3}), "auto")
    assert read_metrics(tmp_path / "run")[0][-1]["loss"] < 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_compiled_run_is_the_eager_run(make_config, tmp_path, read_metrics):
    losses = []
    shallow = {"MODEL.SWINV2.DEPTHS": [1, 1], "MODEL.SWINV2.NUM_HEADS": [2, 2]}
    shallow |= {"MODEL.SWINV2.PRETRAINED_WINDOW_SIZES": [0, 0], "MODEL.MOE.BLOCKS": [[], [0]]}
    shallow["TRAIN.MAX_STEPS"] = 2
    for name, compiled in (("eager", False), ("compiled", True)):
        train(make_config(tmp_path / name, PLAIN | shallow | {"COMPILE": compiled}))
        steps = read_metrics(tmp_path / name)[0]
        losses.append([line[key] for line in steps for key in ("loss", "grad_norm")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
