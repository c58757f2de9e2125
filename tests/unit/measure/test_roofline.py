"""What the phases of a step compute and move, against formulas; and what bounds a phase."""

import os
import statistics
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from trainer_cases import make_batch, make_step

from moe_core import expert_parameters, moe_layers
from moe_core.parallel import ParallelStrategy, count_traffic
from moe_core.parallel.cost_model import LayerShape, volume
from swinv2_moe.config import CheckpointConfig
from swinv2_moe.errors import UserError
from swinv2_moe.measure import phases, roofline, roofline_figure
from swinv2_moe.measure.configurations import COUNTED_OPTIMIZERS, repeatable_step
from swinv2_moe.measure.phases import bytes_read, without_experts
from swinv2_moe.measure.roofline import Peak, Phase, Roofline
from swinv2_moe.measure.roofline_figure import draw
from swinv2_moe.measure.spread import Times
from swinv2_moe.measure.work import MemoryTraffic, Work, counted
from swinv2_moe.models import MoEMlp

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart_digits.yaml"
FLOAT, LONG, INT = 4, 8, 4  # bytes


def traffic(work) -> int:
    with MemoryTraffic() as found:
        work()
    return found.bytes


# Memory


@given(st.integers(1, 300), st.integers(1, 5))
def test_an_operator_reads_what_it_is_given_and_writes_what_it_makes(rows, columns):
    a, b = torch.zeros(rows, columns), torch.zeros(rows, columns)
    size = FLOAT * rows * columns
    assert traffic(lambda: a + b) == 3 * size
    assert traffic(lambda: a + a) == 2 * size  # one tensor is read once
    assert traffic(lambda: a.add_(b)) == 3 * size
    assert traffic(lambda: a.copy_(b)) == 2 * size
    assert traffic(lambda: a.fill_(1.0)) == size
    assert traffic(lambda: torch._foreach_mul_([a, b], 2.0)) == 4 * size
    assert traffic(lambda: a.view(-1)[1:].unsqueeze(0).detach()) == 0
    assert traffic(lambda: torch.empty_like(a)) == 0
    shaped = (torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like)
    shaped += (lambda t: torch.full_like(t, 2.0),)
    shaped += (lambda t: t.new_zeros(t.shape), lambda t: t.new_ones(t.shape))
    assert [traffic(lambda make=make: make(a)) for make in shaped] == [size] * len(shaped)
    assert traffic(lambda: a.bernoulli_(0.5)) == size
    assert traffic(lambda: a.t().contiguous().view(-1)) == (0 if 1 in (rows, columns) else 2 * size)
    assert traffic(lambda: a[:1].expand(rows, columns) + b) == 2 * size + FLOAT * columns


def test_a_linear_layer_forward_and_backward():
    batch, width, out = 7, 5, 3
    layer, grad = torch.nn.Linear(width, out), torch.zeros(batch, out)
    x = torch.zeros(batch, width, requires_grad=True)
    task = counted(lambda: torch.autograd.grad(layer(x.view_as(x)), [x, *layer.parameters()], grad))
    inputs, weights, outputs, bias = batch * width, width * out, batch * out, out
    forward = inputs + weights + bias + outputs
    backward = (outputs + weights + inputs) + (outputs + inputs + weights) + (outputs + bias)
    assert task.work == Work(flops=3 * 2 * batch * width * out, memory=FLOAT * (forward + backward))


def test_bytes_read(tmp_path):
    if not Path("/proc/self/io").exists():
        pytest.skip("only Linux tells")
    (tmp_path / "file").write_bytes(os.urandom(123_456))
    assert bytes_read(lambda: (tmp_path / "file").read_bytes()) == pytest.approx(123_456, abs=10)
    assert bytes_read(lambda: None) < 10


# Phases, on three blocks, two of them with 4 experts, dropless


@pytest.fixture(scope="module")
def step():
    return make_step(0, 1)


@pytest.fixture(scope="module")
def batch():
    return make_batch(1)


@pytest.fixture(scope="module")
def watched(step, batch):
    return phases.watch(step, batch.images)


def shapes(calls):
    """(tokens T, model dim M, hidden dim H, experts E) of each call."""
    return [(call.x.numel() // c.model_dim, c.model_dim, c.hidden_dim, c.num_experts)
            for call in calls for c in [call.layer.config]]  # fmt: skip


def test_what_a_forward_pass_gives_to_the_layers(step, batch, watched):
    calls, moves = watched
    assert [call.layer for call in calls] == list(moe_layers(step.model).values())
    assert shapes(calls) == [
        (32 * 16, 32, 128, 4),
        (32 * 4, 64, 256, 4),
    ]  # 8 px of 16, 2 px patches, merged once, twice
    operators = [operator._schema.name.split("::")[1] for operator, _ in moves]
    assert operators == ["dispatch_rows", "combine_rows"] * 2
    chunks = [chunk for call in calls for chunk in call.chunks]
    assert [(len(c.rows), int(c.offsets[-1])) for c in chunks] == [(512, 512), (128, 128)]
    assert not any(layer._forward_pre_hooks for layer in moe_layers(step.model).values())


def test_the_trunk_is_the_model_without_its_moe_layers(step, batch):
    before = step.model.state_dict()
    with without_experts(step.model):
        assert not any(isinstance(module, MoEMlp) for module in step.model.modules())
        trunk = sum(p.numel() for p in step.model.parameters())
    assert step.model.state_dict().keys() == before.keys()
    layers = sum(p.numel() for layer in moe_layers(step.model).values() for p in layer.parameters())
    assert trunk + layers == sum(p.numel() for p in step.model.parameters())


def test_flops_of_the_phases_are_those_of_the_step(step, batch, watched):
    calls, moves = watched
    work = {"trunk": phases.trunk(step, batch).work, "router": phases.router(step, calls).work}
    work["experts"] = phases.experts(step, calls).work
    assert work["router"].flops == sum(3 * 2 * t * m * e for t, m, _, e in shapes(calls))
    assert work["experts"].flops == sum(3 * 2 * 2 * t * m * h for t, m, h, _ in shapes(calls))
    with FlopCounterMode(display=False) as counter:
        step.run([batch], 0)
    assert sum(found.flops for found in work.values()) == counter.get_total_flops()
    assert phases.dispatch(moves).work.flops == sum(5 * t * m for t, m, *_ in shapes(calls))


def test_memory_of_dispatch_and_experts(step, watched):
    calls, moves = watched
    expected = 0
    for t, m, *_ in shapes(calls):
        rows, places = FLOAT * t * m, LONG * t  # dropless, one expert a token: rows are tokens
        forward = (2 * rows + 2 * places) + (2 * rows + FLOAT * t + 2 * places)
        expected += forward + (3 * rows + 2 * FLOAT * t + 2 * places) + (2 * rows + places)
    assert phases.dispatch(moves).work.memory == expected
    expected = 0
    for t, m, h, e in shapes(calls):
        rows, hidden, weight, offsets = FLOAT * t * m, FLOAT * t * h, FLOAT * e * m * h, INT * e
        parameters = 2 * weight + FLOAT * e * h + FLOAT * e * m
        # the activation happens within the one operator
        expected += (rows + parameters + offsets) + (rows + hidden)
        expected += (2 * rows + hidden + parameters + offsets) + (rows + parameters)
    assert phases.experts(step, calls).work.memory == pytest.approx(expected, rel=1e-9)


def test_the_optimiser_counts_by_parameter(step, batch):
    count = sum(p.numel() for p in step.model.parameters())
    task = phases.optimiser(step, batch)
    # AdamW, norm, clipping
    assert task.work == Work(flops=(14 + 2 + 1) * count, memory=(28 + 4 + 8) * count)
    task.run()
    assert all(p.grad is None for p in step.model.parameters())


def test_phases_leave_the_model_as_it_was(step, batch, watched):
    """At a learning rate of 0 so does the optimiser; no gradient and no hook stays behind."""
    for group in step.optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    calls, moves = watched
    for task in (
        phases.trunk(step, batch),
        phases.router(step, calls),
        phases.dispatch(moves),
        phases.experts(step, calls),
        phases.optimiser(step, batch),
    ):
        task.run()
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items()
    )
    assert all(p.grad is None for p in step.model.parameters())


def test_a_checkpoint_is_what_lies_on_the_disk(step, tmp_path):
    with phases.checkpoint(step, CheckpointConfig(), tmp_path / "checkpoints") as (task, costs):
        task.run()
    assert len(costs) == 2
    (latest,) = {p.resolve() for p in (tmp_path / "checkpoints").glob("latest")}
    assert task.work.disk == sum(p.stat().st_size for p in latest.rglob("*.safetensors"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the last checkpoint was not saved"):
        phases.checkpoint(step, CheckpointConfig(), tmp_path / "file" / "checkpoints").__enter__()


def exchange_on_two_ranks(rank: int) -> None:
    step, batch = make_step(rank, 2), make_batch(2)
    calls, moves = phases.watch(step, batch.images)
    task = phases.exchange(step, calls, batch)
    own = sum(p.numel() for p in expert_parameters(step.model).values())
    # all-reduced by two: n (2 - 1)
    shared = FLOAT * (sum(p.numel() for p in step.model.parameters()) - own)
    layers = list(moe_layers(step.model).values())
    tokens = [call.x.numel() // call.layer.config.model_dim for call in calls]
    even = [LayerShape.of(layer.config, n, FLOAT) for layer, n in zip(layers, tokens, strict=True)]
    even = sum(
        2 * 2 * FLOAT * volume(shape, 2, ParallelStrategy()).dispatch.elements for shape in even
    )
    everyone = step.world.gather(task.work.exchange - shared)
    assert 0.3 * even < statistics.mean(everyone) < 1.7 * even  # fresh routers are not quite even
    with count_traffic(layers[0].group) as found:
        task.run()
    again = FLOAT * sum(found.elements.values())
    assert again == pytest.approx(task.work.exchange - shared, rel=1e-3)
    for other in (phases.trunk(step, batch), phases.router(step, calls), phases.dispatch(moves)):
        other.run()
    phases.experts(step, calls).run()
    phases.optimiser(step, batch).run()
    step.run([batch], 1)  # DDP still goes
    replicas = make_step(rank, 2, "MODEL.MOE.EXPERT_PARALLEL_SIZE 1")
    calls, _ = phases.watch(replicas, batch.images)
    task = phases.exchange(replicas, calls, batch)  # no rows, all gradients
    assert task.work.exchange == FLOAT * sum(p.numel() for p in replicas.model.parameters())
    task.run()
    dist.barrier()


def test_exchange_of_two_ranks(run_processes):
    run_processes(exchange_on_two_ranks, 2)


# The roof


def peaks(run: str = "r") -> dict[str, Peak]:
    """1e9 FLOPs in 1 ms; 1e6 bytes in 1 ms, in every second round in 2 ms."""
    return {
        "flops": Peak("product", 1e9, Times([1, 1, 1], run)),
        "memory": Peak("copy", 1e6, Times([1, 2, 1], run)),
    }


def saving() -> Phase:
    disk = Peak("writing", 1e6, Times([100], "s"))
    return Phase(Work(disk=1e6), Times([500], "s"), {"disk": disk})


def test_a_phase_is_bounded_by_what_takes_longest():
    assert peaks()["flops"].rate == 1e12
    compute = Phase(Work(flops=5e9, memory=1e6), Times([10, 10, 10], "r"), peaks())
    assert compute.shares() == {"flops": 0.5, "memory": 0.1}
    assert compute.bound() == ("flops", 0.5)
    memory = Phase(Work(flops=1e9, memory=3e6), Times([10, 20, 10], "r"), peaks())
    assert memory.bound() == ("memory", pytest.approx(0.3))
    assert memory.rate("memory") == 3e8


def test_a_peak_of_another_run_is_no_roof():
    with pytest.raises(ValueError, match="different runs"):
        Phase(Work(flops=1.0), Times([1, 1, 1], "r"), peaks("s")).bound()


def test_what_the_phases_leave_of_a_step(tmp_path):
    work = Work(flops=1e9, memory=1e6)
    found = {
        "data": Phase(Work(memory=1e6), Times([50, 50, 50], "r"), peaks()),
        "trunk": Phase(work, Times([60, 60, 50], "r"), peaks()),
        "optimiser": Phase(work, Times([30, 20, 30], "r"), peaks()),
        "checkpoint": saving(),
    }
    whole = Roofline("a title", "a machine", found, peaks(), Times([100, 100, 80], "r"), 0.1, 2)
    assert whole.accounted() == [0.9, 0.8, 1.0]
    assert whole.share_of_step("trunk") == 0.6
    assert whole.share_of_step("checkpoint") is None
    assert whole.record()["phases"]["checkpoint"]["share_of_roof"] == pytest.approx(0.2)
    draw(whole, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_a_figure_shows_the_shares(monkeypatch):
    work, figures = Work(flops=1e9, memory=1e6), []
    found = {"trunk": Phase(work, Times([4, 4, 4], "r"), peaks()), "checkpoint": saving()}
    title, step = "16 images of /data/$x_$", Times([8, 8, 8], "r")
    whole = Roofline(title, "a machine", found, peaks(), step, 0.1, 2)
    monkeypatch.setattr(roofline_figure, "save_png", lambda figure, path: figures.append(figure))
    draw(whole, Path("r.png"))
    roof, bars = figures[0].axes
    # from below: step, then roof
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([0, 50, 20, 25])
    assert [text.get_text() for text in bars.texts] == ["", "50.0%", "20.0%", "25.0%"]
    labels = [label.get_text() for label in bars.get_yticklabels()]
    assert labels == ["checkpoint\n(disk)", "trunk\n(flops)"]
    (point,) = [line for line in roof.lines if line.get_marker() == "o"]
    assert point.get_xydata().tolist() == [[1000, 250]]  # FLOP a byte, GFLOP/s


# What is measured


def test_a_step_is_one_batch_whatever_the_training_does(tmp_path):
    keys = "TRAIN: {ACCUMULATION_STEPS: 4, EMA_DECAY: 0.9}\nAUG: {MIXUP: 0.5}\n"
    (tmp_path / "mine.yaml").write_text(f"BASE: [{QUICKSTART}]\n{keys}")
    config = repeatable_step(tmp_path / "mine.yaml", ["AUG.CUTMIX", "0"], None, None)
    assert (config.TRAIN.ACCUMULATION_STEPS, config.TRAIN.EMA_DECAY, config.AUG.MIXUP) == (1, 0, 0)


def test_opts_that_would_be_ignored():
    for opts, message in (
        ("TRAIN.ACCUMULATION_STEPS 4", "ACCUMULATION_STEPS is 4, but what is measured has 1"),
        ("TRAIN.EMA_DECAY 0.9", "EMA_DECAY is 0.9, but what is measured has 0.0"),
        ("PRINT_FREQ 5 AUG.MIXUP 0.5", "MIXUP is 0.5, but what is measured has 0.0"),
        ("DATA.BATCH_SIZE 8", "BATCH_SIZE is 8, but --batch-size decides"),
    ):
        section = opts.split()[-2].split(".")[0]
        with pytest.raises(UserError) as error:
            repeatable_step(QUICKSTART, opts.split(), None, 4)
        assert str(error.value) == f"--opts {section}.{message}"


def test_an_optimiser_that_is_not_counted():
    for name in ("lamb", "lars"):
        with pytest.raises(UserError) as error:
            repeatable_step(QUICKSTART, ["TRAIN.OPTIMIZER.NAME", name], None, None)
        assert str(error.value).startswith(f"TRAIN.OPTIMIZER.NAME is '{name}': ")
        assert str(error.value).endswith("allowed here: adamw, sgd")
    assert tuple(phases._UPDATE) == COUNTED_OPTIMIZERS


def test_the_file_that_measures_the_disk(tmp_path):
    roofline.write_file(tmp_path / "file", 3 * 2**20)
    assert (tmp_path / "file").stat().st_size == 3 * 2**20
    roofline.read_file(tmp_path / "file")
    with pytest.raises(UserError, match=r"--output .*none: cannot be written"):
        roofline.write_file(tmp_path / "none" / "file", 2**20)
