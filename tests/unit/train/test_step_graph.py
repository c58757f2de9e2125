"""TRAIN.GRAPH: a replayed step does what a step does, with a graph of recorded operations in place
of CUDA's."""

import fake_graph
import pytest
import torch
from tool_cases import refusal
from trainer_cases import make_batch, make_step

from moe_core import moe_layers
from swinv2_moe.config import load_config
from swinv2_moe.errors import UserError
from swinv2_moe.train import graph as train_graph
from swinv2_moe.train.distributed import World
from swinv2_moe.train.graph import StepGraph, check_device
from swinv2_moe.train.step import TrainingStep

# all that a step draws, and biases that it moves
OPTIONS = (
    "MODEL.MOE.KERNELS torch MODEL.MOE.GATE_NOISE 1.0 MODEL.DROP_PATH_RATE 0.2"
    " MODEL.MOE.HIDDEN_DROPOUT 0.1 MODEL.MOE.BALANCE bias TRAIN.CLIP_GRAD 0.05"
    " TRAIN.OPTIMIZER.EPS 1e-8 TRAIN.SKIP_NON_FINITE 2 TRAIN.LAYER_DECAY 0.9"
)
NUM_STEPS = 7


@pytest.fixture
def replay(monkeypatch):
    """`replay(step)`: the step's graph, with recorded operations in place of CUDA's."""
    monkeypatch.setattr(train_graph, "capture", lambda run, stream: fake_graph.capture(run))
    monkeypatch.setattr(StepGraph, "_as_usual", lambda self, compute, *inputs: compute(*inputs))

    def start(step: TrainingStep) -> StepGraph:
        step.replay_from_now_on(StepGraph(moe_layers(step.model).values()))
        return step.graph

    return start


def batches(number: int, count: int) -> list:
    """Those of a step; step 5 has an image that is not finite."""
    found = []
    for part in range(count):
        batch = make_batch(4)
        noise = torch.Generator().manual_seed(10 * number + part)
        images = torch.randn(batch.images.shape, generator=noise)
        if number == 5:
            images[0, 0, 0, 0] = torch.nan
        found.append(batch._replace(images=images))
    return found


def train(step: TrainingStep, count: int = 1) -> list:
    """Results and routing of steps, with other learning rates in each."""
    found = []
    for number in range(NUM_STEPS):
        for group in step.optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + number) * group["lr_scale"]
        step.stop.received = "SIGTERM" if number == 6 else None
        result = step.run(batches(number, count), number)
        routing = [layer.last_routing for layer in moe_layers(step.model).values()]
        found.append((result, [stats.counts.clone() for stats in routing]))
        with torch.no_grad():  # a validation routes other images
            step.model.eval()(make_batch(8).images.to(step.world.device))
        step.wrapped.train()
    return found


class Uncaptured(StepGraph):
    """Computes each step as the first ones of a graph."""

    def __call__(self, compute, signalled, batches):
        return self._as_usual(compute, signalled, batches)


@pytest.mark.parametrize("count", [1, 2])
def test_a_replay_does_what_a_step_does(replay, count):
    """To the last bit."""
    usual, replayed = make_step(0, 1, OPTIONS), make_step(0, 1, OPTIONS)
    usual.replay_from_now_on(Uncaptured([]))
    graph = replay(replayed)
    expected, found = train(usual, count), train(replayed, count)
    assert graph.replays
    for (right, right_counts), (result, counts) in zip(expected, found, strict=True):
        assert repr(result) == repr(right)  # NaN is not equal to itself
        assert all(map(torch.equal, counts, right_counts))
    assert [result.was_skipped for result, _ in found] == [number == 5 for number in range(7)]
    assert found[-1][0].stopping
    for section, tensors in usual.state().items():
        for name, value in tensors.items():
            assert torch.equal(replayed.state()[section][name], value), (section, name)


def test_the_device_decides_as_the_host_does(replay):
    """Of a finite step and of one that is skipped."""
    host, device = make_step(0, 1, OPTIONS), make_step(0, 1, OPTIONS)
    device.replay_from_now_on(Uncaptured([]))
    for number in (4, 5):
        results = [step.run(batches(number, 1), number) for step in (host, device)]
        numbers = zip(results[0][:3], results[1][:3], strict=True)
        assert all(pytest.approx(one, rel=1e-5, nan_ok=True) == two for one, two in numbers)
        assert results[0][3:] == results[1][3:]
        assert results[0].was_skipped == (number == 5)
        after = device.model.state_dict()
        for name, value in host.model.state_dict().items():
            torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-6)


def test_too_many_bad_steps_name_the_layer(replay):
    step = make_step(0, 1, OPTIONS)
    replay(step)
    for number in range(5):
        step.run(batches(number, 1), number)
    for _ in range(2):
        assert step.run(batches(5, 1), 5).was_skipped
    with pytest.raises(UserError, match=r"step 6: .* begins at the input images"):
        step.run(batches(5, 1), 5)


def test_a_gradient_that_is_not_finite_is_found_in_a_replay(replay):
    """The gradients of a replay are those that the search for the layer reads."""
    step = make_step(0, 1, OPTIONS.replace("SKIP_NON_FINITE 2", "SKIP_NON_FINITE 0"))
    replay(step)
    factor = torch.ones(())
    step.model.head.fc.weight.register_hook(lambda gradient: gradient * factor)
    for number in range(5):
        step.run(batches(number, 1), number)
    factor.fill_(torch.inf)
    with pytest.raises(UserError, match=r"begins at the gradient of head.fc.weight"):
        step.run(batches(4, 1), 5)


def test_a_step_that_reads_on_the_host_is_refused(replay):
    step = make_step(0, 1, OPTIONS)
    replay(step)
    loss = step.loss
    step.loss = lambda *inputs: (loss(*inputs), inputs[0].sum().item())[0]
    for number in range(3):
        step.run(batches(number, 1), number)
    with pytest.raises(UserError, match=r"TRAIN.GRAPH is True: .* cannot be captured \(operation"):
        step.run(batches(3, 1), 3)


def test_only_one_process_with_a_gpu():
    for size, device, message in (
        (2, "cuda", "TRAIN.GRAPH needs one rank, not 2"),
        (1, "cpu", "TRAIN.GRAPH needs a GPU, the device is 'cpu'"),
    ):
        with pytest.raises(UserError, match=message):
            check_device(World(0, size, torch.device(device)), "TRAIN.GRAPH")
    check_device(World(0, 1, torch.device("cuda")), "TRAIN.GRAPH")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("COMPILE", "True"),
        ("TRAIN.OPTIMIZER.NAME", "sgd"),
        ("TRAIN.USE_CHECKPOINT", "True"),
        ("MODEL.MOE.TOP_K_SCHEDULE", "epoch 0:2 1:1"),
        ("MODEL.MOE.CAPACITY_AUTO", "True"),
        ("AMP_DTYPE", "float16"),
    ],
)
def test_what_cannot_be_captured_is_refused(key, value):
    keys = ["TRAIN.GRAPH", "True", "AMP_ENABLE", "True"]
    load_config("quickstart_digits", keys)
    message = refusal(load_config, "quickstart_digits", [*keys, key, value])
    assert message.startswith(f"TRAIN.GRAPH is True, but {key} is")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("amp", [False, True])
def test_on_a_gpu(amp):
    options = OPTIONS.replace("KERNELS torch", "KERNELS auto") + f" AMP_ENABLE {amp} DEVICE cuda"
    found = []
    for graph in (False, True):
        step = make_step(0, 1, f"{options} TRAIN.GRAPH {graph}", "cuda")
        found.append([result.loss for result, _ in train(step)])
    assert found[0] == pytest.approx(found[1], rel=1e-2 if amp else 1e-4, nan_ok=True)
