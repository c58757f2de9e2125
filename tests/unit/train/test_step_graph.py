"""TRAIN.GRAPH: a replayed step does what a step does, with a graph of recorded operations in place
of CUDA's."""

import fake_graph
import pytest
import torch
from run_cases import saver_of
from tool_cases import refusal
from trainer_cases import SAME_STEPS, make_batch, make_step, make_trainer

from moe_core import moe_layers, prepared
from swinv2_moe.config import load_config
from swinv2_moe.errors import UserError
from swinv2_moe.export.programs import load_program, write_program
from swinv2_moe.ranks.world import World
from swinv2_moe.train import graph as train_graph
from swinv2_moe.train.graph import PassGraph, StepGraph, can_replay, check_device
from swinv2_moe.train.record import Recorder
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
    monkeypatch.setattr(train_graph, "capture", lambda run, _=None: fake_graph.capture(run))
    monkeypatch.setattr(StepGraph, "_as_usual", lambda self, compute, *inputs: compute(*inputs))

    def start(step: TrainingStep, key: str | None = "TRAIN.GRAPH") -> StepGraph:
        step.replay_from_now_on(StepGraph(step.model, key))
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
    usual.replay_from_now_on(Uncaptured(usual.model))
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
    device.replay_from_now_on(Uncaptured(device.model))
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
    losses = step.losses
    step.losses = lambda *inputs: (losses(*inputs), inputs[0].sum().item())[0]
    for number in range(3):
        step.run(batches(number, 1), number)
    with pytest.raises(UserError, match=r"TRAIN.GRAPH is True: .* cannot be captured \(operation"):
        step.run(batches(3, 1), 3)


def run_steps(step: TrainingStep, count: int, change=lambda number: None, sizes=(32,)) -> list:
    """(result, whether it was a replay) of each step; `change` comes before it. Step i has
    sizes[i % len(sizes)] images."""
    found = []
    for number in range(count):
        change(number)
        batch = batches(10 + number, 1)[0]
        size = sizes[number % len(sizes)]
        batch = batch._replace(images=batch.images[:size], targets=batch.targets[:size])
        result = step.run([batch], number)
        found.append((result, step.graph is not None and step.graph.replayed))
    return found


def assert_same_weights(one: TrainingStep, other: TrainingStep) -> None:
    for section, tensors in one.state().items():
        for name, value in tensors.items():
            assert torch.equal(other.state()[section][name], value), (section, name)


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8, 8, 8, 4), (8, 4)])
def test_a_batch_of_another_size_is_computed_as_usual(replay, sizes):
    """The graph of the others stays; sizes that alternate are never captured."""
    usual, replayed = make_step(0, 1, OPTIONS), make_step(0, 1, OPTIONS)
    usual.replay_from_now_on(Uncaptured(usual.model))
    replay(replayed)
    expected, found = run_steps(usual, 14, sizes=sizes), run_steps(replayed, 14, sizes=sizes)
    assert [result for result, _ in found] == [result for result, _ in expected]
    replays = [is_replay for _, is_replay in found]
    if len(sizes) == 2:
        assert not any(replays)
    else:
        assert replays == 3 * [False] + 3 * [True] + [False] + 6 * [True] + [False]
    assert_same_weights(usual, replayed)


def test_auto_goes_on_without_a_graph_where_a_capture_fails(replay, caplog):
    usual, step = make_step(0, 1, OPTIONS), make_step(0, 1, OPTIONS)
    usual.replay_from_now_on(Uncaptured(usual.model))
    replay(step, key=None)
    losses = step.losses
    step.losses = lambda *inputs: (losses(*inputs), inputs[0].sum().item())[0]
    expected, found = run_steps(usual, 8), run_steps(step, 8)
    assert [result for result, _ in found] == [result for result, _ in expected]
    assert not any(is_replay for _, is_replay in found)
    assert_same_weights(usual, step)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("this step cannot be captured as a CUDA graph, going on without (op")


@pytest.fixture
def captures(replay, monkeypatch):
    """`captures(bool)`: whether `auto` captures steps and passes on this machine's device."""

    def decide(is_captured: bool) -> None:
        monkeypatch.setattr(train_graph, "can_replay", lambda *_: is_captured)

    return decide


def test_20_steps_of_a_run_with_auto_have_the_losses_of_one_without(
    captures, tmp_path, monkeypatch
):
    """Four epochs, each with its validation, whose last batch is smaller."""
    found, steps = {}, []
    capture = StepGraph._captured
    monkeypatch.setattr(StepGraph, "_captured", lambda *inputs: steps.append(1) or capture(*inputs))
    for is_captured in (False, True):
        captures(is_captured)
        trainer = make_trainer(0, 1, "MODEL.MOE.KERNELS torch TRAIN.EPOCHS 4")
        results = found[is_captured] = []
        run = trainer.step.run
        trainer.step.run = lambda *inputs, run=run, results=results: (
            results.append(run(*inputs)) or results[-1]
        )
        root = tmp_path / str(is_captured)
        recorder = Recorder(root, trainer.world, 0)
        trainer.fit(recorder, saver_of(trainer, root / "checkpoints"))
        recorder.close()
        assert (trainer.step.graph is not None and trainer.step.graph.replays) == is_captured
    usual, captured = found.values()
    assert len(usual) == 20
    assert len(steps) == 1
    # the device clips and updates with other orders of operations
    losses = [torch.tensor([result.loss for result in results]) for results in (usual, captured)]
    torch.testing.assert_close(*losses, **SAME_STEPS)


def test_a_pass_is_replayed_for_equal_shapes(captures):
    """To the last bit, another shape in between, and the routing is that of the last pass."""
    captures(True)
    model = make_step(0, 1, OPTIONS).model.eval()
    (layer, *_) = moe_layers(model).values()
    runs = []

    def run(images):
        runs.append(len(images))
        return model(images).float()

    with torch.inference_mode(), prepared(model):
        forward = PassGraph(model, run, torch.device("cpu"))
        for number, size in enumerate([8, 8, 8, 8, 8, 5, 8, 8, 5]):
            images = batches(10 + number, 1)[0].images[:size]
            found, counts = forward(images).clone(), layer.last_routing.counts.clone()
            assert torch.equal(found, model(images).float())
            assert torch.equal(counts, layer.last_routing.counts)
    assert runs == [8, 8, 8, 8, 5, 5]  # the fourth is the capture


def test_a_pass_that_cannot_be_captured_goes_on(captures, caplog):
    captures(True)
    model = make_step(0, 1, OPTIONS).model.eval()
    with torch.inference_mode():
        forward = PassGraph(
            model, lambda images: images * images.mean().item(), torch.device("cpu")
        )
        for _ in range(6):
            assert torch.equal(forward(torch.full((2, 3), 2.0)), torch.full((2, 3), 4.0))
    assert len(caplog.records) == 1


def test_an_exported_program_is_replayed_for_equal_shapes(captures, tmp_path):
    """To the last bit, read back from its file."""
    captures(True)
    model = make_step(0, 1, f"{OPTIONS} MODEL.MOE.EVAL_CAPACITY_FACTOR 1.25").model.eval()
    images = [batches(10 + number, 1)[0].images[:4] for number in range(6)]
    with torch.inference_mode():
        write_program("torch", model, images[0], "float32", False, tmp_path)
        program = load_program("torch", tmp_path, torch.device("cpu"))
        usual, runs = program.run, []
        program.run = lambda batch: runs.append(1) or usual(batch)
        for batch in images:
            assert torch.equal(program(batch), usual(batch))
    assert len(runs) == 4  # the fourth is the capture


def test_which_passes_can_be_replayed():
    model = make_step(0, 1, OPTIONS).model
    for one in (model, None):
        assert can_replay(one, torch.device("cuda"))
        assert not can_replay(one, torch.device("cpu"))
    hook = model.head.register_forward_hook(lambda *_: None)
    assert not can_replay(model, torch.device("cuda"))
    hook.remove()
    model.head.compile(backend="eager")
    assert not can_replay(model, torch.device("cuda"))


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
