"""Top-k and capacity that change during training: what each step uses, and after a resume."""

import pytest
import torch
from run_cases import interrupt_at, weights_of

from moe_core import moe_layers
from swinv2_moe.checkpoints.checkpoint import open_checkpoint
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEMlp
from swinv2_moe.train.run import train
from swinv2_moe.train.schedules import STEPS, RoutingSchedule

# five steps an epoch
SCHEDULE = {"MODEL.MOE.TOP_K_SCHEDULE": "epoch 0:2 1:1"}
AUTO = {"MODEL.MOE.CAPACITY_AUTO": True}


def routing_of_steps(run, read_metrics):
    keys = ("loss", "moe/top_k", "moe/capacity_factor", "moe/dropped_share", "moe_layers")
    return [{key: line.get(key) for key in keys} for line in read_metrics(run)[0]]


@pytest.mark.parametrize("keys", [SCHEDULE, AUTO], ids=["schedules", "auto"])
def test_killed_in_the_second_epoch(keys, tmp_path, make_config, read_metrics, monkeypatch):
    keys = keys | {"CHECKPOINT.STEPS": 3}
    train(make_config(tmp_path / "whole", keys))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 8)
        with pytest.raises(KeyboardInterrupt):
            train(make_config(tmp_path / "killed", keys), "auto")
    train(make_config(tmp_path / "killed", keys), "auto")
    whole = routing_of_steps(tmp_path / "whole", read_metrics)
    assert len(whole) == 10
    assert routing_of_steps(tmp_path / "killed", read_metrics) == whole
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")
    needed = [needed_capacity(tmp_path / name) for name in ("whole", "killed")]
    assert needed[0] == needed[1]
    if "MODEL.MOE.TOP_K_SCHEDULE" in keys:
        assert [line["moe/top_k"] for line in whole] == [2] * 5 + [1] * 5


def needed_capacity(run):
    return open_checkpoint(run / "checkpoints" / "latest").meta["training"]["needed_capacity"]


def test_automatic_capacity_follows_the_loads(tmp_path, make_config, read_metrics):
    """A step drops at most the share if its loads need no more than those of the steps before."""
    train(make_config(tmp_path / "run", AUTO | {"MODEL.MOE.CAPACITY_FACTOR": 0.1}))
    lines = routing_of_steps(tmp_path / "run", read_metrics)
    assert lines[0]["moe/capacity_factor"] is None  # CAPACITY_FACTOR
    assert lines[0]["moe/dropped_share"] > 0.5
    assert all(line["moe/dropped_share"] < 0.2 for line in lines[1:])
    needed = needed_capacity(tmp_path / "run")
    assert len(needed) == len(lines)
    for i in range(1, len(lines)):
        by_layer = zip(*needed[:i], strict=True)
        assert lines[i]["moe/capacity_factor"] == max(map(max, by_layer))


def test_accumulated_batches_count(tmp_path, make_config):
    """The largest factor of a step's forward passes, on the device."""
    keys = AUTO | {"TRAIN.ACCUMULATION_STEPS": 2, "DATA.BATCH_SIZE": 16, "TRAIN.MAX_STEPS": 2}
    train(make_config(tmp_path / "run", keys))
    needed = needed_capacity(tmp_path / "run")
    assert [len(factors) for factors in needed] == [2, 2]
    assert min(map(min, needed)) >= 0.9  # an even load needs about 1 with a share of 0.01


def test_only_the_last_steps_count(make_trainer):
    schedule = make_trainer(AUTO).routing
    schedule.observe([9.0, 9.0])
    for step in range(STEPS):
        schedule.observe([1.0, 2.0 + step])
    schedule.apply(0, 0)
    assert [layer.capacity_factor for layer in schedule.layers] == [1.0, 1.0 + STEPS]
    assert schedule.current == {"moe/capacity_factor": 1.0 + STEPS}


def test_linear_top_k_is_rounded(make_trainer):
    schedule = make_trainer({"MODEL.MOE.TOP_K_SCHEDULE": "step 0:3 4:1 linear"}).routing
    used = []
    for step in range(6):
        schedule.apply(0, step)
        used.append(schedule.layers[0].top_k)
    assert used == [3, 3, 2, 2, 1, 1]


def test_evaluation_and_averaged_weights_do_not_follow(make_trainer):
    trainer = make_trainer(SCHEDULE | {"TRAIN.EMA_DECAY": 0.9})
    trainer.routing.apply(0, 0)
    layers = [m for m in trainer.step.model.modules() if isinstance(m, MoEMlp)]
    assert [layer.top_k for layer in layers] == [2, 2]
    for model in (trainer.step.model, trainer.step.deployed):
        model.eval()(torch.randn(4, 3, 16, 16))
        layer = next(iter(moe_layers(model).values()))
        assert int(layer.last_routing.counts.sum()) == 4 * 4 * 4  # top-1 of 4 x 4 tokens an image


def test_priority_in_evaluation(make_trainer):
    keys = {"MODEL.MOE.CAPACITY_FACTOR": 0.5, "MODEL.MOE.EVAL_CAPACITY_FACTOR": 0.5}
    images = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    outputs = {}
    for value in ("same", "always", "never"):
        model = make_trainer(keys | {"MODEL.MOE.EVAL_BATCH_PRIORITIZED": value}).step.model
        for name, parameter in model.named_parameters():
            if name.endswith("norm2.weight"):  # 0 at first
                torch.nn.init.ones_(parameter)
        with torch.no_grad():
            outputs[value] = model.eval()(images)
    assert torch.equal(outputs["same"], outputs["always"])
    assert not torch.equal(outputs["same"], outputs["never"])


def test_a_state_of_another_number_of_layers(make_trainer, save, tmp_path):
    trainer = make_trainer(AUTO)
    trainer.routing.needed.append([1.0])
    directory = save(trainer, tmp_path)
    other = make_trainer(AUTO)
    before = [parameter.clone() for parameter in other.step.model.parameters()]
    with pytest.raises(UserError, match="needed_capacity has 1 layers, the model has 2"):
        other.resume(open_checkpoint(directory))
    assert all(map(torch.equal, before, other.step.model.parameters()))
    make_trainer().resume(open_checkpoint(directory))  # without CAPACITY_AUTO it is ignored


@pytest.fixture
def compiled(make_trainer):
    """`compiled(keys)`: a trainer, an MoE layer of its model that is compiled, and its input."""
    torch.compiler.reset()

    def make(keys=None):
        trainer = make_trainer(keys)
        layer = trainer.step.model.train().layers[1].blocks[0].mlp
        tokens = torch.randn(4, 4, 4, 32, generator=torch.Generator().manual_seed(0))
        return trainer, torch.compile(layer, backend="eager"), tokens

    yield make
    torch.compiler.reset()


def test_another_capacity_is_not_compiled_anew(compiled):
    trainer, layer, tokens = compiled()
    schedule = RoutingSchedule(trainer.config.model.experts, trainer.step.model, keeps_steps=True)
    schedule.needed.append([0.5, 0.6])
    schedule.apply(0, 0)
    torch.manual_seed(0)
    layer(tokens)
    shares = []
    for factors in ([0.7, 0.8], [1.5, 0.9]):
        schedule.observe(factors)
        schedule.apply(0, 0)
        with torch.compiler.set_stance("fail_on_recompile"):
            layer(tokens)
        shares.append(float(layer.moe.last_routing.dropped_share))
    assert shares[0] > shares[1]
